"""Fifteen short documents about a harbour town that does not exist, and questions over them.

No model can know the answers from elsewhere. About 6,900 SmolLM2 tokens in all, each document under 512, so that a
document is one chunk. Nothing here but text: `demo` and `check` use it.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from infoflow_kv.records import Document

# The order in the prompt. A model of 135 M parameters reads the end of a long prompt best, so what the questions ask
# for stands there, as many retrievers put it; a larger model does not need that.
ORDER = (
    "ferry",
    "honey",
    "council",
    "school",
    "stew",
    "clockmaker",
    "festival",
    "museum",
    "bakery",
    "accordion",
    "weather",
    "observatory",
    "shipwreck",
    "lighthouse",
    "glass",
)


@dataclass(frozen=True, slots=True)
class SampleQuestion:
    """A question, the strings of which one must occur in a right answer, and the documents that the answer needs."""

    text: str
    expected: tuple[str, ...]
    documents: tuple[str, ...]
    note: str = ""

    def is_answered_by(self, answer: str) -> bool:
        """Whether one of the expected strings occurs in `answer`, whatever the case."""
        return any(expected.casefold() in answer.casefold() for expected in self.expected)


QUESTIONS: tuple[SampleQuestion, ...] = (
    SampleQuestion(
        "What does the keeper of Corran Light collect?",
        ("bottles",),
        ("lighthouse.md", "glass.md"),
        "two documents: one says who the keeper is, the other what she collects",
    ),
    SampleQuestion("Who was the captain of the Anna Lisbet?", ("Vaal",), ("shipwreck.md",)),
    SampleQuestion("Who is the director of the observatory?", ("Quarrie",), ("observatory.md",)),
    SampleQuestion("How many glass bottles does Maren Holt own?", ("1,318", "1318"), ("glass.md",)),
    SampleQuestion("Who is the keeper of Corran Light?", ("Maren Holt",), ("lighthouse.md",)),
    SampleQuestion(
        "Which instrument does the owner of Fennick's Bakery play?",
        ("accordion",),
        ("bakery.md", "accordion.md"),
        "two documents; more than the embedded model can do",
    ),
)

# Those that the embedded model answers rightly after a full prefill.
DEMO_QUESTIONS: tuple[SampleQuestion, ...] = QUESTIONS[:3]


@cache
def documents() -> tuple[Document, ...]:
    """The sample documents in the order of the prompt; `source` is the file's name, `title` its first heading."""
    folder = files(__name__) / "documents"
    return tuple(_document(f"{name}.md", (folder / f"{name}.md").read_text(encoding="utf-8")) for name in ORDER)


def _document(source: str, content: str) -> Document:
    heading, _, text = content.partition("\n")
    return Document(text=text.strip(), title=heading.removeprefix("#").strip(), source=source)

"""The model's chat template, rendered once with marks and cut at them: what stands before, between and after."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infoflow_kv.chunking.tokens import Tokenizer, control_tokens, encode_plainly, replace_surrogates
from infoflow_kv.errors import ModelError

FIXED_DATE = "26 Jul 2024"
"""What every template is told the date is. A real clock would change the head, and its KV, from day to day (T04)."""

# Transformers gives templates `strftime_now`; a macro of that name before the template takes its place. (A function
# passed as an argument does not: since 5.24 only plain data reach a template.) English, whatever the locale.
_DATE_PARTS = {
    "%d": "26", "%-d": "26", "%e": "26", "%j": "208", "%a": "Fri", "%A": "Friday", "%w": "5", "%u": "5",
    "%m": "07", "%-m": "7", "%b": "Jul", "%B": "July", "%y": "24", "%Y": "2024", "%F": "2024-07-26", "%D": "07/26/24",
    "%x": "07/26/24", "%c": "Fri Jul 26 00:00:00 2024", "%H": "00", "%-H": "0", "%I": "12", "%M": "00", "%S": "00",
    "%f": "000000", "%p": "AM", "%T": "00:00:00", "%R": "00:00", "%X": "00:00:00", "%s": "1721952000",
    "%z": "", "%Z": "",
}  # fmt: skip
_FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('{code}', '{value}')" for code, value in _DATE_PARTS.items())
    + " }}{%- endmacro %}\n"  # the renderer drops a newline that follows a block
)

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Template:
    """The scaffold around a request: `head`, documents, `before_question`, question, `after_question`.

    `content_ranges` are characters of `head` that hold the caller's own words *and* a control token typed there;
    they are encoded as content. Without such a token the head is encoded in one go. `joint` stands between a label and
    the question, and is encoded with the question.
    """

    head: str
    before_question: str
    after_question: str
    content_ranges: tuple[Range, ...] = ()
    joint: str = " "


def render(tokenizer: Tokenizer, *, instruction: str, system: str | None, labels: bool = True) -> Template:
    """Return the model's own chat scaffold around instruction, documents and question.

    A template that refuses or drops the system message gets the system text at the start of the instruction. A model
    without a chat template, or whose template loses the user's text, gets a plain layout: whatever the tokenizer
    itself puts before a text (BOS, if it does), instruction, documents, `Question: …`, `Answer:`. Templates see the
    date 26 July 2024 and `enable_thinking=False`. Without `labels` neither `Question:` nor `Answer:` is written: the
    question brings all words behind the documents with it.

    Raises ModelError if the template fails in every way tried.
    """
    instruction = replace_surrogates(instruction).strip()
    system = replace_surrogates(system).strip() if system else ""
    if not tokenizer.chat_template:
        return _plain(tokenizer, instruction, system, labels)
    marks = _Marks.for_texts(instruction, system)
    if _holds_control(tokenizer, instruction) or _holds_control(tokenizer, system):
        instruction, system = marks.wrap(instruction), marks.wrap(system)
    failure: Exception | None = None
    rendered_once = False
    for messages in _attempts(instruction, system, marks, labels):
        try:
            text = tokenizer.apply_chat_template(
                messages,
                chat_template=_FIXED_CLOCK + tokenizer.get_chat_template(),
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
                date_string=FIXED_DATE,
            )
        except Exception as error:  # noqa: BLE001 - a template is foreign code; the first error is reported below
            failure = failure or error
            continue
        rendered_once = True
        if "{'type': 'text'" in str(text):  # a text template printed the list of parts itself
            continue
        parts = _between(text, marks.documents, marks.question)
        if parts and system in parts[0]:
            head, content_ranges = marks.unwrap(parts[0])
            return Template(head, parts[1], parts[2], content_ranges, " " if labels else "")
    if failure and not rendered_once:
        raise ModelError(
            f"the model's chat template failed: {' '.join(str(failure).split()) or type(failure).__name__}; "
            "use a model whose template takes a user message"
        ) from failure
    return _plain(tokenizer, marks.strip(instruction), marks.strip(system), labels)


@dataclass(frozen=True, slots=True)
class _Marks:
    """Words that stand for documents, question and the caller's texts while a template is rendered.

    They hold a hash of those texts, so the texts cannot contain them.
    """

    documents: str
    question: str
    start: str
    stop: str

    @classmethod
    def for_texts(cls, *texts: str) -> "_Marks":
        seed = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]
        return cls(f"DOCUMENTS{seed}", f"QUESTION{seed}", f"START{seed}", f"STOP{seed}")

    def wrap(self, text: str) -> str:
        return f"{self.start}{text}{self.stop}" if text else ""

    def strip(self, text: str) -> str:
        return text.removeprefix(self.start).removesuffix(self.stop)

    def unwrap(self, text: str) -> tuple[str, tuple[Range, ...]]:
        """Return the text without start and stop marks, and what stood between them as ranges of the result."""
        first, *others = text.split(self.start)
        result, ranges = first, []
        for other in others:
            inside, _, after = other.partition(self.stop)
            ranges.append((len(result), len(result) + len(inside)))
            result += inside + after
        return result, tuple(ranges)


def _attempts(instruction: str, system: str, marks: _Marks, labels: bool) -> list[list[dict[str, Any]]]:
    """Return the conversations to try, best first: system message, folded system; text, then parts (vision models)."""

    def user(*blocks: str) -> dict[str, Any]:
        documents = f"{marks.documents}{'Question:' if labels else ''}{marks.question}"
        return {"role": "user", "content": "\n\n".join([*(b for b in blocks if b), documents])}

    folded = [user(system, instruction)]
    whole = [{"role": "system", "content": system}, user(instruction)]
    texts = [whole, folded] if system else [folded]
    return texts + [
        [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages] for messages in texts
    ]


def _between(text: Any, *marks: str) -> Sequence[str] | None:
    """Return the parts of the text around the marks, or None unless each stands there once, in this order."""
    if not isinstance(text, str) or any(text.count(mark) != 1 for mark in marks):
        return None
    parts = []
    for mark in marks:
        part, found, text = text.partition(mark)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _holds_control(tokenizer: Tokenizer, text: str) -> bool:
    return any(literal in text for literal in control_tokens(tokenizer).values())


def _plain(tokenizer: Tokenizer, instruction: str, system: str, labels: bool) -> Template:
    head, content_ranges = _own_prefix(tokenizer), []
    for text in (system, instruction):
        if _holds_control(tokenizer, text):
            content_ranges.append((len(head), len(head) + len(text)))
        head += text + "\n\n" if text else ""
    if not labels:
        return Template(head, "", "", tuple(content_ranges), "")
    return Template(head, "Question:", "\nAnswer:", tuple(content_ranges))


def _own_prefix(tokenizer: Tokenizer) -> str:
    """Return the text of the tokens that the tokenizer itself puts before a text: usually BOS or nothing."""
    bare = encode_plainly(tokenizer, "x", add_special_tokens=False)
    full = encode_plainly(tokenizer, "x", add_special_tokens=True)
    for length in range(len(full) - len(bare) + 1):
        if full[length : length + len(bare)] == bare:
            added = tokenizer.added_tokens_decoder
            return "".join(str(added[i].content) for i in full[:length] if i in added)
    return ""

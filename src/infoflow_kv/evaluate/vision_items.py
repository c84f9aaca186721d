"""The record that every question about pictures becomes, and what each published set asks beside the question."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infoflow_kv.errors import unknown_name
from infoflow_kv.evaluate.items import facts

Picture = Path | bytes
"""A picture as its file, or as its bytes where a data file holds it. Nobody has looked into it but for its first bytes:
whoever shows it to a model opens it."""


@dataclass(frozen=True, slots=True)
class VisionSet:
    """How a published set is asked and scored. `suffix` stands behind the question, on a line of its own.

    `metric` names a row of `vision_metrics.METRICS`; `metric_of` names others for records by their type.
    """

    name: str
    metric: str
    suffix: str
    max_new_tokens: int
    metric_of: Mapping[str, str] = field(default_factory=dict)


_PHRASE = "Answer the question using a single word or phrase."

SETS: dict[str, VisionSet] = {
    s.name: s
    for s in (
        VisionSet("chartqa", "relaxed", "Answer the question with a single word.", 16),
        VisionSet("infovqa", "anls", _PHRASE, 32),
        VisionSet("docvqa", "anls", _PHRASE, 32),
        VisionSet(
            "ocrbench", "ocr", "", 128, metric_of={"Handwritten Mathematical Expression Recognition": "ocr_formula"}
        ),
        # Its questions end in their own request ("Please answer directly with only the letter …").
        VisionSet("realworldqa", "realworld", "", 16),
        # No published task limits its tokens; a letter with some words around it fits.
        VisionSet("hrbench4k", "option", "Answer the option letter directly.", 16),
    )
}
"""Suffixes and numbers of new tokens as in lmms-eval 0.7.3's default prompts. VLMEvalKit words some otherwise, and the
paper's runs took 128 new tokens for all: scores under two prompts never belong in one table."""


# By these the published tables are broken down; OCRBench's are longer than what rows take of other facts.
_CLASSES = ("type", "category")


@dataclass(frozen=True, slots=True)
class VisionItem:
    """One question about one picture or more, with its gold answers.

    `id` is unique in a run. `options`: letter → text, empty where the question is open or holds them itself. `metric`
    names a row of `vision_metrics.METRICS`. `suffix` is shown to the model behind question and options. `group` is the
    cluster for the bootstrap: the picture, so that the four option orders of an HRBench4K question are in one. `meta`
    holds facts of the record; nothing in it is shown to the model.
    """

    id: str
    dataset: str
    question: str
    answers: tuple[str, ...]
    images: tuple[Picture, ...]
    metric: str
    options: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""
    max_new_tokens: int = 32
    group: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All that the model reads behind the pictures: the question, a line an option, and the suffix.

        >>> VisionItem("1", "d", "Which?", ("A",), (b"",), "option", {"A": "red", "B": "blue"}, "Letter only.").text
        'Which?\\nA. red\\nB. blue\\nLetter only.'
        """
        options = (f"{letter}. {text}" for letter, text in self.options.items())
        return "\n".join(line for line in (self.question.strip(), *options, self.suffix) if line)

    @property
    def row_fields(self) -> dict[str, Any]:
        """What a row of predictions must say of the item, beside its arm and its prediction."""
        return {
            "_id": self.id,
            "dataset": self.dataset,
            "group": self.group,
            "answers": list(self.answers),
            "metric": self.metric,
            "options": dict(self.options),
            "meta": {**facts(self.meta), **{name: self.meta[name] for name in _CLASSES if name in self.meta}},
        }


def find_set(name: str) -> VisionSet:
    """The set of this name; OptionError with the nearest one for a name that is in no table."""
    if name not in SETS:
        raise unknown_name("vision set", name, SETS)
    return SETS[name]

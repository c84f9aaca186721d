"""Scores of one answer about a picture by the published rules of ChartQA, OCRBench, RealWorldQA, HRBench4K and DocVQA.

Every metric is a row of METRICS, and what is to be scored names its metric: nothing here asks which set it is. All are
0..1 for one item and take the best of several gold answers. Rules are followed to the letter, oddities included, where
another rule would give other numbers than those published; a deviation is said where it is made.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.evaluate.items import LETTERS
from infoflow_kv.evaluate.metrics import anls

Options = Mapping[str, str]
"""The choices of a question: letter → text. Empty for an open question, or where the question's text holds them."""

_TOLERANCE = 0.05
# Labels that a year could be: four digits and nothing else, in these bounds.
_YEAR = re.compile(r"[0-9]{4}")
_YEARS = (1000, 2100)
_BETWEEN_LETTERS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))


def relaxed_accuracy(prediction: str, answers: Sequence[str], options: Options | None = None) -> float:
    """ChartQA's relaxed accuracy: 1 if the prediction is within 5 % of a gold number, or equal to it as text.

    Masry et al. 2022, section 5.1, in the form of pix2struct that lmms-eval and VLMEvalKit share. Both sides are
    numbers where `float()` takes them, with a trailing % divided by 100: "5%" is 0.05 and not 5. Thousands separators
    and currency signs are no part of that rule: "1,200" equals only itself. Everything else, and a gold of 0, which
    nothing can be relative to, must be equal as text, case ignored. The ratio is taken to the gold, never to the
    prediction.

    Two deviations that no published label meets: white space around both is ignored (VLMEvalKit does so, pix2struct
    does not), and "nan" and "inf" are words, not numbers.

    >>> relaxed_accuracy("104.9", ["100"]), relaxed_accuracy("5%", ["0.05"]), relaxed_accuracy("1200", ["1,200"])
    (1.0, 1.0, 0.0)
    """
    return float(any(_is_near(prediction, gold) for gold in _golds(answers)))


def strict_accuracy(prediction: str, answers: Sequence[str], options: Options | None = None) -> float:
    """Relaxed accuracy that does not let 2008 pass for 2010: a gold that could be a year must be met exactly.

    Of our own making, for google-research/pix2struct#35: four digits from 1000 to 2100 without a unit count as a year,
    so a value such as 1500 must be met exactly too. Report it beside the relaxed one, never instead.

    >>> strict_accuracy("2008", ["2010"]), strict_accuracy("2010.0", ["2010"]), strict_accuracy("104", ["100"])
    (0.0, 1.0, 1.0)
    """
    return float(
        any(
            _number(prediction) == _number(gold) if _is_year(gold) else _is_near(prediction, gold)
            for gold in _golds(answers)
        )
    )


def text_contained(prediction: str, answers: Sequence[str], options: Options | None = None) -> float:
    """OCRBench's rule: 1 if a gold occurs in the prediction, both in lower case, line feeds as spaces.

    Liu et al. 2023; as VLMEvalKit and lmms-eval have it. lmms-eval 0.7 folds full-width letters as well, which the
    published rule does not. A blank gold would occur everywhere and is refused.

    >>> text_contained("The sign says STOP\\nHERE.", ["Stop here"])
    1.0
    """
    said = prediction.lower().strip().replace("\n", " ")
    return float(any(gold.lower().strip().replace("\n", " ") in said for gold in _golds(answers)))


def formula_contained(prediction: str, answers: Sequence[str], options: Options | None = None) -> float:
    """OCRBench's rule for handwritten formulas (HME100k): 1 if a gold occurs, spaces left out and case kept.

    Case is kept on both sides: x and X are two variables. An older lmms-eval lowered the prediction alone (its #1220).

    >>> formula_contained("$x ^ { 2 } + Y$", ["x^{2}+Y"]), formula_contained("x+y", ["x+Y"])
    (1.0, 0.0)
    """
    said = _without_spaces(prediction)
    return float(any(_without_spaces(gold) in said for gold in _golds(answers)))


def option_letter(prediction: str, options: Options | None = None) -> str | None:
    """The option that a prediction names, None where it names none or several.

    VLMEvalKit's `can_infer`, as HRBench is scored without a judge model: with `.()[],:;!*#{}` as spaces, the one letter
    of the options that stands as a word; else the one option whose text occurs in the prediction, case ignored. Letters
    are capitals, and an article "A" is taken for the letter. Left out are its "Z" for "none of them" and its list of
    refusals of APIs: both only make a prediction count as wrong that names no letter.
    Without `options` the letters are A to D.

    >>> option_letter("(B)."), option_letter("Because"), option_letter("A or B"), option_letter("the dog", {"A": "Dog"})
    ('B', None, None, 'A')
    """
    texts = options or dict.fromkeys(LETTERS, "")
    words = prediction.translate(_BETWEEN_LETTERS).split()
    named = [letter for letter in texts if letter in words]
    if len(named) != 1:
        said = prediction.lower()
        named = [letter for letter, text in texts.items() if text.strip() and text.lower() in said]
    return named[0] if len(named) == 1 else None


def option_accuracy(prediction: str, answers: Sequence[str], options: Options | None = None) -> float:
    """1 if the option that the prediction names is the gold letter (HRBench4K, one of its four option orders).

    >>> option_accuracy("The answer is C.", ["C"])
    1.0
    """
    letter = option_letter(prediction, options)
    return float(letter is not None and any(letter == gold.strip().upper() for gold in _golds(answers)))


def option_or_text_accuracy(prediction: str, answers: Sequence[str], options: Options | None = None) -> float:
    """RealWorldQA's exact match: an option's letter where the gold is one, else the whole short answer.

    Open answers as lmms-eval 0.7: equal with case, white space around and full stops at the end of the prediction
    ignored; number words are not digits. Letters by `option_letter`, and a small letter alone counts, as in lmms-eval's
    older exact match; its newer search for a letter finds one in "Because" and is not followed.

    >>> option_or_text_accuracy("B. Two", ["B"]), option_or_text_accuracy(" Left. ", ["left"])
    (1.0, 1.0)
    """
    said = prediction.lower().strip().rstrip(".")
    golds = [gold.strip() for gold in _golds(answers)]
    if any(said == gold.lower() for gold in golds):
        return 1.0
    letters = [gold.upper() for gold in golds if gold.upper() in tuple(options or LETTERS)]
    return float(bool(letters) and option_letter(prediction, options) in letters)


@dataclass(frozen=True, slots=True)
class VisionMetric:
    """How an item that names this metric is scored.

    `field`: what the number is called in results; metrics of one field are averaged together (OCRBench's two rules).
    `is_binary`: hit or miss, which McNemar's test can take. `also`: metrics told beside it. `mean_over`: a fact in
    `meta`; the set's number is the mean over its values of their means.
    """

    name: str
    title: str
    field: str
    score: Callable[[str, Sequence[str], Options | None], float]
    is_binary: bool = True
    also: tuple[str, ...] = ()
    mean_over: str = ""


def _anls(prediction: str, answers: Sequence[str], options: Options | None = None) -> float:
    return anls(prediction, _golds(answers))


METRICS: dict[str, VisionMetric] = {
    m.name: m
    for m in (
        VisionMetric("relaxed", "relaxed accuracy", "relaxed", relaxed_accuracy, also=("strict",)),
        VisionMetric("strict", "relaxed accuracy, years exact", "strict", strict_accuracy),
        VisionMetric("ocr", "text found", "ocr", text_contained),
        VisionMetric("ocr_formula", "text found", "ocr", formula_contained),
        VisionMetric("anls", "ANLS", "anls", _anls, is_binary=False),
        VisionMetric("realworld", "exact match or letter", "realworld", option_or_text_accuracy),
        VisionMetric("option", "right option", "option", option_accuracy, mean_over="cycle_category"),
    )
}
"""Every metric by the name that items and rows carry."""

FIELDS: dict[str, str] = {m.field: m.title for m in METRICS.values()}
"""What is measured and what it is called, in the order of tables."""

BINARY_FIELDS = tuple(field for field in FIELDS if all(m.is_binary for m in METRICS.values() if m.field == field))
"""The measures that say yes or no of each item."""


def find_metric(name: str) -> VisionMetric:
    """The metric of this name; OptionError with the nearest one for a name that is in no table."""
    if name not in METRICS:
        raise unknown_name("vision metric", name, METRICS)
    return METRICS[name]


def fields_scored(name: str) -> tuple[str, ...]:
    """The fields that an item of this metric has scores in.

    >>> fields_scored("relaxed"), fields_scored("ocr_formula")
    (('relaxed', 'strict'), ('ocr',))
    """
    return tuple(m.field for m in _told(name))


def vision_values(row: Mapping[str, Any], prediction: str | None) -> dict[str, float]:
    """The scores of a row's prediction by field: its `metric` and those told beside it; empty where it has none.

    `prediction` is the row's own, or that of its closed book. Reads `metric`, `answers` and `options` of the row.

    >>> vision_values({"metric": "relaxed", "answers": ["2010"]}, "2008")
    {'relaxed': 1.0, 'strict': 0.0}
    """
    if prediction is None or row.get("metric") is None:
        return {}
    return {m.field: m.score(prediction, row["answers"], row.get("options")) for m in _told(row["metric"])}


def _told(name: str) -> tuple[VisionMetric, ...]:
    metric = find_metric(name)
    return (metric, *map(find_metric, metric.also))


def _is_near(prediction: str, gold: str) -> bool:
    given, wanted = _number(prediction), _number(gold)
    if given is not None and wanted:
        return abs(given - wanted) / abs(wanted) <= _TOLERANCE
    return prediction.strip().lower() == gold.strip().lower()


def _number(text: str) -> float | None:
    text = text.strip()
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_year(gold: str) -> bool:
    text = gold.strip()
    return bool(_YEAR.fullmatch(text)) and _YEARS[0] <= int(text) <= _YEARS[1]


def _without_spaces(text: str) -> str:
    return text.strip().replace("\n", " ").replace(" ", "")


def _golds(answers: Sequence[str]) -> Sequence[str]:
    """`answers` as given; OptionError for a bare string, for none, and for a blank one, which every text would hold."""
    if isinstance(answers, str):
        raise OptionError(f"answers is the string {answers!r}; expected a list of strings")
    if not answers:
        raise OptionError("answers is empty; expected at least one gold string")
    for place, gold in enumerate(answers):
        if not gold.strip():
            raise OptionError(f"answers[{place}] is {gold!r}; expected a visible gold string")
    return answers

"""Scores of one prediction against its gold answers: LongBench v1, InfoFlow KV's own protocol, RULER, ANLS.

All are 0..1 for one item and take the best of several gold answers, except `contains_all`, which asks for every one.
`qa_f1` and `paper_f1` are different protocols; numbers of the two never belong in one table. `choice_letter` only reads
what a multiple-choice prediction says.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from infoflow_kv.errors import OptionError

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ANSWER_PREFIXES = re.compile(r"(?:\s*(?:answer\s*:|the answer is\b\s*:?))+", re.IGNORECASE)
# A letter alone: part of no word (D'Artagnan, A-level, C++), in brackets or not.
_ALONE = r"(?<![\w'’+#-])(?P<letter>[A-D])(?![\w'’+#-])"
_LETTER = re.compile(_ALONE)
_NAMED_LETTER = re.compile(r"(?i:\banswer\s*(?:is\b|:)\s*:?)[\s(\[*]*" + _ALONE)
_PAPER_CUT = re.compile("[,;。]")
# ANLS: a similarity under this is a wrong answer, not a misspelt one. The threshold itself still counts.
_ANLS_THRESHOLD = 0.5


def normalise(text: str) -> str:
    """`text` in LongBench's form: lower case, no ASCII punctuation, no a/an/the, single spaces.

    Punctuation is deleted, not replaced by a space; typographic quotes and dashes stay, as in the official rule.

    >>> normalise("The well-known  actor.")
    'wellknown actor'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def qa_f1(prediction: str, answers: Sequence[str]) -> float:
    """LongBench v1's `qa_f1_score`: word F1 of the normalised texts, the best over `answers`.

    The prediction is not cut at its first line. No common word gives 0, also where both texts normalise to nothing.

    >>> qa_f1("Yes, both are American.", ["yes"])
    0.4
    """
    return max(_overlap_f1(prediction, gold, both_empty=0.0) for gold in _checked(answers, "answers"))


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """True where the prediction equals one of `answers` after LongBench's normalisation.

    Texts that normalise to nothing match nothing, so that an exact match always has `qa_f1` 1.

    >>> exact_match("the Oberoi Group.", ["Oberoi Group"])
    True
    """
    given = normalise(prediction)
    return bool(given) and any(given == normalise(gold) for gold in _checked(answers, "answers"))


def longbench_score(values: Iterable[float]) -> float:
    """LongBench's number for a data set: 100 × the mean of the items' scores, rounded to 2 places.

    OptionError if there are no values or one is outside 0..1.

    >>> longbench_score([1, 0, 0])
    33.33
    """
    scores = list(values)
    if not scores:
        raise OptionError("longbench_score got no values; expected the score of at least one item")
    for place, score in enumerate(scores):
        if not 0 <= score <= 1:  # also true for NaN
            raise OptionError(f"values[{place}] is {score!r}; expected scores of items, each in 0..1")
    return round(100 * math.fsum(scores) / len(scores), 2)


def paper_parse(prediction: str) -> str:
    """The answer that InfoFlow KV's released evaluation takes out of a generation.

    In this order: prefixes ("Answer:", "The answer is") removed, first line, cut at the first of `, ; 。`, and a text
    whose first word is yes or no becomes that word. The cut loses the tail of dates, numbers and lists; it is kept
    to reproduce the paper's protocol, and no other metric uses it.

    >>> paper_parse("The answer is: April 1, 1954")
    'April 1'
    """
    text = prediction.strip()
    if prefix := _ANSWER_PREFIXES.match(text):
        text = text[prefix.end() :].strip()
    text = _PAPER_CUT.split(text.split("\n", 1)[0], maxsplit=1)[0].strip()
    words = normalise(text).split()
    return words[0] if words and words[0] in ("yes", "no") else text


def paper_f1(prediction: str, answers: Sequence[str]) -> float:
    """InfoFlow KV's released F1: word F1 of `paper_parse(prediction)`, the best over `answers`.

    Only the prediction is parsed, gold answers are not cut. Two texts that normalise to nothing score 1 (LongBench: 0).

    >>> paper_f1("April 1, 1954", ["April 1, 1954"])
    0.8
    """
    parsed = paper_parse(prediction)
    return max(_overlap_f1(parsed, gold, both_empty=1.0) for gold in _checked(answers, "answers"))


def contains_all(prediction: str, references: Sequence[str]) -> float:
    """RULER's `string_match_all` of one item: the share of `references` that occur in the prediction, case ignored.

    >>> contains_all("7 and 12", ["7", "12", "30", "41"])
    0.5
    """
    found = _occurrences(prediction, references)
    return sum(found) / len(found)


def choice_letter(prediction: str) -> str | None:
    """The letter A to D that a multiple-choice prediction gives, None where it gives none.

    The letter after "answer is" or "answer:" where the text has that form, else the first capital that stands alone:
    "(B)", "B.", "B". An "A" that opens a sentence without naming a letter is taken for the letter.

    >>> choice_letter("The answer is (B)."), choice_letter("C. Because it says so"), choice_letter("Because")
    ('B', 'C', None)
    """
    found = _NAMED_LETTER.search(prediction) or _LETTER.search(prediction)
    return found["letter"] if found else None


def anls(prediction: str, answers: Sequence[str]) -> float:
    """Normalised Levenshtein similarity of DocVQA and InfographicVQA, the best over `answers`; 0 if it is below 0.5.

    Compared in lower case with white space collapsed; a similarity of exactly 0.5 is kept. The distance is divided by
    the longer of the two texts as compared.

    >>> anls("Cofee  shop", ["coffee shop"])
    0.9090909090909091
    """
    given = _collapsed(prediction)
    best = max(_similarity(given, _collapsed(gold)) for gold in _checked(answers, "answers"))
    return best if best >= _ANLS_THRESHOLD else 0.0


def levenshtein(first: str, second: str) -> int:
    """The fewest insertions, deletions and replacements of one character that turn `first` into `second`.

    >>> levenshtein("kitten", "sitting")
    3
    """
    above = list(range(len(second) + 1))
    for row, left in enumerate(first, start=1):
        current = [row]
        for column, right in enumerate(second, start=1):
            replaced = above[column - 1] + (left != right)
            current.append(min(replaced, above[column] + 1, current[-1] + 1))
        above = current
    return above[-1]


def _overlap_f1(prediction: str, gold: str, *, both_empty: float) -> float:
    """Harmonic mean of the shares of predicted and of gold words in their common multiset."""
    given, wanted = normalise(prediction).split(), normalise(gold).split()
    if not given and not wanted:
        return both_empty
    common = (Counter(given) & Counter(wanted)).total()
    if common == 0:
        return 0.0
    # 2PR / (P + R) without its two roundings: identical texts give exactly 1.
    return 2 * common / (len(given) + len(wanted))


def _similarity(first: str, second: str) -> float:
    longest = max(len(first), len(second))
    return (longest - levenshtein(first, second)) / longest if longest else 1.0


def _collapsed(text: str) -> str:
    return " ".join(text.lower().split())


def _occurrences(prediction: str, references: Sequence[str], name: str = "references") -> list[bool]:
    """For each reference, whether it occurs in the prediction, case ignored."""
    text = prediction.lower()
    wanted = _checked(references, name)
    for place, reference in enumerate(wanted):
        if not reference.strip():
            raise OptionError(
                f"{name}[{place}] is {reference!r}, which occurs in every text; expected a visible string"
            )
    return [reference.lower() in text for reference in wanted]


def _checked(golds: Sequence[str], name: str) -> Sequence[str]:
    """`golds` as given; OptionError for a bare string (its letters would count as answers) and for no answers."""
    if isinstance(golds, str):
        raise OptionError(f"{name} is the string {golds!r}; expected a list of strings")
    if not golds:
        raise OptionError(f"{name} is empty; expected at least one gold string")
    return golds

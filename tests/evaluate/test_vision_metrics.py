"""Scores of answers about pictures, worked out by hand from the published rules."""

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate import vision_metrics
from infoflow_kv.evaluate.vision_metrics import (
    BINARY_FIELDS,
    FIELDS,
    METRICS,
    find_metric,
    formula_contained,
    option_accuracy,
    option_letter,
    option_or_text_accuracy,
    relaxed_accuracy,
    strict_accuracy,
    text_contained,
    vision_values,
)

ANIMALS = {"A": "Cat", "B": "Dog", "C": "Dark dog", "D": "10"}


def relaxed_by_description(prediction: str, gold: str) -> bool:
    """pix2struct's rule for one gold, step by step from its description."""
    numbers: list[float | None] = []
    for text in (prediction, gold):
        try:
            numbers.append(float(text.rstrip("%")) / 100 if text.endswith("%") else float(text))
        except ValueError:
            numbers.append(None)
    given_number, gold_number = numbers
    if given_number is not None and gold_number:
        return abs(given_number - gold_number) / abs(gold_number) <= 0.05
    return prediction.lower() == gold.lower()


@pytest.mark.parametrize(
    ("prediction", "answers", "hit"),
    [
        ("100", ["100"], 1),
        ("105", ["100"], 1),  # 5 % exactly
        ("95", ["100"], 1),
        ("105.01", ["100"], 0),
        ("100", ["105.2"], 1),  # 5.2 / 105.2: relative to the gold
        ("100", ["106"], 0),  # 6 / 106
        ("105.2", ["100"], 0),  # and not to the prediction, of which 5.2 is less than 5 %
        ("-100", ["100"], 0),
        ("-104", ["-100"], 1),
        # Per cent is a hundredth, a bare number is none.
        ("5%", ["0.05"], 1),
        ("0.05", ["5%"], 1),
        ("5", ["5%"], 0),
        ("5%", ["5"], 0),
        ("5 %", ["5%"], 1),
        ("52%", ["50%"], 1),
        ("%", ["%"], 1),  # no number: the same text
        # No thousands separators and no currency in the published rule: text only.
        ("1,200", ["1200"], 0),
        ("1200", ["1,200"], 0),
        ("1,200", ["1,200"], 1),
        ("1,201", ["1,200"], 0),
        ("$5", ["5"], 0),
        ("$5", ["$5"], 1),
        ("1e3", ["1000"], 1),
        # A gold of 0 falls through to text.
        ("0", ["0"], 1),
        ("0.0", ["0"], 0),
        ("0.0001", ["0"], 0),
        ("0%", ["0%"], 1),
        # Numbers that are none.
        ("nan", ["5"], 0),
        ("inf", ["5"], 0),
        ("5", ["nan"], 0),
        ("NaN", ["nan"], 1),
        ("inf", ["Infinity"], 0),
        ("1e999", ["5"], 0),
        # Text.
        ("netherlands", ["Netherlands"], 1),
        ("Netherlands.", ["Netherlands"], 0),
        ("The Netherlands", ["Netherlands"], 0),
        (" Cairo\n", ["Cairo"], 1),
        ("", ["Cairo"], 0),
        ("", ["0"], 0),
        ("SÃO PAULO", ["São Paulo"], 1),
        ("12", ["2"], 0),  # containing is not enough, as it is in the paper's own script
        ("12 apples", ["12"], 0),
        # Several golds: any of them.
        ("12", ["30", "12.1"], 1),
        ("blue", ["red", "Blue"], 1),
    ],
)
def test_relaxed_accuracy(prediction, answers, hit):
    assert relaxed_accuracy(prediction, answers) == hit


@given(st.text("019.,%-e$ab", max_size=6), st.text("0129.,%-eab", min_size=1, max_size=6))
def test_relaxed_accuracy_follows_the_published_steps(prediction, gold):
    if not gold.strip() or any(math.isinf(n) for n in (_float(prediction), _float(gold))):
        return  # ours takes "1e999" for text
    # White space around is ignored by ours.
    assert relaxed_accuracy(prediction, [gold]) == relaxed_by_description(prediction.strip(), gold.strip())


def _float(text: str) -> float:
    try:
        return float(text.strip().rstrip("%"))
    except ValueError:
        return 0.0


@pytest.mark.parametrize(
    ("prediction", "answers", "relaxed", "strict"),
    [
        ("2008", ["2010"], 1, 0),
        ("2010", ["2010"], 1, 1),
        ("2010.0", ["2010"], 1, 1),
        ("1000", ["1000"], 1, 1),
        ("999", ["1000"], 1, 0),
        ("998", ["999"], 1, 1),  # no year: relaxed
        ("2100", ["2100"], 1, 1),
        ("2101", ["2100"], 1, 0),
        ("2102", ["2101"], 1, 1),
        ("2009", ["2010%"], 0, 0),  # 20.1 with its unit
        ("2009%", ["2010%"], 1, 1),  # a unit: no year
        ("in 2010", ["2010"], 0, 0),
        ("2008", ["2010", "2008"], 1, 1),
        ("104", ["100"], 1, 1),
        ("red", ["Red"], 1, 1),
        ("", ["2010"], 0, 0),
        ("nan", ["2010"], 0, 0),
    ],
)
def test_strict_accuracy_wants_years_exactly(prediction, answers, relaxed, strict):
    assert (relaxed_accuracy(prediction, answers), strict_accuracy(prediction, answers)) == (relaxed, strict)


@given(st.text("0129.%-", max_size=5), st.text("0129.%-", min_size=1, max_size=5))
def test_strict_never_takes_what_relaxed_refuses(prediction, gold):
    assert strict_accuracy(prediction, [gold]) <= relaxed_accuracy(prediction, [gold])


@pytest.mark.parametrize(
    ("prediction", "answers", "hit"),
    [
        ("It says STOP.", ["stop"], 1),
        ("List of\nKentucky Derby", ["list of kentucky"], 1),
        ("clásica 2008", ["Clásica"], 1),
        ("stop", ["stop here"], 0),  # the gold in the output, not the other way round
        ("unstoppable", ["stop"], 1),  # containment, not words
        ("s t o p", ["stop"], 0),
        ("", ["stop"], 0),
        ("x", ["y", "X"], 1),
        ("ＳＴＯＰ", ["stop"], 0),  # full-width letters are not folded
        ("ＳＴＯＰ", ["ｓｔｏｐ"], 1),
        ("12.50", [" 12.5 "], 1),
    ],
)
def test_ocr_is_containment(prediction, answers, hit):
    assert text_contained(prediction, answers) == hit


@pytest.mark.parametrize(
    ("prediction", "answers", "hit"),
    [
        ("$ \\frac { 1 } { 2 } $", ["\\frac{1}{2}"], 1),
        ("\\frac{1}{2}", ["\\frac { 1 }\n{ 2 }"], 1),
        ("x+y", ["X+y"], 0),  # case is kept
        ("X+y", ["X+y"], 1),
        ("a\tb", ["ab"], 0),  # spaces and line feeds only
        ("", ["x"], 0),
        ("2x", ["y", "x"], 1),
    ],
)
def test_formulas_ignore_spaces_and_keep_case(prediction, answers, hit):
    assert formula_contained(prediction, answers) == hit


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("B", "B"),
        ("B.", "B"),
        ("(B)", "B"),
        ("[B]", "B"),
        ("**B**", "B"),
        ("B: Dog", "B"),
        ("The answer is B.", "B"),
        ("B, so B!", "B"),
        ("b", None),
        ("Because", None),  # no letter inside a word
        ("ABBA", None),
        ("A-level", None),
        ("A car", "A"),  # the article is taken for the letter, as published
        ("A or B", None),
        ("E", None),
        ("", None),
        ("B？", None),  # full-width marks part nothing in the published rule
        ("B\n\nIt is there", "B"),
    ],
)
def test_letters_without_options(prediction, letter):
    assert option_letter(prediction) == letter


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("a cat", "A"),
        ("the CAT sits", "A"),
        ("dog", "B"),
        ("dark dog", None),  # holds two texts
        ("cat or dog", None),
        ("C. Dark dog", "C"),  # the letter comes first
        ("A or B: the cat", "A"),  # two letters name none, so the text decides
        ("100", "D"),
        ("horse", None),
        ("E", None),
    ],
)
def test_letters_by_the_texts_of_options(prediction, letter):
    assert option_letter(prediction, ANIMALS) == letter


def test_options_without_text_occur_nowhere():
    assert option_letter("horse", {"A": "", "B": " "}) is None
    assert option_letter("E", {"E": "fish"}) == "E"


@pytest.mark.parametrize(
    ("prediction", "answers", "hit"),
    [("(C).", ["C"], 1), ("C", ["c"], 1), ("A", ["C"], 0), ("", ["C"], 0), ("B", ["A", "B"], 1)],
)
def test_option_accuracy(prediction, answers, hit):
    assert option_accuracy(prediction, answers) == hit
    assert option_accuracy("dog", ["B"], ANIMALS) == 1


@pytest.mark.parametrize(
    ("prediction", "answers", "hit"),
    [
        ("B", ["B"], 1),
        ("B. Two cars", ["B"], 1),
        ("b.", ["B"], 1),
        ("the letter b", ["B"], 0),
        ("Because", ["B"], 0),
        ("A", ["B"], 0),
        ("Left", ["left"], 1),
        (" LEFT.\n", ["left"], 1),
        ("to the left", ["left"], 0),
        ("3", ["3"], 1),
        ("three", ["3"], 0),
        ("3.0", ["3"], 0),
        ("", ["3"], 0),
        ("...", ["3"], 0),
        ("Yes", ["No", "Yes"], 1),
        ("No", ["N"], 0),
        ("Straße", ["straße"], 1),
    ],
)
def test_letters_and_short_answers(prediction, answers, hit):
    assert option_or_text_accuracy(prediction, answers) == hit


def test_an_open_answer_is_no_option_of_another_text():
    assert option_or_text_accuracy("dog", ["B"], ANIMALS) == 1
    assert option_or_text_accuracy("E", ["E"], {"E": "fish", "F": "bird"}) == 1


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("Seán McLoughlin", ["Sean McLoughlin"], 14 / 15),
        ("2012–13", ["2012-13"], 6 / 7),
        ("abcd", ["abxy"], 0.5),  # exactly the threshold is kept
        ("abc", ["xyz"], 0),
        ("abcde", ["abxyz"], 0),  # 2/5
        ("", ["3"], 0),
        ("Doha", ["Doha, Qatar", "doha"], 1),
    ],
)
def test_anls_takes_the_best_gold_over_half(prediction, answers, score):
    assert METRICS["anls"].score(prediction, answers, None) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_every_metric_is_one_for_the_gold_itself_and_refuses_what_cannot_be_scored(metric):
    assert metric.score("B", ["B"], {}) == 1
    assert metric.score("", ["B"], None) == 0
    for answers, why in ((["B", "  "], "visible"), ([], "at least one"), ("B", "list of strings")):
        with pytest.raises(OptionError, match=why):
            metric.score("B", answers, None)


def test_the_table_names_metrics_that_are_in_it():
    assert all(name == m.name and set(m.also) <= set(METRICS) for name, m in METRICS.items())
    assert list(FIELDS) == ["relaxed", "strict", "ocr", "anls", "realworld", "option"]
    assert set(FIELDS) - set(BINARY_FIELDS) == {"anls"}
    assert all(m.title == FIELDS[m.field] for m in METRICS.values())
    with pytest.raises(OptionError, match="unknown vision metric 'relax'; did you mean 'relaxed'"):
        find_metric("relax")


def test_a_row_is_scored_by_the_metric_that_it_names():
    row = {"metric": "option", "answers": ["B"], "options": ANIMALS}
    assert vision_values(row, "dog") == {"option": 1.0}
    assert vision_values({"metric": "ocr_formula", "answers": ["x y"]}, "xy") == {"ocr": 1.0}
    assert vision_values({"metric": "relaxed", "answers": ["2010"]}, "2008") == {"relaxed": 1.0, "strict": 0.0}
    assert vision_values(row, None) == {} and vision_values({"answers": ["x"]}, "x") == {}


def test_doctests_of_the_module():
    assert doctest.testmod(vision_metrics).failed == 0

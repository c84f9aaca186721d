"""Scores of one prediction: LongBench's official values, the paper's protocol, RULER's containment, ANLS."""

import doctest
import math
import re
import string
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate import metrics
from infoflow_kv.evaluate.metrics import (
    anls,
    choice_letter,
    contains_all,
    exact_match,
    levenshtein,
    longbench_score,
    normalise,
    paper_f1,
    paper_parse,
    qa_f1,
)

# Letters that meet every rule: articles, ASCII and typographic punctuation, all kinds of white space.
texts = st.lists(st.sampled_from(["a", "The", "an", "no", "x", "Ann", "-", ".", "“", "’", " ", "\n", "\t"])).map(
    "".join
)


def official_f1(prediction, gold):
    """LongBench v1's rule for one gold answer, written from its description step by step."""
    words = []
    for text in (prediction, gold):
        text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        words.append(re.sub(r"\b(a|an|the)\b", " ", text).split())
    common = sum((Counter(words[0]) & Counter(words[1])).values())
    if common == 0:
        return 0
    precision, recall = common / len(words[0]), common / len(words[1])
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("The Oberoi Group.", "Oberoi Group", 1),
        ("April 1, 1954", "1 April 1954", 1),
        ("well-known actor", "well known actor", 0.4),
        ("Yes, both are American.", "yes", 0.4),
        ("no no no", "no", 0.5),
        ("The The", "the", 0),
        ("“Exeter College”", "Exeter College", 0),
        ("Animorphs\nQuestion: what", "Animorphs", 0.5),
        ("", "x", 0),
    ],
)
def test_f1_has_longbenchs_reference_values(prediction, gold, score):
    assert qa_f1(prediction, [gold]) == pytest.approx(score, abs=1e-12)


@given(texts, texts)
def test_f1_follows_the_official_steps(prediction, gold):
    # Ours takes 2c / (|p| + |g|) instead of precision and recall: equal but for the last bits.
    assert qa_f1(prediction, [gold]) == pytest.approx(official_f1(prediction, gold), abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The well-known, actor!", "wellknown actor"),
        ("a an the", ""),
        ("Theatre and anthem", "theatre and anthem"),
        ("“The” – café", "“ ” – café"),
        ("  A\n\tB  ", "b"),
    ],
)
def test_normalisation(text, expected):
    assert normalise(text) == expected


SCORES = [qa_f1, paper_f1, exact_match, contains_all, anls]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("gold", ["Oberoi Group", "1954", "Łódź", "yes", "Exeter College (Oxford)"])
def test_gold_against_gold_is_exactly_one_and_unrelated_is_zero(score, gold):
    assert score(gold, [gold]) == 1
    assert score("qqqq wwww", [gold]) == 0


@pytest.mark.parametrize("score", [qa_f1, paper_f1, exact_match, anls])
def test_the_best_answer_counts_wherever_it_stands(score):
    assert score("Oberoi Group", ["Hilton", "Oberoi Group"]) == score("Oberoi Group", ["Oberoi Group", "Hilton"]) == 1


@pytest.mark.parametrize("score", SCORES)
def test_a_bare_string_and_no_answers_are_refused(score):
    with pytest.raises(OptionError, match=r"is the string 'gold'; expected a list"):
        score("gold", "gold")
    with pytest.raises(OptionError, match="is empty; expected at least one"):
        score("gold", [])


@pytest.mark.parametrize(
    ("prediction", "gold", "hit"),
    [
        ("the Oberoi Group.", "Oberoi Group", True),
        ("The Oberoi", "Oberoi Group", False),
        ("Group Oberoi", "Oberoi Group", False),
        ("The", "a", False),
        ("", "", False),
    ],
)
def test_exact_match(prediction, gold, hit):
    assert exact_match(prediction, [gold]) is hit


@given(texts, texts)
@example("The x.", "x")
def test_an_exact_match_has_f1_one(prediction, gold):
    if exact_match(prediction, [gold]):
        assert qa_f1(prediction, [gold]) == 1
    else:
        assert normalise(prediction) != normalise(gold) or not normalise(gold)


@pytest.mark.parametrize(
    ("values", "score"), [([1], 100.0), ([0, 0], 0.0), ([1, 0, 0], 33.33), ([1, 1, 0], 66.67), ([0.4, 0.5], 45.0)]
)
def test_the_score_of_a_data_set_is_a_percentage_with_two_places(values, score):
    assert longbench_score(values) == score
    assert longbench_score(iter(values)) == score


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [1.01], [-0.1], [50.0, 60.0]])
def test_scores_that_are_no_shares_are_refused(values):
    with pytest.raises(OptionError, match="expected"):
        longbench_score(values)


@pytest.mark.parametrize(
    ("prediction", "parsed"),
    [
        ("April 1, 1954", "April 1"),
        ("Answer: Paris", "Paris"),
        ("The answer is: Paris.", "Paris."),
        ("the answer is Paris; France", "Paris"),
        ("ANSWER:\nthe answer is Paris", "Paris"),
        ("The answer isn't here", "The answer isn't here"),
        ("answers vary", "answers vary"),
        ("\n Paris \nQuestion: what", "Paris"),
        ("巴黎。法国", "巴黎"),
        ("Yes, both are American.", "yes"),
        ("No.", "no"),
        ("YES both", "yes"),
        ("Nobody", "Nobody"),
        ("Yesterday", "Yesterday"),
        ("It is: a, b", "It is: a"),
        (", Paris", ""),
        ("", ""),
    ],
)
def test_the_papers_parsing(prediction, parsed):
    assert paper_parse(prediction) == parsed


@pytest.mark.parametrize(
    ("prediction", "gold", "paper", "official"),
    [
        ("April 1, 1954", "April 1, 1954", 0.8, 1),
        ("Yes, both are American.", "yes", 1, 0.4),
        ("Animorphs\nQuestion: what", "Animorphs", 1, 0.5),
        ("red, green, blue", "red, green, blue", 0.5, 1),
        ("The The", "the", 1, 0),
        ("", "", 1, 0),
        ("", "x", 0, 0),
        ("x", "", 0, 0),
    ],
)
def test_where_the_papers_f1_and_longbenchs_part(prediction, gold, paper, official):
    assert paper_f1(prediction, [gold]) == pytest.approx(paper, abs=1e-12)
    assert qa_f1(prediction, [gold]) == pytest.approx(official, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "references", "share"),
    [
        ("x1, X2 and x3", ["X1", "x2", "X3"], 1),
        ("7 and 12", ["7", "12", "30", "41"], 0.5),
        ("", ["7", "12"], 0),
        ("BLUE", ["blue", "grün"], 0.5),
    ],
)
def test_containment_by_share(prediction, references, share):
    assert contains_all(prediction, references) == share


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_a_reference_that_every_text_contains_is_refused(blank):
    with pytest.raises(OptionError, match=r"\[1\] is .* occurs in every text"):
        contains_all("some text", ["some", blank])


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("abcd", "abxy", 0.5),  # exactly at the threshold: kept
        ("abc", "axy", 0),  # 1/3, below it
        ("Coffee  Shop\n", "coffee shop", 1),
        ("cofee", "coffee", 5 / 6),
        ("", "", 1),
        ("", "abc", 0),
    ],
)
def test_anls(prediction, gold, score):
    assert anls(prediction, [gold]) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) because it says so", "B"),
        ("The answer is B", "B"),
        ("The correct answer is (C).", "C"),
        ("Answer: **D**", "D"),
        ("A good answer is B.", "B"),
        ("C, not D", "C"),
        ("D'Artagnan, A-level and C++", None),
        ("because", None),
        ("E", None),
        ("", None),
    ],
)
def test_the_letter_of_a_choice(prediction, letter):
    assert choice_letter(prediction) == letter


letters = st.text(alphabet="abé ", max_size=12)


@given(letters, letters)
@example("kitten", "sitting")
def test_the_edit_distance_is_rapidfuzz_s(first, second):
    assert levenshtein(first, second) == Levenshtein.distance(first, second)


@given(
    st.text(alphabet="aBé \n", max_size=10), st.lists(st.text(alphabet="aBé \n", max_size=10), min_size=1, max_size=3)
)
def test_anls_is_rapidfuzz_s_similarity_over_the_threshold(prediction, answers):
    def collapsed(text):
        return " ".join(text.lower().split())

    best = max(Levenshtein.normalized_similarity(collapsed(prediction), collapsed(gold)) for gold in answers)
    # The similarities here are fractions of at most 10, so only 1/2 itself can be near the threshold; it is exact.
    assert anls(prediction, answers) == pytest.approx(best if best >= 0.5 else 0, abs=1e-12)


def test_the_examples_in_the_docstrings_run():
    result = doctest.testmod(metrics)
    assert result.attempted >= 10 and result.failed == 0

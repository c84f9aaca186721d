"""Scores and a budget become a Selection; layer sets are read from text."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.records import Context, Span
from infoflow_kv.select import layer_set, num_selected, take


def context(tokens: int, exact: int) -> Context:
    kv = torch.zeros(1, 1, tokens, 2)
    return Context(kv, kv, torch.arange(tokens), (Span(0, tokens),), exact)


@given(st.floats(0, 1), st.integers(0, 20))
def test_the_count_follows_the_documented_rule(budget, reusable):
    count = num_selected(budget, reusable)
    assert 0 <= count <= reusable
    if budget == 0 or reusable == 0:
        assert count == 0
    else:
        assert count == max(1, math.floor(budget * reusable + 0.5))
    if budget == 1:
        assert count == reusable


@pytest.mark.parametrize("budget", [-1, -1e-9, 1.0001, 1.5, math.nan, math.inf, -math.inf, "0.15", None, True])
def test_budgets_outside_their_range_are_refused(budget):
    with pytest.raises(OptionError, match="outside 0..1"):
        num_selected(budget, 10)


def test_top_scores_outside_the_exact_prefix_in_slot_order():
    scores = torch.tensor([9.0, 9.0, 1.0, 5.0, 3.0, 7.0, 2.0])
    assert take(scores, 0.6, context(7, 2)).slots.tolist() == [3, 4, 5]


def test_ties_go_to_the_earlier_token():
    assert take(torch.ones(10), 0.5, context(10, 2)).slots.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_never_select(bad):
    scores = torch.ones(6)
    scores[3] = bad
    with pytest.raises(ComputeError, match="not finite"):
        take(scores, 0.5, context(6, 0))


def test_scores_of_another_length_are_an_error():
    with pytest.raises(ComputeError, match="5 scores for 6"):
        take(torch.ones(5), 0.5, context(6, 0))


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("relative", 32, (22, 23, 24, 25)),  # the paper's set
        ("relative", 30, (20, 21, 22, 23)),
        ("relative", 2, (1,)),
        ("relative", 1, (0,)),
        ("all", 3, (0, 1, 2)),
        ("22-25", 32, (22, 23, 24, 25)),
        ("7, 3,9-11", 12, (3, 7, 9, 10, 11)),
    ],
)
def test_layer_sets(text, layers, expected):
    assert layer_set(text, layers) == expected


@pytest.mark.parametrize("text", ["", "a", "3-", "-1", "5-3", "30", "0-30", "1,,2", "9" * 9])
def test_malformed_layer_sets_are_refused(text):
    with pytest.raises(OptionError, match="layers"):
        layer_set(text, 30)

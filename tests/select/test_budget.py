"""Adaptive budgets and the spread over chunks."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infoflow_kv.errors import OptionError
from infoflow_kv.records import Context, Span
from infoflow_kv.select import AUTO_CEILING, AUTO_COVER, Allocation, Budget, best, check_budget, take


def context(lengths, exact=0) -> Context:
    starts = [0, *itertools.accumulate(lengths)]
    kv = torch.zeros(1, 1, starts[-1], 2)
    spans = tuple(Span(a, b) for a, b in itertools.pairwise(starts))
    return Context(kv, kv, torch.arange(starts[-1]), spans, exact)


@pytest.mark.parametrize(
    ("given", "ceiling", "expected"),
    [
        (0.15, None, Budget(0.15)),
        (1, None, Budget(1.0)),
        ("auto", None, Budget(AUTO_CEILING, AUTO_COVER)),
        ("auto:0.5", 0.2, Budget(0.2, 0.5)),
        (Budget(0.3, 0.9), None, Budget(0.3, 0.9)),
    ],
)
def test_budgets_are_read(given, ceiling, expected):
    assert check_budget(given, ceiling) == expected


@pytest.mark.parametrize("bad", ["auto:0", "auto:1.1", "auto:", "auto:x", "auto:nan", "0.15", "automatic", ""])
def test_malformed_budgets_are_refused(bad):
    with pytest.raises(OptionError, match="budget '"):
        check_budget(bad)


def test_auto_takes_the_smallest_set_that_covers_its_share():
    scores = torch.tensor([9.0, 5.0, 1.0, 3.0, 1.0])  # the first is exact; 5 + 3 of 10 is 0.8
    chosen = take(scores, Budget(1.0, 0.8), context([1, 4], exact=1))
    assert chosen.slots.tolist() == [1, 3]
    assert chosen.reason == "auto:0.8: 50.0% of the tokens cover 80.0% of the predicted influence"
    assert take(scores, Budget(1.0, 0.81), context([1, 4], exact=1)).slots.tolist() == [1, 2, 3]


def test_auto_stops_at_its_ceiling_and_says_so():
    chosen = take(torch.ones(10), Budget(0.2, 0.9), context([10]))
    assert chosen.slots.tolist() == [0, 1]
    assert chosen.reason.endswith("stopped by the ceiling of 0.2")


def test_auto_without_any_prediction_takes_the_ceiling_and_says_so():
    chosen = take(-torch.arange(10.0), Budget(0.3, 0.5), context([10]))
    assert chosen.slots.tolist() == [0, 1, 2]
    assert "predicts no influence" in chosen.reason


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40), st.floats(0.01, 1))
def test_the_covering_set_is_minimal(values, cover):
    scores = torch.tensor(values)
    count = Budget(1.0, cover).count(scores)
    ordered = sorted((float(s) for s in scores), reverse=True)
    total = math.fsum(ordered)
    assert 1 <= count <= len(values)
    if total > 0:
        assert math.fsum(ordered[:count]) >= cover * total * (1 - 1e-9)
        assert count == 1 or math.fsum(ordered[: count - 1]) < cover * total


MAGNET = torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0.5, 0.4, 0.3])


def test_a_cap_keeps_a_magnet_from_eating_the_budget():
    spans = context([6, 3, 3]).spans
    assert best(MAGNET, 6, 0, spans).tolist() == [0, 1, 2, 3, 4, 5]
    assert best(MAGNET, 6, 0, spans, Allocation(cap=0.5)).tolist() == [0, 1, 2, 6, 7, 8]


def test_a_cap_that_leaves_budget_over_gives_it_back_by_score():
    spans = context([10, 2]).spans
    assert best(MAGNET, 8, 0, spans, Allocation(cap=0.25)).tolist() == [0, 1, 2, 3, 4, 5, 10, 11]


def test_a_floor_gives_every_chunk_its_share_first():
    spans = context([6, 3, 3]).spans
    # Half of 6 tokens by length: 1.5, 0.75, 0.75 → 1, 0, 0; all of it: 3, 1, 1 and the best of the rest.
    assert best(MAGNET, 6, 0, spans, Allocation(floor=0.5)).tolist() == [0, 1, 2, 3, 4, 5]
    assert best(MAGNET, 6, 0, spans, Allocation(floor=1.0)).tolist() == [0, 1, 2, 3, 6, 9]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 40),
    st.floats(0, 1),
    st.floats(0.01, 1),
    st.integers(0, 5),
)
def test_every_allocation_buys_exactly_the_budget(lengths, count, floor, cap, seed):
    ctx = context(lengths, exact=lengths[0] if len(lengths) > 1 else 0)
    count = min(count, ctx.reusable_tokens)
    scores = torch.rand(ctx.num_tokens, generator=torch.Generator().manual_seed(seed))
    slots = best(scores, count, ctx.exact_tokens, ctx.spans, Allocation(floor, cap)).tolist()
    assert len(slots) == len(set(slots)) == count
    assert slots == sorted(slots)
    assert all(slot >= ctx.exact_tokens for slot in slots)


def test_a_fixed_count_overrides_the_budget():
    chosen = take(torch.arange(10.0), 0.9, context([10]), count=2)
    assert chosen.slots.tolist() == [8, 9]
    assert "fixes 2 tokens" in chosen.reason

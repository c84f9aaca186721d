"""Distances against scipy and torch, and against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from infoflow_kv.evaluate.distances import agreement, divergences, kv_error, margin, nll, selection_lift
from infoflow_kv.methods import find_method
from infoflow_kv.recipes import Recipe
from infoflow_kv.records import Chunk, Context, Prompt, Selection, Span, Timings, Usage
from infoflow_kv.runs import Run
from infoflow_kv.select import Budget


def softmax(logits: torch.Tensor) -> np.ndarray:
    shifted = logits.double().numpy() - logits.double().numpy().max()
    return np.exp(shifted) / np.exp(shifted).sum()


@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0, 60.0])
def test_divergences_are_scipys(spread):
    torch.manual_seed(3)
    full, ours = spread * torch.randn(6, 50), spread * torch.randn(6, 50)
    kl, js = divergences(ours, full)
    for place in range(6):
        p, q = softmax(full[place]), softmax(ours[place])
        assert kl[place] == pytest.approx(rel_entr(p, q).sum(), rel=1e-9)
        assert js[place] == pytest.approx(jensenshannon(p, q, base=2) ** 2, rel=1e-7)


def test_kl_is_from_full_to_ours_and_bounds_hold():
    full, ours = torch.tensor([[math.log(0.9), math.log(0.1)]]), torch.tensor([[math.log(0.5), math.log(0.5)]])
    kl, _ = divergences(ours, full)
    assert kl[0] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)  # 0.368; 0.511 the other way
    assert divergences(ours, ours) == ([0.0], [0.0])
    apart = divergences(torch.tensor([[0.0, 200.0]]), torch.tensor([[200.0, 0.0]]))
    assert apart[1] == [pytest.approx(1.0)] and apart[0] == [pytest.approx(200.0)]


def test_nll_is_torchs_cross_entropy():
    torch.manual_seed(1)
    logits, ids = 5 * torch.randn(7, 30), [3, 0, 29, 5, 5, 11, 2]
    expected = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids))
    assert nll(logits, ids) == pytest.approx(float(expected), rel=1e-12)


def test_agreement_counts_leading_tokens_only():
    logits = torch.eye(5)[[2, 4, 1, 0]]
    assert agreement(logits, [2, 4, 1, 0]) == 4
    assert agreement(logits, [2, 4, 3, 0]) == 2
    assert agreement(logits, [1, 4, 1, 0]) == 0
    assert agreement(logits, [2]) == 1


def test_margin_is_the_lead_in_nats():
    assert margin(torch.tensor([1.0, 4.0, 3.5, -2.0])) == pytest.approx(0.5)


def made_run(slots, order=(0, 1, 2), method="infoflow", head=(7, 8)) -> Run:
    """A head of 2 tokens and chunks of 4, 4 and 2 tokens in `order`; head and first chunk are exact."""
    chunks = [Chunk((1,) * size, f"p{i}") for i, size in enumerate((4, 4, 2))]
    placed = [chunks[i] for i in order]
    lengths = ([len(head)] if head else []) + [c.num_tokens for c in placed]
    stops = np.cumsum(lengths).tolist()
    spans = tuple(Span(stop - length, stop) for stop, length in zip(stops, lengths, strict=True))
    buffer = torch.zeros(1, 1, stops[-1], 2)
    context = Context(
        buffer,
        buffer,
        torch.zeros(stops[-1], dtype=torch.int64),
        spans,
        exact_tokens=len(head) + placed[0].num_tokens,
    )
    recipe = Recipe(find_method(method), Budget(0.5), (0,))
    selection = Selection(torch.tensor(slots, dtype=torch.int64))
    prompt = Prompt(head, tuple(placed), (9,))
    usage = Usage(stops[-1], 1, 3, 3, 6, len(slots), 0, 0)
    return Run(prompt, recipe, order, context, None, selection, torch.zeros(1, 5), usage, Timings(), 0)


class TestSelectionLift:
    def test_the_share_of_the_selected_over_the_share_of_all(self):
        # Slots 6..9 are chunk 1, 10..11 chunk 2: 4 of 6 reusable tokens stand in chunk 1.
        assert selection_lift(made_run([6, 7, 8]), [1]) == pytest.approx(1 / (4 / 6))
        assert selection_lift(made_run([6, 7, 10]), [1]) == pytest.approx((2 / 3) / (4 / 6))
        assert selection_lift(made_run([6, 7, 10]), [2]) == pytest.approx((1 / 3) / (2 / 6))
        assert selection_lift(made_run([6, 7]), [2]) == 0
        assert selection_lift(made_run([6, 7, 10]), [1, 2]) == pytest.approx(1)

    def test_chunks_are_found_where_they_stand_after_reordering(self):
        # Order 2, 0, 1: slots 2..3 chunk 2 (exact), 4..7 chunk 0, 8..11 chunk 1.
        run = made_run([8, 9, 4], order=(2, 0, 1))
        assert selection_lift(run, [1]) == pytest.approx((2 / 3) / (4 / 8))
        assert selection_lift(run, [0]) == pytest.approx((1 / 3) / (4 / 8))

    def test_without_a_head(self):
        assert selection_lift(made_run([4, 5], head=()), [1]) == pytest.approx(1 / (4 / 6))

    def test_none_where_there_is_nothing_to_compare(self):
        assert selection_lift(made_run([]), [1]) is None
        assert selection_lift(made_run([6]), []) is None
        assert selection_lift(made_run([6]), [0]) is None  # the exact chunk cannot be selected
        assert selection_lift(made_run([6], method="full"), [1]) is None


def test_kv_error_by_hand():
    full = torch.tensor([[[[9.0, 9.0], [3.0, 4.0], [0.0, 2.0], [6.0, 8.0], [50.0, 50.0]]]])
    ours = torch.tensor([[[[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [6.0, 5.0], [7.0, 7.0]]]])
    keys, full_keys = torch.cat([ours, full]), torch.cat([full, full])  # two layers, the second without error
    context = Context(keys, 2 * keys, torch.zeros(4, dtype=torch.int64), (Span(0, 1), Span(1, 4)), exact_tokens=1)
    delta_k, delta_v = kv_error(context, torch.tensor([1, 3]), full_keys, full_keys)
    # Slot 0 is exact and counts in neither, slot 4 is no context. Repaired: slots 1 and 3, (0, -3) off (9, 12)-ish.
    repaired = math.sqrt(3**2) / math.sqrt(3**2 + 4**2 + 6**2 + 8**2)
    assert delta_k == {"repaired": [pytest.approx(repaired, abs=1e-5), 0.0], "reused": [0.5, 0.0]}
    # Values are twice the keys, against the keys of full prefill: slot 2 is (0, 2) and right, the second layer is not.
    assert delta_v["reused"] == [0.0, 1.0]
    nothing, _ = kv_error(context, torch.tensor([], dtype=torch.int64), full_keys, full_keys)
    assert set(nothing) == {"reused"}

"""Counted work against hand-made examples, and against what a real forward does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import tiny
from infoflow_kv.benchmark.work import (
    ModelShape,
    Work,
    chunk_work,
    count_pairs,
    forward_work,
    layer_work,
    met_weights,
    narrowing_work,
    scoring_work,
    shape_of,
)
from infoflow_kv.models import LanguageModel, wrap

# Two layers of 10 weights each, one head of width 1 with its own K/V, hidden 2, vocab 3.
HAND = ModelShape(
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    hidden=2,
    vocab=3,
    linear_shapes=((5, 2),),
    layer_weights=(10, 10),
    windows=(None, None),
    value_bytes=4,
)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True).map(sorted),
    st.one_of(st.none(), st.integers(1, 70)),
)
def test_pairs_are_those_that_a_mask_shows(ranks: list[int], window: int | None) -> None:
    expected = sum(
        1 for rank in ranks for slot in range(61) if slot <= rank and (window is None or slot > rank - window)
    )
    assert count_pairs(torch.tensor(ranks), window) == expected


def test_a_forward_by_hand() -> None:
    ranks = torch.tensor([1, 4, 5])
    # Layer 0: 3 rows, 2 + 5 + 6 = 13 pairs. Layer 1: the last row whole, 6 pairs; K and V (4 weights) of the other two.
    # Logits: 3 × 2 weights for one row. 4 FLOPs a pair.
    assert forward_work(HAND, ranks) == Work(
        linear_flops=2 * (3 * 10 + 1 * 10 + 2 * 4 + 6), attention_flops=4 * 19, pairs=19, row_layers=4
    )
    assert forward_work(HAND, ranks, whole_last=True) == Work(2 * (6 * 10 + 6), 4 * 26, 26, 6)
    assert forward_work(HAND, ranks, num_logits=0) == Work(2 * (3 * 10 + 3 * 4), 4 * 13, 13, 3)


def test_chunks_stand_behind_their_head_and_make_no_logits() -> None:
    # Two chunks of 2 and 1 tokens behind a head of 3: ranks 3, 4 and 3.
    assert chunk_work(HAND, [2, 1], 3).pairs == (4 + 5) + 4
    assert chunk_work(HAND, [2, 1], 3).linear_flops == 2 * (3 * 10 + 3 * 4)


def test_scoring_ends_at_queries_and_keys_of_its_last_layer() -> None:
    ranks = torch.tensor([6, 7])
    # Layer 0 whole (15 pairs); layer 1: Q, K and V (6 weights a row), half of the pairs' FLOPs.
    assert scoring_work(HAND, ranks, 1) == Work(2 * (2 * 10 + 2 * 6), 4 * 15 + 2 * 15, 30, 4)
    assert scoring_work(HAND, ranks, 0) == Work(2 * 2 * 6, 2 * 15, 15, 2)


def test_rows_that_leave_on_the_way_no_longer_count() -> None:
    context, slots, prompt = torch.arange(1, 5), torch.tensor([2, 4]), torch.tensor([5])
    # Layer 0: 4 rows of the context and the prompt's (2+3+4+5+6 pairs). Layer 1: K and V of the two that stay.
    assert narrowing_work(HAND, (4, 2), context, slots, prompt) == Work(
        2 * (5 * 10 + 10 + 2 * 4 + 6), 4 * (20 + 6), 26, 6
    )
    # Another number of rows counts at the mean rank of the selected ones: 3 rows at rank 3.
    assert narrowing_work(HAND, (3, 2), context, slots, prompt).pairs == 3 * 4 + 6 + 6


def test_windows_bound_the_pairs() -> None:
    windowed = ModelShape(1, 1, 1, 2, 3, ((5, 2),), (10, 10), (2, None), 4)
    assert layer_work(windowed, 0, torch.tensor([0, 3, 9])).pairs == 1 + 2 + 2
    assert layer_work(windowed, 1, torch.tensor([0, 3, 9])).pairs == 1 + 4 + 10


def test_the_shape_is_the_models_own(model: LanguageModel) -> None:
    shape = shape_of(model)
    assert (shape.num_layers, shape.hidden, shape.vocab, shape.windows) == (4, 64, 400, (None,) * 4)
    # q 64×64, k and v 32×64, o 64×64, gate and up 128×64, down 64×128
    assert shape.layer_weights == (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64,) * 4
    assert shape.kv_weights == 2 * 32 * 64
    assert shape.kv_bytes_per_token == 2 * 4 * 2 * 16 * 4
    assert sum(outputs * inputs for outputs, inputs in shape.linear_shapes) == shape.layer_weights[0]


def test_windows_come_from_the_layers() -> None:
    assert shape_of(wrap(tiny.hf_model("gemma3"), tiny.tokenizer(), "g")).windows == (24, None, 24, None)


def test_of_stacked_experts_a_row_meets_those_that_it_is_sent_to() -> None:
    layer = torch.nn.Module()
    layer.router = torch.nn.Linear(4, 8, bias=False)
    layer.experts = torch.nn.Parameter(torch.zeros(8, 3, 5))
    assert met_weights(layer, 2) == 4 * 8 + 2 * 15
    assert met_weights(layer, None) == 4 * 8 + 8 * 15


def test_flops_are_those_of_a_real_forward(model: LanguageModel) -> None:
    """Against torch's own counter, which multiplies the full square of attention: pairs are corrected for that."""
    shape, rows = shape_of(model), 40
    plain = model.plain(attention="eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        plain(input_ids=torch.arange(rows)[None], use_cache=False, logits_to_keep=1)
    work = forward_work(shape, torch.arange(rows), whole_last=True)
    square = shape.num_layers * rows * rows * shape.pair_flops
    assert counter.get_total_flops() == work.linear_flops + square


@pytest.mark.parametrize("budget", [0.05, 0.3])
def test_adding_work_adds_all_of_it(budget: float) -> None:
    one, rows = forward_work(HAND, torch.arange(9)), round(9 * budget) + 1
    two = forward_work(HAND, torch.arange(rows))
    assert (one + two).flops == one.flops + two.flops
    assert (one + two).pairs == one.pairs + two.pairs

"""Attention over a part of the slots, merged: one softmax over all of them, written down in float64."""

import pytest
import torch

from infoflow_kv.ops import AttentionSpec
from infoflow_kv.ops.parts import PartialAttention, add_sinks, finite, merge_parts, stretches
from reference.attention import attend as dense
from tolerance import KERNEL, assert_close

HEADS, KV_HEADS, WIDTH = 6, 2, 16
SPECS = {
    "plain": {},
    "window": {"window": 9},
    "window of one": {"window": 1},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 2.0, 0.0, 5.0, -3.0])},
    "all": {"window": 20, "softcap": 4.0, "sinks": torch.linspace(-2, 3, HEADS)},
}
# Ranks of the rows over 150 slots: some neighbours, the first, the last, and gaps.
RANKS = torch.tensor([0, 1, 5, 6, 7, 30, 64, 65, 99, 100, 140, 148, 149])


def spec_of(name: str) -> AttentionSpec:
    return AttentionSpec(scale=0.3, **SPECS[name])


def tensors(rows: int, slots: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 1000 + slots)
    shapes = ((HEADS, rows, WIDTH), (KV_HEADS, slots, WIDTH), (KV_HEADS, slots, WIDTH))
    return tuple(torch.randn(shape, generator=generator).mul(1.5).to(dtype) for shape in shapes)


def dealt(slots: int, parts: int, how: str) -> list[torch.Tensor]:
    """Which slots each part has: in turn, one after the other, or all in the last part."""
    every = torch.arange(slots)
    if how == "in turn":
        return [every[part::parts].contiguous() for part in range(parts)]
    if how == "in a row":
        return list(torch.tensor_split(every, parts))
    return [every[:0]] * (parts - 1) + [every]


def merged(query, keys, values, ranks, homes, spec):
    """Output and LSE of the parts' own attention, put together; slots that no row sees are NaN."""
    outs, lses = [], []
    last = int(ranks[-1])
    for slots in homes:
        part_keys, part_values = keys[:, slots].clone(), values[:, slots].clone()
        part_keys[:, slots > last] = float("nan")
        part_values[:, slots > last] = float("nan")
        out, lse = PartialAttention(stretches(ranks, slots, spec.window)).attend(query, part_keys, part_values, spec)
        assert out.dtype == query.dtype
        assert lse.dtype == torch.float32
        outs.append(out)
        lses.append(lse)
    return merge_parts(torch.stack(outs), torch.stack(lses))


@pytest.mark.parametrize("how", ["in turn", "in a row", "in the last"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_merge_to_a_softmax_over_all_slots(dtype, name, parts, how):
    spec, ranks = spec_of(name), RANKS
    query, keys, values = tensors(ranks.numel(), 160, dtype)  # ten slots are of tokens to come
    out, _ = add_sinks(*merged(query, keys, values, ranks, dealt(160, parts, how), spec), spec.sinks)
    assert out.dtype == torch.float32
    expected = dense(query.float(), keys.float(), values.float(), ranks, spec)
    assert_close(out, expected, KERNEL[dtype])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", ["plain", "window"])
def test_a_long_run_of_rows_is_cut_into_pieces_and_merges_all_the_same(name, parts):
    spec, ranks = spec_of(name), torch.arange(40, 340)
    query, keys, values = tensors(300, 340)
    out, _ = merged(query, keys, values, ranks, dealt(340, parts, "in turn"), spec)
    assert_close(out, dense(query, keys, values, ranks, spec), KERNEL[torch.float32])


def test_the_lse_is_the_log_of_the_sum_over_what_is_seen():
    query, keys, values = tensors(RANKS.numel(), 150)
    slots = torch.arange(3, 150, 4)
    _, lse = PartialAttention(stretches(RANKS, slots)).attend(query, keys[:, slots], values[:, slots], spec_of("plain"))
    wide = keys[:, slots].repeat_interleave(HEADS // KV_HEADS, dim=0).double()
    logits = (query.double() @ wide.transpose(1, 2) * 0.3).masked_fill(slots > RANKS[:, None], float("-inf"))
    expected = torch.logsumexp(logits, dim=-1)
    assert torch.equal(torch.isinf(lse), torch.isinf(expected))
    assert_close(finite(lse), finite(expected), 1e-6)


@pytest.mark.parametrize("name", ["plain", "window", "softcap"])
def test_a_row_that_sees_nothing_of_a_part_gets_zeros_and_no_weight(name):
    spec, ranks = spec_of(name), torch.tensor([2, 3, 50])
    slots = torch.arange(45, 60)
    query, keys, values = tensors(3, 15)
    out, lse = PartialAttention(stretches(ranks, slots, spec.window)).attend(query, keys, values, spec)
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert bool((lse[:, :2] == float("-inf")).all())
    assert bool(torch.isfinite(lse[:, 2]).all())
    nothing = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    again, whole = merge_parts(torch.stack([out, nothing[0]]), torch.stack([lse, nothing[1]]))
    assert torch.equal(again, out)
    assert torch.equal(whole, lse)


@pytest.mark.parametrize(("rows", "slots"), [(0, 5), (3, 0), (0, 0)])
def test_no_rows_or_no_slots_are_no_error(rows, slots):
    query, keys, values = tensors(rows, slots)
    seen = stretches(torch.arange(10, 10 + rows), torch.arange(slots))
    out, lse = PartialAttention(seen).attend(query, keys, values, spec_of("plain"))
    assert out.shape == query.shape
    assert not bool(out.any())
    assert bool((lse == float("-inf")).all())
    assert lse.shape == (HEADS, rows)


def test_what_nobody_sees_merges_to_zero_and_not_to_nan():
    out, lse = merge_parts(torch.zeros(2, 3, 4, 5), torch.full((2, 3, 4), float("-inf")))
    assert not bool(out.any())
    assert bool((lse == float("-inf")).all())
    with_sinks, whole = add_sinks(out, lse, torch.tensor([1.0, 2.0, 3.0]))
    assert not bool(with_sinks.any())
    assert torch.equal(whole[:, 0], torch.tensor([1.0, 2.0, 3.0]))


def test_equal_keys_in_all_parts_weigh_the_same():
    """Ties: the output is the mean of all values, whoever holds how many of them."""
    query, keys, values = tensors(1, 12)
    keys[:] = keys[:, :1]
    ranks, homes = torch.tensor([11]), [torch.arange(0, 1), torch.arange(1, 4), torch.arange(4, 12)]
    out, _ = merged(query, keys, values, ranks, homes, spec_of("plain"))
    expected = values.mean(dim=1, keepdim=True).repeat_interleave(HEADS // KV_HEADS, dim=0)
    assert_close(out, expected, 1e-6)


def test_large_logits_do_not_overflow():
    query, keys, values = tensors(4, 40)
    ranks, spec = torch.tensor([9, 19, 29, 39]), AttentionSpec(scale=200.0)
    out, _ = merged(query, keys, values, ranks, dealt(40, 3, "in turn"), spec)
    assert_close(out, dense(query, keys, values, ranks, spec), 1e-4)


def test_stretches_are_what_each_row_sees_of_the_slots():
    slots = torch.tensor([2, 3, 8, 20])
    ranks = torch.tensor([1, 2, 8, 9, 25])
    for window in (None, 1, 6, 7, 100):
        seen = stretches(ranks, slots, window).visible(slice(0, 5), 4)
        expected = [[s <= r and (window is None or s > r - window) for s in slots.tolist()] for r in ranks.tolist()]
        assert seen.tolist() == expected, window

"""Staircase attention and attention mass against the slow reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_kv.ops import AttentionSpec, attention_mass, staircase_attention
from infoflow_kv.ops import attention as room
from reference.attention import attend, weights
from tolerance import KERNEL, assert_close


def tensors(heads: int, kv_heads: int, rows: int, slots: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    torch.manual_seed(seed)
    make = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    return make(heads, rows, 16), make(kv_heads, slots, 16), make(kv_heads, slots, 16)


RANKS = {
    "all": torch.arange(150),
    "tail": torch.arange(90, 150),
    "one": torch.tensor([37]),
    "scattered": torch.randperm(150, generator=torch.Generator().manual_seed(1))[:99].sort().values,
    "first and last": torch.tensor([0, 149]),
    "sparse with prompt": torch.cat([torch.arange(0, 140, 7), torch.arange(140, 150)]),
}
SPECS = {
    "plain": AttentionSpec(0.25),
    "window": AttentionSpec(0.25, window=13),
    "window of one": AttentionSpec(0.25, window=1),
    "wide window": AttentionSpec(0.25, window=1000),
    "softcap": AttentionSpec(0.25, softcap=2.0),
    "sinks": AttentionSpec(0.25, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "all": AttentionSpec(0.25, window=20, softcap=3.0, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_staircase_is_causal_attention_by_rank(ranks, spec, dtype):
    query, keys, values = tensors(4, 2, len(ranks), 160, dtype=dtype)
    out = staircase_attention(query, keys, values, ranks, spec)
    assert out.dtype == dtype
    assert_close(out.float(), attend(query, keys, values, ranks, spec), KERNEL[dtype])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ascending_ranks(data):
    slots = data.draw(st.integers(1, 200))
    ranks = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=slots, unique=True).map(sorted))
    window = data.draw(st.one_of(st.none(), st.integers(1, slots + 5)))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    spec = AttentionSpec(0.3, window=window)
    query, keys, values = tensors(kv_heads * group, kv_heads, len(ranks), slots, seed=slots)
    out = staircase_attention(query, keys, values, torch.tensor(ranks), spec)
    assert_close(out, attend(query, keys, values, torch.tensor(ranks), spec), KERNEL[torch.float32])


def test_slots_after_the_last_rank_are_never_read():
    query, keys, values = tensors(4, 2, 50, 160)
    ranks = torch.arange(0, 150, 3)
    keys[:, 148:] = float("nan")
    values[:, 148:] = float("nan")
    assert torch.isfinite(staircase_attention(query, keys, values, ranks, AttentionSpec(0.25))).all()


def test_the_path_of_other_devices_agrees_with_the_merged_blocks():
    query, keys, values = tensors(6, 2, 99, 160)
    ranks = RANKS["scattered"]
    merged = room._merged_blocks(query, keys, values, ranks, 0.25)
    masked = room._in_blocks(query, keys, values, ranks, AttentionSpec(0.25), None)
    assert_close(merged, masked, KERNEL[torch.float32])


def test_a_rank_without_a_slot_is_an_error():
    query, keys, values = tensors(2, 2, 1, 10)
    with pytest.raises(ValueError, match="rank 10 has no slot"):
        staircase_attention(query, keys, values, torch.tensor([10]), AttentionSpec(1.0))


@pytest.mark.parametrize("prompt", [1, 5, 40])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_mass_sums_the_attention_weights_of_the_prompt(spec, prompt):
    query, keys, _ = tensors(4, 2, prompt, 160)
    ranks = torch.arange(100, 100 + prompt)
    expected = weights(query, keys, ranks, spec)[:, :, :100]
    assert_close(attention_mass(query, keys, ranks, 100, spec), expected.sum(dim=(0, 1)), KERNEL[torch.float32])
    l2 = attention_mass(query, keys, ranks, 100, spec, "l2")
    assert_close(l2, expected.mean(dim=0).square().sum(dim=0).sqrt(), KERNEL[torch.float32])


def test_mass_takes_its_softmax_over_prompt_keys_too():
    query, keys, _ = tensors(4, 2, 8, 160)
    ranks = torch.arange(100, 108)
    total = attention_mass(query, keys, ranks, 100, SPECS["plain"]).sum()
    assert total < 4 * 8  # heads × rows would mean that the prompt's own keys were left out of the softmax

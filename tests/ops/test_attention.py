"""Staircase attention and attention mass against the slow reference."""

import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_kv.errors import OptionError
from infoflow_kv.ops import (
    AttentionSpec,
    Staircase,
    attention_mass,
    forms,
    pieces,
    products,
    staircase,
    staircase_attention,
)
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


@pytest.mark.parametrize("window", [None, 1, 13, 64, 90])
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_pieces_hold_each_visible_pair_once_and_no_other(ranks, window, monkeypatch):
    monkeypatch.setattr(pieces, "EDGE_ROWS", 8)
    held = torch.zeros(len(ranks), 150, dtype=torch.int64)
    opened = torch.zeros(len(ranks), dtype=torch.int64)
    for piece in pieces.cut(ranks, window):
        block = held[piece.rows, piece.slots]
        block += 1 if piece.mask is None else piece.mask
        if piece.mask is not None:
            assert piece.mask.any(dim=1).all(), "a row that sees nothing of a piece would get weight in the merge"
        opened[piece.rows] += piece.opens
        assert bool((opened[piece.rows] == 1).all())
    slots = torch.arange(150)
    expected = slots[None] <= ranks[:, None]
    if window is not None:
        expected &= slots[None] > ranks[:, None] - window
    assert torch.equal(held, expected.long())


@pytest.mark.parametrize("edge_rows", [5, 64])
def test_pieces_of_rows_that_share_their_rank(edge_rows):
    ranks = torch.arange(0, 150, 3).repeat_interleave(torch.arange(50) % 4)
    held = torch.zeros(len(ranks), 148, dtype=torch.int64)
    for piece in pieces.cut(ranks, edge_rows=edge_rows):
        held[piece.rows, piece.slots] += 1 if piece.mask is None else piece.mask
        assert piece.mask is None or piece.mask.any(dim=1).all()
    assert torch.equal(held, (torch.arange(148)[None] <= ranks[:, None]).long())


def test_most_of_a_staircase_is_rectangles():
    """What is masked costs as much as what is seen: the edges must be a small part."""
    ranks = torch.randperm(7168, generator=torch.Generator().manual_seed(0))[:1075].sort().values
    masked = sum(piece.mask.numel() for piece in pieces.cut(ranks) if piece.mask is not None)
    assert masked < 0.13 * int((ranks + 1).sum())


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_all_forms_agree(ranks):
    query, keys, values = tensors(6, 2, len(ranks), 160)
    packed = staircase.pack(query, 2)
    masked = staircase.in_blocks(query, keys, values, ranks, AttentionSpec(0.25), None)
    cuts = pieces.cut(ranks)
    merged, _ = pieces.in_pieces(packed, keys, values, cuts, [pieces.bias_of(c, 3, packed.dtype) for c in cuts], 0.25)
    assert_close(staircase.unpack(merged, query.shape), masked, KERNEL[torch.float32])
    for block_rows in (16, 64):
        blocks = products.blocks_of(ranks, ranks.tolist(), block_rows, packed.dtype)
        multiplied = products.by_products(packed, keys, values, blocks, 0.25)
        assert_close(staircase.unpack(multiplied, query.shape), masked, KERNEL[torch.float32])


def test_packing_puts_the_heads_of_a_group_next_to_each_other():
    query = torch.arange(4.0 * 3).view(4, 3, 1)
    packed = staircase.pack(query, 2)
    assert packed[..., 0].tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
    assert torch.equal(staircase.unpack(packed, query.shape), query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", get_args(forms.CpuForm))
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_each_form_of_the_cpu_is_right_for_many_rows(ranks, form, dtype):
    """Several edges of the largest form, and ends that are no multiple of a step of slots."""
    longer = torch.cat([ranks + 150 * copy for copy in range(7)])
    query, keys, values = tensors(6, 2, len(longer), 1100, dtype=dtype)
    out = Staircase(longer, cpu_form=form).attend(query, keys, values, AttentionSpec(0.25))
    assert out.dtype == dtype
    assert_close(out.float(), attend(query, keys, values, longer, AttentionSpec(0.25)), KERNEL[dtype])


@pytest.mark.parametrize("first", [1, 31, 32, 33, 700])
@pytest.mark.parametrize("form", ["pieces-64", "products"])
def test_contiguous_rows_may_begin_anywhere(first, form):
    query, keys, values = tensors(6, 2, 300, 1000)
    ranks = torch.arange(first, first + 300)
    keys[:, first + 300 :] = float("nan")
    out = Staircase(ranks, cpu_form=form).attend(query, keys, values, AttentionSpec(0.25))
    assert_close(out, attend(query, keys[:, : first + 300], values[:, : first + 300], ranks, AttentionSpec(0.25)), 2e-6)


@pytest.mark.parametrize("form", get_args(forms.CpuForm))
def test_the_form_asked_for_is_the_form_taken(form, monkeypatch):
    taken = []
    for name in ("by_products", "in_pieces"):
        right = getattr(staircase, name)
        monkeypatch.setattr(staircase, name, lambda *given, n=name, right=right: taken.append(n) or right(*given))
    query, keys, values = tensors(6, 2, 99, 160)
    Staircase(RANKS["scattered"], cpu_form=form).attend(query, keys, values, AttentionSpec(0.25))
    assert taken == ["by_products" if form == "products" else "in_pieces"]


def test_products_whose_logits_take_too_much_memory_give_way(monkeypatch):
    monkeypatch.setattr(products, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(staircase, "by_products", None)
    query, keys, values = tensors(6, 2, 99, 160)
    ranks = RANKS["scattered"]
    out = Staircase(ranks, cpu_form="products").attend(query, keys, values, AttentionSpec(0.25))
    assert_close(out, attend(query, keys, values, ranks, AttentionSpec(0.25)), KERNEL[torch.float32])


def test_the_variable_names_a_cpu_form_and_an_unknown_one_is_an_error(monkeypatch):
    monkeypatch.setenv(forms.CPU_VARIABLE, "products")
    assert forms.cpu_choice_of_environment.__wrapped__() == "products"
    monkeypatch.setenv(forms.CPU_VARIABLE, "")
    assert forms.cpu_choice_of_environment.__wrapped__() == "auto"
    with pytest.raises(OptionError, match="unknown CPU form of attention.*'peaces-64'; did you mean 'pieces-64'"):
        Staircase(torch.tensor([0]), cpu_form="peaces-64")


def test_a_staircase_serves_every_layer():
    """Cuts and masks are kept; another window, group or dtype gets its own."""
    stairs = Staircase(RANKS["scattered"])
    for heads, window, dtype in itertools.product((2, 6), (None, 13, 40), (torch.float32, torch.bfloat16)):
        for layer in range(2):
            query, keys, values = tensors(heads, 2, 99, 160, seed=layer, dtype=dtype)
            spec = AttentionSpec(0.25, window=window)
            expected = attend(query, keys, values, stairs.ranks, spec)
            assert_close(stairs.attend(query, keys, values, spec).float(), expected, KERNEL[dtype])


def test_a_rank_without_a_slot_is_an_error():
    query, keys, values = tensors(2, 2, 1, 10)
    with pytest.raises(ValueError, match="rank 10 has no slot"):
        staircase_attention(query, keys, values, torch.tensor([10]), AttentionSpec(1.0))


@pytest.mark.parametrize("prompt", [1, 5, 40])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_mass_sums_the_attention_weights_of_the_prompt(spec, prompt):
    query, keys, values = tensors(4, 2, prompt, 160)
    ranks = torch.arange(100, 100 + prompt)
    expected = weights(query, keys, ranks, spec)[:, :, :100]
    mass, out = attention_mass(query, keys, values, ranks, 100, spec)
    assert_close(mass, expected.sum(dim=(0, 1)), KERNEL[torch.float32])
    assert_close(out, attend(query, keys, values, ranks, spec), KERNEL[torch.float32])
    l2, _ = attention_mass(query, keys, values, ranks, 100, spec, "l2")
    assert_close(l2, expected.mean(dim=0).square().sum(dim=0).sqrt(), KERNEL[torch.float32])


def test_mass_takes_its_softmax_over_prompt_keys_too():
    query, keys, values = tensors(4, 2, 8, 160)
    ranks = torch.arange(100, 108)
    total = attention_mass(query, keys, values, ranks, 100, SPECS["plain"])[0].sum()
    assert total < 4 * 8  # heads × rows would mean that the prompt's own keys were left out of the softmax

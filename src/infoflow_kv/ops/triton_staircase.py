"""Staircase attention as one Triton kernel, for GPUs. Needs the extra `triton`; nothing else imports Triton.

A program has a block of packed rows (the query heads of a K/V head side by side as its rows) and walks over the slots
that they see: K and V are read once per group, slots that all rows see take no mask, and slots that none sees are not
read. Sums and softmax are float32.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from infoflow_kv.ops.spec import AttentionSpec
from infoflow_kv.shapes import Float, Int, Tensor

# The widest head whose block of K and V fits beside the queries' in a GPU's shared memory.
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Packed rows and slots per step of a program (powers of two, at least 16), its warps and stages of loading."""

    rows: int
    slots: int
    warps: int = 4
    stages: int = 2


def tiles_for(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Sizes with which queries, K and V of a step fit in 100 KB of shared memory. Reckoned, not tuned on a GPU yet."""
    if dtype == torch.float32:
        return Tiles(64, 32) if head_dim <= 64 else Tiles(32, 32) if head_dim <= 128 else Tiles(16, 16)
    if head_dim <= 64:
        return Tiles(128, 64, stages=3)
    return Tiles(128, 64, warps=8) if head_dim <= 128 else Tiles(64, 32)


def interprets() -> bool:
    """Whether Triton runs kernels in Python (TRITON_INTERPRET=1 when it was imported), as tests on a CPU do."""
    return not isinstance(_attend_block, triton.JITFunction)


def attend_by_triton(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    spec: AttentionSpec,
    tiles: Tiles | None = None,
) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
    """Output, and the float32 LSE without sinks, of rows over slots 0..rank (inside the window, where there is one).

    `ranks` never descend, the last one is a slot. Tensors may have any strides. ValueError for a wider head than
    MAX_HEAD_DIM or a dtype that is not one of DTYPES.
    """
    heads, num_rows, head_dim = query.shape
    if head_dim > MAX_HEAD_DIM or query.dtype not in DTYPES:
        raise ValueError(
            f"heads of width {head_dim} in {query.dtype}; the Triton kernel takes widths up to {MAX_HEAD_DIM} in "
            "float32, float16 or bfloat16"
        )
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    chosen = tiles if tiles is not None else tiles_for(head_dim, query.dtype)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(heads, num_rows, dtype=torch.float32, device=query.device)
    # Triton starts kernels on the current device, which need not be the tensors'.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        _attend_block[(triton.cdiv(num_rows * group, chosen.rows), kv_heads)](
            query,
            keys,
            values,
            ranks,
            out,
            lse,
            # A pointer that is not read where there are no sinks.
            spec.sinks.float().contiguous() if spec.sinks is not None else lse,
            num_rows,
            spec.window or 0,
            spec.scale,
            spec.softcap or 0.0,
            *query.stride(),
            *keys.stride(),
            *values.stride(),
            *out.stride(),
            GROUP=group,
            HEAD_DIM=head_dim,
            WIDE=max(16, triton.next_power_of_2(head_dim)),
            ROWS=chosen.rows,
            SLOTS=chosen.slots,
            HAS_WINDOW=spec.window is not None,
            HAS_SOFTCAP=spec.softcap is not None,
            HAS_SINKS=spec.sinks is not None,
            WIDENS=interprets() and query.dtype == torch.bfloat16,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
    return out, lse


# ------------------------------------------------------------------------------------------------------------- kernels
# Triton reads these functions' source: the tests' shape checks, which no_type_check keeps away, would be read with it.
# Exponents are of two, which the hardware has: logits are multiplied by LOG2_E, and the LSE is turned back at the end.

LOG2_E: Any = tl.constexpr(1.4426950408889634)
LN_2: Any = tl.constexpr(0.6931471805599453)


# Lengths change from request to request: a kernel of its own for those that 16 divides would be compiled in vain.
@triton.jit(do_not_specialize=["num_rows", "window"])
@no_type_check
def _attend_block(
    query,
    keys,
    values,
    ranks,
    out,
    lse,
    sinks,
    num_rows,
    window,
    scale,
    softcap,
    query_head,
    query_row,
    query_dim,
    keys_head,
    keys_slot,
    keys_dim,
    values_head,
    values_slot,
    values_dim,
    out_head,
    out_row,
    out_dim,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDENS: tl.constexpr,
):
    # The last rows see most: they start first, so that short programs fill the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    kv_head = tl.program_id(1).to(tl.int64)
    packed = first + tl.arange(0, ROWS)
    row, exists = packed // GROUP, packed < num_rows * GROUP
    head = kv_head * GROUP + packed % GROUP
    dims = tl.arange(0, WIDE)
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]
    places = query + head[:, None] * query_head + row.to(tl.int64)[:, None] * query_row + dims[None, :] * query_dim
    q = tl.load(places, mask=inside, other=0.0)
    # Rows past the end take the last rank, so that each row sees something.
    last_row = num_rows - 1
    rank = tl.load(ranks + tl.minimum(row, last_row)).to(tl.int32)
    low = tl.load(ranks + first // GROUP).to(tl.int32)
    high = tl.load(ranks + tl.minimum((first + ROWS - 1) // GROUP, last_row)).to(tl.int32)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDE], tl.float32)
    keys += kv_head * keys_head
    values += kv_head * values_head
    begin, full_begin = 0, 0
    if HAS_WINDOW:
        begin = tl.maximum(low - window + 1, 0) // SLOTS * SLOTS
        full_begin = tl.minimum((tl.maximum(high - window + 1, 0) + SLOTS - 1) // SLOTS * SLOTS, high + 1)
    full_end = tl.maximum((low + 1) // SLOTS * SLOTS, full_begin)
    if HAS_WINDOW:
        summed, peak, total = _over(
            q, keys, values, rank, summed, peak, total, begin, full_begin, high, window, scale, softcap,
            keys_slot, keys_dim, values_slot, values_dim, HEAD_DIM, WIDE, SLOTS, True, HAS_WINDOW, HAS_SOFTCAP, WIDENS,
        )  # fmt: skip
    summed, peak, total = _over(
        q, keys, values, rank, summed, peak, total, full_begin, full_end, high, window, scale, softcap,
        keys_slot, keys_dim, values_slot, values_dim, HEAD_DIM, WIDE, SLOTS, False, HAS_WINDOW, HAS_SOFTCAP, WIDENS,
    )  # fmt: skip
    summed, peak, total = _over(
        q, keys, values, rank, summed, peak, total, full_end, high + 1, high, window, scale, softcap,
        keys_slot, keys_dim, values_slot, values_dim, HEAD_DIM, WIDE, SLOTS, True, HAS_WINDOW, HAS_SOFTCAP, WIDENS,
    )  # fmt: skip

    found = peak + tl.log2(total)
    summed = summed / total[:, None]
    if HAS_SINKS:
        # A sink takes its share of the denominator and adds nothing: sigmoid(LSE - sink), in powers of two.
        sink = tl.load(sinks + head, mask=exists, other=0.0) * LOG2_E
        summed = summed / (1.0 + tl.exp2(sink - found))[:, None]
    places = out + head[:, None] * out_head + row.to(tl.int64)[:, None] * out_row + dims[None, :] * out_dim
    tl.store(places, summed.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head * num_rows + row, found * LN_2, mask=exists)


@triton.jit
@no_type_check
def _over(
    q, keys, values, rank, summed, peak, total, begin, end, high, window, scale, softcap,
    keys_slot, keys_dim, values_slot, values_dim,
    HEAD_DIM: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """The running sums after slots begin..end-1; where unmasked, they are whole steps that all rows see."""
    dims, step = tl.arange(0, WIDE), tl.arange(0, SLOTS)
    for start in range(begin, end, SLOTS):
        slots = start + step
        offset = tl.cast(start, tl.int64)
        key_places = keys + offset * keys_slot + step[None, :] * keys_slot + dims[:, None] * keys_dim
        value_places = values + offset * values_slot + step[:, None] * values_slot + dims[None, :] * values_dim
        if IS_MASKED:
            # Slots after the block's last rank may hold anything, NaN too.
            filled = slots <= high
            k = tl.load(key_places, mask=filled[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(value_places, mask=filled[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif WIDE == HEAD_DIM:
            k = tl.load(key_places)
            v = tl.load(value_places)
        else:
            k = tl.load(key_places, mask=(dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(value_places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        logits = _product(q, k, WIDENS) * scale
        if HAS_SOFTCAP:
            logits = _tanh(logits / softcap) * softcap
        logits *= LOG2_E
        if IS_MASKED:
            seen = slots[None, :] <= rank[:, None]
            if HAS_WINDOW:
                seen &= slots[None, :] > rank[:, None] - window
            logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        # A row that has seen nothing yet has the peak -inf; 0 in its place gives weights of 0 instead of NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None] + _product(weights.to(v.dtype), v, WIDENS)
        peak = higher
    return summed, peak, total


@triton.jit
@no_type_check
def _product(a, b, WIDENS: tl.constexpr):
    if WIDENS:
        # Triton's interpreter keeps bfloat16 as bits and would multiply those.
        a, b = a.to(tl.float32), b.to(tl.float32)
    # "ieee" matters for float32 alone: TF32 would round it to ten bits.
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
@no_type_check
def _tanh(x):
    # Near 0 the quotient loses digits and the series has them all; elsewhere the other way round.
    small = x * x
    series = x * (1.0 - small * (1.0 / 3.0 - small * (2.0 / 15.0 - small * (17.0 / 315.0))))
    power = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -quotient, quotient))

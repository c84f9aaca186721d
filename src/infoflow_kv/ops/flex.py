"""Staircase attention by torch's FlexAttention: its block-sparse kernel with the staircase as its mask.

For GPUs, and for a CPU where it is asked for. The block mask follows from the sorted ranks alone: a block of rows sees
the K/V blocks up to its smallest rank in full and those up to its largest in part. No rows × slots mask is made.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, no_type_check

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from infoflow_kv.ops.spec import AttentionSpec
from infoflow_kv.shapes import Float, Int, Tensor

# Rows and slots per block of the mask: what FlexAttention's kernels are tuned for.
BLOCK = 128
# torch compiles anew for each number of heads, head width, scale, dtype and kind of mask, and gives up after eight by
# default: too few for a process that serves several models. Lengths, ranks and a window's width bring no new variant.
MAX_VARIANTS = 64


def make_block_mask(ranks: Int[Tensor, " rows"], steps: Sequence[int], window: int | None) -> BlockMask:
    """The staircase as FlexAttention takes it, for `rows` rows over slots 0..last rank; serves every layer.

    `steps` are the ascending ranks as numbers. On the device of `ranks`.
    """
    num_rows, filled = len(steps), steps[-1] + 1
    starts = range(0, num_rows, BLOCK)
    low = torch.tensor([steps[start] for start in starts])
    high = torch.tensor([steps[min(start + BLOCK, num_rows) - 1] for start in starts])
    # Blocks first..stop-1 are needed; of these full_first..full_stop-1 are seen by every row in every slot.
    first, full_first = torch.zeros_like(low), torch.zeros_like(low)
    if window is not None:
        first = (low - window + 1).clamp_min(0) // BLOCK
        full_first = ((high - window + 1).clamp_min(0) + BLOCK - 1) // BLOCK
    stop, full_stop = high // BLOCK + 1, (low + 1) // BLOCK
    # Where no block is full, all of them count as left of the full ones.
    full_first = torch.where(full_first < full_stop, full_first, stop)
    full_stop = torch.maximum(full_first, full_stop)
    num_left, num_full = full_first - first, full_stop - full_first
    num_partial = stop - first - num_full
    turn = torch.arange(_at_least_two(-(-filled // BLOCK)))[None]
    after_full = (full_stop - num_left)[:, None] + turn
    partial = torch.where(turn < num_left[:, None], first[:, None] + turn, after_full)
    # What stands after a row block's own number is never read, but names a block that exists.
    partial, full = (table.clamp_max(turn.shape[1] - 1) for table in (partial, full_first[:, None] + turn))
    return BlockMask.from_kv_blocks(
        _table(num_partial, ranks.device),
        _table(partial, ranks.device),
        _table(num_full, ranks.device),
        _table(full, ranks.device),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(ranks, window),
        seq_lengths=(num_rows, filled),
        compute_q_blocks=False,  # for gradients only
    )


def attend_by_flex(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads filled head_dim"],
    values: Float[Tensor, "kv_heads filled head_dim"],
    mask: BlockMask,
    spec: AttentionSpec,
    wants_lse: bool = False,
    backend: str | None = None,
) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"] | None]:
    """Output, and the float32 LSE without sinks where `wants_lse`, of rows over slots 0..last rank (`filled` of them).

    `mask` brings ranks and window. `backend`: torch.compile's, by default inductor; on a CPU without a C++ compiler,
    and there too for the LSE, which torch's CPU kernel does not return, it is "eager", which writes all scores down.
    """
    needs_lse = wants_lse or spec.sinks is not None
    if backend is None:
        backend = "inductor" if query.device.type != "cpu" or (has_compiler() and not needs_lse) else "eager"
    # A full graph: on a break, or with too many variants, torch would quietly write all scores down instead.
    # Scale and softcap are a model's constants: torch's CPU compiler refuses a softcap that is an input of the kernel.
    with torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS, specialize_float=True):
        given = [query[None], keys[None], values[None]]
        for tensor in given:
            _vary(tensor, 2)
        out, aux = _compiled(backend)(
            *given,
            score_mod=_softcap(spec.softcap),
            block_mask=mask,
            scale=spec.scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=needs_lse),
        )
    out, lse = out[0], aux.lse[0] if needs_lse else None
    if lse is not None and spec.sinks is not None:
        # A sink takes its share of the denominator and adds nothing: exact by the LSE alone.
        share = torch.sigmoid(lse - spec.sinks.float()[:, None])
        out = (out.float() * share[..., None]).to(out.dtype)
    return out, lse


def has_compiler() -> bool:
    """Whether the C++ compiler is there with which torch compiles for the CPU."""
    return shutil.which(os.environ.get("CXX") or "g++") is not None


@cache
def _compiled(backend: str) -> Callable[..., Any]:
    return torch.compile(flex_attention, backend=backend, dynamic=True, fullgraph=True)


# torch traces these functions: the tests' shape checks, which no_type_check keeps away, would be traced with them.


def _mask_mod(ranks: Tensor, window: int | None) -> Any:
    if ranks.device.type == "cpu":
        # torch 2.13's C++ for a captured tensor of dynamic length does not compile ("cur_qSplitSize8"), so that its
        # length is a constant there, one of few.
        length = 1 << max(13, (ranks.numel() - 1).bit_length())
        ranks = torch.cat([ranks, ranks[-1:].expand(length - ranks.numel())])
        torch._dynamo.mark_static(ranks)
    if window is None:

        @no_type_check
        def sees(batch, head, row, slot):
            return slot <= ranks[row]

        return sees

    # A tensor and no number, so that another window needs no other kernel.
    before = ranks - window
    if ranks.device.type == "cpu":
        torch._dynamo.mark_static(before)

    @no_type_check
    def sees_near(batch, head, row, slot):
        return (slot <= ranks[row]) & (slot > before[row])

    return sees_near


@cache
def _softcap(softcap: float | None) -> Any:
    if softcap is None:
        return None

    @no_type_check
    def capped(score, batch, head, row, slot):
        return torch.tanh(score / softcap) * softcap

    return capped


def _at_least_two(size: int) -> int:
    # torch.compile takes a size of one for a special case, which would be compiled apart.
    return max(2, size)


def _vary(tensor: Tensor, *dims: int) -> None:
    """Tells torch.compile that these sizes have nothing to do with others: else those that happen to be equal once,
    as two blocks and two K/V heads, are compiled in as one."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _table(given: Tensor, device: torch.device) -> Tensor:
    """`[1, 1, blocks, …]` in int32, with at least two blocks of rows; an added one sees nothing."""
    missing = given.new_zeros(_at_least_two(len(given)) - len(given), *given.shape[1:])
    table = torch.cat([given, missing])[None, None].to(device, torch.int32)
    _vary(table, *range(2, table.dim()))
    return table

"""CPU: a staircase by two matrix products and a softmax, block of rows by block.

With bfloat16 instructions but without AMX torch multiplies bfloat16 matrices several times quicker than its flash
kernel attends, so that writing the logits down pays. They are rounded to the dtype before the softmax, as in
Transformers' eager attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infoflow_kv.ops.spec import visible
from infoflow_kv.shapes import Float, Int, Tensor

BLOCK_ROWS = 64
FEWEST_ROWS = 16
# The logits of one K/V head and block should stay in the processor's cache, and long contexts must not take memory
# without bound.
BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `rows`, which all see the slots before `low` and none from `high` on; `bias` is 0 or -inf between."""

    rows: slice
    low: int
    high: int
    bias: Float[Tensor, "rows edge"]


def rows_of_block(group: int, num_slots: int, dtype: torch.dtype) -> int:
    """Rows of which one K/V head's logits over all slots fit a block; 0 where that would be too few to pay."""
    rows = BLOCK_BYTES // (dtype.itemsize * group * max(1, num_slots))
    return 0 if rows < FEWEST_ROWS else min(rows, BLOCK_ROWS)


def blocks_of(
    ranks: Int[Tensor, " rows"], steps: Sequence[int], block_rows: int, dtype: torch.dtype
) -> tuple[Block, ...]:
    """The staircase as blocks of `block_rows` rows; `steps` are the ranks as numbers."""
    found = []
    for start in range(0, len(steps), block_rows):
        rows = slice(start, min(start + block_rows, len(steps)))
        low, high = steps[rows.start], steps[rows.stop - 1] + 1
        bias = torch.where(visible(ranks[rows], low, high, None), 0.0, float("-inf")).to(dtype)
        found.append(Block(rows, low, high, bias))
    return tuple(found)


def by_products(
    packed: Float[Tensor, "kv_heads packed head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    blocks: Sequence[Block],
    scale: float,
) -> Float[Tensor, "kv_heads packed head_dim"]:
    """Attention of packed rows, which all stand in some block.

    One K/V head at a time: its logits stay in the cache from the first product to the second, and a batched product
    would copy the slots' keys and values for every block, as they are no whole tensor.
    """
    group = packed.shape[1] // blocks[-1].rows.stop
    out = torch.empty_like(packed)
    scaled, turned = packed * scale, keys.transpose(1, 2)
    room = packed.new_empty(max((b.rows.stop - b.rows.start) * group * b.high for b in blocks))
    for block in blocks:
        num_rows = block.rows.stop - block.rows.start
        rows = slice(block.rows.start * group, block.rows.stop * group)
        logits = room[: num_rows * group * block.high].view(num_rows * group, block.high)
        edge = logits.view(num_rows, group, block.high)[..., block.low :]
        for head in range(packed.shape[0]):
            torch.mm(scaled[head, rows], turned[head, :, : block.high], out=logits)
            edge.add_(block.bias[:, None])
            torch.softmax(logits, dim=-1, out=logits)
            torch.mm(logits, values[head, : block.high], out=out[head, rows])
    return out

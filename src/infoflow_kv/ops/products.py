"""CPU with bfloat16 instructions: a staircase by two matrix products and a softmax, block of rows by block.

There torch multiplies bfloat16 matrices several times quicker than its flash kernel attends, so that writing the
logits down pays. They are rounded to the dtype before the softmax, as in Transformers' eager attention.
"""

from functools import cache

import torch

from infoflow_kv.ops.spec import visible
from infoflow_kv.shapes import Float, Int, Tensor

BLOCK_ROWS = 64
FEWEST_ROWS = 16
# A block's logits should stay in the processor's cache, and long contexts must not take memory without bound.
BLOCK_BYTES = 16 * 2**20


@cache
def pays() -> bool:
    """Whether this processor multiplies bfloat16 by itself."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(supported is not None and supported())


def rows_of_block(num_heads: int, num_slots: int) -> int:
    """Rows of which the logits over all slots fit a block; 0 where that would be too few to pay."""
    rows = BLOCK_BYTES // (2 * num_heads * max(1, num_slots))
    return 0 if rows < FEWEST_ROWS else min(rows, BLOCK_ROWS)


def by_products(
    packed: Float[Tensor, "kv_heads packed head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    steps: list[int],
    scale: float,
    block_rows: int = BLOCK_ROWS,
) -> Float[Tensor, "kv_heads packed head_dim"]:
    """Attention of packed rows, `block_rows` at a time; `steps` are the ranks as numbers."""
    kv_heads, num_packed, _ = packed.shape
    group = num_packed // len(steps)
    out = torch.empty_like(packed)
    scaled, turned = packed * scale, keys.transpose(1, 2)
    for start in range(0, len(steps), block_rows):
        part = ranks[start : start + block_rows]
        low, high = steps[start], steps[min(start + block_rows, len(steps)) - 1] + 1
        rows = slice(start * group, (start + len(part)) * group)
        logits = torch.bmm(scaled[:, rows], turned[:, :, :high])
        hidden = ~visible(part, low, high, None)
        edge = logits.view(kv_heads, len(part), group, high)[..., low:]
        edge.masked_fill_(hidden[:, None], float("-inf"))
        out[:, rows] = torch.bmm(torch.softmax(logits, dim=-1), values[:, :high])
    return out

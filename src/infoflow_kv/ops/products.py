"""CPU with bfloat16 instructions: a staircase by two matrix products and a softmax, block of rows by block.

There torch multiplies bfloat16 matrices several times quicker than its flash kernel attends, so that writing the
logits down pays. They are rounded to the dtype before the softmax, as in Transformers' eager attention.
"""

from functools import cache

import torch

from infoflow_kv.ops.spec import visible
from infoflow_kv.shapes import Float, Int, Tensor

# A block's logits (kv_heads × group × rows × slots) should stay in the processor's cache.
BLOCK_ROWS = 64


@cache
def pays() -> bool:
    """Whether this processor multiplies bfloat16 by itself."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(supported is not None and supported())


def by_products(
    packed: Float[Tensor, "kv_heads packed head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    steps: list[int],
    scale: float,
) -> Float[Tensor, "kv_heads packed head_dim"]:
    """Attention of packed rows; `steps` are the ranks as numbers."""
    kv_heads, num_packed, _ = packed.shape
    group = num_packed // len(steps)
    out = torch.empty_like(packed)
    scaled, turned = packed * scale, keys.transpose(1, 2)
    for start in range(0, len(steps), BLOCK_ROWS):
        part = ranks[start : start + BLOCK_ROWS]
        low, high = steps[start], steps[min(start + BLOCK_ROWS, len(steps)) - 1] + 1
        rows = slice(start * group, (start + len(part)) * group)
        logits = torch.bmm(scaled[:, rows], turned[:, :, :high])
        hidden = ~visible(part, low, high, None)
        edge = logits.view(kv_heads, len(part), group, high)[..., low:]
        edge.masked_fill_(hidden[:, None], float("-inf"))
        out[:, rows] = torch.bmm(torch.softmax(logits, dim=-1), values[:, :high])
    return out

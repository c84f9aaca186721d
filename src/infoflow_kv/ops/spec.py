"""What a layer's attention does beside softmax(qk), and the mask by rank that every kernel here shares."""

from dataclasses import dataclass

import torch

from infoflow_kv.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention does beside softmax(qk): scale, sliding window, score softcap, attention sinks.

    `window`: a row of rank r sees slots r-window+1..r. `sinks`: one logit per head that joins the denominator.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def visible(ranks: Int[Tensor, " rows"], start: int, stop: int, window: int | None) -> Bool[Tensor, "rows part"]:
    """Which of the slots start..stop-1 each row sees."""
    slots = torch.arange(start, stop, device=ranks.device)
    mask = slots[None, :] <= ranks[:, None]
    if window is not None:
        mask &= slots[None, :] > ranks[:, None] - window
    return mask


def masked_logits(
    packed: Float[Tensor, "kv_heads packed head_dim"],
    keys: Float[Tensor, "kv_heads part head_dim"],
    mask: Bool[Tensor, "packed masked"],
    spec: AttentionSpec,
) -> Float[Tensor, "kv_heads packed part"]:
    """Attention logits with scale, softcap and mask applied, in the dtype of the product (softcap: float32), for a
    softmax in float32. `mask` is that of the last slots, where all rows see those before."""
    # Scaled first: float16 overflows at 65,504.
    logits = by_head(packed * spec.scale, keys.transpose(1, 2))
    if spec.softcap is not None:
        logits = torch.tanh(logits.float() / spec.softcap) * spec.softcap
    logits[..., logits.shape[-1] - mask.shape[-1] :].masked_fill_(~mask, float("-inf"))
    return logits


def by_head(
    left: Float[Tensor, "kv_heads packed _"], right: Float[Tensor, "kv_heads _ _"]
) -> Float[Tensor, "kv_heads packed _"]:
    """The product for each K/V head."""
    if left.device.type == "cpu" and left.dtype == torch.bfloat16:
        # The batched product would copy keys or values first, which are a part of a larger tensor.
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
        for a, b, product in zip(left, right, out, strict=True):
            torch.mm(a, b, out=product)
        return out
    return left @ right


def with_sinks(
    logits: Float[Tensor, "kv_heads packed part"], spec: AttentionSpec, group: int
) -> Float[Tensor, "kv_heads packed wider"]:
    """The logits with one more column, the head's sink, where the layer has sinks."""
    if spec.sinks is None:
        return logits
    kv_heads, packed, _ = logits.shape
    column = spec.sinks.float().reshape(kv_heads, group, 1).expand(-1, -1, packed // group).reshape(kv_heads, packed, 1)
    return torch.cat([logits.float(), column], dim=-1)

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
    mask: Bool[Tensor, "packed part"],
    spec: AttentionSpec,
) -> Float[Tensor, "kv_heads packed part"]:
    """float32 attention logits with scale, softcap and mask applied."""
    logits = (packed * spec.scale @ keys.transpose(1, 2)).float()  # scaled first: float16 overflows at 65,504
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    return logits.masked_fill(~mask, float("-inf"))


def with_sinks(
    logits: Float[Tensor, "kv_heads packed part"], spec: AttentionSpec, group: int
) -> Float[Tensor, "kv_heads packed wider"]:
    """The logits with one more column, the head's sink, where the layer has sinks."""
    if spec.sinks is None:
        return logits
    kv_heads, packed, _ = logits.shape
    column = spec.sinks.float().reshape(kv_heads, group, 1).expand(-1, -1, packed // group).reshape(kv_heads, packed, 1)
    return torch.cat([logits, column], dim=-1)

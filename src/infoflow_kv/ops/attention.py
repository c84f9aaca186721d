"""Staircase attention: rows sorted by rank, each row sees the prefix of slots that ends at its own rank.

It is causal attention with the row number replaced by the rank, so a block of rows is dense up to its smallest rank,
masked only between its smallest and its largest, and needs nothing after that. The
merge of partial results by log-sum-exp (LSE) is the one of FlashAttention and Ring Attention.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from infoflow_kv.shapes import Bool, Float, Int, Tensor

# Rows per block. The masked edge of a block is about ROWS_PER_BLOCK / budget slots wide: smaller blocks waste less
# of it, larger ones read K and V less often.
ROWS_PER_BLOCK = 128


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention does beside softmax(qk): scale, sliding window, score softcap, attention sinks.

    `window`: a row of rank r sees slots r-window+1..r. `sinks`: one logit per head that joins the denominator.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def staircase_attention(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    spec: AttentionSpec,
) -> Float[Tensor, "heads rows head_dim"]:
    """Attention output of each row over slots 0..rank (inside the window, where there is one).

    `ranks` must ascend strictly and end below `slots`; slot index == rank of the key in that slot. No rows × slots mask
    is ever built.
    """
    rows = query.shape[1]
    first, last = int(ranks[0]), int(ranks[-1])
    if last >= keys.shape[1]:
        raise ValueError(f"rank {last} has no slot: there are {keys.shape[1]}")
    window = spec.window if spec.window is not None and spec.window <= last else None
    if spec.softcap is not None or spec.sinks is not None:
        return _in_blocks(query, keys, values, ranks, spec, window)
    if window is None and (rows == 1 or last - first == rows - 1):
        return _contiguous(query, keys[:, : last + 1], values[:, : last + 1], first, spec.scale)
    if window is None and query.device.type == "cpu":
        return _merged_blocks(query, keys, values, ranks, spec.scale)
    return _in_blocks(query, keys, values, ranks, spec, window)


def visible(ranks: Int[Tensor, " rows"], start: int, stop: int, window: int | None) -> Bool[Tensor, "rows part"]:
    """Which of the slots start..stop-1 each row sees."""
    slots = torch.arange(start, stop, device=ranks.device)
    mask = slots[None, :] <= ranks[:, None]
    if window is not None:
        mask &= slots[None, :] > ranks[:, None] - window
    return mask


def _contiguous(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads filled head_dim"],
    values: Float[Tensor, "kv_heads filled head_dim"],
    first: int,
    scale: float,
) -> Float[Tensor, "heads rows head_dim"]:
    """Rows first..first+rows-1: a dense part before `first` and a causal square."""
    if query.shape[1] == 1:
        packed = _pack(query, keys.shape[0])
        out = F.scaled_dot_product_attention(packed[None], keys[None], values[None], scale=scale)[0]
        return _unpack(out, query.shape)
    if first == 0:
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
    if query.device.type != "cpu":
        ranks = torch.arange(first, first + query.shape[1], device=query.device)
        return _in_blocks(query, keys, values, ranks, AttentionSpec(scale), None)
    group = query.shape[0] // keys.shape[0]
    packed = _pack(query, keys.shape[0])
    dense, dense_lse = _flash(packed, keys[:, :first], values[:, :first], scale)
    square, square_lse = _flash(
        query, _repeat(keys[:, first:], group), _repeat(values[:, first:], group), scale, is_causal=True
    )
    shape = (query.shape[0], query.shape[1])
    return merge(_unpack(dense, query.shape), dense_lse.reshape(shape), square, square_lse)


def _merged_blocks(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    scale: float,
) -> Float[Tensor, "heads rows head_dim"]:
    """CPU: per block of rows a dense piece without a mask and a small masked edge, merged by LSE."""
    out = torch.empty_like(query)
    kv_heads = keys.shape[0]
    group = query.shape[0] // kv_heads
    for start in range(0, query.shape[1], ROWS_PER_BLOCK):
        part = query[:, start : start + ROWS_PER_BLOCK]
        part_ranks = ranks[start : start + ROWS_PER_BLOCK]
        low, high = int(part_ranks[0]), int(part_ranks[-1]) + 1
        packed = _pack(part, kv_heads)
        # The edge starts at the smallest rank itself, so that every row sees at least one of its slots: the kernel
        # gives lse 0 (not -inf) to a row that sees nothing, which would be merged as if it were real.
        mask = visible(part_ranks, low, high, None).repeat(group, 1)
        edge, edge_lse = _flash(packed, keys[:, low:high], values[:, low:high], scale, mask=mask)
        if low > 0:
            dense, dense_lse = _flash(packed, keys[:, :low], values[:, :low], scale)
            edge = merge(dense, dense_lse, edge, edge_lse)
        out[:, start : start + ROWS_PER_BLOCK] = _unpack(edge, part.shape)
    return out


def _in_blocks(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    spec: AttentionSpec,
    window: int | None,
) -> Float[Tensor, "heads rows head_dim"]:
    """Any device, window, softcap and sinks: per block one masked attention over the slots that it can see."""
    out = torch.empty_like(query)
    kv_heads = keys.shape[0]
    group = query.shape[0] // kv_heads
    for start in range(0, query.shape[1], ROWS_PER_BLOCK):
        part = query[:, start : start + ROWS_PER_BLOCK]
        part_ranks = ranks[start : start + ROWS_PER_BLOCK]
        low, high = 0 if window is None else max(0, int(part_ranks[0]) - window + 1), int(part_ranks[-1]) + 1
        mask = visible(part_ranks, low, high, window).repeat(group, 1)
        packed, k, v = _pack(part, kv_heads), keys[:, low:high], values[:, low:high]
        if spec.softcap is None and spec.sinks is None:
            block = F.scaled_dot_product_attention(packed[None], k[None], v[None], attn_mask=mask, scale=spec.scale)[0]
        else:
            logits = masked_logits(packed, k, mask, spec)
            block = torch.softmax(with_sinks(logits, spec, group), dim=-1)[..., : k.shape[1]].to(v.dtype) @ v
        out[:, start : start + ROWS_PER_BLOCK] = _unpack(block, part.shape)
    return out


def masked_logits(
    packed: Float[Tensor, "kv_heads packed head_dim"],
    keys: Float[Tensor, "kv_heads part head_dim"],
    mask: Bool[Tensor, "packed part"],
    spec: AttentionSpec,
) -> Float[Tensor, "kv_heads packed part"]:
    """float32 attention logits with scale, softcap and mask applied."""
    logits = (packed @ keys.transpose(1, 2)).float() * spec.scale
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


def merge(
    out_a: Float[Tensor, "some rows head_dim"],
    lse_a: Float[Tensor, "some rows"],
    out_b: Float[Tensor, "some rows head_dim"],
    lse_b: Float[Tensor, "some rows"],
) -> Float[Tensor, "some rows head_dim"]:
    """The attention over the union of two disjoint sets of keys, from the outputs and LSEs over each."""
    weight_b = torch.sigmoid(lse_b - lse_a)[..., None]
    return torch.lerp(out_a.float(), out_b.float(), weight_b).to(out_a.dtype)


def _pack(query: Float[Tensor, "heads rows head_dim"], kv_heads: int) -> Float[Tensor, "kv_heads packed head_dim"]:
    """Query heads of one group as more rows of their K/V head, so that K and V are read once per group."""
    return query.reshape(kv_heads, -1, query.shape[2])


def _unpack(
    packed: Float[Tensor, "kv_heads packed head_dim"], shape: torch.Size
) -> Float[Tensor, "heads rows head_dim"]:
    return packed.reshape(shape)


def _repeat(x: Float[Tensor, "kv_heads part head_dim"], group: int) -> Float[Tensor, "heads part head_dim"]:
    return x.repeat_interleave(group, dim=0) if group > 1 else x


def _flash(
    query: Float[Tensor, "some rows head_dim"],
    keys: Float[Tensor, "some part head_dim"],
    values: Float[Tensor, "some part head_dim"],
    scale: float,
    *,
    is_causal: bool = False,
    mask: Bool[Tensor, "rows part"] | None = None,
) -> tuple[Float[Tensor, "some rows head_dim"], Float[Tensor, "some rows"]]:
    """Output and LSE of torch's CPU flash kernel; both are needed for the exact merge, and SDPA returns only one."""
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))[None, None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out[0], lse[0]

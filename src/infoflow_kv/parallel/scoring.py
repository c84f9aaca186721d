"""Attention mass over ranks, exactly: every weight is divided by the sum over all keys, wherever these lie."""

import itertools

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import AttentionInput
from infoflow_kv.ops.mass import Reduction
from infoflow_kv.ops.parts import ROWS_PER_STEP, add_sinks, finite, logits_of, merge_parts, output_of, stretches
from infoflow_kv.parallel.shard import Shard, packed, unpacked
from infoflow_kv.shapes import Float, Int, Tensor


def spread_mass(
    given: AttentionInput,
    shard: Shard,
    keys: Float[Tensor, "kv_heads own_slots head_dim"],
    values: Float[Tensor, "kv_heads own_slots head_dim"],
    ranks: Int[Tensor, " rows"],
    slot_ranks: Int[Tensor, " own_slots"],
    num_own: int,
    reduction: Reduction,
    weight: Float[Tensor, "kv_heads own_context"] | None,
) -> tuple[Float[Tensor, " own_context"], Float[Tensor, "heads rows head_dim"]]:
    """`ops.attention_mass` for rows that every rank runs: the sum over this rank's heads for its `num_own` context
    slots, and the whole output. A softmax over each rank's own keys would choose other tokens (docs/parallel.md)."""
    if weight is not None and reduction == "l2":
        raise ComputeError("the l2 reduction averages over heads, so it takes no weights per K/V head")
    spec = shard.spec(given.spec)
    query = given.query[shard.own_heads]
    num_heads, num_rows, _ = query.shape
    total = torch.zeros(num_own, dtype=torch.float32, device=query.device)
    seen = stretches(ranks, slot_ranks, spec.window)
    # Slots of tokens to come hold whatever was in that memory; a NaN there would survive its weight of 0.
    filled = int(seen.stops[-1])
    keys, values = keys[:, :filled], values[:, :filled]
    outs = []
    for start in range(0, num_rows, ROWS_PER_STEP):
        part = slice(start, min(start + ROWS_PER_STEP, num_rows))
        logits = logits_of(query[:, part], keys, seen.visible(part, filled), spec)
        message, dtype, width = packed(*output_of(logits, values, query.dtype))
        parts = shard.sequence.all_gather(message[None], [1] * shard.sequence.size)
        out, lse = add_sinks(*merge_parts(*unpacked(parts, dtype, width)), spec.sinks)
        outs.append(out.to(dtype))
        weights = torch.exp(logits - finite(lse)[..., None])
        if reduction == "entropy":
            inside = torch.special.entr(weights).sum(dim=-1)
            entropy = shard.sequence.all_gather(inside[None], [1] * shard.sequence.size).sum(dim=0)
            if spec.sinks is not None:
                entropy += torch.special.entr(torch.exp(spec.sinks.float()[:, None] - lse))
            window = int(ranks[-1]) + 1 if spec.window is None else spec.window
            focus = 1 - entropy / (ranks[part] + 1).clamp_max(window).clamp_min(2).log()
            weights = weights * focus.clamp_min(0)[..., None]
        weights = weights[..., :num_own]
        if reduction != "l2":
            # In numbers: a rank without a context slot has none to guess a size from.
            in_group = num_heads // keys.shape[0] * weights.shape[1]
            per_head = weights.reshape(keys.shape[0], in_group, num_own).sum(dim=1)
            total += per_head.sum(dim=0) if weight is None else (per_head * weight).sum(dim=0)
            continue
        # Each member of the heads team gets all heads of its part of the slots, and leaves 0 in the others' parts: a
        # sum for every row and slot would be more than all else that is sent.
        size, at = shard.heads.size, shard.heads.index
        bounds = [num_own * member // size for member in range(size + 1)]
        counts = [stop - start for start, stop in itertools.pairwise(bounds)]
        received = shard.heads.all_to_all(weights.sum(dim=0).T.contiguous(), counts, [counts[at]] * size)
        per_row = received.view(size, counts[at], weights.shape[1]).sum(dim=0)
        total[bounds[at] : bounds[at + 1]] += (per_row / (num_heads * size)).square().sum(dim=-1)
    if reduction == "l2":
        total = total.sqrt()
    return total, shard.all_heads(torch.cat(outs, dim=1))

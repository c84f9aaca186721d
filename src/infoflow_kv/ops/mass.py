"""Attention mass: how much attention the prompt rows pay to each context token (paper, eq. 7)."""

from typing import Literal

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.ops.spec import AttentionSpec, by_head, masked_logits, visible, with_sinks
from infoflow_kv.shapes import Float, Int, Tensor

Reduction = Literal["sum", "l2", "entropy"]

# Prompt rows per step: bounds the workspace to a few times heads × ROWS_PER_STEP × slots floats however long the prompt
# is.
ROWS_PER_STEP = 32


def attention_mass(
    query: Float[Tensor, "heads prompt head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " prompt"],
    num_context: int,
    spec: AttentionSpec,
    reduction: Reduction = "sum",
    weight: Float[Tensor, "kv_heads context"] | None = None,
) -> tuple[Float[Tensor, " context"], Float[Tensor, "heads prompt head_dim"]]:
    """float32 score of each context slot for one layer, and the layer's attention output, which is made of the same
    weights. Softmax over context *and* prompt keys.

    `sum`: sum of the weights over rows and heads (eq. 7). `l2`: L2 norm over the rows of the head-mean weights (the
    authors' released code). `entropy`: the sum in which each row of a head counts by 1 − H / log n, H the entropy of
    its weights over the n slots it sees: a head that looks everywhere says little about where the information is.
    `weight` multiplies what a slot gets from the heads of each K/V head (`sum` and `entropy` only).
    """
    if weight is not None and reduction == "l2":
        raise ComputeError("the l2 reduction averages over heads, so it takes no weights per K/V head")
    kv_heads = keys.shape[0]
    group = query.shape[0] // kv_heads
    filled = int(ranks[-1]) + 1
    total = torch.zeros(num_context, dtype=torch.float32, device=query.device)
    outs = []
    for start in range(0, query.shape[1], ROWS_PER_STEP):
        part = query[:, start : start + ROWS_PER_STEP]
        part_ranks = ranks[start : start + ROWS_PER_STEP]
        masked_from = int(part_ranks[0]) if spec.window is None else 0
        mask = visible(part_ranks, masked_from, filled, spec.window).repeat(group, 1)
        logits = masked_logits(part.reshape(kv_heads, -1, part.shape[2]), keys[:, :filled], mask, spec)
        weights = torch.softmax(with_sinks(logits, spec, group), dim=-1, dtype=torch.float32)
        out = by_head(weights[..., :filled].to(values.dtype), values[:, :filled])
        outs.append(out.view(query.shape[0], part.shape[1], -1))
        if reduction == "entropy":
            seen = (mask.sum(dim=-1) + masked_from).clamp_min(2).log()
            focus = 1 - torch.special.entr(weights).sum(dim=-1) / seen
            weights = weights * focus.clamp_min(0)[..., None]
        weights = weights[..., :num_context]
        if reduction != "l2":
            per_head = weights.sum(dim=1)
            total += per_head.sum(dim=0) if weight is None else (per_head * weight).sum(dim=0)
        else:
            per_row = weights.reshape(query.shape[0], part.shape[1], num_context).mean(dim=0)
            total += per_row.square().sum(dim=0)
    return total.sqrt() if reduction == "l2" else total, torch.cat(outs, dim=1)

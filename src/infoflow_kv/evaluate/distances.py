"""How far one method's distributions and KV lie from full prefill's, place by place."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from infoflow_kv.records import Context
from infoflow_kv.shapes import Float, Tensor

if TYPE_CHECKING:
    from infoflow_kv.runs import Run


def divergences(
    ours: Float[Tensor, "places vocab"], full: Float[Tensor, "places vocab"]
) -> tuple[list[float], list[float]]:
    """KL(full ‖ ours) in nats and Jensen–Shannon divergence in bits (at most 1) at each place, summed in float64."""
    p, q = torch.log_softmax(full.double(), -1), torch.log_softmax(ours.double(), -1)
    middle = torch.logaddexp(p, q) - math.log(2)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    js = 0.5 * ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)) / math.log(2)
    return kl.tolist(), js.clamp(0, 1).tolist()


def nll(logits: Float[Tensor, "places vocab"], token_ids: Sequence[int]) -> float:
    """Mean negative log-likelihood of the tokens in nats, `logits[i]` being those before token i."""
    wanted = torch.tensor(list(token_ids), device=logits.device)
    chosen = torch.log_softmax(logits.double(), -1).gather(1, wanted[:, None])
    return float(-chosen.mean())


def agreement(logits: Float[Tensor, "places vocab"], token_ids: Sequence[int]) -> int:
    """How many leading tokens of the full-prefill answer the method would have chosen itself (greedily)."""
    chosen = logits[: len(token_ids)].argmax(-1).tolist()
    for place, (ours, theirs) in enumerate(zip(chosen, token_ids, strict=True)):
        if ours != theirs:
            return place
    return len(token_ids)


def margin(logits: Float[Tensor, " vocab"]) -> float:
    """The lead of the likeliest token over the second in nats: a small one makes `top1` a matter of rounding."""
    best = torch.log_softmax(logits.double(), -1).topk(2).values
    return float(best[0] - best[1])


def selection_lift(run: "Run", supporting: Sequence[int]) -> float | None:
    """The share of the selected tokens that stand in supporting chunks ÷ the share of reusable tokens that do.

    `supporting`: chunk indices in the request's order. None where nothing is selected or supports.
    """
    spans = run.chunk_spans
    place_of = {index: place for place, index in enumerate(run.order)}
    inside = torch.zeros(run.context.num_tokens, dtype=torch.bool)
    for index in supporting:
        span = spans[place_of[index]]
        inside[span.start : span.stop] = True
    reusable = inside[run.context.exact_tokens :]
    slots = run.selection.slots.cpu()
    if slots.numel() == 0 or not bool(reusable.any()) or not run.method.reuse:
        return None
    return float(inside[slots].double().mean() / reusable.double().mean())


def kv_error(
    context: Context, slots: Tensor, keys: Tensor, values: Tensor
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """‖X − X_full‖ / ‖X_full‖ per layer over the recomputed and over the reused tokens, for K (after RoPE) and V.

    `keys`, `values`: those of a full prefill. Exact tokens count in neither.
    """
    count = context.num_tokens
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[slots.cpu()] = True
    reused = ~chosen
    reused[: context.exact_tokens] = False

    def errors(ours: Tensor, full: Tensor) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for name, mask in (("repaired", chosen), ("reused", reused)):
            if bool(mask.any()):
                a, b = ours[:, :, :count][:, :, mask].float(), full[:, :, :count][:, :, mask].float()
                ratio: Any = (a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1).clamp_min(1e-12)
                found[name] = [round(x, 5) for x in ratio.tolist()]
        return found

    return errors(context.keys, keys), errors(context.values, values)

"""What a selector gets and gives, and the one function that turns scores and a budget into a Selection."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.models import LanguageModel, RotaryTables
from infoflow_kv.records import Context, Selection, Span
from infoflow_kv.select.budget import Budget, check_budget, num_selected
from infoflow_kv.shapes import Float, Int, Tensor


@dataclass(frozen=True, slots=True)
class Scene:
    """All that a selector may look at: the model, the assembled context, the prompt rows and their rotary tables.

    `rotary` covers context and prompt at the geometry's positions, slot by slot. `seed` is the request's.
    `sensitivity`: how far each value moves behind a neighbour, for methods that need it. `truth`: the values of a full
    prefill, for the oracle.
    """

    model: LanguageModel
    context: Context
    prompt_ids: Int[Tensor, " prompt"]
    rotary: RotaryTables
    seed: int = 0
    sensitivity: Float[Tensor, "layers context"] | None = None
    truth: Float[Tensor, "layers kv_heads slots head_dim"] | None = None


class Selector(Protocol):
    """A selector has one method; everything else is the same for all methods."""

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        """float32 score of each context token; higher is recomputed first. Scores of exact tokens are ignored."""
        ...


@dataclass(frozen=True, slots=True)
class Allocation:
    """How the budget is spread over chunks. By default tokens of all chunks compete for all of it.

    `floor`: this share of the budget is given to the chunks first, by their length. `cap`: no chunk gets more than this
    share of the budget while others have tokens left: an attention magnet must not eat it.
    """

    floor: float | int = 0.0
    cap: float | int = 1.0

    def __post_init__(self) -> None:
        for name, value in (("chunk_floor", self.floor), ("chunk_cap", self.cap)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise OptionError(f"{name} {value!r} is outside 0..1; it is a share of the budget")
        if self.cap == 0:
            raise OptionError("chunk_cap 0 would leave nothing to recompute; expected above 0 and at most 1")


EVEN = Allocation()


def take(
    scores: Float[Tensor, " context"], budget: Any, context: Context, allocation: Allocation = EVEN, count: int = -1
) -> Selection:
    """The best tokens outside the exact prefix, as many as the budget buys; ties go to the earlier token.

    `budget`: a share, `auto:P` or a Budget. `count`: this many instead (rules with a fixed number of tokens).
    ComputeError if a score is not finite: a NaN would otherwise pick tokens at random.
    """
    if scores.shape[0] != context.num_tokens:
        raise ComputeError(f"{scores.shape[0]} scores for {context.num_tokens} context tokens")
    if not bool(torch.isfinite(scores).all()):
        raise ComputeError("the selector gave scores that are not finite")
    budget = check_budget(budget)
    reusable = scores[context.exact_tokens :]
    wanted = min(count, context.reusable_tokens) if count >= 0 else budget.count(reusable)
    slots = best(scores, wanted, context.exact_tokens, context.spans, allocation)
    reason = f"the rule fixes {slots.numel()} tokens" if count >= 0 else adaptive_reason(budget, scores, slots, context)
    return Selection(slots=slots, scores=scores, reason=reason)


def best(
    scores: Float[Tensor, " context"], count: int, exact: int, spans: tuple[Span, ...], allocation: Allocation = EVEN
) -> Int[Tensor, " selected"]:
    """The `count` slots of the highest scores from slot `exact` on, ascending, spread as `allocation` says."""
    order = torch.sort(scores[exact:], descending=True, stable=True).indices + exact
    if allocation == EVEN or count == 0:
        return torch.sort(order[:count]).values
    chunk_of = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    for index, span in enumerate(spans):
        chunk_of[span.start : span.stop] = index
    open_spans = [(index, span) for index, span in enumerate(spans) if span.start >= exact]
    reusable = sum(span.num_tokens for _, span in open_spans)
    rank_in_chunk = torch.empty(order.shape[0], dtype=torch.int64, device=scores.device)
    for index, _ in open_spans:
        own = chunk_of[order] == index
        rank_in_chunk[own] = torch.arange(int(own.sum()), device=scores.device)
    floors = torch.zeros(len(spans), dtype=torch.int64, device=scores.device)
    for index, span in open_spans:
        floors[index] = int(allocation.floor * count * span.num_tokens / reusable)
    most = max(1, int(allocation.cap * count + 0.5))
    # Three classes in this order: what the floors grant, what lies under the caps, the rest; by score inside each.
    chunk = chunk_of[order]
    kind = torch.where(rank_in_chunk < floors[chunk], 0, torch.where(rank_in_chunk < most, 1, 2))
    return torch.sort(order[torch.sort(kind, stable=True).indices[:count]]).values


def adaptive_reason(budget: Budget, scores: Tensor, slots: Tensor, context: Context) -> str:
    """Why an adaptive budget took so many tokens, in words; empty for a plain share."""
    reusable = scores[context.exact_tokens :].double().clamp_min(0)
    total = float(reusable.sum())
    if budget.cover is None or slots.numel() == 0:
        return ""
    if total <= 0:
        return f"{budget}: this method predicts no influence, so the ceiling of {budget.share:g} was taken"
    covered = float(scores[slots].double().clamp_min(0).sum()) / total
    share = slots.numel() / reusable.numel()
    stopped = covered < budget.cover - 1e-6 and slots.numel() >= num_selected(budget.share, reusable.numel())
    limit = f", stopped by the ceiling of {budget.share:g}" if stopped else ""
    return f"{budget}: {share:.1%} of the tokens cover {covered:.1%} of the predicted influence{limit}"

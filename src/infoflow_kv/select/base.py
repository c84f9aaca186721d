"""What a selector gets and gives, and the one function that turns scores and a budget into a Selection."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.models import LanguageModel, RotaryTables
from infoflow_kv.records import Context, Selection
from infoflow_kv.shapes import Float, Int, Tensor


@dataclass(frozen=True, slots=True)
class Scene:
    """All that a selector may look at: the model, the assembled context, the prompt rows and their rotary tables.

    `rotary` covers context and prompt at their global positions, slot by slot. `seed` is the request's.
    """

    model: LanguageModel
    context: Context
    prompt_ids: Int[Tensor, " prompt"]
    rotary: RotaryTables
    seed: int = 0


class Selector(Protocol):
    """A selector has one method; everything else is the same for all methods."""

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        """float32 score of each context token; higher is recomputed first. Scores of exact tokens are ignored."""
        ...


def check_budget(budget: Any) -> float:
    """The budget as a float; OptionError unless it is a finite number in 0..1."""
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not (number and math.isfinite(budget) and 0 <= budget <= 1):
        raise OptionError(
            f"budget {budget!r} is outside 0..1; it is the share of reusable tokens to recompute, for example 0.15"
        )
    return float(budget)


def num_selected(budget: Any, reusable_tokens: int) -> int:
    """How many tokens a budget buys: `budget × reusable`, rounded half up; at least 1 if both are above 0."""
    share = check_budget(budget)
    if share == 0 or reusable_tokens == 0:
        return 0
    return min(reusable_tokens, max(1, math.floor(share * reusable_tokens + 0.5)))


def take(scores: Float[Tensor, " context"], budget: Any, context: Context) -> Selection:
    """The top-k tokens outside the exact prefix, k from the budget; ties go to the earlier token.

    ComputeError if a score is not finite: a NaN would otherwise pick tokens at random.
    """
    if scores.shape[0] != context.num_tokens:
        raise ComputeError(f"{scores.shape[0]} scores for {context.num_tokens} context tokens")
    if not bool(torch.isfinite(scores).all()):
        raise ComputeError("the selector gave scores that are not finite")
    count = num_selected(budget, context.reusable_tokens)
    reusable = scores[context.exact_tokens :]
    order = torch.sort(reusable, descending=True, stable=True).indices[:count]
    slots = torch.sort(order).values + context.exact_tokens
    return Selection(slots=slots, scores=scores)

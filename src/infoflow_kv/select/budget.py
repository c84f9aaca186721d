"""How many tokens are recomputed: a share of the reusable ones, or as many as cover a share of what was predicted."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from infoflow_kv.errors import OptionError
from infoflow_kv.shapes import Float, Tensor

# Share of the predicted influence that `auto` covers, and the largest share of tokens that it may take for it. With
# SmolLM2-135M, 0.8 takes about 15 % of contexts of 1K tokens and 9 % of 2K.
AUTO_COVER = 0.8
AUTO_CEILING = 0.30


@dataclass(frozen=True, slots=True)
class Budget:
    """`share`: of the reusable tokens, 0..1. With `cover` the budget is adaptive: the smallest set of tokens whose
    scores sum to that share of all scores, and `share` is its ceiling."""

    share: float
    cover: float | None = None

    def __str__(self) -> str:
        return f"{self.share:g}" if self.cover is None else f"auto:{self.cover:g}"

    def count(self, scores: Float[Tensor, " reusable"]) -> int:
        """How many of these reusable tokens it buys."""
        ceiling = num_selected(self.share, scores.shape[0])
        if self.cover is None or ceiling == 0:
            return ceiling
        # Only scores above 0 predict anything; a selector of places has none and gets the ceiling.
        ordered = torch.sort(scores.double().clamp_min(0), descending=True).values.cumsum(0)
        total = float(ordered[-1])
        if total <= 0:
            return ceiling
        # As many as lie below the wanted sum, and the one that reaches it. The last sum may miss 1 by rounding.
        needed = int((ordered < self.cover * total * (1 - 1e-12)).sum()) + 1
        return min(max(needed, 1), ceiling)


def check_budget(budget: Any, ceiling: Any = None) -> Budget:
    """The Budget of a number in 0..1, of `auto` or `auto:P`, or a Budget itself; OptionError for anything else.

    `ceiling`: the largest share that an adaptive budget may take.

    >>> check_budget("auto:0.5", 0.2)
    Budget(share=0.2, cover=0.5)
    """
    if isinstance(budget, Budget):
        return budget
    # Checked beside a plain share too: it may be the ceiling of a later adaptive budget.
    most = AUTO_CEILING if ceiling is None else check_share(ceiling, "budget_max")
    if isinstance(budget, str):
        word, colon, text = budget.partition(":")
        if word != "auto":
            raise OptionError(f"budget '{budget}' is neither a number in 0..1 nor auto or auto:P, for example auto:0.8")
        try:
            cover = float(text) if colon else AUTO_COVER
        except ValueError:
            cover = math.nan
        if not 0 < cover <= 1:
            raise OptionError(
                f"budget '{budget}' is not understood; P in auto:P is the share of the predicted influence that is "
                "covered, above 0 and at most 1, for example auto:0.8"
            )
        return Budget(most, cover)
    return Budget(check_share(budget, "budget"))


def check_share(share: Any, name: str) -> float:
    """The share as a float; OptionError unless it is a finite number in 0..1."""
    number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not (number and math.isfinite(share) and 0 <= share <= 1):
        raise OptionError(
            f"{name} {share!r} is outside 0..1; it is the share of reusable tokens to recompute, for example 0.15"
        )
    return float(share)


def num_selected(share: Any, reusable_tokens: int) -> int:
    """How many tokens a share buys: `share × reusable`, rounded half up; at least 1 if both are above 0."""
    share = check_share(share, "budget")
    if share == 0 or reusable_tokens == 0:
        return 0
    return int(min(reusable_tokens, max(1, math.floor(share * reusable_tokens + 0.5))))

"""CacheBlend's rule: rows are chosen by how far their new K or V lies from the stored one, while they run.

It is no score of the prompt but a rule for the repair forward itself: all rows run the first layers, then the set
shrinks. With one check layer it is CacheBlend's released code; re-ranked at every layer it is the filter of its paper.
"""

from collections.abc import Callable

import torch

from infoflow_kv.errors import OptionError
from infoflow_kv.models import Deviate, Measure
from infoflow_kv.records import Context, Selection
from infoflow_kv.select.base import EVEN, Allocation, adaptive_reason, best
from infoflow_kv.select.budget import Budget
from infoflow_kv.shapes import Bool, Int, Tensor

CHECK_LAYER = 1  # K and V of layer 0 depend on the token alone, so layer 1 is the first that can deviate

# (share of the tokens, number of layers) → for each layer the share of the reusable rows that goes on after it.
Rates = Callable[[float, int], tuple[float, ...]]


class Deviation:
    """Drops rows on the way through the layers; made anew for each request.

    `rates`: share of the reusable rows that goes on after each layer, never rising. `measure`: what is compared, V
    (CacheBlend's released code) or K (LMCache).
    """

    def __init__(
        self,
        context: Context,
        budget: Budget,
        num_layers: int,
        rates: Rates,
        measure: Measure = "V",
        allocation: Allocation = EVEN,
    ) -> None:
        self._context = context
        self._budget = budget
        self._rates = rates(budget.share, num_layers)
        self._measure: Measure = measure
        self._allocation = allocation
        self._scores = torch.zeros(context.num_tokens, device=context.keys.device)
        self._slots: Tensor | None = None
        self._counts: list[int] = []
        adaptive = budget.cover is not None
        if adaptive and len(set(self._rates[CHECK_LAYER:])) > 1:
            raise OptionError("an adaptive budget needs a method with one set of tokens for all layers")

    def writes(self, layer: int, ranks: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"] | None:
        return None

    def kept(self, layer: int, ranks: Int[Tensor, " rows"], deviate: Deviate) -> Int[Tensor, " kept"] | None:
        context = self._context
        rows = int((ranks < context.num_tokens).sum())
        self._counts.append(rows)
        before = 1.0 if layer == 0 else self._rates[layer - 1]
        chooses = self._budget.cover is not None and layer == CHECK_LAYER  # whatever its ceiling
        if rows == 0 or (self._rates[layer] >= before and not chooses):
            return None
        slots = ranks[:rows]
        # Rows that have left can never come back: they rank below every row that is still there.
        scores = torch.full_like(self._scores, -1.0)
        scores[slots] = deviate(self._measure)[:rows]
        if self._slots is None:
            self._scores = scores.clamp_min(0)
        chosen = best(scores, self._count(scores, layer), context.exact_tokens, context.spans, self._allocation)
        chosen = chosen[torch.isin(chosen, slots)]
        if self._slots is None:
            self._slots = chosen
        return torch.cat([torch.searchsorted(slots, chosen), torch.arange(rows, ranks.shape[0], device=ranks.device)])

    def selection(self) -> Selection:
        """What was recomputed: the rows after the check layer, and how many rows each layer really ran."""
        context, slots = self._context, self._slots
        if slots is None:  # nothing left on the way: all rows ran all layers
            slots = torch.arange(context.exact_tokens, context.num_tokens, device=context.keys.device)
            return Selection(slots, None, layer_counts=tuple(self._counts), full_layers=CHECK_LAYER + 1)
        return Selection(
            slots,
            self._scores,
            layer_counts=tuple(self._counts),
            full_layers=CHECK_LAYER + 1,
            reason=adaptive_reason(self._budget, self._scores, slots, context),
        )

    def _count(self, scores: Tensor, layer: int) -> int:
        reusable = scores[self._context.exact_tokens :]
        if self._budget.cover is not None:
            return self._budget.count(reusable)
        return Budget(self._rates[layer]).count(reusable)


def constant(share: float, num_layers: int) -> tuple[float, ...]:
    """All rows up to the check layer, then one set (CacheBlend's released code)."""
    return tuple(1.0 if layer < CHECK_LAYER else share for layer in range(num_layers))


def shrinking(share: float, num_layers: int) -> tuple[float, ...]:
    """A set that shrinks evenly from 1.5 to 0.5 times the share, so that the layers' mean is the share.

    CacheBlend's paper asks for r₁ > r₂ > … around r and gives no numbers. Near a share of 1 the slope is what fits.
    """
    spread = min(0.5, (1 - share) / share) if share > 0 else 0.0
    # The set after layer l runs layer l + 1; after the last layer nothing runs.
    steps = max(1, num_layers - CHECK_LAYER - 2)
    rates = [1.0] * CHECK_LAYER
    for step in range(num_layers - CHECK_LAYER):
        rates.append(share * (1 + spread * (1 - 2 * min(step, steps) / steps)))
    return tuple(rates)

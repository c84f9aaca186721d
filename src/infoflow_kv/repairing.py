"""Selective recomputation: the selected rows and the prompt rows go through all layers together."""

from dataclasses import replace

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import Deviate, LanguageModel, RotaryTables, RowRule, forward_rows, memory_of
from infoflow_kv.records import Context, Selection
from infoflow_kv.shapes import Bool, Float, Int, Tensor


def repair(
    model: LanguageModel,
    context: Context,
    selection: Selection,
    prompt_ids: Int[Tensor, " prompt"],
    rotary: RotaryTables,
    num_logits: int = 1,
    rule: RowRule | None = None,
) -> Float[Tensor, "logit_rows vocab"] | None:
    """float32 logits of the last `num_logits` prompt rows over the repaired context (docs/method.md, section 2).

    At each layer the new K/V of the selected rows replace the old ones *before* attention, and every row attends to all
    slots not after its own. Writes into the context's buffers. `rotary` are the request's GLOBAL tables, slot by slot.
    `rule` may let rows leave on the way, or keep them from writing. None where several ranks share the context and
    another one ran the prompt's last rows.
    """
    if prompt_ids.shape[0] < max(1, num_logits):
        raise ComputeError(f"{num_logits} logit rows were asked of a prompt of {prompt_ids.shape[0]} tokens")
    num_context = context.num_tokens
    device = model.device
    prompt_ranks = torch.arange(num_context, num_context + prompt_ids.shape[0], device=device)
    ranks = torch.cat([selection.slots.to(device), prompt_ranks])
    ids = torch.cat([context.token_ids[selection.slots], prompt_ids.to(device)])
    logits = forward_rows(
        model, ids, ranks, rotary.at(ranks), memory_of(context), num_logits, rule=rule, visual=context.visual
    )  # fmt: skip
    if logits is None and context.memory is None:
        raise ComputeError("the repair forward ended early")
    return logits


class OnlyLayers:
    """Partial-layer repair, an ablation that the paper leaves open: stored KV is replaced in layers `first..last` only.

    Below `first` the selected rows run without writing, as their hidden states are needed; after `last` they leave.
    Made anew for each request.
    """

    def __init__(self, num_context: int, first: int, last: int) -> None:
        self._num_context = num_context
        self._first = first
        self._last = last
        self._counts: list[int] = []

    def writes(self, layer: int, ranks: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"] | None:
        return ranks >= self._num_context if layer < self._first else None

    def kept(self, layer: int, ranks: Int[Tensor, " rows"], deviate: Deviate) -> Int[Tensor, " kept"] | None:
        self._counts.append(int((ranks < self._num_context).sum()))
        if layer < self._last:
            return None
        return torch.nonzero(ranks >= self._num_context)[:, 0]

    def selection(self, chosen: Selection) -> Selection:
        """What was chosen, with the rows that each layer really ran."""
        return replace(chosen, layer_counts=tuple(self._counts))

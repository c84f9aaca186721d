"""Selective recomputation: the selected rows and the prompt rows go through all layers together."""

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import LanguageModel, RotaryTables, forward_rows
from infoflow_kv.records import Context, Selection
from infoflow_kv.shapes import Float, Int, Tensor


def repair(
    model: LanguageModel,
    context: Context,
    selection: Selection,
    prompt_ids: Int[Tensor, " prompt"],
    rotary: RotaryTables,
    num_logits: int = 1,
) -> Float[Tensor, "logit_rows vocab"]:
    """float32 logits of the last `num_logits` prompt rows over the repaired context (docs/method.md, section 2).

    At each layer the new K/V of the selected rows replace the old ones *before* attention, and every row attends to all
    slots not after its own. Writes into the context's buffers. `rotary` are the request's GLOBAL tables, slot by slot.
    """
    if prompt_ids.shape[0] < max(1, num_logits):
        raise ComputeError(f"{num_logits} logit rows were asked of a prompt of {prompt_ids.shape[0]} tokens")
    num_context = context.num_tokens
    device = context.keys.device
    prompt_ranks = torch.arange(num_context, num_context + prompt_ids.shape[0], device=device)
    ranks = torch.cat([selection.slots.to(device), prompt_ranks])
    ids = torch.cat([context.token_ids[selection.slots], prompt_ids.to(device)])
    logits = forward_rows(model, ids, ranks, ranks, rotary.at(ranks), context.keys, context.values, num_logits)
    if logits is None:
        raise ComputeError("the repair forward ended early")
    return logits

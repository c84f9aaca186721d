"""Rows through the layers: the one forward that prefill, scoring, repair and decode share.

Each row has a token, a rank (its slot, its place in the order for the mask) and a rotary position. At every layer the
rows' new keys and values are written into their slots *before* attention, then each row attends to every slot whose
rank is not after its own.
"""

from collections.abc import Callable

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models.hooks import AttentionInput
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.rotary import RotaryTables
from infoflow_kv.ops import staircase_attention
from infoflow_kv.shapes import Float, Int, Tensor

# Called in each layer after the rows' K/V were written; may raise StopForward. Gets the layer's input and key slots.
OnLayer = Callable[[AttentionInput, Tensor], None]


def forward_rows(
    model: LanguageModel,
    token_ids: Int[Tensor, " rows"],
    ranks: Int[Tensor, " rows"],
    positions: Int[Tensor, " rows"],
    rotary: RotaryTables,
    keys: Float[Tensor, "layers kv_heads slots head_dim"],
    values: Float[Tensor, "layers kv_heads slots head_dim"],
    num_logits: int = 0,
    on_layer: OnLayer | None = None,
) -> Float[Tensor, "logit_rows vocab"] | None:
    """float32 logits of the last `num_logits` rows in rank order, or None; writes the rows' K/V into their slots.

    Rows may come in any order; they are sorted by rank, which must not repeat. `rotary` belongs to `positions`.
    """
    ranks, order = torch.sort(ranks)
    if ranks.numel() > 1 and not bool((ranks[1:] > ranks[:-1]).all()):
        raise ComputeError("two rows have the same rank; each slot can be computed only once in a forward")
    token_ids, positions, rotary = token_ids[order], positions[order], rotary.at(order)

    def attend(given: AttentionInput) -> Tensor:
        layer_keys, layer_values = keys[given.layer], values[given.layer]
        layer_keys.index_copy_(1, ranks, given.key)
        layer_values.index_copy_(1, ranks, given.value)
        if on_layer is not None:
            on_layer(given, layer_keys)
        return staircase_attention(given.query, layer_keys, layer_values, ranks, given.spec)

    return model.forward(token_ids, positions, rotary, attend, num_logits)

"""Rows through the layers: the one forward that prefill, scoring, repair and decode share.

Each row has a token, a rank (its slot, its place in the order for the mask) and a rotary position. At every layer the
rows' new keys and values are written into their slots *before* attention, then each row attends to every slot whose
rank is not after its own.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models.hooks import AttentionInput, Narrowed
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.rotary import RotaryTables
from infoflow_kv.ops import Staircase
from infoflow_kv.records import VisualRows
from infoflow_kv.shapes import Bool, Float, Int, Tensor

# Called in each layer after the rows' K/V were written, with the layer's input, key slots and value slots. Returns the
# attention output where it has made it already, else None; may raise StopForward.
OnLayer = Callable[[AttentionInput, Tensor, Tensor], Tensor | None]


@runtime_checkable
class RowRule(Protocol):
    """Which rows write their K/V at a layer, and which go on after it; asked once per layer, before anything is
    written, so that the stored K/V can be compared with the new ones."""

    def writes(self, layer: int, ranks: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"] | None:
        """The rows that write at this layer; None for all."""
        ...

    def kept(
        self, given: AttentionInput, ranks: Int[Tensor, " rows"], keys: Tensor, values: Tensor
    ) -> Int[Tensor, " kept"] | None:
        """Ascending indices of the rows that go on to the next layer; None for all. `keys`, `values`: the layer's
        slots as stored."""
        ...


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
    rule: RowRule | None = None,
    attends_last: bool = False,
    visual: VisualRows | None = None,
) -> Float[Tensor, "logit_rows vocab"] | None:
    """float32 logits of the last `num_logits` rows in rank order, or None; writes the rows' K/V into their slots.

    Rows may come in any order; they are sorted by rank, which must not repeat. `rotary` belongs to `positions`.
    `rule` may drop rows on the way, but never one of the last `num_logits`. In the last layer rows without logits leave
    their K/V and go no further; `attends_last`: they attend there too, for what `on_layer` makes of their queries.
    `visual`: what the layers read in some slots instead of tokens; of those that are computed here it counts.
    """
    if not 0 <= num_logits <= ranks.numel():
        raise ComputeError(f"{num_logits} logit rows were asked of {ranks.numel()} rows")
    ranks, order = torch.sort(ranks)
    if ranks.numel() > 1 and not bool((ranks[1:] > ranks[:-1]).all()):
        raise ComputeError("two rows have the same rank; each slot can be computed only once in a forward")
    token_ids, positions, rotary = token_ids[order], positions[order], rotary.at(order)
    read = None if visual is None else visual_of(visual, ranks)

    current = Staircase(ranks)
    is_written = False

    def write(given: AttentionInput) -> tuple[Tensor | None, Tensor | None]:
        """The rows' K/V go into their slots; which rows go on (None: all), and the output where `on_layer` made it."""
        layer_keys, layer_values = keys[given.layer], values[given.layer]
        rows, kept = current.ranks, None
        new_keys, new_values, slots = given.key, given.value, rows
        if rule is not None:
            kept = rule.kept(given, rows, layer_keys, layer_values)
            mask = rule.writes(given.layer, rows)
            if mask is not None:
                new_keys, new_values, slots = new_keys[:, mask], new_values[:, mask], rows[mask]
        layer_keys.index_copy_(1, slots, new_keys)
        layer_values.index_copy_(1, slots, new_values)
        return kept, on_layer(given, layer_keys, layer_values) if on_layer is not None else None

    def write_last(given: AttentionInput) -> None:
        nonlocal is_written, current
        _, out = write(given)
        if out is not None:
            raise ComputeError("on_layer made the last layer's output, which is not asked for; give attends_last=True")
        is_written = True
        current = Staircase(current.ranks[-num_logits:]) if num_logits else current

    def attend(given: AttentionInput) -> Tensor | Narrowed:
        nonlocal current
        kept, out = (None, None) if is_written else write(given)
        if out is None:
            out = current.attend(given.query, keys[given.layer], values[given.layer], given.spec)
        if kept is None or kept.numel() == current.ranks.numel():
            return out
        current = Staircase(current.ranks[kept])
        if num_logits and not torch.equal(current.ranks[-num_logits:], ranks[-num_logits:]):
            raise ComputeError("a row whose logits are wanted was dropped on the way")
        return Narrowed(out, kept)

    last = None if attends_last else write_last
    return model.forward(token_ids, positions, rotary, attend, num_logits, write=last, visual=read)


def visual_of(visual: VisualRows, ranks: Int[Tensor, " rows"]) -> VisualRows:
    """The part of `visual` that stands in the slots `ranks` (ascending), its own slots being rows of these."""
    place = torch.searchsorted(visual.slots, ranks)
    place = place.clamp_max(visual.slots.numel() - 1)
    found = torch.nonzero(visual.slots[place] == ranks)[:, 0]
    taken = place[found]
    return VisualRows(found, visual.embeddings[taken], visual.layer_rows[:, taken])

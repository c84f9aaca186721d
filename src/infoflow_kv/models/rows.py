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
from infoflow_kv.models.memory import Measure, Memory, Rows, Spreading, without_rows
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.rotary import RotaryTables
from infoflow_kv.records import VisualRows
from infoflow_kv.shapes import Bool, Float, Int, Tensor

# Called in each layer after the rows' K/V were written, with the layer's input and the rows. Returns the attention
# output where it has made it already, else None; may raise StopForward.
OnLayer = Callable[[AttentionInput, Rows], Tensor | None]

# How far the rows' new V or K lies from what is stored, row by row; see `Rows.deviation`.
Deviate = Callable[[Measure], Float[Tensor, " rows"]]


@runtime_checkable
class RowRule(Protocol):
    """Which rows write their K/V at a layer, and which go on after it; asked once per layer, before anything is
    written, so that the stored K/V can be compared with the new ones."""

    def writes(self, layer: int, ranks: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"] | None:
        """The rows that write at this layer; None for all."""
        ...

    def kept(self, layer: int, ranks: Int[Tensor, " rows"], deviate: Deviate) -> Int[Tensor, " kept"] | None:
        """Ascending indices of the rows that go on to the next layer; None for all."""
        ...


def forward_rows(
    model: LanguageModel,
    token_ids: Int[Tensor, " rows"],
    ranks: Int[Tensor, " rows"],
    rotary: RotaryTables,
    memory: Memory,
    num_logits: int = 0,
    on_layer: OnLayer | None = None,
    rule: RowRule | None = None,
    attends_last: bool = False,
    visual: VisualRows | None = None,
    spreading: Spreading = "even",
) -> Float[Tensor, "logit_rows vocab"] | None:
    """float32 logits of the last `num_logits` rows in rank order, or None; writes the rows' K/V into their slots.

    Rows may come in any order; they are sorted by rank, which must not repeat. `rotary` holds the tables of the rows,
    one by one. `rule` may drop rows on the way, but never one of the last `num_logits`. In the last layer rows without
    logits leave their K/V and go no further; `attends_last`: they attend there too, for what `on_layer` makes of their
    queries. `visual`: what the layers read in some slots instead of tokens; of those that are computed here it counts.
    Where several ranks share the memory, all call this with the same rows, `spreading` says who runs which, and those
    who run none of the rows with logits get None.
    """
    if not 0 <= num_logits <= ranks.numel():
        raise ComputeError(f"{num_logits} logit rows were asked of {ranks.numel()} rows")
    ranks, order = torch.sort(ranks)
    if ranks.numel() > 1 and not bool((ranks[1:] > ranks[:-1]).all()):
        raise ComputeError("two rows have the same rank; each slot can be computed only once in a forward")
    current = memory.rows(ranks, "owner" if rule is not None and spreading == "even" else spreading)
    if current.here is not None:
        order = order[current.here]
        num_here = int((current.here >= ranks.numel() - num_logits).sum())
    else:
        num_here = num_logits
    own_ranks = ranks if current.here is None else ranks[current.here]
    read = None if visual is None else visual_of(visual, own_ranks)
    is_written = False

    def write(given: AttentionInput) -> tuple[Tensor | None, Tensor | None]:
        """The rows' K/V go into their slots; which rows go on (None: all), and the output where `on_layer` made it."""
        rows, kept, which = current, None, None
        if rule is not None:
            kept = rule.kept(given.layer, rows.ranks, lambda measure: rows.deviation(given, measure))
            which = rule.writes(given.layer, rows.ranks)
        rows.write(given, which)
        return kept, on_layer(given, rows) if on_layer is not None else None

    def write_last(given: AttentionInput) -> None:
        nonlocal is_written, current
        _, out = write(given)
        if out is not None:
            raise ComputeError("on_layer made the last layer's output, which is not asked for; give attends_last=True")
        is_written = True
        if num_logits:
            current = current.last(num_logits)
            if not num_here:  # another rank runs these rows, and needs what this one holds
                current.attend(without_rows(given))

    def attend(given: AttentionInput) -> Tensor | Narrowed:
        nonlocal current
        kept, out = (None, None) if is_written else write(given)
        if current.here is not None and not (is_written or attends_last) and given.layer + 1 == model.num_layers:
            # All rows here have logits, so that the last layer runs once; on the other ranks only such rows attend.
            kept, current = None, current.last(num_logits)
        if out is None:
            out = current.attend(given)
        if kept is None or kept.numel() == current.ranks.numel():
            return out
        current, own = current.keep(kept)
        if num_logits and not torch.equal(current.ranks[-num_logits:], ranks[-num_logits:]):
            raise ComputeError("a row whose logits are wanted was dropped on the way")
        return Narrowed(out, own)

    last = None if attends_last else write_last
    positions = ranks if current.here is None else own_ranks
    return model.forward(token_ids[order], positions, rotary.at(order), attend, num_here, write=last, visual=read)


def visual_of(visual: VisualRows, ranks: Int[Tensor, " rows"]) -> VisualRows:
    """The part of `visual` that stands in the slots `ranks` (ascending), its own slots being rows of these."""
    place = torch.searchsorted(visual.slots, ranks)
    place = place.clamp_max(visual.slots.numel() - 1)
    found = torch.nonzero(visual.slots[place] == ranks)[:, 0]
    taken = place[found]
    return VisualRows(found, visual.embeddings[taken], visual.layer_rows[:, taken])

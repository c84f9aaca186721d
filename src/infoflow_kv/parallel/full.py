"""Full prefill over several ranks, the rival: every rank runs its rows, and keys and values come to it.

`ring`: they go round from neighbour to neighbour while each rank attends to what it has (Ring Attention), rows in
head-tail order, so that all do the same work. `gather`: one all-gather a layer (Llama 3's context parallelism). The
last layer attends for the last row alone, as everywhere here. (docs/parallel.md)
"""

import itertools
from typing import Literal

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import AttentionInput, Rows, Spreading
from infoflow_kv.ops import AttentionSpec
from infoflow_kv.ops.parts import PartialAttention, add_sinks, merge_parts, stretches
from infoflow_kv.ops.pieces import flash, merge_into
from infoflow_kv.parallel.memory import DealtRows, SpreadMemory
from infoflow_kv.shapes import Float, Int, Tensor

Baseline = Literal["ring", "gather"]


class FullMemory(SpreadMemory):
    """A memory that is filled by an ordinary prefill of all rows; layout Q, homes in head-tail order."""

    baseline: Baseline = "ring"

    def rows(self, ranks: Int[Tensor, " rows"], spreading: Spreading = "even") -> Rows:
        if spreading == "repeat":
            return super().rows(ranks, spreading)
        if self.shard.layout.head_shards != 1:
            raise ComputeError("full prefill over several ranks needs one head shard: every rank attends for all heads")
        runners = self.homes[ranks.cpu()]
        return (RingRows if self.baseline == "ring" else GatherRows)(self, ranks, runners)


class GatherRows(DealtRows):
    """Rows that attend to keys and values of all ranks, gathered in each layer."""

    def attend(self, given: AttentionInput) -> Float[Tensor, "heads here head_dim"]:
        memory, sequence = self.memory, self.memory.shard.sequence
        places = self._team_places
        own = torch.cat([memory.keys[given.layer][:, places], memory.values[given.layer][:, places]], dim=-1)
        both = sequence.all_gather(own.transpose(0, 1).contiguous(), self._shard_counts)
        both = both.index_select(0, self._whole).transpose(0, 1)
        width = both.shape[-1] // 2
        here = self.ranks[self.here[: self._num_here]]
        part = self._partial.get(given.spec.window)
        if part is None:
            part = PartialAttention(stretches(here, self.ranks, given.spec.window))
            self._partial[given.spec.window] = part
        query = given.query[:, : self._num_here]
        found = part.attend(query, both[..., :width].contiguous(), both[..., width:].contiguous(), given.spec)
        out = add_sinks(*found, given.spec.sinks)[0].to(query.dtype)
        return out if self._num_here else out.new_zeros(out.shape[0], 1, out.shape[2])


class RingRows(DealtRows):
    """Rows that attend to keys and values as these come round."""

    def __init__(self, memory: SpreadMemory, ranks: Int[Tensor, " rows"], runners: Int[Tensor, " rows"]) -> None:
        super().__init__(memory, ranks, runners)
        self._blocks: dict[tuple[int | None, int], PartialAttention] = {}
        self._rank_of_own = self.ranks[self.here[: self._num_here]]
        # Whose keys come from each rank, and both shares as runs of consecutive ranks: the same in every layer.
        self._sources = [ranks[(runners == rank).to(ranks.device)] for rank in range(memory.shard.sequence.size)]
        self._own_halves, self._halves = _halves(self._rank_of_own), [_halves(source) for source in self._sources]

    def attend(self, given: AttentionInput) -> Float[Tensor, "heads here head_dim"]:
        memory, sequence = self.memory, self.memory.shard.sequence
        places = self._team_places
        query = given.query[:, : self._num_here]
        own = torch.stack([memory.keys[given.layer][:, places], memory.values[given.layer][:, places]])
        merged: Tensor | None = None
        for step in range(sequence.size):
            source = (sequence.index - step) % sequence.size
            came_from = (source - 1) % sequence.size
            following = None
            if step + 1 < sequence.size:  # under way while this block is attended
                following = sequence.shift(own, (2, own.shape[1], self._shard_counts[came_from], own.shape[3]))
            out, lse = self._over_block(query, own[0], own[1], source, given.spec)
            if merged is None:  # its own block, of which each row sees itself at least
                merged, whole = out.float(), lse
            else:
                merge_into(merged, whole, out, lse)
            if following is not None:
                own = following.wait()
        assert merged is not None
        out = add_sinks(merged, whole, given.spec.sinks)[0].to(query.dtype)
        return out if self._num_here else out.new_zeros(out.shape[0], 1, out.shape[2])

    def _over_block(
        self, query: Tensor, keys: Tensor, values: Tensor, source: int, spec: AttentionSpec
    ) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
        here, slot_ranks = self._rank_of_own, self._sources[source]
        halves = self._own_halves, self._halves[source]
        if query.device.type == "cpu" and spec.softcap is None and spec.window is None and all(halves):
            return _by_halves(query, keys, values, here, slot_ranks, halves, spec)
        key = spec.window, source
        part = self._blocks.get(key)
        if part is None:
            part = self._blocks[key] = PartialAttention(stretches(here, slot_ranks, spec.window))
        return part.attend(query, keys, values, spec)


def _halves(ranks: Int[Tensor, " rows"]) -> list[slice]:
    """The two runs of consecutive ranks that a head-tail share is made of; one where they touch, none where the ranks
    are no such share."""
    if not ranks.numel():
        return []
    breaks = (torch.nonzero(ranks[1:] - ranks[:-1] > 1)[:, 0] + 1).tolist()
    if len(breaks) > 1:
        return []
    bounds = [0, *breaks, int(ranks.numel())]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def _by_halves(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row_ranks: Tensor,
    slot_ranks: Tensor,
    halves: tuple[list[slice], list[slice]],
    spec: AttentionSpec,
) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
    """Half by half: all of it seen, or nothing, or a causal square; no mask at all."""
    heads, rows, head_dim = query.shape
    group = heads // keys.shape[0]
    out = torch.zeros(heads, rows, head_dim, dtype=torch.float32)
    lse = torch.full((heads, rows), float("-inf"))
    for part in halves[0]:
        found: list[tuple[Tensor, Tensor]] = []
        for slots in halves[1]:
            first, last = int(row_ranks[part.start]), int(row_ranks[part.stop - 1])
            low, high = int(slot_ranks[slots.start]), int(slot_ranks[slots.stop - 1])
            if high <= first:
                packed = query[:, part].reshape(keys.shape[0], -1, head_dim)
                one, its_lse = flash(packed, keys[:, slots], values[:, slots], spec.scale)
                found.append((one.reshape(heads, -1, head_dim), its_lse.reshape(heads, -1)))
            elif low == first and high == last:
                wide_keys, wide_values = (x[:, slots].repeat_interleave(group, dim=0) for x in (keys, values))
                found.append(flash(query[:, part], wide_keys, wide_values, spec.scale, is_causal=True))
            elif low <= last:  # runs that overlap otherwise
                partial = PartialAttention(stretches(row_ranks[part], slot_ranks[slots]))
                found.append(partial.attend(query[:, part], keys[:, slots], values[:, slots], spec))
        if found:
            both = merge_parts(torch.stack([o for o, _ in found]), torch.stack([x for _, x in found]))
            out[:, part], lse[:, part] = both
    return out, lse

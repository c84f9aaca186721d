"""A request's keys and values over several ranks: each holds its heads of its part of the slots.

The layout (u head shards × s sequence shards) is all that tells Q (u = 1), H (s = 1) and HQ apart: queries, keys and
values go to the rank of their heads inside a heads team, queries visit every part of the sequence in a sequence team,
and the partial outputs that come home merge exactly by their LSE. The cache is never gathered. (docs/parallel.md)
"""

from functools import cached_property

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import AttentionInput, Measure, Rows, Spreading
from infoflow_kv.ops import AttentionSpec, Staircase
from infoflow_kv.ops.mass import Reduction
from infoflow_kv.ops.parts import PartialAttention, add_sinks, merge_parts, stretches
from infoflow_kv.parallel.dealing import balanced, members
from infoflow_kv.parallel.scoring import spread_mass
from infoflow_kv.parallel.shard import Shard, packed, unpacked
from infoflow_kv.shapes import Bool, Float, Int, Tensor


class SpreadMemory:
    """This rank's part of a request's memory.

    keys, values: `[layers, own kv_heads, own slots, head_dim]`, own slots ascending. homes: the sequence shard of every
    slot of the request, the same on all ranks. movable: slots whose row may be repaired by another shard, which then
    holds the slot: those of text, in the context.
    """

    def __init__(
        self,
        shard: Shard,
        keys: Float[Tensor, "layers kv_heads slots head_dim"],
        values: Float[Tensor, "layers kv_heads slots head_dim"],
        homes: Int[Tensor, " all_slots"],
        movable: Bool[Tensor, " all_slots"],
    ) -> None:
        self.shard = shard
        self.keys, self.values = keys, values
        self.homes, self._movable = homes, movable
        self.num_slots = int(homes.numel())
        self.ranks = self._own_ranks()
        if self.ranks.numel() != keys.shape[2] or keys.shape[1] != shard.num_kv_heads:
            raise ComputeError(
                f"this rank was given keys of {keys.shape[1]} K/V heads and {keys.shape[2]} slots; its share is "
                f"{shard.num_kv_heads} and {self.ranks.numel()}"
            )

    def rows(self, ranks: Int[Tensor, " rows"], spreading: Spreading = "even") -> Rows:
        if spreading == "repeat":
            return RepeatedRows(self, ranks)
        layout = self.shard.layout
        homes = self.homes[ranks.cpu()]
        if spreading == "even" and layout.sequence_shards > 1:
            runners = balanced(homes, self._movable[ranks.cpu()], layout.sequence_shards)
            if not torch.equal(runners, homes):
                self._move(ranks.cpu(), runners)
                homes = runners
        return DealtRows(self, ranks, members(homes, layout.sequence_shards, layout.head_shards))

    def own_context(self, num_context: int) -> Int[Tensor, " own_context"]:
        return self.ranks[self.ranks < num_context]

    def own_values(self, layer: int) -> Float[Tensor, "own_kv_heads own_slots head_dim"]:
        return self.values[layer]

    def whole(self, scores: Float[Tensor, "some own_context"], num_context: int) -> Float[Tensor, "some context"]:
        shard = self.shard
        if shard.heads.size > 1:  # each has the sum over its own heads
            scores = shard.heads.all_gather(scores[None], [1] * shard.heads.size).sum(dim=0)
        homes = self.homes[:num_context]
        counts = torch.bincount(homes, minlength=shard.sequence.size).tolist()
        gathered = shard.sequence.all_gather(scores.T.contiguous(), counts)
        order = torch.sort(homes, stable=True).indices.to(scores.device)
        found = scores.new_empty(scores.shape[0], num_context)
        found[:, order] = gathered.T
        return found

    def places(self, ranks: Int[Tensor, " some"]) -> Int[Tensor, " some"]:
        """Where the slots of these ranks lie here."""
        return torch.searchsorted(self.ranks, ranks)

    def _own_ranks(self) -> Int[Tensor, " own_slots"]:
        return torch.nonzero(self.homes == self.shard.sequence.index)[:, 0].to(self.keys.device)

    def _move(self, ranks: Tensor, runners: Tensor) -> None:
        """Slots go to the shards that will fill them anew; what they hold is not sent."""
        self.homes = self.homes.clone()
        self.homes[ranks] = runners
        before, self.ranks = self.ranks, self._own_ranks()
        stays = self.ranks[torch.isin(self.ranks, before)]
        source, target = torch.searchsorted(before, stays), torch.searchsorted(self.ranks, stays)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], self.ranks.numel(), old.shape[3])
            for layer in range(old.shape[0]):
                new[layer].index_copy_(1, target, old[layer].index_select(1, source))
            setattr(self, name, new)


class _Rows:
    """What both kinds of rows share: attention over the slots that lie here, whose plans are made once."""

    def __init__(self, memory: SpreadMemory, ranks: Int[Tensor, " rows"]) -> None:
        self.memory, self.ranks = memory, ranks
        self._partial: dict[int | None, PartialAttention] = {}

    def _over_own_slots(
        self, query: Float[Tensor, "heads rows head_dim"], layer: int, spec: AttentionSpec
    ) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
        memory = self.memory
        partial = self._partial.get(spec.window)
        if partial is None:
            partial = self._partial[spec.window] = PartialAttention(stretches(self.ranks, memory.ranks, spec.window))
        return partial.attend(query, memory.keys[layer], memory.values[layer], spec)

    @cached_property
    def _stairs(self) -> Staircase:
        return Staircase(self.ranks)


class RepeatedRows(_Rows):
    """Rows that every rank runs: prompt rows while tokens are scored, and new tokens."""

    here = None

    def write(self, given: AttentionInput, which: Bool[Tensor, " rows"] | None = None) -> None:
        memory, shard = self.memory, self.memory.shard
        own, places = self._own
        if which is not None:
            own, places = own & which, memory.places(self.ranks[own & which])
        memory.keys[given.layer].index_copy_(1, places, given.key[shard.own_kv_heads][:, own])
        memory.values[given.layer].index_copy_(1, places, given.value[shard.own_kv_heads][:, own])

    @cached_property
    def _own(self) -> tuple[Bool[Tensor, " rows"], Int[Tensor, " own"]]:
        """Which of the rows have their slots here, and where; the same in every layer."""
        homes = self.memory.homes[self.ranks.cpu()].to(self.ranks.device)
        own = homes == self.memory.shard.sequence.index
        return own, self.memory.places(self.ranks[own])

    def attend(self, given: AttentionInput) -> Float[Tensor, "heads here head_dim"]:
        memory, shard = self.memory, self.memory.shard
        query, spec = given.query[shard.own_heads], shard.spec(given.spec)
        if shard.sequence.size == 1:
            out = self._stairs.attend(query, memory.keys[given.layer], memory.values[given.layer], spec)
        else:
            message, dtype, width = packed(*self._over_own_slots(query, given.layer, spec))
            parts = shard.sequence.all_gather(message[None], [1] * shard.sequence.size)
            out = add_sinks(*merge_parts(*unpacked(parts, dtype, width)), spec.sinks)[0].to(dtype)
        return shard.all_heads(out)

    def mass(
        self,
        given: AttentionInput,
        num_context: int,
        reduction: Reduction,
        weight: Float[Tensor, "own_kv_heads own_context"] | None,
    ) -> tuple[Float[Tensor, " own_context"], Float[Tensor, "heads here head_dim"]]:
        memory = self.memory
        keys, values = memory.keys[given.layer], memory.values[given.layer]
        num_own = int((memory.ranks < num_context).sum())
        return spread_mass(given, memory.shard, keys, values, self.ranks, memory.ranks, num_own, reduction, weight)

    def deviation(self, given: AttentionInput, measure: Measure) -> Float[Tensor, " rows"]:
        raise ComputeError("rows that every rank runs are not compared with stored ones")

    def keep(self, kept: Int[Tensor, " kept"]) -> tuple[Rows, Tensor]:
        return RepeatedRows(self.memory, self.ranks[kept]), kept

    def last(self, count: int) -> Rows:
        return RepeatedRows(self.memory, self.ranks[-count:])


class DealtRows(_Rows):
    """Rows of which each rank runs some: `runners` are their ranks.

    A rank without rows runs one for itself, of which it sends nothing: it must take part in every exchange.
    """

    def __init__(self, memory: SpreadMemory, ranks: Int[Tensor, " rows"], runners: Int[Tensor, " rows"]) -> None:
        super().__init__(memory, ranks)
        shard = memory.shard
        self._runners = runners
        here = torch.nonzero(runners == shard.group.rank)[:, 0]
        self._num_here = int(here.numel())
        # The one that a rank without rows runs is the last, counted from behind: so it is never one with logits.
        self.here = here.to(ranks.device) if self._num_here else torch.tensor([-1], device=ranks.device)
        # Rows of this sequence shard by member of the heads team, and of all shards, ascending in each.
        by_member = [torch.nonzero(runners == rank)[:, 0] for rank in shard.heads.ranks]
        self._member_counts = [int(rows.numel()) for rows in by_member]
        joined = torch.cat(by_member)
        team_rows, order = torch.sort(joined)
        self._ascending = order.to(ranks.device)
        self._by_member = torch.argsort(order).to(ranks.device)
        self._team_ranks = ranks[team_rows.to(ranks.device)]
        self._team_places = memory.places(self._team_ranks)
        shards = runners // shard.layout.head_shards
        self._shard_counts = torch.bincount(shards, minlength=shard.sequence.size).tolist()
        by_shard = torch.sort(shards, stable=True).indices
        self._by_shard = by_shard.to(ranks.device)
        self._whole = torch.argsort(by_shard).to(ranks.device)
        self._exchanged: tuple[int, Tensor] | None = None

    def write(self, given: AttentionInput, which: Bool[Tensor, " rows"] | None = None) -> None:
        memory = self.memory
        new, places = self._new(given), self._team_places
        self._exchanged = None
        if which is not None:
            mine = which[torch.searchsorted(self.ranks, self._team_ranks)]
            new, places = new[:, mine], places[mine]
        width = new.shape[-1] // 2
        memory.keys[given.layer].index_copy_(1, places, new[..., :width])
        memory.values[given.layer].index_copy_(1, places, new[..., width:])

    def attend(self, given: AttentionInput) -> Float[Tensor, "heads here head_dim"]:
        shard = self.memory.shard
        own = shard.to_heads(given.query[:, : self._num_here], self._member_counts).index_select(1, self._ascending)
        out = self._attend_own_heads(own, given.layer, shard.spec(given.spec))
        out = shard.from_heads(out.index_select(1, self._by_member), self._member_counts)
        return out if self._num_here else out.new_zeros(out.shape[0], 1, out.shape[2])

    def mass(
        self, given: AttentionInput, num_context: int, reduction: Reduction, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        raise ComputeError("tokens are scored by rows that every rank runs")

    def deviation(self, given: AttentionInput, measure: Measure) -> Float[Tensor, " rows"]:
        memory, shard = self.memory, self.memory.shard
        new, places = self._new(given), self._team_places
        width = new.shape[-1] // 2
        mine, stored = (new[..., width:], memory.values) if measure == "V" else (new[..., :width], memory.keys)
        moved = (mine.float() - stored[given.layer].index_select(1, places).float()).square().sum(dim=(0, 2))
        if shard.heads.size > 1:
            moved = shard.heads.all_gather(moved[None], [1] * shard.heads.size).sum(dim=0)
        return shard.sequence.all_gather(moved, self._shard_counts).index_select(0, self._whole)

    def keep(self, kept: Int[Tensor, " kept"]) -> tuple[Rows, Tensor]:
        rows = type(self)(self.memory, self.ranks[kept], self._runners[kept.cpu()])
        if not (self._num_here and rows._num_here):
            return rows, torch.zeros(1, dtype=torch.int64, device=self.ranks.device)
        return rows, torch.searchsorted(self.here, kept[rows.here])

    def last(self, count: int) -> Rows:
        return DealtRows(self.memory, self.ranks[-count:], self._runners[-count:])

    def _new(self, given: AttentionInput) -> Float[Tensor, "own_kv_heads team_rows twice"]:
        """Keys and values, side by side, of this rank's heads and its heads team's rows."""
        if self._exchanged is None or self._exchanged[0] != given.layer:
            both = torch.cat([given.key, given.value], dim=-1)[:, : self._num_here]
            new = self.memory.shard.to_heads(both, self._member_counts).index_select(1, self._ascending)
            self._exchanged = given.layer, new
        return self._exchanged[1]

    def _attend_own_heads(
        self, query: Float[Tensor, "heads team_rows head_dim"], layer: int, spec: AttentionSpec
    ) -> Float[Tensor, "heads team_rows head_dim"]:
        memory, sequence = self.memory, self.memory.shard.sequence
        if sequence.size == 1:
            return self._stairs.attend(query.contiguous(), memory.keys[layer], memory.values[layer], spec)
        everyone = sequence.all_gather(query.transpose(0, 1).contiguous(), self._shard_counts)
        visiting = everyone.index_select(0, self._whole).transpose(0, 1).contiguous()
        message, dtype, width = packed(*self._over_own_slots(visiting, layer, spec))
        own = query.shape[1]
        home = sequence.all_to_all(message.index_select(0, self._by_shard), self._shard_counts, [own] * sequence.size)
        parts = home.view(sequence.size, own, *home.shape[1:])
        return add_sinks(*merge_parts(*unpacked(parts, dtype, width)), spec.sinks)[0].to(dtype)

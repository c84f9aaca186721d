"""A request over several ranks: who holds which chunk, and what is sent so that each has its heads of its part.

A chunk is loaded or prefilled by one rank of the sequence shard that it was dealt to, and re-sharded by head there.
Where every rank of the shard finds it in a store, each takes its own heads from there and nothing is sent.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from infoflow_kv.decoding import Sampler
from infoflow_kv.errors import OptionError, ParallelError, unknown_name
from infoflow_kv.models import LanguageModel, RotaryTables
from infoflow_kv.parallel.cost import LAYOUTS, DecoderShape, Layout, head_layout, pick_layout, query_layout
from infoflow_kv.parallel.dealing import deal_chunks, deal_sources, zigzag
from infoflow_kv.parallel.full import Baseline, FullMemory
from infoflow_kv.parallel.group import Group
from infoflow_kv.parallel.memory import SpreadMemory
from infoflow_kv.parallel.shard import Shard
from infoflow_kv.positions import cells_of, lay_out, reserve, shift_of, visual_rows, visual_slots, write_part
from infoflow_kv.recipes import Recipe
from infoflow_kv.records import Chunk, ChunkIdentity, ChunkInputs, ChunkKV, Context, Prompt, Selection
from infoflow_kv.shapes import Int, Tensor
from infoflow_kv.supply import Parts, Supply

# In "load" each rank prefills its chunks, and the others may have less to do: they wait so many times the usual limit.
LOAD_TIMES = 10.0


def spread_over(
    group: Group, layout: str | Layout, model: LanguageModel, supply: Supply, recipe: Recipe, *, refused: Sequence[str]
) -> "Spread":
    """Where requests lie that the ranks of `group` answer together; OptionError for a layout that the model or the
    ranks do not allow, and for `refused`, settings that were given and have no parallel form."""
    if refused:
        raise OptionError(f"{' and '.join(refused)} cannot be used where several ranks share a request; leave them out")
    found = find_layout(layout, group.size, model, recipe.budget.share, stored=supply.store is not None)
    return Spread(model, supply, group, *found)


def find_layout(
    layout: str | Layout, ranks: int, model: LanguageModel, share: float, *, stored: bool
) -> tuple[Layout, str]:
    """The layout of this name, and why; OptionError with the known ones if there is none. `stored`: see
    `pick_layout`."""
    if isinstance(layout, Layout):
        return layout, "as given"
    shape = shape_of(model)
    if layout == "auto":
        return pick_layout(shape, ranks, share, stored=stored)
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    found = query_layout(ranks) if layout == "Q" else head_layout(shape, ranks)
    if ranks > 1 and found.name != layout:
        raise OptionError(
            f"layout {layout} does not exist for {ranks} ranks and {model.num_kv_heads} K/V heads; try auto or "
            f"{found.name}"
        )
    return found, "as asked"


def shape_of(model: LanguageModel) -> DecoderShape:
    """The model as far as the bytes of a layout depend on it; its matrices do not matter for these."""
    width = model.num_heads * model.head_dim
    return DecoderShape(
        model.name, model.num_layers, width, model.num_heads, model.num_kv_heads, model.head_dim, 0, 0, model.num_layers
    )


class Spread:
    """Over the ranks of a group, in a layout. `rule`: why in this one. `baseline`: how full prefill attends."""

    def __init__(
        self,
        model: LanguageModel,
        supply: Supply,
        group: Group,
        layout: Layout,
        rule: str = "as given",
        baseline: Baseline = "ring",
    ) -> None:
        self._model, self._supply, self._group, self.baseline = model, supply, group, baseline
        self.layout, self.rule = layout, rule
        self._busy = threading.Lock()
        self._told: object = None  # what else the ranks must have been given alike
        self._has_begun = False
        self._shard = Shard(group, layout, model.num_heads, model.num_kv_heads)
        self._whole = Shard(group, query_layout(group.size), model.num_heads, model.num_kv_heads)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._group.phase(name, LOAD_TIMES if name == "load" else 1.0)

    def begin(self, prompt: Prompt, recipe: Recipe, num_new: int, seed: int, *, in_laboratory: bool) -> None:
        if in_laboratory:
            raise OptionError("teacher forcing and the oracle belong to the laboratory, which runs in one process")
        rules = (recipe.method.name, recipe.budget, recipe.layers, recipe.geometry, recipe.reorder, recipe.allocation)
        request = (rules, recipe.repair_layers, recipe.repair_tokens, prompt.token_ids, num_new, seed)
        images = [chunk.images.key for chunk in prompt.chunks if chunk.images is not None]
        # The same ids may be cut or prefilled otherwise; ranks would then wait for messages of other sizes.
        chunks = [(i.namespace, i.head_ids, len(i.token_ids)) for i in self._supply.identities(prompt)]
        with self._group.phase("begin"):
            ends = sorted(self._model.stop_ids), self._told
            told = (request, images, chunks, self._model.identity, self._shard.layout, self.baseline, ends)
            self._has_begun = True
            self._group.world.agree(repr(told))

    def parts(self, prompt: Prompt, needs_movement: bool) -> Parts:
        shard, supply = self._shard, self._supply
        found_head, prefilled = supply.head()
        chunks = prompt.chunks
        identities = supply.identities(prompt)[1 if prompt.head_ids else 0 :]
        held = self._held(identities)
        by_shard = [range(g * shard.heads.size, (g + 1) * shard.heads.size) for g in range(shard.sequence.size)]
        holders = [[g for g, ranks in enumerate(by_shard) if held[list(ranks), i].any()] for i in range(len(chunks))]
        homes = deal_chunks([c.num_tokens for c in chunks], shard.sequence.size, holders)
        # A chunk that stands there twice is prefilled once: its copies go where the first is.
        firsts = [identities.index(identity) for identity in identities]
        homes = tuple(homes[first] for first in firsts)
        kept: dict[int, ChunkKV] = {}
        moving: list[tuple[int, int]] = []  # chunks that are re-sharded by head, each with the member that has it
        whole: dict[int, ChunkKV] = {}
        records: dict[int, ChunkKV] = {}
        counts = torch.zeros(4, dtype=torch.int64)  # prefilled tokens, chunks from the store, measured tokens, unstored
        from_store = [0] * len(chunks)
        team = list(shard.heads.ranks)
        mine = [i for i in range(len(chunks)) if firsts[i] == i and homes[i] == shard.sequence.index]
        sources = dict(
            zip(mine, deal_sources([c.num_tokens for c in chunks], held[team].T.tolist(), mine), strict=True)
        )
        for index, (chunk, identity) in enumerate(zip(chunks, identities, strict=True)):
            if firsts[index] != index:
                counts[1] += from_store[firsts[index]]
                continue
            if homes[index] != shard.sequence.index:
                kept[index] = self._nothing_of(identity)
                continue
            source = sources[index]
            is_source, all_have_it = source == shard.heads.index, bool(held[team, index].all()) or len(team) == 1
            if not all_have_it:
                moving.append((index, source))
            if is_source or all_have_it:
                found, was_stored, stored_now = supply.fetch(chunk, identity, found_head)
                if is_source:
                    from_store[index] = int(was_stored)
                    counts += torch.tensor([0 if was_stored else chunk.num_tokens, was_stored, 0, not stored_now])
                if is_source and needs_movement:
                    records[index], measured = supply.fetch_movement(found, supply.identify_movement(identity))
                    counts[2] += measured
                if all_have_it:
                    kept[index] = self._sliced(found)
                else:
                    whole[index] = found
        # The head is prefilled by every rank that does not find it; ranks with one store race for it.
        told = self._group.world.all_gather(
            torch.cat([counts, torch.tensor([prefilled])])[None], [1] * self._group.size
        )
        totals, prefilled = told[:, :4].sum(dim=0).tolist(), int(told[:, 4].max())
        # Only now, when all have prefilled their chunks: all links are busy at once.
        kept |= self._move(identities, chunks, moving, whole)
        wanted = dict.fromkeys(firsts) if needs_movement else {}
        moved = {index: self._movement(index, identities[index], sources, records) for index in wanted}
        return Parts(
            head=None if found_head is None else self._sliced(found_head),
            chunks=tuple(kept[first] for first in firsts),
            cached_chunks=totals[1],
            prefilled_tokens=prefilled + totals[0],
            unstored=totals[3],
            movement=tuple(moved[first] for first in firsts) if needs_movement else None,
            measured_tokens=totals[2],
            homes=homes,
        )

    def assemble(
        self, prompt: Prompt, given: list[Parts], tables: RotaryTables, num_slots: int, exact_tokens: int, *, last: bool
    ) -> tuple[Context, Parts]:
        model, shard, parts = self._model, self._shard, given.pop()
        spans = lay_out([part.num_tokens for part in parts.all])
        num_head = 1 if parts.head is not None else 0
        part_homes = [0] * num_head + list(parts.homes)
        homes = self._turns(prompt.num_tokens, num_slots, shard.sequence.size)
        for span, home in zip(spans, part_homes, strict=True):
            homes[span.start : span.stop] = home
        keys, values = self._own_slots(shard, homes)
        seen: list[tuple[int, ChunkInputs]] = []
        at = 0
        for part, span, home in zip(parts.all, spans, part_homes, strict=True):
            if home != shard.sequence.index:
                continue
            here, there = slice(at, at + span.num_tokens), slice(span.start, span.stop)
            if part.inputs is not None:
                seen.append((span.start, part.inputs))
            write_part(part, tables.at(there), keys[:, :, here], values[:, :, here])
            at += span.num_tokens
        movable = torch.zeros(num_slots, dtype=torch.bool)
        movable[exact_tokens : prompt.context_tokens] = True
        movable[visual_slots(prompt)] = False  # what the layers read there is known to this shard alone
        memory = SpreadMemory(shard, keys, values, homes, movable)
        ids = torch.tensor(prompt.token_ids[: prompt.context_tokens], dtype=torch.int64, device=model.device)
        # Its own keys and values have no slots: the memory has them, and makes new ones where slots move.
        context = Context(
            *model.empty_slots(0), ids, spans, exact_tokens, visual_rows(model, seen),
            shift_of(prompt.chunks), cells_of(prompt), memory,
        )  # fmt: skip
        return context, replace(parts, chunks=()) if last else parts

    def reserve(self, prompt: Prompt, num_slots: int) -> Context:
        model, shard = self._model, self._whole
        homes = self._turns(prompt.num_tokens, num_slots, self._group.size)
        homes[: prompt.num_tokens] = zigzag(prompt.num_tokens, self._group.size)
        memory = FullMemory(shard, *self._own_slots(shard, homes), homes, torch.zeros(num_slots, dtype=torch.bool))
        memory.baseline = self.baseline
        # Every rank runs the vision tower: rows of an image go to all of them.
        return replace(reserve(model, prompt, 0, self._supply.inputs(prompt)), memory=memory)

    def decoding(self, tokens: Iterator[int]) -> Iterator[int]:
        while True:
            with self._group.phase("decode"):  # not held while whoever reads the tokens does something else
                token = next(tokens, None)
            if token is None:
                return
            yield token

    @contextmanager
    def request(self, told: object) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise OptionError("the ranks answer one request at a time; wait for the stream or answer before")
        self._told, self._has_begun = told, False
        try:
            yield
        except ParallelError:
            raise
        except BaseException:
            # The others are in the middle of it, and would take the next request's messages for this one's.
            if self._has_begun:
                self._group.abandon()
            raise
        finally:
            self._told = None
            self._busy.release()

    def same(self, selection: Selection) -> None:
        self._group.world.agree(selection.slots.cpu().numpy().tobytes())

    def picks(self, pick: Sampler) -> Sampler:
        world, device = self._group.world, self._model.device

        def first_rank_picks(logits: Tensor | None) -> int:
            """Rank 0 runs the last prompt row, so that it has all logits; ranks of other hardware may differ by a
            rounding, and must not go on with another token."""
            token = pick(logits) if world.index == 0 else 0
            return int(world.broadcast(torch.tensor([token], device=device), 0))

        return first_rank_picks

    # ---- steps ----

    def _held(self, identities: Sequence[ChunkIdentity]) -> Tensor:
        """Which rank finds which chunk in its store, `[ranks, chunks]`; the same on all ranks."""
        store = self._supply.store
        own = torch.tensor([[store is not None and store.contains(i) for i in identities]], dtype=torch.bool)
        gathered: Tensor = self._group.world.all_gather(own.view(torch.uint8), [1] * self._group.size).bool()
        return gathered

    def _turns(self, num_prompt: int, num_slots: int, shards: int) -> Int[Tensor, " slots"]:
        """Slots behind the context in turn over the shards; that of the last prompt row goes to shard 0, and rank 0
        runs it."""
        return (torch.arange(num_slots) - (num_prompt - 1)) % shards

    def _own_slots(self, shard: Shard, homes: Int[Tensor, " slots"]) -> tuple[Tensor, Tensor]:
        """Uninitialised key and value buffers of this rank's heads of its part of the slots."""
        num_own = int((homes == shard.sequence.index).sum())
        shape = (self._model.num_layers, shard.num_kv_heads, num_own, self._model.head_dim)
        keys = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        return keys, torch.empty_like(keys)

    def _nothing_of(self, identity: ChunkIdentity) -> ChunkKV:
        empty = torch.empty(self._model.num_layers, self._shard.num_kv_heads, 0, self._model.head_dim)
        return ChunkKV(identity, empty, empty)

    def _sliced(self, whole: ChunkKV) -> ChunkKV:
        own = self._shard.own_kv_heads
        if self._shard.heads.size == 1:
            return whole
        # Copies: a view would keep the other heads in memory.
        return replace(whole, keys=whole.keys[:, own].contiguous(), values=whole.values[:, own].contiguous())

    def _move(
        self,
        identities: Sequence[ChunkIdentity],
        chunks: Sequence[Chunk],
        moving: Sequence[tuple[int, int]],
        whole: dict[int, ChunkKV],
    ) -> dict[int, ChunkKV]:
        """This rank's heads of chunks that one member of its heads team has; `whole`: those that it has itself."""
        team, model, own = self._shard.heads, self._model, self._shard.num_kv_heads
        if not moving:
            return {}

        def width(index: int) -> int:
            return 2 * model.num_layers * own * chunks[index].num_tokens * model.head_dim

        with self._group.phase("move"):
            mine = sum(width(index) for index in whole)
            flat = torch.empty(team.size * mine, dtype=model.dtype, device=model.device)
            at = 0
            for member in range(team.size):
                heads = slice(member * own, (member + 1) * own)
                for part in whole.values():
                    for tensor in (part.keys, part.values):
                        piece = tensor[:, heads].to(model.device).reshape(-1)
                        flat[at : at + piece.numel()] = piece
                        at += piece.numel()
            seen = {index: part.inputs for index, part in whole.items()}
            whole.clear()  # copied: it need not lie here twice
            received = team.all_to_all(
                flat,
                [mine] * team.size,
                [sum(width(index) for index, source in moving if source == member) for member in range(team.size)],
            )
            found, at = {}, 0
            for index, source in sorted(moving, key=lambda pair: (pair[1], pair[0])):
                shape = (2, model.num_layers, own, chunks[index].num_tokens, model.head_dim)
                both = received[at : at + width(index)].view(shape)
                at += width(index)
                inputs = self._share_inputs(identities[index], chunks[index], seen.get(index), source)
                found[index] = ChunkKV(identities[index], both[0], both[1], inputs)
        return found

    def _share_inputs(
        self, identity: ChunkIdentity, chunk: Chunk, own: ChunkInputs | None, source: int
    ) -> ChunkInputs | None:
        if chunk.images is None:
            return None
        team, model = self._shard.heads, self._model
        visual, hidden, early, _ = identity.inputs_layout
        rows = torch.empty(1 + early, visual, hidden, dtype=model.dtype, device=model.device)
        if own is not None:
            rows = torch.cat([own.embeddings[None], own.layer_rows]).to(model.device)
        rows = team.broadcast(rows, source)
        return ChunkInputs(chunk.images.positions, chunk.images.visual, rows[0], rows[1:])

    def _movement(
        self, index: int, identity: ChunkIdentity, sources: dict[int, int], records: dict[int, ChunkKV]
    ) -> ChunkKV:
        """The record of a chunk's movement, from the member that has it; zeros for a chunk of another shard."""
        own = self._supply.identify_movement(identity)
        if index not in sources:
            return _zero_movement(own)
        given = records.get(index) or _zero_movement(own)
        both = self._shard.heads.broadcast(torch.stack([given.keys, given.values]).cpu(), sources[index])
        return ChunkKV(own, both[0], both[1])


def _zero_movement(identity: ChunkIdentity) -> ChunkKV:
    """A record for chunks that another shard scores."""
    zeros = torch.zeros(identity.model.num_layers, 1, len(identity.token_ids), 1, dtype=torch.float16)
    return ChunkKV(identity, zeros, zeros)

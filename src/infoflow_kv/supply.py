"""Where a request's KV comes from: the store, else a prefill that is stored on the way."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from infoflow_kv.errors import ComputeError, StoreError
from infoflow_kv.methods import Method
from infoflow_kv.models import LanguageModel
from infoflow_kv.prefilling import identify, identify_movement, measure_movement, movement_of, prefill
from infoflow_kv.records import Chunk, ChunkIdentity, ChunkInputs, ChunkKV, Prompt
from infoflow_kv.shapes import Float, Tensor
from infoflow_kv.store import ChunkStore, load_many

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The KV of one request in the order of its prompt, and where it came from.

    `head`: None where the template has none. `unstored`: new chunks that the store did not take. `movement`: how far
    each chunk's KV moves behind a neighbour, for methods that ask for it; `measured_tokens` had no record of it.
    `homes`: where several ranks share the request, the sequence shard of each chunk; a chunk of another shard is then
    here without its KV, and others with this rank's K/V heads alone.
    """

    head: ChunkKV | None
    chunks: tuple[ChunkKV, ...]
    cached_chunks: int
    prefilled_tokens: int
    unstored: int
    movement: tuple[ChunkKV, ...] | None = None
    measured_tokens: int = 0
    homes: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[ChunkKV, ...]:
        return ((self.head,) if self.head is not None else ()) + self.chunks

    @property
    def identities(self) -> tuple[ChunkIdentity, ...]:
        return tuple(part.identity for part in self.all)

    def hand_over(self) -> tuple[Iterator[ChunkKV], "Parts"]:
        """The KV one after the other, each forgotten once the next is asked for, and the parts without the chunks: a
        request then holds its context's KV once, not twice."""
        waiting = list(reversed(self.all))

        def one_by_one() -> Iterator[ChunkKV]:
            while waiting:
                yield waiting.pop()

        return one_by_one(), replace(self, chunks=())

    def reordered(self, order: Sequence[int]) -> "Parts":
        moved = None if self.movement is None else tuple(self.movement[index] for index in order)
        homes = tuple(self.homes[index] for index in order) if self.homes else ()
        return replace(self, chunks=tuple(self.chunks[index] for index in order), movement=moved, homes=homes)

    def sensitivity(self) -> Float[Tensor, "layers context"] | None:
        """‖ΔV‖ behind a neighbour for each token of the parts, 0 for the head; None where it was not asked for."""
        if self.movement is None:
            return None
        # Records from a disk store are on the CPU, those measured just now on the model's device.
        pieces = [
            movement_of(record, chunk.identity.model.num_layers).cpu()
            for record, chunk in zip(self.movement, self.chunks, strict=True)
        ]
        if self.head is not None:
            pieces.insert(0, torch.zeros(self.head.values.shape[0], self.head.num_tokens, dtype=torch.float16))
        return torch.cat(pieces, dim=1)


class Supply:
    """Chunk KV of one engine: its model, store, namespace and chat header.

    `behind_head`: chunks are prefilled behind the header (head policy `head`). `neighbour_ids`: what stands before a
    chunk while its movement is measured.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: ChunkStore | None,
        namespace: str,
        head_ids: tuple[int, ...],
        behind_head: bool,
        neighbour_ids: tuple[int, ...],
    ) -> None:
        self.model = model
        self.store = store
        self.namespace = namespace
        self.head_ids = head_ids
        self.neighbour_ids = neighbour_ids
        self._before_chunk = head_ids if behind_head else ()
        self._before: ChunkKV | None = None
        self._logged_store_error = False

    def identify(self, chunk: Chunk) -> ChunkIdentity:
        """The identity under which a chunk is stored and found."""
        return self._identities([chunk])[0]

    def identify_head(self) -> ChunkIdentity:
        """The identity of the chat header, which is stored like a chunk of its own."""
        return identify(self.model, self.head_ids, (), self.namespace)

    def head(self) -> tuple[ChunkKV | None, int]:
        """The KV of the chat header (None where the template has none), and how many of its tokens were not stored."""
        if not self.head_ids:
            return None, 0
        identity = self.identify_head()
        found = self.store.get(identity) if self.store is not None else None
        if found is not None:
            return found, 0
        found = prefill(self.model, identity)
        self.put(found)
        return found, found.num_tokens

    def add(self, chunks: Sequence[Chunk], measure: bool) -> Iterator[int]:
        """After each chunk, how many tokens were prefilled for the store to hold it; its movement too, if `measure`."""
        assert self.store is not None
        head: ChunkKV | None = None
        for chunk, identity in zip(chunks, self._identities(chunks), strict=True):
            prefilled = 0
            stored = self.store.contains(identity)  # verified when it is read
            moved = self.identify_movement(identity) if measure else None
            unmeasured = moved is not None and not self.store.contains(moved)
            if not stored or unmeasured:
                kv = self.store.get(identity) if stored else None
                if kv is None:
                    head = head or self.head()[0]
                    kv = self._prefill(chunk, identity, head)
                    self.store.put(kv)
                    prefilled = chunk.num_tokens
                if unmeasured:
                    self.store.put(measure_movement(self.model, kv, self._before_movement()))
            yield prefilled

    def parts(self, prompt: Prompt) -> Parts:
        """The KV of the head and of every chunk in order. A chunk that stands there twice is prefilled once."""
        identities = self._identities(prompt.chunks)
        wanted = list(dict.fromkeys(identities))
        found = self._load(wanted)
        stored = set(found)
        head, prefilled = self.head()
        unstored = 0
        for chunk, identity in zip(prompt.chunks, identities, strict=True):
            if identity not in found:
                found[identity] = self._prefill(chunk, identity, head)
                unstored += not self.put(found[identity])
        prefilled += sum(len(identity.token_ids) for identity in wanted if identity not in stored)
        return Parts(
            head=head,
            chunks=tuple(found[identity] for identity in identities),
            cached_chunks=sum(identity in stored for identity in identities),
            prefilled_tokens=prefilled,
            unstored=unstored,
        )

    def with_movement(self, parts: Parts) -> Parts:
        """The parts with the movement of every chunk, measured and stored on the way where there is no record."""
        wanted = {p.identity: self.identify_movement(p.identity) for p in parts.chunks}
        found = self._load(list(wanted.values()))
        measured = 0
        for part in {p.identity: p for p in parts.chunks}.values():
            identity = wanted[part.identity]
            if identity not in found:
                found[identity] = measure_movement(self.model, part, self._before_movement())
                measured += part.num_tokens
                self.put(found[identity])
        movement = tuple(found[wanted[part.identity]] for part in parts.chunks)
        return replace(parts, movement=movement, measured_tokens=measured)

    def identify_movement(self, identity: ChunkIdentity) -> ChunkIdentity:
        """The identity of the record of a chunk's movement."""
        return identify_movement(self.model, identity, self.neighbour_ids)

    def fetch(self, chunk: Chunk, identity: ChunkIdentity, head: ChunkKV | None) -> tuple[ChunkKV, bool, bool]:
        """One chunk, whether it was stored, and whether it is now, where it should be."""
        found = self.store.get(identity) if self.store is not None else None
        if found is not None:
            return found, True, True
        found = self._prefill(chunk, identity, head)
        return found, False, self.put(found)

    def fetch_movement(self, chunk: ChunkKV, identity: ChunkIdentity) -> tuple[ChunkKV, int]:
        """The record of a chunk's movement, and how many tokens had to be measured for it."""
        found = self.store.get(identity) if self.store is not None else None
        if found is not None:
            return found, 0
        found = measure_movement(self.model, chunk, self._before_movement())
        self.put(found)
        return found, chunk.num_tokens

    def put(self, chunk: ChunkKV) -> bool:
        """Whether the chunk is stored now, where it should be; a store that takes nothing never fails a request."""
        if self.store is None:
            return True
        try:
            self.store.put(chunk)
        except StoreError as error:
            if not self._logged_store_error:
                logger.warning("chunks are used but not stored: %s", error)
            self._logged_store_error = True
            return False
        return True

    def inputs(self, prompt: Prompt) -> tuple[ChunkInputs | None, ...]:
        """What the layers read where the prompt's images are, chunk by chunk, from the vision tower; None for text."""
        return tuple(self._inputs(chunk) for chunk in prompt.chunks)

    def exact_tokens(self, parts: Parts, length: int, chunks: Sequence[Chunk]) -> int:
        """Leading tokens whose KV is what full prefill gives: the head, and the first chunk if it was prefilled behind
        this very head and not in cells; nothing of both if RoPE treats a sequence of the request's `length` otherwise.
        `chunks` are the parts' own."""
        exact = 0
        regime = self.model.rope_regime(length)
        expected: tuple[tuple[int, ...], ...] = ((), self.head_ids) if self.head_ids else ((),)
        if not is_whole(chunks):
            expected = expected[:-1]
        for part, head_ids in zip(parts.all, expected, strict=False):
            if part.identity.head_ids != head_ids or part.identity.rope != regime or exact != len(head_ids):
                break
            exact += part.num_tokens
        return exact

    def identities(self, prompt: Prompt) -> tuple[ChunkIdentity, ...]:
        """The identities of head and chunks in order, as their parts have them, without loading anything."""
        head = (self.identify_head(),) if prompt.head_ids else ()
        return (*head, *self._identities(prompt.chunks))

    def wanted(self, prompt: Prompt, method: Method) -> tuple[ChunkIdentity, ...]:
        """Everything that the store must hold for a request to compute no KV but what it repairs."""
        found = self.identities(prompt)
        if "sensitivity" not in method.needs:
            return found
        chunks = found[1:] if prompt.head_ids else found
        return found + tuple(self.identify_movement(i) for i in chunks)

    def exact_chunk_tokens(self, prompt: Prompt, length: int) -> int:
        """Tokens of the first chunk if a request of this length finds its KV exact, see `exact_tokens`."""
        first = self._identities(prompt.chunks[:1])[0]
        is_exact = (
            is_whole(prompt.chunks) and first.head_ids == self.head_ids and first.rope == self.model.rope_regime(length)
        )
        return len(first.token_ids) if is_exact else 0

    def _identities(self, chunks: Sequence[Chunk]) -> list[ChunkIdentity]:
        known = self.model.identity
        return [identify(self.model, c.token_ids, self._before_chunk, self.namespace, known, c.images) for c in chunks]

    def _prefill(self, chunk: Chunk, identity: ChunkIdentity, head: ChunkKV | None) -> ChunkKV:
        cells = chunk.images.cells if chunk.images is not None else ()
        return prefill(self.model, identity, self._behind(head), self._inputs(chunk), cells)

    def _inputs(self, chunk: Chunk) -> ChunkInputs | None:
        if chunk.images is None:
            return None
        if self.model.vision is None:
            raise ComputeError(f"a chunk has images, but {self.model.name} reads none; its prompt is another model's")
        return self.model.vision.inputs(chunk.images)

    def _load(self, wanted: Sequence[ChunkIdentity]) -> dict[ChunkIdentity, ChunkKV]:
        if self.store is None:
            return {}
        found = load_many(self.store, wanted)
        return {identity: kv for identity, kv in zip(wanted, found, strict=True) if kv is not None}

    def _behind(self, head: ChunkKV | None) -> ChunkKV | None:
        return head if self._before_chunk else None

    def _before_movement(self) -> ChunkKV:
        """Head and neighbour as one sequence; computed once, and again when the model's weights have changed."""
        identity = identify(self.model, self._before_chunk + self.neighbour_ids, (), self.namespace)
        if self._before is None or self._before.identity != identity:
            self._before = prefill(self.model, identity)
        return self._before


def is_whole(chunks: Sequence[Chunk]) -> bool:
    """Whether the first of these chunks is prefilled as one, and not in cells that do not see each other."""
    return not chunks or chunks[0].images is None or not chunks[0].images.cells

"""Chunks in this process's memory: the quickest tier, bounded by bytes."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infoflow_kv.errors import OptionError, StoreError
from infoflow_kv.records import ChunkIdentity, ChunkInputs, ChunkKV
from infoflow_kv.store import identity as identities
from infoflow_kv.store.payload import check_chunk
from infoflow_kv.store.protocol import StoreCounters, Tally

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    chunk: ChunkKV
    versions: tuple[int, ...]


class MemoryStore:
    """A `ChunkStore` that keeps own copies in memory and forgets the least recently used beyond `max_bytes`.

    Safe to use from several threads. A chunk that a reader wrote into (torch counts that) is a miss.

    >>> list(MemoryStore(max_bytes=2**30).keys())
    []
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes <= 0):
            raise OptionError(f"max_bytes must be a positive whole number or None, given {max_bytes!r}")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._num_bytes = 0
        self._tally = Tally()

    @property
    def counters(self) -> StoreCounters:
        """What this object did so far."""
        return self._tally.read()

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """The chunk, or None. Its tensors are shared by all readers, who never write into them."""
        key = identities.key(identity)
        with self._lock:
            held = self._held.get(key)
            is_sound = held is not None and held.versions == _versions(held.chunk) and held.chunk.identity == identity
            if held is None or not is_sound:
                self._tally.add("misses")
                if held is not None:
                    self._forget(key)
                    self._tally.add("damaged")
                    _log.warning("chunk %s in memory was written into or is another's; it is computed again", key)
                return None
            self._held.move_to_end(key)
        self._tally.add("hits")
        return held.chunk

    def put(self, chunk: ChunkKV) -> None:
        """Nothing; on return the chunk is held. Raises StoreError if it is larger than `max_bytes` or not finite.

        The tensors are copied: views into a larger buffer would keep all of it alive, and their owner may write on.
        """
        key = identities.key(chunk.identity)
        try:
            check_chunk(chunk)
            if self.max_bytes is not None and chunk.num_bytes > self.max_bytes:
                raise StoreError(
                    f"cannot hold chunk {key}: it has {chunk.num_bytes} bytes, the store's max_bytes is "
                    f"{self.max_bytes}; raise it"
                )
        except StoreError:
            self._tally.add("write_failures")
            raise
        own = _own(chunk)
        with self._lock:
            if key in self._held:
                self._forget(key)
            while self.max_bytes is not None and self._num_bytes + own.num_bytes > self.max_bytes:
                self._forget(next(iter(self._held)))
                self._tally.add("evicted")
            self._held[key] = _Held(own, _versions(own))
            self._num_bytes += own.num_bytes
        self._tally.add("written")

    def contains(self, identity: ChunkIdentity) -> bool:
        """Whether a chunk is held under the identity's key. Does not count as use."""
        with self._lock:
            return identities.key(identity) in self._held

    def delete(self, key: str) -> bool:
        """Whether the chunk was held; it is not any more. Raises OptionError if `key` is no key."""
        identities.check_key(key)
        with self._lock:
            was_held = key in self._held
            if was_held:
                self._forget(key)
        return was_held

    def keys(self) -> Iterator[str]:
        """The keys held at this moment, least recently used first."""
        with self._lock:
            return iter(list(self._held))

    def _forget(self, key: str) -> None:
        self._num_bytes -= self._held.pop(key).chunk.num_bytes


def _own(chunk: ChunkKV) -> ChunkKV:
    given = chunk.inputs
    inputs = None
    if given is not None:
        inputs = ChunkInputs(
            _copy(given.positions), _copy(given.visual), _copy(given.embeddings), _copy(given.layer_rows)
        )
    return ChunkKV(chunk.identity, _copy(chunk.keys), _copy(chunk.values), inputs)


def _copy(tensor: "Tensor") -> "Tensor":
    """An own, contiguous copy, made outside inference mode so that torch counts later writes into it."""
    import torch

    with torch.inference_mode(False):
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def _versions(chunk: ChunkKV) -> tuple[int, ...]:
    tensors = [chunk.keys, chunk.values]
    if (inputs := chunk.inputs) is not None:
        tensors += [inputs.positions, inputs.visual, inputs.embeddings, inputs.layer_rows]
    return tuple(tensor._version for tensor in tensors)

"""What every store can do: five verbs and its counters."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from infoflow_kv.records import ChunkIdentity, ChunkKV


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """What a store object has done since it was opened; each `get` is exactly one hit or one miss.

    A hit is counted once the chunk is loaded and verified. `damaged` counts the misses whose stored bytes failed a
    check, `read_failures` those where the system refused to hand the bytes out (they were not judged).
    """

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    read_failures: int = 0
    written: int = 0
    write_failures: int = 0
    evicted: int = 0


@runtime_checkable
class ChunkStore(Protocol):
    """A place for chunks. A chunk is found by its whole identity, or not at all.

    Any fault of a stored chunk is a miss and the caller computes it again. Only `put` and `delete` raise StoreError.
    """

    @property
    def counters(self) -> StoreCounters:
        """What happened so far."""
        ...

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """The verified chunk, or None. Its tensors are shared: readers never write into them."""
        ...

    def put(self, chunk: ChunkKV) -> None:
        """Nothing; on return the chunk is stored. Raises StoreError if it is not, OptionError if it is not sound."""
        ...

    def contains(self, identity: ChunkIdentity) -> bool:
        """Whether the chunk seems to be there: a cheap look that verifies nothing. Only `get` is proof."""
        ...

    def delete(self, key: str) -> bool:
        """Whether anything was stored under the key; it is gone now."""
        ...

    def keys(self) -> Iterator[str]:
        """The keys of all stored chunks, ascending on disk, least recently used first in memory."""
        ...


class Tally:
    """Counters that threads may raise together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {field.name: 0 for field in fields(StoreCounters)}

    def add(self, *names: str, count: int = 1) -> None:
        with self._lock:
            for name in names:
                self._counts[name] += count

    def read(self) -> StoreCounters:
        """A snapshot; a later `add` does not change it."""
        with self._lock:
            return StoreCounters(**self._counts)

"""Reading several chunks at once: order, repetition, misses, threads."""

import threading
from pathlib import Path
from typing import Any

import pytest
from store_chunks import make_chunk, make_identity, same_bits

from infoflow_kv.errors import OptionError
from infoflow_kv.records import ChunkIdentity, ChunkKV
from infoflow_kv.store import ChunkStore, DiskStore, MemoryStore, StoreCounters, load_many


@pytest.mark.parametrize("max_workers", [1, 2, 8])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_order_is_kept_and_repetition_is_free(tmp_path: Path, kind: str, max_workers: int) -> None:
    store: ChunkStore = MemoryStore() if kind == "memory" else DiskStore(tmp_path / "kv")
    chunks = [make_chunk(make_identity(first=n), seed=n) for n in range(6)]
    for chunk in chunks[:4]:
        store.put(chunk)
    order = [3, 5, 0, 3, 1, 4, 2, 0, 5]
    found = load_many(store, [chunks[n].identity for n in order], max_workers=max_workers)
    assert len(found) == len(order)
    for n, loaded in zip(order, found, strict=True):
        assert loaded is None if n > 3 else same_bits(loaded, chunks[n])
    assert found[0] is found[3]
    assert store.counters == StoreCounters(hits=4, misses=2, written=4)
    assert load_many(store, []) == []


class Meeting(MemoryStore):
    """Each `get` waits until another one is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=5)

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        self.barrier.wait()
        return super().get(identity)


def test_two_are_read_at_the_same_time() -> None:
    assert load_many(Meeting(), [make_identity(first=n) for n in range(4)]) == [None] * 4


class Failing(MemoryStore):
    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        raise ZeroDivisionError


@pytest.mark.parametrize("max_workers", [1, 2])
def test_an_error_of_the_program_is_not_a_miss(max_workers: int) -> None:
    with pytest.raises(ZeroDivisionError):
        load_many(Failing(), [make_identity(first=n) for n in range(3)], max_workers)


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, None])
def test_workers_are_at_least_one(wrong: Any) -> None:
    with pytest.raises(OptionError, match="max_workers"):
        load_many(MemoryStore(), [], max_workers=wrong)

"""The memory store: own copies, a bound in bytes, and no chunk that someone wrote into."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from store_chunks import (
    IDENTITY,
    IMAGE_IDENTITY,
    INPUT_NAMES,
    MODEL,
    inputs_of,
    make_chunk,
    make_identity,
    same_bits,
    tensors_of,
)

from infoflow_kv.errors import StoreError
from infoflow_kv.records import ChunkKV
from infoflow_kv.store import MemoryStore, StoreCounters, key


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_chunk_comes_back_to_the_bit(dtype: str) -> None:
    store, chunk = MemoryStore(), make_chunk(make_identity(dtype))
    assert store.get(chunk.identity) is None
    store.put(chunk)
    assert same_bits(store.get(chunk.identity), chunk)
    assert store.counters == StoreCounters(hits=1, misses=1, written=1)


def test_readers_share_one_copy_that_is_not_the_writers() -> None:
    store, chunk = MemoryStore(), make_chunk()
    store.put(chunk)
    chunk.keys.zero_()
    first, second = store.get(IDENTITY), store.get(IDENTITY)
    assert first is second
    assert same_bits(first, make_chunk()), "what the writer does later is its own affair"


def test_a_view_does_not_keep_its_buffer_alive() -> None:
    """The bound in bytes would mean nothing otherwise."""
    model = replace(MODEL, num_layers=2, num_kv_heads=1, head_dim=4)
    identity = replace(IDENTITY, model=model)
    buffer = torch.zeros(2, 1, 1000, 4)
    store = MemoryStore()
    store.put(ChunkKV(identity, buffer[:, :, :3], buffer[:, :, 3:6]))
    found = store.get(identity)
    assert found is not None
    assert found.keys.untyped_storage().nbytes() + found.values.untyped_storage().nbytes() == found.num_bytes


def test_a_strided_chunk_is_held_in_order() -> None:
    chunk = make_chunk(make_identity(tokens=5))
    strided = chunk.keys.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    store = MemoryStore()
    store.put(replace(chunk, keys=strided))
    found = store.get(chunk.identity)
    assert same_bits(found, chunk)
    assert found is not None
    assert found.keys.is_contiguous()
    assert not strided.is_contiguous()


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_chunk_that_a_reader_wrote_into_is_a_miss(
    part: str, in_inference_mode: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    with torch.inference_mode(in_inference_mode):
        store.put(replace(make_chunk(), keys=make_chunk().keys * 1))
        found = store.get(IDENTITY)
        getattr(found, part)[0, :, 1:2].mul_(2)
        assert store.get(IDENTITY) is None
    assert store.counters == StoreCounters(hits=1, misses=1, damaged=1, written=1)
    assert "written into" in caplog.text
    assert list(store.keys()) == []
    store.put(make_chunk())
    assert same_bits(store.get(IDENTITY), make_chunk())


def test_the_bound_holds_and_the_least_recently_used_goes_first() -> None:
    chunks = [make_chunk(make_identity(first=n)) for n in range(5)]
    store = MemoryStore(max_bytes=3 * chunks[0].num_bytes)
    for chunk in chunks[:3]:
        store.put(chunk)
    assert store.counters.evicted == 0, "exactly full is not too full"
    assert store.get(chunks[0].identity) is not None
    assert store.contains(chunks[1].identity), "a look is no use"
    store.put(chunks[3])
    assert list(store.keys()) == [key(chunks[n].identity) for n in (2, 0, 3)]
    store.put(chunks[2])
    store.put(chunks[4])
    assert list(store.keys()) == [key(chunks[n].identity) for n in (3, 2, 4)]
    assert store.counters.evicted == 2


def test_a_chunk_larger_than_the_bound_is_refused_and_evicts_nothing() -> None:
    small, large = make_chunk(), make_chunk(make_identity(tokens=100))
    store = MemoryStore(max_bytes=2 * small.num_bytes)
    store.put(small)
    with pytest.raises(StoreError, match=f"it has {large.num_bytes} bytes, the store's max_bytes is"):
        store.put(large)
    assert same_bits(store.get(IDENTITY), small)
    assert store.counters == StoreCounters(hits=1, written=1, write_failures=1)


def test_bytes_are_counted_right_through_replacing_and_deleting() -> None:
    """L02: a leak in the count would sink the hit rate to zero with time."""
    chunks = [make_chunk(make_identity(first=n)) for n in range(3)]
    store = MemoryStore(max_bytes=3 * chunks[0].num_bytes)
    for _ in range(20):
        for chunk in chunks:
            store.put(chunk)
        assert store.delete(key(chunks[0].identity))
        assert not store.delete(key(chunks[0].identity))
    store.put(chunks[0])
    assert store.counters.evicted == 0
    assert len(list(store.keys())) == 3


def test_keys_may_be_walked_while_the_store_changes() -> None:
    store = MemoryStore()
    for n in range(4):
        store.put(make_chunk(make_identity(first=n)))
    names = store.keys()
    assert all(store.delete(name) for name in names)
    assert list(store.keys()) == []


def test_a_warning_names_the_key_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = MemoryStore()
    secret: Any = make_chunk(replace(IDENTITY, namespace="canary", token_ids=(90210, 1, 2)))
    store.put(secret)
    store.get(secret.identity).keys.zero_()  # type: ignore[union-attr]
    assert store.get(secret.identity) is None
    (record,) = caplog.records
    assert key(secret.identity) in record.getMessage()
    assert "canary" not in record.getMessage()
    assert "90210" not in record.getMessage()


@pytest.mark.parametrize("part", INPUT_NAMES)
def test_a_chunk_whose_inputs_a_reader_wrote_into_is_a_miss(part: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store = MemoryStore()
    store.put(make_chunk(IMAGE_IDENTITY))
    getattr(inputs_of(store.get(IMAGE_IDENTITY)), part)[:1].mul_(2)
    assert store.get(IMAGE_IDENTITY) is None
    assert store.counters == StoreCounters(hits=1, misses=1, damaged=1, written=1)
    assert "written into" in caplog.text


def test_memory_holds_copies_of_the_inputs() -> None:
    """What the writer does later is its own affair, and a view keeps no larger buffer alive."""
    store = MemoryStore()
    buffer = torch.zeros(3, 1000, 6)
    chunk = make_chunk(IMAGE_IDENTITY)
    store.put(replace(chunk, inputs=replace(inputs_of(chunk), layer_rows=buffer[:2, :3], embeddings=buffer[2, :3])))
    buffer.fill_(7)
    inputs_of(chunk).visual.zero_()
    inputs_of(chunk).positions.zero_()
    found = store.get(IMAGE_IDENTITY)
    inputs = inputs_of(found)
    assert float(inputs.layer_rows.abs().max()) == float(inputs.embeddings.abs().max()) == 0
    assert inputs.visual.tolist() == inputs_of(make_chunk(IMAGE_IDENTITY)).visual.tolist()
    assert found is not None
    assert sum(t.untyped_storage().nbytes() for t in tensors_of(found).values()) == found.num_bytes

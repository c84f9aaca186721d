"""A chunk with images whose file was harmed: the right bytes, or a miss. Never another picture, never a wrong place."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from store_chunks import (
    IDENTITY,
    IMAGE_IDENTITY,
    forged,
    header_bytes,
    make_chunk,
    make_image_identity,
    names_in,
    same_bits,
    sealed,
    tensors_of,
)

from infoflow_kv.records import ChunkIdentity, ChunkKV
from infoflow_kv.store import DiskStore, StoreCounters, key, ls, verify
from infoflow_kv.store import identity as identities
from infoflow_kv.store.layout import chunk_path

NAME = key(IMAGE_IDENTITY)
# float32 lays its indices out last, the narrow dtypes first; one has no early-layer rows.
SMALL = [
    pytest.param(IMAGE_IDENTITY, id="float32"),
    pytest.param(make_image_identity("bfloat16", layout=(2, 3, 3, 1)), id="bfloat16"),
    pytest.param(make_image_identity("float16", layout=(5, 2, 0, 3)), id="float16"),
]


@pytest.fixture
def store(quick_path: Path) -> DiskStore:
    return DiskStore(quick_path / "kv")


@pytest.fixture(autouse=True)
def usual_log_level() -> Iterator[None]:
    yield
    logging.getLogger("infoflow_kv.store.disk").setLevel(logging.NOTSET)


def assert_each_is_damage(store: DiskStore, chunk: ChunkKV, variants: Iterator[bytes], at_least: int) -> None:
    """Every variant is a miss, is counted and set aside, and `verify` agrees; the place is free for the right chunk."""
    store.put(chunk)
    path, count = chunk_path(store.path, key(chunk.identity)), 0
    good = path.read_bytes()
    shutil.rmtree(store.path / "quarantine", ignore_errors=True)
    logging.getLogger("infoflow_kv.store.disk").setLevel(logging.ERROR)  # pytest would format thousands of lines
    for data in variants:
        assert data != good
        path.write_bytes(data)
        assert len(verify(store.path).damaged) == 1, f"variant {count} passes `verify`"
        before = store.counters
        assert store.get(chunk.identity) is None, f"variant {count} was served"
        after = store.counters
        assert (after.misses, after.damaged, after.hits) == (before.misses + 1, before.damaged + 1, before.hits)
        assert not path.exists(), f"variant {count} was left in place"
        count += 1
    assert count >= at_least
    assert len(names_in(store.path, "quarantine")) == count
    path.write_bytes(good)
    assert same_bits(store.get(chunk.identity), chunk), "the chunk itself was sound all along"


def file_bytes(store: DiskStore, chunk: ChunkKV) -> bytes:
    store.put(chunk)
    return chunk_path(store.path, key(chunk.identity)).read_bytes()


@pytest.mark.parametrize("identity", SMALL)
def test_every_byte_counts(store: DiskStore, identity: ChunkIdentity) -> None:
    """One bit of each, the bits in turn; also those of positions, visual tokens, embeddings and early-layer rows."""
    chunk = make_chunk(identity)
    data = file_bytes(store, chunk)

    def flipped(place: int) -> bytes:
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        return bytes(changed)

    assert_each_is_damage(store, chunk, (flipped(place) for place in range(len(data))), at_least=len(data))


@pytest.mark.parametrize("identity", SMALL)
def test_every_cut_and_every_addition_is_found(store: DiskStore, identity: ChunkIdentity) -> None:
    chunk = make_chunk(identity)
    data = file_bytes(store, chunk)
    variants = [*(data[:cut] for cut in range(0, len(data), 3)), data[:-1], data[:-4], data + b"\0", data + bytes(4)]
    assert_each_is_damage(store, chunk, iter(variants), at_least=300)


def changed_tensor(name: str, index: tuple[int, ...], value: int) -> bytes:
    chunk = make_chunk(IMAGE_IDENTITY)
    tensors = {key_: tensor.clone() for key_, tensor in tensors_of(chunk).items()}
    tensors[name][index] = value
    return forged(tensors, IMAGE_IDENTITY)


def test_a_wrong_place_is_found_behind_a_right_digest(store: DiskStore) -> None:
    """A writer that erred, or means ill: the indices are looked at again at every read, by `verify` too."""
    chunk = make_chunk(IMAGE_IDENTITY)
    assert forged(tensors_of(chunk), IMAGE_IDENTITY) == file_bytes(store, chunk), "the forger knows the format"
    visual = chunk.inputs.visual.tolist() if chunk.inputs is not None else []
    variants = [
        changed_tensor("positions", (0, 0), -1),
        changed_tensor("positions", (2, 4), -(2**31)),
        changed_tensor("visual", (0,), -1),
        changed_tensor("visual", (2,), 5),
        changed_tensor("visual", (2,), 2**31 - 1),
        changed_tensor("visual", (1,), visual[0]),
        changed_tensor("visual", (0,), visual[1] + 1),
    ]
    assert_each_is_damage(store, chunk, iter(variants), at_least=7)


def test_a_wrong_place_is_told_without_numbers(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    store.put(make_chunk(IMAGE_IDENTITY))
    path = chunk_path(store.path, NAME)
    for name, index, words in (
        ("positions", (1, 1), "it has a position below 0"),
        ("visual", (0,), "its visual tokens are not in ascending order"),
    ):
        path.write_bytes(changed_tensor(name, index, -12345))
        assert verify(store.path).damaged == ((NAME, words),)
        assert store.get(IMAGE_IDENTITY) is None
        assert words in caplog.text
    assert "12345" not in caplog.text


def test_verify_follows_indices_across_blocks(store: DiskStore) -> None:
    """More than a block of positions, and of visual tokens; the wrong one stands in a later block, or at a seam."""
    tokens = 300_000
    identity = make_image_identity("float16", tokens, layout=(tokens - 1, 1, 0, 1))
    identity = replace(identity, model=replace(identity.model, num_layers=1, head_dim=1))
    chunk = make_chunk(identity)
    store.put(chunk)
    assert verify(store.path).sound == 1
    assert same_bits(store.get(identity), chunk)
    path = chunk_path(store.path, key(identity))
    seam = 2**18 * 2 - tokens  # the first visual token of the third block, as positions come first
    for name, place, value in (
        *(("positions", place, -1) for place in (0, 2**18 - 1, 2**18, tokens - 1)),
        *(("visual", place, 0) for place in (1, seam - 1, seam, tokens - 2)),
        ("visual", tokens - 2, tokens),
    ):
        tensors = {key_: tensor.clone() for key_, tensor in tensors_of(chunk).items()}
        tensors[name].view(-1)[place] = value
        path.write_bytes(forged(tensors, identity))
        (_, reason) = verify(store.path).damaged[0]
        assert "digest" not in reason, f"{name} {place}"


def edited(data: bytes, old: bytes, new: bytes) -> bytes:
    """The file with other words in its header, which is padded to its old length, and with a right digest."""
    start = header_bytes(data)
    assert data[:start].count(old) == 1, old
    head = data[8:start].replace(old, new).rstrip(b" ")
    assert len(head) <= start - 8
    return sealed(data[:8] + head.ljust(start - 8) + data[start:])


def test_a_right_digest_is_not_enough(store: DiskStore) -> None:
    chunk = make_chunk(IMAGE_IDENTITY)
    right, fields = tensors_of(chunk), identities.to_fields(IMAGE_IDENTITY)
    other = replace(IMAGE_IDENTITY, inputs="0" * 64)
    text = replace(IMAGE_IDENTITY, inputs="", inputs_layout=())
    text_fields = identities.to_fields(text)
    good = file_bytes(store, chunk)

    def less(name: str) -> dict[str, torch.Tensor]:
        return {key_: tensor for key_, tensor in right.items() if key_ != name}

    variants = [
        forged(tensors_of(make_chunk(other)), other),
        forged(right, IMAGE_IDENTITY, identity=identities.to_fields(other)),
        forged(tensors_of(make_chunk(text)), text),
        *(forged(right, IMAGE_IDENTITY, format_version=version) for version in (1, 0, -2, "2", 2.0, None)),
        forged(right, IMAGE_IDENTITY, identity=text_fields),
        forged(tensors_of(make_chunk(text)), text, format_version=2),
        forged(tensors_of(make_chunk(text)), text, identity={**text_fields, "inputs": "", "inputs_layout": []}),
        forged(
            tensors_of(make_chunk(text)),
            text,
            identity={**text_fields, "inputs": "", "inputs_layout": []},
            format_version=2,
        ),
        *(forged(right, IMAGE_IDENTITY, identity={**fields, "inputs": wrong}) for wrong in ("", "AB" * 32, "x", None)),
        *(
            forged(right, IMAGE_IDENTITY, identity={**fields, "inputs_layout": wrong})
            for wrong in ([], [3, 6, 2], [3, 6, 2, 3, 0], [6, 6, 2, 3], [3, 6, -2, 3], [3.0, 6, 2, 3], "3623", None)
        ),
        *(
            forged(right, IMAGE_IDENTITY, identity={k: v for k, v in fields.items() if k != name})
            for name in ("inputs", "inputs_layout")
        ),
        *(forged(less(name), IMAGE_IDENTITY) for name in right),
        forged({**right, "more": torch.zeros(1)}, IMAGE_IDENTITY),
        *(forged({**right, name: right[name].half()}, IMAGE_IDENTITY) for name in ("embeddings", "layer_rows")),
        *(forged({**right, name: right[name].float()}, IMAGE_IDENTITY) for name in ("positions", "visual")),
        forged({**right, "positions": right["positions"].T.contiguous()}, IMAGE_IDENTITY),
        forged({**right, "positions": right["positions"].long()}, IMAGE_IDENTITY),
        forged({**right, "layer_rows": right["layer_rows"].flatten(0, 1)}, IMAGE_IDENTITY),
        edited(good, b'"data_offsets":[0,72]', b'"data_offsets":[1,72]'),
        edited(good, b'"data_offsets":[536,596]', b'"data_offsets":[536,600]'),
        edited(good, b'"data_offsets":[596,608]', b'"data_offsets":[592,604]'),
        edited(good, b'"visual":{', b'"visuals":{'),
        edited(good, b'"dtype":"I32","shape":[3]', b'"dtype":"U32","shape":[3]'),
        swapped_names(good),
    ]
    assert len(set(variants)) == len(variants)
    assert_each_is_damage(store, chunk, iter(variants), at_least=len(variants))


def swapped_names(data: bytes) -> bytes:
    """Keys called values and values called keys: both of one shape."""
    changed = edited(data, b'"keys":{', b'"kkkk":{')
    changed = edited(changed, b'"values":{', b'"keys":{')
    return edited(changed, b'"kkkk":{', b'"values":{')


def test_a_tensor_without_numbers_is_not_in_the_file(store: DiskStore) -> None:
    """One chunk, one file: the same content with an empty tensor written out is another file, and refused."""
    identity = make_image_identity(layout=(3, 6, 0, 3))
    chunk = make_chunk(identity)
    written = tensors_of(chunk) | {"layer_rows": torch.zeros(0, 3, 6)}
    assert_each_is_damage(store, chunk, iter([forged(written, identity)]), at_least=1)


def test_a_file_of_a_newer_format_is_a_miss_and_stays(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    store.put(make_chunk(IMAGE_IDENTITY))
    path = chunk_path(store.path, NAME)
    right = tensors_of(make_chunk(IMAGE_IDENTITY))
    for data in (
        forged(right, IMAGE_IDENTITY, format_version=3),
        forged({**right, "video": torch.zeros(3000)}, IMAGE_IDENTITY, format_version=3, identity=[]),
    ):
        path.write_bytes(data)
        assert store.get(IMAGE_IDENTITY) is None
        assert path.read_bytes() == data
        assert (verify(store.path).newer, verify(store.path).is_clean) == (1, True)
        (row,) = ls(store.path)
        assert row.problem == "it has format version 3; this release reads up to 2"
        assert row.visual_tokens == 0
    assert "this release reads up to 2" in caplog.text
    assert store.counters == StoreCounters(misses=2, written=1)


@pytest.mark.parametrize("base", [IDENTITY, IMAGE_IDENTITY], ids=["text", "image"])
@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
def test_a_file_of_an_empty_chunk_is_damage(store: DiskStore, base: ChunkIdentity, field: str) -> None:
    """It cannot be stored; yet a file may say that it holds one, and inputs beside it."""
    sizes: dict[str, Any] = {field: 0}
    identity = replace(base, model=replace(base.model, **sizes))
    chunk = make_chunk(identity)
    path = chunk_path(store.path, key(identity))
    path.parent.mkdir()
    path.write_bytes(forged({**tensors_of(chunk), "keys": chunk.keys, "values": chunk.values}, identity))
    assert len(verify(store.path).damaged) == 1
    assert store.get(identity) is None
    assert store.counters == StoreCounters(misses=1, damaged=1)


def test_sizes_that_no_file_has_cost_no_memory(store: DiskStore) -> None:
    """A header that promises exabytes is judged by its numbers alone."""
    huge = replace(IMAGE_IDENTITY, inputs_layout=(5, 2**62, 2**62, 2**62))
    entry: dict[str, Any] = {
        "digest": "0" * 64,
        "format_version": 2,
        "identity": identities.to_fields(huge),
        "key": key(huge),
    }
    data = sealed(save(tensors_of(make_chunk(IMAGE_IDENTITY)), {"infoflow": json.dumps(entry, separators=(",", ":"))}))
    path = chunk_path(store.path, key(huge))
    path.parent.mkdir()
    path.write_bytes(data)
    assert len(verify(store.path).damaged) == 1
    assert store.get(huge) is None
    assert store.counters == StoreCounters(misses=1, damaged=1)

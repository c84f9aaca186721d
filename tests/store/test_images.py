"""Chunks with images: what their layers read beside the token ids is stored, checked and counted like the KV itself."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from store_chunks import (
    IDENTITY,
    IMAGE_IDENTITY,
    INPUT_NAMES,
    counted_chunk,
    header_bytes,
    inputs_of,
    make_chunk,
    make_identity,
    make_image_identity,
    names_in,
    same_bits,
    sample_identities,
    tensors_of,
)

from infoflow_kv.errors import OptionError, StoreError
from infoflow_kv.records import ChunkIdentity, ChunkInputs, ChunkKV
from infoflow_kv.store import ChunkStore, DiskStore, MemoryStore, StoreCounters, key, load_many, ls, stat, verify
from infoflow_kv.store.identity import MOVEMENT
from infoflow_kv.store.layout import chunk_path
from infoflow_kv.store.payload import parts_of

SHAPES = [  # tokens, then visual tokens, hidden, early-layer rows, axes
    pytest.param(1, (1, 1, 0, 1), id="smallest"),
    pytest.param(5, (3, 6, 0, 1), id="no-early-rows"),
    pytest.param(5, (5, 7, 3, 3), id="deepstack"),
    pytest.param(9, (4, 3, 1, 3), id="odd-sizes"),
]


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv")


def file_of(store: DiskStore, identity: ChunkIdentity = IMAGE_IDENTITY) -> Path:
    return chunk_path(store.path, key(identity))


# ---- round trips ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("tokens", "layout"), SHAPES)
def test_a_chunk_comes_back_to_the_bit(
    store: DiskStore, dtype: str, tokens: int, layout: tuple[int, int, int, int]
) -> None:
    """Cold, warm in memory, warm on disk, and on disk after a restart."""
    chunk = make_chunk(make_image_identity(dtype, tokens, layout=layout))
    for place in (MemoryStore(), store):
        assert place.get(chunk.identity) is None
        place.put(chunk)
        assert same_bits(place.get(chunk.identity), chunk)
    again = DiskStore(store.path)
    found = again.get(chunk.identity)
    assert same_bits(found, chunk)
    assert not same_bits(found, make_chunk(chunk.identity, seed=1)), "the comparison can fail"
    assert same_bits(load_many(again, [chunk.identity])[0], chunk)
    assert found is not None
    assert found.num_bytes == chunk.num_bytes
    assert inputs_of(found).layout == layout
    assert inputs_of(found).span == inputs_of(chunk).span
    for name in INPUT_NAMES:
        tensor = getattr(found.inputs, name)
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    assert verify(store.path).sound == 1


@pytest.mark.parametrize("part", INPUT_NAMES)
def test_the_comparison_of_these_tests_sees_every_tensor(part: str) -> None:
    chunk = make_chunk(IMAGE_IDENTITY)
    other = make_chunk(IMAGE_IDENTITY)
    getattr(other.inputs, part).view(-1)[-1] += 1
    assert same_bits(chunk, make_chunk(IMAGE_IDENTITY))
    assert not same_bits(chunk, other)
    assert not same_bits(chunk, replace(chunk, inputs=None))


def test_views_and_shared_tensors_are_stored_as_their_values(store: DiskStore) -> None:
    """Rows of one buffer, as a vision tower gives them, and a transposed table of positions."""
    rows = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(15, dtype=torch.int32).view(5, 3).T
    inputs = ChunkInputs(positions, torch.tensor([0, 9, 3, 9, 4], dtype=torch.int32)[::2], rows[0], rows[1:])
    chunk = replace(make_chunk(IMAGE_IDENTITY), inputs=inputs)
    for place in (store, MemoryStore()):
        place.put(chunk)
        found = place.get(IMAGE_IDENTITY)
        assert same_bits(found, chunk)
        assert inputs_of(found).visual.tolist() == [0, 3, 4]


def test_loading_makes_no_copy(store: DiskStore) -> None:
    """All tensors of a chunk are views of the one buffer that its file was read into."""
    chunk = make_chunk(make_image_identity("bfloat16", 200, layout=(190, 64, 3, 3)))
    store.put(chunk)
    found = store.get(chunk.identity)
    assert found is not None
    tensors = tensors_of(found)
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors.values())
    for (first, num_bytes), (second, _) in itertools.pairwise(places):
        assert first + num_bytes == second
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in tensors.values())


def test_a_chunk_of_format_2_from_an_earlier_release_is_read(tmp_path: Path) -> None:
    """`format_2/` was written once, by `python tests/store/store_chunks.py`, and is never written again."""
    shutil.copytree(Path(__file__).parent / "format_2", tmp_path / "kv")
    store = DiskStore(tmp_path / "kv")
    for identity in sample_identities():
        before = file_of(store, identity).read_bytes()
        assert same_bits(store.get(identity), counted_chunk(identity))
        store.put(counted_chunk(identity))
        assert file_of(store, identity).read_bytes() == before, "this release writes the same bytes"
    assert store.counters == StoreCounters(hits=3, written=3)
    assert json.loads((store.path / "infoflow-store.json").read_text()) == {"format_version": 1}, (
        "an earlier release still opens the store and reads its text"
    )


def test_a_record_of_movement_has_the_digest_of_the_inputs_and_no_inputs(store: DiskStore) -> None:
    first = make_image_identity("float16", layout=(), quantisation=MOVEMENT)
    second = replace(first, inputs="cd" * 32)
    for place in (store, MemoryStore()):
        place.put(make_chunk(first))
        assert same_bits(place.get(first), make_chunk(first))
        assert make_chunk(first).inputs is None
        assert place.get(second) is None
        with pytest.raises(OptionError, match="the chunk has inputs, its identity promises none"):
            place.put(replace(make_chunk(first), inputs=make_chunk(IMAGE_IDENTITY).inputs))


# ---- the file ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("tokens", "layout"), SHAPES)
def test_the_library_reads_our_files_as_we_do(
    store: DiskStore, dtype: str, tokens: int, layout: tuple[int, int, int, int]
) -> None:
    chunk = make_chunk(make_image_identity(dtype, tokens, layout=layout))
    store.put(chunk)
    expected = tensors_of(chunk)
    assert ("layer_rows" in expected) == (layout[2] > 0), "an empty tensor is left out"
    with safe_open(file_of(store, chunk.identity), framework="pt") as file:
        assert sorted(file.keys()) == sorted(expected)
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        header = json.loads(file.metadata()["infoflow"])
    assert header["format_version"] == 2
    assert (header["identity"]["inputs"], header["identity"]["inputs_layout"]) == (chunk.identity.inputs, [*layout])


@settings(max_examples=60)
@given(
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 9),
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 3), st.integers(1, 4)),
)
def test_the_layout_is_the_librarys(dtype: str, tokens: int, layout: tuple[int, int, int, int]) -> None:
    """The rule knows offsets that only the library decides; here the library is asked."""
    identity = make_image_identity(dtype, tokens, layout=(min(layout[0], tokens), *layout[1:]))
    data = save(tensors_of(make_chunk(identity)))
    header = json.loads(data[8 : header_bytes(data)])
    found = [(name, h["dtype"], tuple(h["shape"]), *h["data_offsets"]) for name, h in header.items()]
    parts = parts_of(identity)
    assert [(p.name, p.code, p.shape, p.start, p.stop) for p in parts] == sorted(found, key=lambda row: row[3])
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]


def test_text_is_stored_as_ever(store: DiskStore) -> None:
    """To the bit: the files of format 1 come out of this release again."""
    for dtype in ("float32", "float16", "bfloat16"):
        identity = make_identity(dtype, namespace="sample")
        store.put(counted_chunk(identity))
        old = chunk_path(Path(__file__).parent / "format_1", key(identity))
        assert file_of(store, identity).read_bytes() == old.read_bytes()


# ---- identity ----


def near_identities() -> list[ChunkIdentity]:
    return [
        replace(IMAGE_IDENTITY, inputs="0" * 64),
        replace(IMAGE_IDENTITY, inputs=hashlib.sha256(b"other pixels").hexdigest()),
        *(
            replace(IMAGE_IDENTITY, inputs_layout=layout)
            for layout in [(2, 6, 2, 3), (3, 7, 2, 3), (3, 6, 1, 3), (3, 6, 0, 3), (3, 6, 2, 1)]
        ),
        replace(IMAGE_IDENTITY, inputs="", inputs_layout=()),
        replace(IMAGE_IDENTITY, namespace="tenant"),
    ]


@pytest.mark.parametrize("other", near_identities(), ids=str)
def test_another_identity_misses(store: DiskStore, other: ChunkIdentity) -> None:
    """The same words with other pixels, other sizes, or none."""
    for place in (store, MemoryStore()):
        place.put(make_chunk(IMAGE_IDENTITY))
        assert place.get(other) is None
        assert not place.contains(other)
        place.put(make_chunk(other, seed=1))
        assert same_bits(place.get(IMAGE_IDENTITY), make_chunk(IMAGE_IDENTITY))
        assert same_bits(place.get(other), make_chunk(other, seed=1))
        assert len(list(place.keys())) == 2


def test_files_of_two_pictures_are_not_mixed_up(store: DiskStore) -> None:
    """Same size, same words; one file under the other's name is a miss and is set aside."""
    other = replace(IMAGE_IDENTITY, inputs="0" * 64)
    for identity in (IMAGE_IDENTITY, other):
        store.put(make_chunk(identity))
    assert file_of(store).stat().st_size == file_of(store, other).stat().st_size
    file_of(store).write_bytes(file_of(store, other).read_bytes())
    assert store.get(IMAGE_IDENTITY) is None
    assert same_bits(store.get(other), make_chunk(other))
    assert store.counters.damaged == 1
    assert len(names_in(store.path, "quarantine")) == 1


# ---- what is refused on the way in ----


def put_into(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkKV:
    chunk = make_chunk(IMAGE_IDENTITY)
    changed: Any = {name: change(getattr(chunk.inputs, name).clone())}
    return replace(chunk, inputs=replace(inputs_of(chunk), **changed))


def with_visual(*numbers: int) -> ChunkKV:
    return put_into("visual", lambda _: torch.tensor(numbers, dtype=torch.int32))


def set_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


WRONG_SHAPES = [
    pytest.param(put_into("positions", lambda t: t[:1]), "positions are", id="axes"),
    pytest.param(put_into("positions", lambda t: t[:, :4]), "positions are", id="tokens"),
    pytest.param(put_into("positions", lambda t: t.T), "positions are", id="order"),
    pytest.param(put_into("positions", lambda t: t.long()), "positions are", id="int64"),
    pytest.param(put_into("positions", lambda t: t.float()), "positions are", id="float positions"),
    pytest.param(put_into("visual", lambda t: t[:2]), "visual are", id="fewer visual"),
    pytest.param(put_into("visual", lambda t: t.bool()), "visual are", id="mask"),
    pytest.param(put_into("embeddings", lambda t: t[:2]), "embeddings are", id="fewer rows"),
    pytest.param(put_into("embeddings", lambda t: t.half()), "embeddings are", id="dtype"),
    pytest.param(put_into("embeddings", lambda t: t.requires_grad_()), "embeddings carry a gradient", id="gradient"),
    pytest.param(put_into("layer_rows", lambda t: t[:1]), "layer_rows are", id="fewer layers"),
    pytest.param(put_into("layer_rows", lambda t: t[:0]), "layer_rows are", id="no layers"),
    pytest.param(put_into("layer_rows", lambda t: t.bfloat16()), "layer_rows are", id="rows dtype"),
    pytest.param(replace(make_chunk(IMAGE_IDENTITY), inputs=None), "has no inputs, its identity promises", id="none"),
    pytest.param(
        replace(make_chunk(IDENTITY), inputs=make_chunk(IMAGE_IDENTITY).inputs),
        "has inputs, its identity promises none",
        id="text",
    ),
    pytest.param(put_into("positions", set_last(-1)), "a position below 0", id="negative position"),
    pytest.param(with_visual(-1, 0, 1), "ascending order", id="negative visual"),
    pytest.param(with_visual(0, 2, 2), "ascending order", id="twice"),
    pytest.param(with_visual(0, 3, 2), "ascending order", id="descending"),
    pytest.param(with_visual(0, 3, 5), "behind its last token", id="past the end"),
]
NOT_FINITE = [
    pytest.param(put_into(name, set_last(value)), f"{name} hold NaN or infinity", id=f"{name} {value}")
    for name in ("embeddings", "layer_rows")
    for value in (float("nan"), float("inf"), float("-inf"))
]


@pytest.mark.parametrize(("chunk", "message"), WRONG_SHAPES + NOT_FINITE)
def test_an_unsound_chunk_is_refused(store: DiskStore, chunk: ChunkKV, message: str) -> None:
    error = StoreError if "NaN" in message else OptionError
    for place in (store, MemoryStore()):
        with pytest.raises(error, match=message) as caught:
            place.put(chunk)
        assert "\n" not in str(caught.value)
        assert list(place.keys()) == []
        assert place.counters.write_failures == (error is StoreError)
    assert names_in(store.path, "tmp") == []


def test_the_largest_and_smallest_indices_are_stored(store: DiskStore) -> None:
    chunk = with_visual(0, 1, 4)
    inputs_of(chunk).positions[0, 0] = 2**31 - 1
    inputs_of(chunk).positions[1, 1] = 0
    for place in (store, MemoryStore()):
        place.put(chunk)
        assert same_bits(place.get(IMAGE_IDENTITY), chunk)


@pytest.mark.parametrize("layout", [(), (3, 6, 2), (6, 6, 2, 3), (0, 6, 2, 3)])
def test_an_identity_that_cannot_be_is_refused_everywhere(store: DiskStore, layout: tuple[int, ...]) -> None:
    wrong = replace(IMAGE_IDENTITY, inputs_layout=layout)
    chunk = replace(make_chunk(IMAGE_IDENTITY), identity=wrong)
    for place in (store, MemoryStore()):
        for verb in (place.get, place.contains, lambda _, place=place: place.put(chunk)):
            with pytest.raises(OptionError, match=r"identity\.inputs_layout"):
                verb(wrong)


# ---- sizes, and looking after a store ----


def test_inputs_count_against_the_limits(tmp_path: Path) -> None:
    identities = [make_image_identity(first=n, layout=(5, 2000, 3, 3)) for n in range(4)]
    chunks = [make_chunk(identity) for identity in identities]
    text_bytes = make_chunk(replace(identities[0], inputs="", inputs_layout=())).num_bytes
    assert chunks[0].num_bytes > 100 * text_bytes
    memory = MemoryStore(max_bytes=3 * chunks[0].num_bytes)
    disk = DiskStore(tmp_path / "kv", max_bytes=3 * (chunks[0].num_bytes + 2 * 4096) + 4096)
    stores: list[ChunkStore] = [memory, disk]
    for place in stores:
        for n, chunk in enumerate(chunks):
            place.put(chunk)
            if isinstance(place, DiskStore):
                os.utime(file_of(place, chunk.identity), (1000 + n, 1000 + n))
        assert [place.contains(identity) for identity in identities] == [False, True, True, True]
        assert place.counters.evicted == 1
    small: list[ChunkStore] = [
        MemoryStore(max_bytes=text_bytes + 2000),
        DiskStore(tmp_path / "small", max_bytes=20_000),
    ]
    for place in small:
        with pytest.raises(StoreError, match="bytes, the store's max_bytes is"):
            place.put(chunks[0])
    for _ in range(9):
        memory.put(chunks[1])
        assert memory.delete(key(chunks[1].identity))
    memory.put(chunks[1])
    assert memory.counters.evicted == 1, "bytes are given back as they were taken"


def test_ls_and_stat_tell_images(store: DiskStore) -> None:
    text = replace(IMAGE_IDENTITY, inputs="", inputs_layout=())
    for identity in (IMAGE_IDENTITY, text, make_image_identity(layout=(), quantisation=MOVEMENT)):
        store.put(make_chunk(identity))
    rows = {row.key: row for row in ls(store.path)}
    assert sorted(row.visual_tokens for row in rows.values()) == [0, 0, 3]
    assert rows[key(IMAGE_IDENTITY)].visual_tokens == 3
    assert rows[key(IMAGE_IDENTITY)].num_bytes == file_of(store).stat().st_size
    assert (
        rows[key(IMAGE_IDENTITY)].num_bytes - rows[key(text)].num_bytes
        > inputs_of(make_chunk(IMAGE_IDENTITY)).num_bytes
    )
    found = stat(store.path)
    assert (found.chunks, found.tokens) == (3, 15)
    assert found.num_bytes == sum(row.num_bytes for row in rows.values())

"""The disk store: what goes in comes out, to the bit; what it opens, refuses, counts and evicts."""

import json
import logging
import os
import stat
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from store_chunks import (
    IDENTITY,
    MODEL,
    files_under,
    folder_for_nobody,
    header_bytes,
    make_chunk,
    make_identity,
    names_in,
    same_bits,
    without_root,
)

from infoflow_kv.errors import OptionError, StoreError
from infoflow_kv.records import ChunkIdentity, ChunkKV, ModelIdentity
from infoflow_kv.store import ChunkStore, DiskStore, MemoryStore, StoreCounters, key
from infoflow_kv.store import identity as identities
from infoflow_kv.store.layout import MARKER, chunk_path


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv")


def file_of(store: DiskStore, identity: ChunkIdentity = IDENTITY) -> Path:
    return chunk_path(store.path, key(identity))


# ---- round trips ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_a_chunk_comes_back_to_the_bit(store: DiskStore, dtype: str, tokens: int) -> None:
    chunk = make_chunk(make_identity(dtype, tokens))
    store.put(chunk)
    found = DiskStore(store.path).get(chunk.identity)
    assert same_bits(found, chunk)
    assert not same_bits(found, make_chunk(chunk.identity, seed=1)), "the comparison can fail"
    assert found is not None
    assert (found.num_tokens, found.num_bytes) == (tokens, chunk.num_bytes)
    assert found.keys.is_contiguous()
    assert not found.keys.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_extreme_numbers_come_back_to_the_bit(store: DiskStore, dtype: str) -> None:
    info = torch.finfo(getattr(torch, dtype))
    numbers = [0.0, -0.0, info.max, info.min, info.tiny, info.smallest_normal / 4, info.eps, -1.0]
    identity = make_identity(dtype, tokens=1)
    keys = torch.tensor(numbers, dtype=getattr(torch, dtype)).view(2, 1, 1, 4)
    chunk = ChunkKV(identity, keys, -keys)
    store.put(chunk)
    assert same_bits(store.get(identity), chunk)


def test_views_and_strided_and_shared_tensors_are_stored_as_their_values(store: DiskStore) -> None:
    model = replace(MODEL, num_layers=2, num_kv_heads=3, head_dim=4)
    identity = replace(IDENTITY, model=model, token_ids=(7, 8, 9, 10, 11))
    buffer = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(1))
    strided = torch.randn(5, 3, 2, 4, generator=torch.Generator().manual_seed(2)).permute(2, 1, 0, 3)
    for keys, values in [(buffer[:, :, 2:7], strided), (buffer[:, :, :5], buffer[:, :, 4:]), (strided, strided)]:
        store.put(ChunkKV(identity, keys, values))
        found = store.get(identity)
        assert same_bits(found, ChunkKV(identity, keys.clone(), values.clone()))
    with torch.inference_mode():
        keys = buffer[:, :, 1:6] * 2
        store.put(ChunkKV(identity, keys, keys))
        found = store.get(identity)
    assert same_bits(found, ChunkKV(identity, keys, keys))


def test_a_long_chunk_and_a_long_namespace_come_back(store: DiskStore) -> None:
    """D09: what can be written can be read; more than one read block, a header of more than a megabyte."""
    long = make_chunk(make_identity(tokens=40_000))
    store.put(long)
    assert same_bits(store.get(long.identity), long)
    named = make_chunk(make_identity(namespace='"digest":"\\é\n' * 100_000))
    store.put(named)
    assert same_bits(store.get(named.identity), named)
    too_long = make_chunk(make_identity(namespace="x" * 17 * 2**20))
    with pytest.raises(StoreError, match="header"):
        store.put(too_long)
    assert store.get(too_long.identity) is None
    assert len(list(store.keys())) == 2


def test_the_library_reads_our_files_as_we_do(store: DiskStore) -> None:
    chunk = make_chunk(make_identity("bfloat16", 9))
    store.put(chunk)
    with safe_open(file_of(store, chunk.identity), framework="pt") as file:
        assert sorted(file.keys()) == ["keys", "values"]
        assert same_bits(ChunkKV(chunk.identity, file.get_tensor("keys"), file.get_tensor("values")), chunk)
        (entry,) = file.metadata().items()
    assert entry[0] == "infoflow"
    header = json.loads(entry[1])
    assert sorted(header) == ["digest", "format_version", "identity", "key"]
    assert identities.from_fields(header["identity"]) == chunk.identity
    assert header["key"] == key(chunk.identity)


def test_a_library_that_writes_otherwise_is_noticed(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should safetensors ever order its header differently, nothing is stored rather than something unreadable."""
    import safetensors.torch

    real = safetensors.torch.save

    def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
        data = real(tensors, metadata)
        start = header_bytes(data)
        header = json.loads(data[8:start])
        moved = json.dumps(header | {"__metadata__": header.pop("__metadata__")}, separators=(",", ":")).encode()
        return data[:8] + moved.ljust(start - 8) + data[start:]

    monkeypatch.setattr(safetensors.torch, "save", save)
    with pytest.raises(StoreError, match="does not begin like a chunk file"):
        store.put(make_chunk())
    assert not store.contains(IDENTITY)
    assert store.counters == StoreCounters(write_failures=1)


def test_equal_chunks_are_equal_files(store: DiskStore, tmp_path: Path) -> None:
    other = DiskStore(tmp_path / "other")
    for place in (store, other):
        place.put(make_chunk())
    assert file_of(store).read_bytes() == file_of(other).read_bytes()


def test_a_chunk_of_format_1_from_an_earlier_release_is_read(tmp_path: Path) -> None:
    """Row 15: `format_1/` was written once by the first release and is never written again."""
    import shutil

    shutil.copytree(Path(__file__).parent / "format_1", tmp_path / "kv")
    store = DiskStore(tmp_path / "kv")
    for dtype in ("float32", "float16", "bfloat16"):
        identity = make_identity(dtype, namespace="sample")
        found = store.get(identity)
        assert found is not None
        numbers = torch.arange(48, dtype=getattr(torch, dtype)).view(2, 2, 1, 3, 4)
        assert same_bits(found, ChunkKV(identity, numbers[0].clone(), numbers[1].clone()))
    assert store.counters == StoreCounters(hits=3)


# ---- identity: any other field is a miss ----


def other_identities() -> list[ChunkIdentity]:
    changed: list[ChunkIdentity] = []
    for field in fields(ModelIdentity):
        value: Any = getattr(MODEL, field.name)
        changed.append(
            replace(IDENTITY, model=replace(MODEL, **{field.name: value + (1 if field.type is int else "x")}))
        )
    changed.append(replace(IDENTITY, model=replace(MODEL, dtype="bfloat16")))
    changed.append(replace(IDENTITY, model=replace(MODEL, dtype="float16")))
    for field in fields(ChunkIdentity):
        if field.name not in ("model", "inputs", "inputs_layout"):  # those of images: test_images.py
            value = getattr(IDENTITY, field.name)
            changed.append(replace(IDENTITY, **{field.name: value + ((1,) if isinstance(value, tuple) else "x")}))
    changed.append(replace(IDENTITY, inputs="0" * 64, inputs_layout=(1, 1, 0, 1)))
    changed.append(replace(IDENTITY, head_ids=(), token_ids=IDENTITY.head_ids + IDENTITY.token_ids))
    changed.append(replace(IDENTITY, token_ids=IDENTITY.token_ids[::-1]))
    return changed


@pytest.mark.parametrize("other", other_identities(), ids=str)
def test_another_identity_misses(store: DiskStore, other: ChunkIdentity) -> None:
    """K01, K02, rows 23 to 26."""
    memory = MemoryStore()
    for place in (store, memory):
        place.put(make_chunk())
        assert place.get(other) is None
        assert not place.contains(other)
        assert same_bits(place.get(IDENTITY), make_chunk())
        assert place.counters == StoreCounters(hits=1, misses=1, written=1)


def test_a_key_that_collides_gives_no_wrong_answer(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """K11, row 28: the whole identity is compared, not the key alone."""
    monkeypatch.setattr(identities, "key", lambda identity: "a" * 64)
    memory = MemoryStore()
    for place in (store, memory):
        first, second = make_chunk(), make_chunk(make_identity(first=9), seed=1)
        place.put(first)
        assert same_bits(place.get(first.identity), first)
        assert place.get(second.identity) is None
        place.put(second)
        assert place.get(first.identity) is None
        assert place.counters.damaged == 2
        longer = make_chunk(make_identity(tokens=90))
        place.put(first)
        assert place.get(longer.identity) is None
        assert place.counters.damaged == 3


def test_a_broken_identity_is_refused_everywhere(store: DiskStore) -> None:
    """K14."""
    wrong: Any = replace(IDENTITY, namespace=None)  # type: ignore[arg-type]
    for place in (store, MemoryStore()):
        for verb in (place.get, place.contains, lambda i, place=place: place.put(replace(make_chunk(), identity=i))):
            with pytest.raises(OptionError, match=r"identity\.namespace must be a str, given NoneType"):
                verb(wrong)


# ---- what is refused on the way in ----


def wrong_chunks() -> list[Any]:
    good = make_chunk()
    return [
        pytest.param(replace(good, keys=good.keys[:, :, :2]), OptionError, "keys are", id="short"),
        pytest.param(replace(good, values=good.values.half()), OptionError, "values are", id="dtype"),
        pytest.param(replace(good, keys=good.keys.permute(0, 1, 3, 2)), OptionError, "keys are", id="order"),
        pytest.param(replace(good, keys=good.keys.clone().requires_grad_()), OptionError, "gradient", id="grad"),
        pytest.param(replace(good, values=good.values / 0), StoreError, "values hold NaN", id="inf"),
        pytest.param(replace(good, keys=good.keys * float("nan")), StoreError, "keys hold NaN", id="nan"),
        pytest.param(make_chunk(make_identity(tokens=0)), OptionError, "empty", id="no tokens"),
        pytest.param(
            replace(good, identity=replace(IDENTITY, model=replace(MODEL, num_layers=0))),
            OptionError,
            "empty",
            id="layers",
        ),
        pytest.param(
            replace(good, identity=replace(IDENTITY, quantisation="int8")), StoreError, "not stored", id="quantised"
        ),
        pytest.param(make_chunk(make_identity("float64")), StoreError, "not stored", id="float64"),
    ]


@pytest.mark.parametrize(("chunk", "error", "message"), wrong_chunks())
def test_an_unsound_chunk_is_refused(store: DiskStore, chunk: ChunkKV, error: type[Exception], message: str) -> None:
    for place in (store, MemoryStore()):
        with pytest.raises(error, match=message) as caught:
            place.put(chunk)
        assert "\n" not in str(caught.value)
        assert list(place.keys()) == []
        assert place.get(chunk.identity) is None
        assert place.counters.write_failures == (error is StoreError)
    assert names_in(store.path, "tmp") == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_number_anywhere_is_found(dtype: str, bad: float) -> None:
    """`aminmax` must see it in vector lanes and in the tail alike."""
    identity = make_identity(dtype, tokens=9)
    for place in range(2 * 9 * 4):
        chunk = make_chunk(identity)
        chunk.values.view(-1)[place] = bad
        with pytest.raises(StoreError, match="values hold NaN or infinity"):
            MemoryStore().put(chunk)


@pytest.mark.parametrize("wrong", ["../" + "a" * 61, "A" * 64, "", "a" * 64 + "\n"])
def test_delete_takes_keys_only(store: DiskStore, wrong: str) -> None:
    before = files_under(store.path)
    for place in (store, MemoryStore()):
        with pytest.raises(OptionError, match="not a chunk key"):
            place.delete(wrong)
    assert files_under(store.path) == before


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "1"])
def test_a_limit_is_a_positive_whole_number(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(OptionError, match="max_bytes"):
        DiskStore(tmp_path / "kv", max_bytes=wrong)
    with pytest.raises(OptionError, match="max_bytes"):
        MemoryStore(max_bytes=wrong)
    assert not (tmp_path / "kv").exists()


# ---- the five verbs and the counters ----


def test_verbs_and_counters(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    chunks = [make_chunk(make_identity(first=n), seed=n) for n in range(5)]
    for chunk in chunks:
        assert not store.contains(chunk.identity)
        assert store.get(chunk.identity) is None
        store.put(chunk)
        assert store.contains(chunk.identity)
        assert same_bits(store.get(chunk.identity), chunk)
    assert list(store.keys()) == sorted(key(chunk.identity) for chunk in chunks)
    assert store.counters == StoreCounters(hits=5, misses=5, written=5)
    gone = key(chunks[2].identity)
    assert store.delete(gone)
    assert not store.delete(gone)
    assert gone not in list(store.keys())
    assert not store.contains(chunks[2].identity)
    assert store.get(chunks[2].identity) is None
    assert store.counters == StoreCounters(hits=5, misses=6, written=5)
    assert caplog.text == "", "an ordinary miss is no news"


def test_contains_opens_nothing(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(make_chunk())
    monkeypatch.setattr(os, "open", lambda *a, **k: pytest.fail("opened a file"))
    assert store.contains(IDENTITY)
    assert list(store.keys()) == [key(IDENTITY)]


def test_counters_are_a_snapshot(store: DiskStore) -> None:
    before = store.counters
    store.put(make_chunk())
    assert before == StoreCounters()


def test_a_chunk_is_replaced_by_its_equal(store: DiskStore) -> None:
    store.put(make_chunk())
    store.put(make_chunk(seed=1))
    assert same_bits(store.get(IDENTITY), make_chunk(seed=1))
    assert len(list(store.keys())) == 1


def test_a_restarted_store_knows_everything(store: DiskStore) -> None:
    """D06: the files are the index."""
    chunks = [make_chunk(make_identity(first=n), seed=n) for n in range(60)]
    for chunk in chunks:
        store.put(chunk)
    again = DiskStore(store.path)
    assert all(same_bits(again.get(chunk.identity), chunk) for chunk in chunks)
    assert again.counters == StoreCounters(hits=60)


def test_deleted_means_every_copy(store: DiskStore) -> None:
    """Row 22: the bytes are the document in another form."""
    store.put(make_chunk())
    name = key(IDENTITY)
    canary = make_chunk().keys.numpy().tobytes()[:16]
    data = bytearray(file_of(store).read_bytes())
    data[-1] ^= 1
    file_of(store).write_bytes(data)
    assert store.get(IDENTITY) is None
    store.put(make_chunk())
    (store.path / "tmp" / f"{name}.dead").write_bytes(canary)
    assert sum(canary in p.read_bytes() for p in store.path.rglob("*") if p.is_file()) == 3
    assert store.delete(name)
    assert sum(canary in p.read_bytes() for p in store.path.rglob("*") if p.is_file()) == 0
    assert not store.delete(name)


def test_reading_needs_nothing_of_the_file_afterwards(store: DiskStore) -> None:
    """Row 12: eviction, or even a cut in place, during use; a mapped file would end the process here."""
    store.put(make_chunk())
    found = store.get(IDENTITY)
    os.truncate(file_of(store), 0)
    file_of(store).unlink()
    assert same_bits(found, make_chunk())


# ---- opening ----


def test_folders_and_files_are_private_under_any_umask(tmp_path: Path) -> None:
    """Row 9."""
    for umask in (0o000, 0o022, 0o077):
        old = os.umask(umask)
        try:
            store = DiskStore(tmp_path / f"{umask:o}" / "kv")
            store.put(make_chunk())
            file_of(store).write_bytes(b"x")
            store.get(IDENTITY)
            store.put(make_chunk())
        finally:
            os.umask(old)
        modes = {stat.S_IMODE(p.lstat().st_mode) for p in [store.path, *store.path.rglob("*")] if p.is_dir()}
        assert modes == {0o700}
        modes = {stat.S_IMODE(p.lstat().st_mode) for p in store.path.rglob("*") if p.is_file()}
        assert modes == {0o600}


def test_opening_makes_the_marker_and_nothing_else(tmp_path: Path) -> None:
    for path in (tmp_path / "new" / "deep" / "kv", tmp_path / "empty"):
        if path.name == "empty":
            path.mkdir()
        store = DiskStore(str(path))
        assert list(files_under(store.path)) == [MARKER]
        assert json.loads((path / MARKER).read_text()) == {"format_version": 1}
        before = files_under(store.path)
        DiskStore(path)
        assert files_under(store.path) == before


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = DiskStore("kv")
    monkeypatch.chdir("/")
    store.put(make_chunk())
    assert file_of(DiskStore(tmp_path / "kv")).exists()


def test_a_store_behind_a_link_is_opened(tmp_path: Path) -> None:
    DiskStore(tmp_path / "real").put(make_chunk())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = DiskStore(tmp_path / "link")
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert list(store.keys()) == [key(IDENTITY)]


def test_another_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = files_under(tmp_path)
    with pytest.raises(StoreError, match="is not an InfoFlow KV store") as caught:
        DiskStore(tmp_path)
    assert "\n" not in str(caught.value)
    assert files_under(tmp_path) == before


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("x")
    with pytest.raises(StoreError, match="is not a folder"):
        DiskStore(tmp_path / "kv")
    with pytest.raises(StoreError, match="cannot make the folder"):
        DiskStore(tmp_path / "kv" / "deeper")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError):
        DiskStore(tmp_path / "dangling")


def test_a_newer_store_is_refused_with_both_versions(store: DiskStore) -> None:
    """Row 15."""
    (store.path / MARKER).write_text('{"format_version": 2, "anything": []}')
    before = files_under(store.path)
    with pytest.raises(StoreError, match="has format version 2, this release reads up to 1"):
        DiskStore(store.path)
    with pytest.raises(StoreError, match="has format version 2"):
        store.put(make_chunk())
    assert files_under(store.path) == before


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format_version": "1"}', '{"format_version": 0}', "\0" * 20]
)
def test_a_garbled_marker_is_refused_with_advice(store: DiskStore, content: str) -> None:
    (store.path / MARKER).write_text(content)
    with pytest.raises(StoreError, match=r"if this is a store of format 1, write"):
        DiskStore(store.path)


def test_a_crash_before_the_marker_does_not_lock_the_folder(tmp_path: Path) -> None:
    (tmp_path / f"{MARKER}.0123456789abcdef").write_text("{")
    store = DiskStore(tmp_path)
    store.put(make_chunk())
    assert same_bits(store.get(IDENTITY), make_chunk())


def test_two_that_begin_one_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process finishes between our look at the marker and our look at the folder."""
    from infoflow_kv.store import layout

    really_empty = layout.is_empty

    def late(root: Path) -> bool:
        monkeypatch.setattr(layout, "is_empty", really_empty)
        DiskStore(root).put(make_chunk())
        return really_empty(root)

    monkeypatch.setattr(layout, "is_empty", late)
    assert same_bits(DiskStore(tmp_path / "kv").get(IDENTITY), make_chunk())


def test_leftovers_go_after_an_hour_unless_their_writer_lives(store: DiskStore) -> None:
    """Row 17."""
    import fcntl

    store.put(make_chunk())
    now = time.time()
    ages = {"old": 3700, "young": 3500, "future": -10_000, "live": 7200}
    for name, age in ages.items():
        path = store.path / "tmp" / f"{'a' * 64}.{name}"
        path.write_bytes(b"half")
        os.utime(path, (now - age, now - age))
    (store.path / f"{MARKER}.0123").write_bytes(b"")
    os.utime(store.path / f"{MARKER}.0123", (now - 7200, now - 7200))
    (store.path / "tmp" / "fifo").mkdir()
    with (store.path / "tmp" / f"{'a' * 64}.live").open("rb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        DiskStore(store.path)
        assert names_in(store.path, "tmp") == sorted(
            [*(f"{'a' * 64}.{n}" for n in ("future", "live", "young")), "fifo"]
        )
    DiskStore(store.path)
    assert f"{'a' * 64}.live" not in names_in(store.path, "tmp")
    assert not (store.path / f"{MARKER}.0123").exists()
    assert same_bits(store.get(IDENTITY), make_chunk())


def test_a_writer_holds_its_temporary_file(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow it is, another process that starts meanwhile leaves its file alone."""
    real = os.fsync
    seen: list[list[str]] = []

    def slow(fd: int) -> None:
        for path in (store.path / "tmp").iterdir():
            os.utime(path, (0, 0))
        DiskStore(store.path)
        seen.append(names_in(store.path, "tmp"))
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    store.put(make_chunk())
    assert len(seen[0]) == 1
    assert same_bits(store.get(IDENTITY), make_chunk())


# ---- a store that cannot be written ----


def test_a_read_only_store_serves_and_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """Row 8, for an ordinary user: permission bits do not bind root."""
    with folder_for_nobody() as folder:
        sound, damaged = make_chunk(), make_chunk(make_identity(first=50))
        (folder / "kv").mkdir(mode=0o777)
        (folder / "kv").chmod(0o777)
        with without_root():
            writer = DiskStore(folder / "kv")
            writer.put(sound)
            writer.put(damaged)
            file_of(writer, damaged.identity).write_bytes(b"x")
            leftover = writer.path / "tmp" / "leftover"
            leftover.write_bytes(b"x")
            os.utime(leftover, (0, 0))
        for path in (folder / "kv").rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        (folder / "kv").chmod(0o555)
        with without_root():
            before = files_under(folder)
            store = DiskStore(folder / "kv", max_bytes=10**6)
            assert same_bits(store.get(sound.identity), sound)
            assert store.get(damaged.identity) is None
            with pytest.raises(StoreError, match="is not writable") as caught:
                store.put(make_chunk(make_identity(first=90)))
            assert "\n" not in str(caught.value)
            with pytest.raises(StoreError, match=r"cannot delete chunk .* is not writable"):
                store.delete(key(sound.identity))
            assert files_under(folder) == before
            assert store.counters == StoreCounters(hits=1, misses=1, damaged=1, write_failures=1)
        assert "left in place" in caplog.text


def test_a_store_whose_folder_alone_is_closed_is_left_as_it_was() -> None:
    """`chmod a-w kv` leaves the folders inside open: nothing is cleaned, set aside or marked as used all the same."""
    with folder_for_nobody() as folder:
        (folder / "kv").mkdir()
        (folder / "kv").chmod(0o777)
        with without_root():
            writer = DiskStore(folder / "kv")
            damaged = make_identity(first=50)
            writer.put(make_chunk())
            writer.put(make_chunk(damaged))
            file_of(writer, damaged).write_bytes(b"x")
            writer.get(damaged)
            writer.put(make_chunk(damaged))
            file_of(writer, damaged).write_bytes(b"x")
            (writer.path / "tmp" / "leftover").write_bytes(b"x")
            os.utime(writer.path / "tmp" / "leftover", (0, 0))
        (folder / "kv").chmod(0o555)
        with without_root():
            before = files_under(folder)
            store = DiskStore(folder / "kv")
            assert same_bits(store.get(IDENTITY), make_chunk())
            assert store.get(damaged) is None
            assert files_under(folder) == before


def test_an_empty_read_only_folder_is_a_store_without_chunks() -> None:
    with folder_for_nobody() as folder, without_root():
        if os.geteuid() == folder.stat().st_uid:
            folder.chmod(0o555)
        store = DiskStore(folder)
        assert store.get(IDENTITY) is None
        assert list(store.keys()) == []
        with pytest.raises(StoreError, match="is not writable"):
            store.put(make_chunk())
        with pytest.raises(StoreError, match=r"cannot make the folder.*not writable"):
            DiskStore(folder / "deeper")
        assert files_under(folder) == {}


def test_a_file_that_may_not_be_read_is_a_miss_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Row 9: the bytes are not judged, so they are not set aside."""
    with folder_for_nobody() as folder:
        (folder / "kv").mkdir()
        (folder / "kv").chmod(0o777)
        with without_root():
            store = DiskStore(folder / "kv")
            store.put(make_chunk())
            file_of(store).chmod(0)
            assert store.get(IDENTITY) is None
            assert store.counters == StoreCounters(misses=1, read_failures=1, written=1)
            assert "Permission denied" in caplog.text
            file_of(store).chmod(0o600)
            assert same_bits(store.get(IDENTITY), make_chunk())


def test_a_marker_that_may_not_be_read_is_an_error() -> None:
    """Never guessed: the store may be of a newer format."""
    with folder_for_nobody() as folder:
        (folder / "kv").mkdir()
        (folder / "kv").chmod(0o777)
        with without_root():
            DiskStore(folder / "kv")
            (folder / "kv" / MARKER).chmod(0)
            with pytest.raises(StoreError, match=r"cannot open: .*Permission denied"):
                DiskStore(folder / "kv")


def test_a_folder_that_vanishes_or_is_replaced_is_a_miss(store: DiskStore, tmp_path: Path) -> None:
    """Row 13: the service goes on; the loss is reported by `put`, not repaired behind the user's back."""
    store.put(make_chunk())
    store.path.rename(tmp_path / "away")
    assert store.get(IDENTITY) is None
    assert not store.contains(IDENTITY)
    assert list(store.keys()) == []
    assert not store.delete(key(IDENTITY))
    with pytest.raises(StoreError, match="No such file or directory"):
        store.put(make_chunk())
    assert not store.path.exists()
    store.path.mkdir()
    (store.path / "other").write_text("mine")
    with pytest.raises(StoreError, match="is not an InfoFlow KV store"):
        store.put(make_chunk())
    (store.path / "other").unlink()
    store.put(make_chunk())
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert same_bits(DiskStore(store.path).get(IDENTITY), make_chunk())


# ---- the limit ----


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    chunks = [make_chunk(make_identity(tokens=200, first=n)) for n in range(6)]
    measure = DiskStore(tmp_path / "measure")
    measure.put(chunks[0])
    one = max(file_of(measure, chunks[0].identity).stat().st_size, 0) + 4096
    store = DiskStore(tmp_path / "kv", max_bytes=4 * one + 4096)
    for n, chunk in enumerate(chunks[:4]):
        store.put(chunk)
        os.utime(file_of(store, chunk.identity), (1000 + n, 1000 + n))
    assert store.get(chunks[0].identity) is not None, "now the most recently used"
    assert store.contains(chunks[1].identity), "a look is no use"
    store.put(chunks[4])
    store.put(chunks[5])
    present = [n for n, chunk in enumerate(chunks) if store.contains(chunk.identity)]
    assert present == [0, 3, 4, 5] or present == [0, 2, 3, 4, 5]
    assert 1 not in present
    assert store.counters.evicted == 6 - len(present)


def disk_usage(root: Path) -> int:
    return sum(max(p.lstat().st_size, p.lstat().st_blocks * 512) for p in root.rglob("*") if p.is_file())


def test_the_limit_counts_everything_and_holds_after_a_restart(tmp_path: Path) -> None:
    """D07: old files, temporary ones and other writers' too; checked whenever anything is written."""
    limit = 200_000
    peak = 0
    real = os.fsync

    def watch(fd: int) -> None:
        nonlocal peak
        peak = max(peak, disk_usage(tmp_path / "kv"))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", watch)
        for start in range(0, 60, 20):
            store = DiskStore(tmp_path / "kv", max_bytes=limit)
            for n in range(start, start + 20):
                store.put(make_chunk(make_identity(tokens=150, first=n)))
                assert store.contains(make_identity(tokens=150, first=n))
    assert 0.6 * limit < peak <= limit
    (store.path / "tmp" / "of-another-process").write_bytes(bytes(100_000))
    store.put(make_chunk(make_identity(tokens=150, first=500)))
    assert disk_usage(store.path) <= limit
    assert (store.path / "tmp" / "of-another-process").exists(), "a file being written is nobody else's to remove"
    (store.path / "tmp" / "of-another-process").write_bytes(bytes(190_000))
    before = files_under(store.path)
    with pytest.raises(StoreError, match="cannot stay within max_bytes=200000"):
        store.put(make_chunk(make_identity(tokens=150, first=501)))
    kept = {name for name in before if name.endswith(".safetensors")}
    assert {n for n in files_under(store.path) if n.endswith(".safetensors")} == kept, "nothing is evicted in vain"


def test_a_chunk_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", max_bytes=20_000)
    store.put(make_chunk())
    with pytest.raises(StoreError, match="bytes, the store's max_bytes is 20000"):
        store.put(make_chunk(make_identity(tokens=400)))
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert store.counters == StoreCounters(hits=1, written=1, write_failures=1)
    assert names_in(store.path, "tmp") == []


def test_quarantined_files_are_the_first_to_go(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", max_bytes=30_000)
    store.put(make_chunk())
    for n in range(3):
        store.put(make_chunk(make_identity(first=100 + n)))
        file_of(store, make_identity(first=100 + n)).write_bytes(bytes(5000))
        assert store.get(make_identity(first=100 + n)) is None
    assert len(names_in(store.path, "quarantine")) == 3
    os.utime(file_of(store), (0, 0))
    store.put(make_chunk(make_identity(tokens=20)))
    assert len(names_in(store.path, "quarantine")) < 3
    assert store.contains(IDENTITY)
    assert store.counters.evicted == 0


def test_two_that_evict_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another process evicted first is room all the same, but not counted as ours."""
    store = DiskStore(tmp_path / "kv", max_bytes=4 * 4096)
    for n in range(3):
        store.put(make_chunk(make_identity(first=n)))
    real = os.unlink

    def unlink(path: Any) -> None:
        real(path)
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    store.put(make_chunk(make_identity(first=3)))
    assert len(list(store.keys())) == 3
    assert store.counters == StoreCounters(written=4)


def test_threads_share_a_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D03, L06: reads, writes, eviction and deletion at once; whatever is read is right."""
    caplog.set_level(logging.WARNING)
    chunks = [make_chunk(make_identity(tokens=30, first=n), seed=n) for n in range(12)]
    stores: list[ChunkStore] = [
        DiskStore(tmp_path / "kv", max_bytes=5 * 4096),  # each file takes one block
        MemoryStore(max_bytes=5 * chunks[0].num_bytes),
    ]
    wrong: list[str] = []

    def work(store: ChunkStore, seed: int) -> None:
        for n in range(60):
            chunk = chunks[(n * 7 + seed * 5) % 12]
            found = store.get(chunk.identity)
            if found is None:
                store.put(chunk)
            elif not same_bits(found, chunk):
                wrong.append(key(chunk.identity))
            if n % 13 == seed:
                store.delete(key(chunk.identity))

    for store in stores:
        threads = [threading.Thread(target=work, args=(store, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        counters = store.counters
        assert counters.hits + counters.misses == 240
        assert counters.written == counters.misses
        assert counters.damaged == counters.write_failures == counters.read_failures == 0
        assert counters.evicted > 0
    assert caplog.text == ""
    assert names_in(tmp_path / "kv", "tmp") == []


def test_a_cleaner_between_making_and_locking_a_temporary_file(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`delete` takes leftovers of any age, and a new file is not locked at once: the writer begins again."""
    real = os.open
    cleaned: list[bool] = []

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        fd = real(path, flags, *args, **options)
        if flags & os.O_CREAT and len(cleaned) < 3:
            cleaned.append(store.delete(key(IDENTITY)))
        return fd

    monkeypatch.setattr(os, "open", opened)
    store.put(make_chunk())
    assert cleaned == [True] * 3
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert names_in(store.path, "tmp") == []

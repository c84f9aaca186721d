"""Looking after a store without its model."""

import errno
import importlib
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from store_chunks import files_under, header_bytes, make_chunk, make_identity, names_in, same_bits

from infoflow_kv.errors import OptionError, StoreError
from infoflow_kv.store import ChunkRecord, DiskStore, ModelStat, VerifyReport, key, ls, stat, verify
from infoflow_kv.store.format import DamagedChunkError, parse_header
from infoflow_kv.store.layout import MARKER, chunk_path


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = DiskStore(tmp_path / "kv")
    for n in range(10):
        store.put(make_chunk(make_identity(first=10 + n, tokens=3 + n)))
    return store


def path_of(store: DiskStore, n: int) -> Path:
    return chunk_path(store.path, key(make_identity(first=10 + n, tokens=3 + n)))


def damage(store: DiskStore, n: int, byte: int = -1) -> str:
    data = bytearray(path_of(store, n).read_bytes())
    data[byte] ^= 1
    path_of(store, n).write_bytes(data)
    return path_of(store, n).stem


def test_a_sound_store_is_clean(store: DiskStore) -> None:
    before = files_under(store.path)
    assert verify(store.path) == VerifyReport(10, 10, 10, (), (), 0, 0)
    assert verify(str(store.path)).is_clean
    assert files_under(store.path) == before


def test_damage_is_named_with_its_reason_and_left_alone(store: DiskStore) -> None:
    digest = damage(store, 1)
    header = damage(store, 2, byte=200)
    path_of(store, 3).write_bytes(b"")
    wrong_name = path_of(store, 4).stem
    path_of(store, 4).write_bytes(path_of(store, 5).read_bytes())
    before = files_under(store.path)
    report = verify(store.path)
    assert dict(report.damaged).keys() == {digest, header, path_of(store, 3).stem, wrong_name}
    reasons = dict(report.damaged)
    assert reasons[digest] == "its digest does not match its bytes"
    assert reasons[path_of(store, 3).stem] == "it has only 0 bytes"
    assert reasons[wrong_name] == "it holds another chunk than the one its name stands for"
    assert (report.checked, report.sound, report.quarantined, report.is_clean) == (10, 6, 0, False)
    assert files_under(store.path) == before


def test_quarantine_is_asked_for(store: DiskStore) -> None:
    damage(store, 1)
    damage(store, 7)
    report = verify(store.path, quarantine=True)
    assert (len(report.damaged), report.quarantined, report.sound) == (2, 2, 8)
    assert len(names_in(store.path, "quarantine")) == 2
    assert verify(store.path) == VerifyReport(8, 8, 8, (), (), 0, 0)
    (store.path / "quarantine").rename(store.path / "q")
    (store.path / "quarantine").write_bytes(b"in the way")
    damage(store, 2)
    with pytest.raises(StoreError, match="cannot quarantine chunk"):
        verify(store.path, quarantine=True)


def test_verify_finds_every_flip_that_get_finds(store: DiskStore) -> None:
    path = path_of(store, 0)
    for n in range(1, 10):
        path_of(store, n).unlink()
    data = path.read_bytes()
    bits = sorted(random.Random(0).sample(range(len(data) * 8), 300))
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert len(verify(store.path).damaged) == 1, f"bit {bit}"


def test_a_file_of_several_blocks_is_read_through(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv")
    chunk = make_chunk(make_identity(tokens=40_000))
    store.put(chunk)
    assert verify(store.path).sound == 1
    path = chunk_path(store.path, key(chunk.identity))
    data = path.read_bytes()
    start = header_bytes(data)
    assert len(data) > 2 * 2**20
    for place in (start, start + 2**20, start + 2**20 - 1, 2**20, 2**20 - 1, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 128
        path.write_bytes(changed)
        assert verify(store.path).damaged == ((path.stem, "its digest does not match its bytes"),)


def test_a_sample_is_a_share_and_repeats(store: DiskStore) -> None:
    bad = damage(store, 4)
    seen = []
    for seed in range(40):
        report = verify(store.path, sample=0.25, seed=seed)
        assert report == verify(store.path, sample=0.25, seed=seed)
        assert (report.chunks, report.checked) == (10, 3)
        seen.append(bool(report.damaged))
        assert {name for name, _ in report.damaged} <= {bad}
    assert 2 < sum(seen) < 30, "other seeds look at other files"
    assert verify(store.path, sample=1e-9).checked == 1
    for path in store.path.rglob("*.safetensors"):
        path.unlink()
    assert verify(store.path, sample=0.5) == VerifyReport(0, 0, 0, (), (), 0, 0)


@pytest.mark.parametrize("wrong", [0, -0.1, 1.01, float("nan"), float("inf"), "1", None, True])
def test_a_sample_outside_its_range_is_refused(store: DiskStore, wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"sample must lie in \(0, 1\]"):
        verify(store.path, sample=wrong)


def test_a_file_that_goes_meanwhile_is_not_damage(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 11: another server may evict."""
    real = os.open
    gone = path_of(store, 6)

    def opened(path: Any, *args: Any, **options: Any) -> int:
        gone.unlink(missing_ok=True)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    report = verify(store.path)
    assert (report.chunks, report.checked, report.sound, report.is_clean) == (10, 9, 9, True)


def test_ls_and_stat_say_what_is_there(store: DiskStore) -> None:
    half = make_chunk(make_identity("float16", 5, namespace="tenant"))
    store.put(half)
    unreadable = path_of(store, 9)
    unreadable.write_bytes(b"x")
    (store.path / "tmp" / "leftover").write_bytes(b"x" * 100)
    before = files_under(store.path)
    rows = {row.key: row for row in ls(store.path)}
    assert list(rows) == sorted(rows)
    assert len(rows) == 11
    path = chunk_path(store.path, key(half.identity))
    info = path.stat()
    assert rows[path.stem] == ChunkRecord(
        path.stem, 5, info.st_size, "float16", half.identity.model.weights[:12], "tenant", info.st_mtime
    )
    assert rows[unreadable.stem].problem == "it has only 1 bytes"
    assert (rows[unreadable.stem].tokens, rows[unreadable.stem].num_bytes) == (0, 1)
    assert sum(bool(row.problem) for row in rows.values()) == 1
    found = stat(store.path)
    tokens = sum(3 + n for n in range(9))
    sizes = sum(path_of(store, n).stat().st_size for n in range(9))
    weights = half.identity.model.weights
    assert found.models == (
        ModelStat(weights, "float16", 1, 5, info.st_size),
        ModelStat(weights, "float32", 9, tokens, sizes),
    )
    assert (found.chunks, found.tokens, found.num_bytes) == (10, tokens + 5, sizes + info.st_size)
    assert (found.unreadable, found.quarantined, found.temporary) == (1, 0, 1)
    assert found.total_bytes == 13 * 4096, "11 chunks, the marker and the temporary file, in blocks"
    assert files_under(store.path) == before


def test_ls_does_not_trust_a_name(store: DiskStore) -> None:
    path_of(store, 0).write_bytes(path_of(store, 1).read_bytes())
    rows = {row.key: row for row in ls(store.path)}
    assert rows[path_of(store, 0).stem].problem == "it holds another chunk than the one its name stands for"
    assert stat(store.path).unreadable == 1


def test_ls_and_stat_go_on_past_a_file_they_cannot_read(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, closed, gone = os.open, path_of(store, 1), path_of(store, 2)

    def opened(path: Any, *args: Any, **options: Any) -> int:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    assert [row.problem for row in ls(store.path) if row.problem] == ["Permission denied"]
    assert (stat(store.path).chunks, stat(store.path).unreadable) == (9, 1)
    names = list(store.keys())
    gone.unlink()
    monkeypatch.setattr(importlib.import_module("infoflow_kv.store.verify"), "keys_in", lambda root: iter(names))
    assert [row.key for row in ls(store.path)] == [name for name in names if name != gone.stem]


def test_a_header_without_our_entry_is_no_header() -> None:
    """Never written by the library, yet `ls` reads headers before anything has vouched for them."""
    for header in (b"{}", b"[]", b"1", b'{"__metadata__":1}', b'{"__metadata__":{"infoflow":1}}', b"\xff", b"{"):
        with pytest.raises(DamagedChunkError, match="its header is wrong"):
            parse_header(struct.pack("<Q", len(header)) + header, len(header) + 8)


def test_ls_tells_a_cut_file_by_its_size(store: DiskStore) -> None:
    path, whole = path_of(store, 0), path_of(store, 0).stat().st_size
    os.truncate(path, whole - 1)
    (row,) = (row for row in ls(store.path) if row.key == path.stem)
    assert row.problem == f"it has {whole - 1} bytes, its header promises {whole}"


def test_a_store_is_needed(tmp_path: Path) -> None:
    """A wrong path is an error, not an empty store, and nothing is made there."""
    (tmp_path / "file").write_bytes(b"x")
    for function in (verify, ls, stat):
        with pytest.raises(StoreError, match="there is no store at"):
            function(tmp_path / "nowhere")
        with pytest.raises(StoreError, match="is not a folder"):
            function(tmp_path / "file")
        with pytest.raises(StoreError, match=f"it has no {MARKER}"):
            function(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    newer = DiskStore(tmp_path / "newer")
    (newer.path / MARKER).write_text('{"format_version": 7}')
    for function in (verify, ls, stat):
        with pytest.raises(StoreError, match="format version 7, this release reads up to 1"):
            function(newer.path)


def test_what_was_quarantined_can_still_be_looked_at(store: DiskStore) -> None:
    name = damage(store, 3)
    assert store.get(make_identity(first=13, tokens=6)) is None
    (aside,) = names_in(store.path, "quarantine")
    assert aside.startswith(name)
    data = bytearray((store.path / "quarantine" / aside).read_bytes())
    data[-1] ^= 1
    path_of(store, 3).write_bytes(data)
    chunk = make_chunk(make_identity(first=13, tokens=6))
    assert same_bits(store.get(chunk.identity), chunk)

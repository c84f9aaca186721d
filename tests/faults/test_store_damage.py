"""Whatever stands under a chunk's name: the right bytes, or a miss. Never wrong bytes, a crash or a wait."""

import contextlib
import errno
import logging
import os
import pickle
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from store_chunks import (
    IDENTITY,
    MODEL,
    forged,
    header_bytes,
    make_chunk,
    make_identity,
    names_in,
    same_bits,
    sealed,
    tensors_of,
)

from infoflow_kv.store import DiskStore, StoreCounters, files, key, layout, verify
from infoflow_kv.store import identity as identities
from infoflow_kv.store.layout import chunk_path

NAME = key(IDENTITY)


@pytest.fixture
def store(quick_path: Path) -> DiskStore:
    store = DiskStore(quick_path / "kv")
    store.put(make_chunk())
    return store


def path_of(store: DiskStore) -> Path:
    return chunk_path(store.path, NAME)


@pytest.fixture(autouse=True)
def usual_log_level() -> Iterator[None]:
    yield
    logging.getLogger("infoflow_kv.store.disk").setLevel(logging.NOTSET)


def assert_each_is_damage(store: DiskStore, variants: Iterator[bytes], at_least: int) -> None:
    """Every variant is a miss, is told, is set aside, and leaves the place free for the right chunk."""
    path, count = path_of(store), 0
    good = path.read_bytes()
    shutil.rmtree(store.path / "quarantine", ignore_errors=True)
    logging.getLogger("infoflow_kv.store.disk").setLevel(logging.ERROR)  # pytest would format thousands of lines
    for data in variants:
        assert data != good
        path.write_bytes(data)
        before = store.counters
        assert store.get(IDENTITY) is None, f"variant {count} was served"
        after = store.counters
        assert (after.misses, after.damaged, after.hits) == (before.misses + 1, before.damaged + 1, before.hits)
        assert not path.exists(), f"variant {count} was left in place"
        count += 1
    assert count >= at_least
    aside = names_in(store.path, "quarantine")
    assert len(aside) == count
    assert all(name.startswith(NAME + ".") and name.endswith(".safetensors") for name in aside)
    path.write_bytes(good)
    assert same_bits(store.get(IDENTITY), make_chunk()), "the chunk itself was sound all along"


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# ---- accidents ----


def test_every_bit_of_the_header_counts(store: DiskStore) -> None:
    """Row 3, D13: length, names, numbers, digest and padding alike."""
    data = path_of(store).read_bytes()
    bits = range(header_bytes(data) * 8)
    assert_each_is_damage(store, (flipped(data, bit) for bit in bits), at_least=4000)


def test_every_bit_of_the_payload_counts(store: DiskStore) -> None:
    data = path_of(store).read_bytes()
    first, last = header_bytes(data) * 8, len(data) * 8
    drawn = random.Random(0).sample(range(first, last), 500)
    bits = sorted({*drawn, first, last - 1, *range(last - 64, last)})
    assert_each_is_damage(store, (flipped(data, bit) for bit in bits), at_least=500)


def test_every_cut_is_found(store: DiskStore) -> None:
    """Row 4: at every byte of the header, zero length included, and at 60 places of the payload."""
    data = path_of(store).read_bytes()
    start = header_bytes(data)
    cuts = [*range(start + 1), *range(start + 1, len(data), max(1, (len(data) - start) // 60)), len(data) - 1]
    assert_each_is_damage(store, (data[:cut] for cut in cuts), at_least=start + 60)


def test_every_addition_is_found(store: DiskStore) -> None:
    data = path_of(store).read_bytes()
    start = header_bytes(data)
    longer_header = struct.pack("<Q", start - 8 + 8) + data[8:start] + b" " * 8 + data[start:]
    variants = [
        *(data + bytes(n) for n in (1, 7, 8, 16, 4096, 2**20)),
        *(data + data, b"\0" + data, b"\xef\xbb\xbf" + data, data + b"\n", longer_header),
        data[:start] + bytes(len(data) - start),
        bytes(len(data)),
        b"\xff" * len(data),
    ]
    assert_each_is_damage(store, iter(variants), at_least=14)


def test_a_hole_costs_no_memory(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that claims a terabyte, sparse: judged by its size, read in small blocks only if its header allows."""
    with path_of(store).open("r+b") as file:
        file.truncate(2**40)
    assert store.get(IDENTITY) is None
    assert store.counters.damaged == 1
    path_of(store).write_bytes(struct.pack("<Q", 2**40 - 8))
    os.truncate(path_of(store), 2**40)
    assert store.get(IDENTITY) is None
    assert store.counters.damaged == 2


def test_swapped_files_and_swapped_parts_are_found(store: DiskStore) -> None:
    """Row 5, D03: every file is sound, and none is the one that was asked for."""
    other = make_chunk(make_identity(first=6), seed=1)
    store.put(other)
    first, second = path_of(store), chunk_path(store.path, key(other.identity))
    good, good_too = first.read_bytes(), second.read_bytes()
    assert len(good) == len(good_too)
    first.write_bytes(good_too)
    second.write_bytes(good)
    assert store.get(IDENTITY) is None
    assert store.get(other.identity) is None
    assert store.counters == StoreCounters(misses=2, damaged=2, written=2)
    start = header_bytes(good)
    mixed = [good[:start] + good_too[start:], good_too[:start] + good[start:], sealed(good_too[:start] + good[start:])]
    assert_each_is_damage_after_writing(store, good, mixed)


def assert_each_is_damage_after_writing(store: DiskStore, good: bytes, variants: list[bytes]) -> None:
    path_of(store).write_bytes(good)
    assert_each_is_damage(store, iter(variants), at_least=len(variants))


# ---- right digest, wrong content ----


def test_a_right_digest_is_not_enough(store: DiskStore) -> None:
    chunk = make_chunk()
    right, wide = tensors_of(chunk), make_chunk(make_identity(first=77))
    half = {name: tensor.half() for name, tensor in right.items()}
    bits = {name: tensor.view(torch.int32) for name, tensor in right.items()}
    flat = {name: tensor.reshape(-1) for name, tensor in right.items()}
    turned = {name: tensor.permute(0, 2, 1, 3).contiguous() for name, tensor in right.items()}
    assert forged(right) == path_of(store).read_bytes(), "the forger knows the format"
    variants = [
        forged(tensors_of(wide), identity=identities.to_fields(wide.identity), key=key(wide.identity)),
        forged(right, identity=identities.to_fields(wide.identity)),
        forged(right, key=key(wide.identity)),
        forged(right, key=NAME.upper()),
        forged(right, key=None),
        forged(right, identity=None),
        forged(right, identity={}),
        forged(right, identity={**identities.to_fields(IDENTITY), "more": 1}),
        forged(right, identity={**identities.to_fields(IDENTITY), "namespace": "other"}),
        *(forged(right, format_version=version) for version in (0, -1, 2, "1", 1.0, True, None)),
        forged(right, more=1),
        *(forged(tensors) for tensors in (half, bits, flat, turned)),
        forged({"keys": right["keys"]}),
        forged({**right, "more": torch.zeros(1)}),
        forged({"key": right["keys"], "value": right["values"]}),
        sealed(save(right, metadata={"infoflow": '{"digest":"' + "0" * 64 + '"}'})),
        sealed(path_of(store).read_bytes().replace(b'"data_offsets":[0,96]', b'"data_offsets":[9,96]')),
        sealed(path_of(store).read_bytes().replace(b'"keys":{', b'"values":{')),
        sealed(path_of(store).read_bytes().replace(b'"shape"', b'"shap\\"')),
    ]
    assert len(set(variants)) == len(variants)
    assert_each_is_damage(store, iter(variants), at_least=len(variants))


def test_a_file_of_a_newer_format_is_a_miss_and_stays(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    """Row 15. Believed only with a right digest: one flipped bit turns a 1 into a 3."""
    right = tensors_of(make_chunk())
    newer = [
        forged(right, format_version=3),
        forged(right, format_version=1000, identity={"new": []}, extra_checks=[1]),
        forged({"kv": torch.zeros(5000)}, format_version=4),
    ]
    for data in newer:
        path_of(store).write_bytes(data)
        assert store.get(IDENTITY) is None
        assert path_of(store).read_bytes() == data
    assert "this release reads up to 2" in caplog.text
    assert store.counters == StoreCounters(misses=3, written=1)
    report = verify(store.path, quarantine=True)
    assert (report.newer, report.sound, report.damaged, report.is_clean) == (1, 0, (), True)
    unsealed = newer[0].replace(b'\\"format_version\\":3', b'\\"format_version\\":4')
    path_of(store).write_bytes(unsealed)
    assert verify(store.path).damaged == ((NAME, "its digest does not match its bytes"),)
    assert store.get(IDENTITY) is None
    assert store.counters.damaged == 1
    assert not path_of(store).exists()


def test_a_newer_file_of_quite_another_size_is_a_miss_and_stays(store: DiskStore) -> None:
    """Its size is wrong for the chunk that was asked for; that alone does not condemn it."""
    long = make_identity(tokens=500)
    path = chunk_path(store.path, key(long))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(forged(tensors_of(make_chunk()), format_version=3))
    assert store.get(long) is None
    assert store.counters == StoreCounters(misses=1, written=1)
    assert path.exists()
    path.write_bytes(path_of(store).read_bytes())
    assert store.get(long) is None
    assert store.counters == StoreCounters(misses=2, damaged=1, written=1)
    assert not path.exists()


# ---- hostile entries ----


class Bomb:
    """Unpickling it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_nothing_is_ever_unpickled(store: DiskStore, quick_path: Path) -> None:
    torch.save(Bomb(quick_path / "mark"), quick_path / "bomb.pt")
    variants = [pickle.dumps(Bomb(quick_path / "mark")), (quick_path / "bomb.pt").read_bytes()]
    assert_each_is_damage(store, iter(variants), at_least=2)
    assert not (quick_path / "mark").exists()


def plant_fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def plant_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def plant_dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nowhere")


def plant_loop(path: Path, outside: Path) -> None:
    path.symlink_to(path)


def plant_folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "inner").write_text("x")


def plant_socket(path: Path, outside: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        os.rename("s", path)


def plant_device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: never ends
    except PermissionError:
        pytest.skip("only root may make device files")


@pytest.mark.parametrize(
    "plant",
    [plant_fifo, plant_link, plant_dangling_link, plant_loop, plant_folder, plant_socket, plant_device],
)
def test_only_regular_files_are_read(store: DiskStore, quick_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """Row 20: a miss at once, moved aside; nothing outside the store is read or touched, even where it is a chunk."""
    outside = quick_path / "outside"
    path = path_of(store)
    path.rename(outside)
    before = outside.stat()
    plant(path, outside)
    assert not store.contains(IDENTITY)
    really_open = os.open

    def opened(name: Any, *args: Any, **options: Any) -> int:
        assert str(name) != str(path), "merely opening some devices has effects"
        return really_open(name, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opened)
        assert verify(store.path).damaged == ((NAME, "it is not a regular file"),)
        assert store.get(IDENTITY) is None
    assert store.counters == StoreCounters(misses=1, damaged=1, written=1)
    assert not os.path.lexists(path)
    assert outside.stat().st_mtime_ns == before.st_mtime_ns
    store.put(make_chunk())
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert not path.is_symlink()
    assert outside.exists()


def test_an_entry_that_becomes_a_link_after_the_look(store: DiskStore, quick_path: Path, monkeypatch: Any) -> None:
    path, real = path_of(store), os.open

    def swap(name: Any, *args: Any, **options: Any) -> int:
        if str(name) == str(path) and not path.is_symlink():
            path.rename(quick_path / "outside")
            path.symlink_to(quick_path / "outside")
        return real(name, *args, **options)

    monkeypatch.setattr(os, "open", swap)
    assert store.get(IDENTITY) is None
    assert store.counters.damaged == 1


def test_a_linked_folder_is_not_followed(store: DiskStore, quick_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shard = path_of(store).parent
    shard.rename(quick_path / "outside")
    shard.symlink_to(quick_path / "outside")
    assert store.get(IDENTITY) is None
    assert not store.contains(IDENTITY)
    assert list(store.keys()) == []
    with pytest.raises(Exception, match="Not a directory"):
        store.put(make_chunk(seed=1))
    limited = DiskStore(store.path, max_bytes=10_000)
    for n in range(10):
        with contextlib.suppress(Exception):
            limited.put(make_chunk(make_identity(first=100 + n)))
    assert [p.name for p in (quick_path / "outside").iterdir()] == [f"{NAME}.safetensors"], (
        "not evicted through the link"
    )
    assert names_in(store.path, "tmp") == []


def test_foreign_names_are_no_keys(store: DiskStore) -> None:
    shard = path_of(store).parent
    for name in ("readme.txt", "a" * 64 + ".safetensors", NAME, NAME + ".safetensors\n", NAME.upper() + ".safetensors"):
        (shard / name).write_bytes(b"x")
    for name in ("notes", "zz", "ab1"):
        (store.path / name).mkdir()
        (store.path / name / f"{NAME}.safetensors").write_bytes(b"x")
    (store.path / ("00" if NAME[:2] != "00" else "01")).write_bytes(b"x")
    assert list(DiskStore(store.path).keys()) == [NAME]
    assert verify(store.path).sound == 1


# ---- races and refusals of the system ----


def test_a_file_that_vanishes_after_the_look_is_an_ordinary_miss(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D04, L06."""
    really_look = layout.look

    def look(root: Path, name: str) -> os.stat_result:
        found = really_look(root, name)
        path_of(store).unlink()
        return found

    monkeypatch.setattr(layout, "look", look)
    assert store.get(IDENTITY) is None
    assert store.counters == StoreCounters(misses=1, written=1)
    assert caplog.text == ""


def test_a_file_that_is_cut_while_it_is_read(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.readv

    def readv(fd: int, buffers: Any) -> int:
        os.truncate(path_of(store), 100)
        return real(fd, buffers)

    monkeypatch.setattr(os, "readv", readv)
    assert store.get(IDENTITY) is None
    assert store.counters.damaged == 1


def test_reads_may_come_in_pieces(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.readv
    monkeypatch.setattr(os, "readv", lambda fd, buffers: real(fd, [buffers[0][:7]]))
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert verify(store.path).sound == 1


def test_a_good_file_that_replaced_the_damaged_one_stays(store: DiskStore) -> None:
    path = path_of(store)
    judged = layout.look(store.path, NAME)
    store.put(make_chunk())
    assert not files.quarantine(store.path, NAME, judged)
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert files.quarantine(store.path, NAME, layout.look(store.path, NAME))
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "readv", "fstat"])
def test_a_read_that_the_system_refuses_is_a_miss_and_judges_nothing(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, number: int
) -> None:
    """Row 7, L: out of descriptors is no reason to throw chunks away."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        assert store.get(IDENTITY) is None
        assert verify(store.path).unreadable == ((NAME, os.strerror(number)),)
    assert store.counters == StoreCounters(misses=1, read_failures=1, written=1)
    assert os.strerror(number) in caplog.text
    assert same_bits(store.get(IDENTITY), make_chunk())


def test_a_quarantine_that_fails_is_told_and_harmless(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    (store.path / "quarantine").write_bytes(b"in the way")
    path_of(store).write_bytes(b"x")
    assert store.get(IDENTITY) is None
    assert "left in place (Not a directory)" in caplog.text
    store.put(make_chunk())
    assert same_bits(store.get(IDENTITY), make_chunk())


def test_no_descriptor_is_lost(store: DiskStore) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else pytest.skip("needs /proc")
    for n in range(20):
        store.get(IDENTITY)
        store.put(make_chunk(make_identity(first=n + 10)))
        path_of(store).write_bytes(bytes(n * 50))
        store.get(IDENTITY)
        store.put(make_chunk())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_warning_is_one_line_without_content(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    """Row 66: neither token ids nor bytes nor names from the file, which may hold anything."""
    caplog.set_level(logging.DEBUG)
    canary = "canary\nERROR fake line\x1b[31m"
    odd = [replace(IDENTITY, model=replace(MODEL, dtype=canary)), replace(IDENTITY, quantisation=canary)]
    secret = replace(IDENTITY, namespace=canary, token_ids=(90210, 90211))
    store.put(make_chunk(secret))
    right = tensors_of(make_chunk())
    for data in (
        chunk_path(store.path, key(secret)).read_bytes(),
        forged(right, identity={**identities.to_fields(IDENTITY), canary: canary}),
        forged(right, identity={**identities.to_fields(IDENTITY), "rope": [canary]}),
        forged(right, **{canary: 1}),
        forged(right, key=canary),
        forged({**right, canary: torch.zeros(1)}),
        forged(right, identity={**identities.to_fields(IDENTITY), "model": {**vars_of(), "dtype": canary}}),
        forged(right, format_version=canary),
        canary.encode() * 20,
        *(forged(right, identity=identities.to_fields(i), key=key(i)) for i in odd),
    ):
        path_of(store).write_bytes(data)
        assert store.get(IDENTITY) is None
    assert len(caplog.records) == 11
    for record in caplog.records:
        message = record.getMessage()
        assert record.levelname == "WARNING"
        assert "\n" not in message
        assert "\x1b" not in message
        assert "canary" not in message
        assert "90210" not in message
        assert NAME in message


def vars_of() -> dict[str, Any]:
    fields: dict[str, Any] = identities.to_fields(IDENTITY)["model"]
    assert fields["weights"] == MODEL.weights
    return fields

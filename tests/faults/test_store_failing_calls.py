"""Every call to the system that a write makes fails in turn, or is the last one before a kill: SQLite's way."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_chunks import IDENTITY, make_chunk, make_identity, names_in, same_bits

from infoflow_kv.errors import StoreError
from infoflow_kv.store import DiskStore, key, verify
from infoflow_kv.store.layout import MARKER, chunk_path

CALLS = ("mkdir", "open", "ftruncate", "write", "fsync", "close", "rename", "lstat", "stat", "fstat", "listdir")
HIDDEN_DOORS = ("replace", "link", "pwrite", "writev", "sendfile", "open_file_cloexec")


class FailingCalls:
    """Makes the N-th call to the system fail; `close` closes all the same, as Linux does."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int, number: int) -> None:
        self.count, self.nth, self.number = 0, nth, number
        self.failed = ""
        for name in CALLS:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))
        for name in HIDDEN_DOORS:
            patch.setattr(os, name, lambda *a, **k: pytest.fail("a call that this test does not count"), raising=False)

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.nth:
                self.failed = name
                if name == "close":
                    real(*args, **options)
                raise OSError(self.number, os.strerror(self.number))
            return real(*args, **options)

        return call


def fail_each(quick_path: Path, number: int, prepare: Callable[[Path], None], act: Callable[[Path], None]) -> set[str]:
    """Runs `act` with its first, second, … call failing, until it runs clean; names of the calls that failed."""
    failed: set[str] = set()
    for nth in range(1, 200):
        root = quick_path / "kv"
        shutil.rmtree(root, ignore_errors=True)
        prepare(root)
        refused = None
        with pytest.MonkeyPatch.context() as patch:
            calls = FailingCalls(patch, nth, number)
            try:
                act(root)
            except StoreError as error:
                refused = error
        if not calls.failed:
            assert refused is None
            return failed
        failed.add(calls.failed)
        check_after(root, refused, calls.failed)
    pytest.fail("the calls never end")


def check_after(root: Path, refused: StoreError | None, failed: str) -> None:
    """Nothing or a valid chunk, no temporary file, and the next try succeeds."""
    if refused is not None:
        assert "\n" not in str(refused)
        assert str(root) in str(refused)
    if (root / MARKER).exists():
        report = verify(root)
        assert report.is_clean, f"after a failed {failed}: {report}"
        assert names_in(root, "tmp") == []
        assert [name for name in os.listdir(root) if name.startswith(MARKER + ".")] == []
    store = DiskStore(root)
    if refused is None:
        assert store.get(IDENTITY) is not None, f"a failed {failed} was turned into success"
    store.put(make_chunk())
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert store.counters.damaged == 0


def no_store(root: Path) -> None:
    pass


def empty_store(root: Path) -> None:
    DiskStore(root)


def full_store(root: Path) -> None:
    store = DiskStore(root)
    for n in range(3):
        store.put(make_chunk(make_identity(first=100 * n + 100)))
    store.put(make_chunk(seed=1))


def put(root: Path) -> None:
    DiskStore(root).put(make_chunk())


def put_within_limit(root: Path) -> None:
    DiskStore(root, max_bytes=4 * 4096 + 100).put(make_chunk())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("prepare", [no_store, empty_store, full_store])
@pytest.mark.parametrize("act", [put, put_within_limit])
def test_a_put_whose_nth_call_fails(
    quick_path: Path, prepare: Callable[[Path], None], act: Callable[[Path], None], number: int
) -> None:
    """Rows 1, 6, 7; D01, D10: the old chunk or the new one, never less."""
    failed = fail_each(quick_path, number, prepare, act)
    assert {"open", "write", "fsync", "rename"} <= failed
    assert ("mkdir" in failed) or prepare is full_store


def test_the_old_chunk_survives_a_failed_put(quick_path: Path) -> None:
    """D10."""
    store = DiskStore(quick_path / "kv")
    old, new = make_chunk(seed=1), make_chunk()
    for nth in range(1, 200):
        store.put(old)
        with pytest.MonkeyPatch.context() as patch:
            calls = FailingCalls(patch, nth, errno.ENOSPC)
            with contextlib.suppress(StoreError):
                store.put(new)
        found = store.get(IDENTITY)
        assert same_bits(found, old) or same_bits(found, new)
        if not calls.failed:
            break
    assert nth > 8
    assert same_bits(found, new)


def test_a_failed_fsync_publishes_nothing(quick_path: Path) -> None:
    """Row 7: it is not asked again; the second answer would be a lie."""
    store = DiskStore(quick_path / "kv")
    asked = []

    def refuse(fd: int) -> None:
        asked.append(fd)
        if len(asked) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StoreError, match="Input/output error"):
            store.put(make_chunk())
    assert len(asked) == 1
    assert not store.contains(IDENTITY)
    assert names_in(store.path, "tmp") == []


def test_everything_is_on_disk_before_it_has_its_name(quick_path: Path) -> None:
    """Row 2, Git's lesson: write, fsync, rename, fsync of both folders, in this order."""
    store = DiskStore(quick_path / "kv")
    log: list[str] = []
    paths: dict[int, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "mkdir")}

        def opened(path: Any, *args: Any, **options: Any) -> int:
            fd: int = real["open"](path, *args, **options)
            paths[fd] = str(path)
            return fd

        def noted(name: str) -> Callable[..., Any]:
            def call(first: Any, *args: Any, **options: Any) -> Any:
                path = Path(paths[first] if isinstance(first, int) else first)
                log.append(f"{name} {path.parent.name if path.is_file() else path.name}")
                return real[name](first, *args, **options)

            return call

        patch.setattr(os, "open", opened)
        for name in ("write", "fsync", "rename", "mkdir"):
            patch.setattr(os, name, noted(name))
        store.put(make_chunk())
    shard = key(IDENTITY)[:2]
    assert log == [
        *("mkdir tmp", "write tmp", "write tmp", "fsync tmp"),
        *(f"mkdir {shard}", "fsync kv", "rename tmp", f"fsync {shard}"),
    ]


def test_writes_may_come_in_pieces(quick_path: Path) -> None:
    store = DiskStore(quick_path / "kv")
    real = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:11]))
        store.put(make_chunk())
    assert same_bits(store.get(IDENTITY), make_chunk())


def test_a_folder_that_cannot_be_synced_by_design_is_let_pass(quick_path: Path) -> None:
    """Some network file systems answer EINVAL to fsync of a folder; there is nothing more that we could do."""
    store = DiskStore(quick_path / "kv")
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        store.put(make_chunk())
    assert store.contains(IDENTITY)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "is full (No space left on device); free space or set max_bytes"),
        (errno.EDQUOT, "is full (Disk quota exceeded)"),
        (errno.EROFS, "is not writable (Read-only file system); check its owner, mode and mount"),
        (errno.EACCES, "is not writable (Permission denied)"),
        (errno.EIO, "failed (Input/output error)"),
    ],
)
def test_the_error_says_what_to_do(quick_path: Path, number: int, words: str) -> None:
    """And the store recovers when the cause is gone."""
    store = DiskStore(quick_path / "kv")

    def refuse(*args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(StoreError) as caught:
            store.put(make_chunk())
    assert f"cannot store chunk {key(IDENTITY)}: " in str(caught.value)
    assert f"'{store.path}'" in str(caught.value)
    assert words in str(caught.value)
    assert store.counters.write_failures == 1
    store.put(make_chunk())
    assert same_bits(store.get(IDENTITY), make_chunk())
    assert store.counters.written == 1


def test_a_file_size_limit_of_the_system(quick_path: Path) -> None:
    """Row 6, by the kernel itself: RLIMIT_FSIZE cuts the second part of the write."""
    import resource

    store = DiskStore(quick_path / "kv")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, old[1]))
    try:
        with pytest.raises(StoreError, match="File too large"):
            store.put(make_chunk(make_identity(tokens=2000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names_in(store.path, "tmp") == []
    assert list(store.keys()) == []
    store.put(make_chunk(make_identity(tokens=2000)))


def test_an_interrupt_leaves_no_temporary_file(quick_path: Path) -> None:
    """Row 69: Ctrl-C is no OSError."""
    store = DiskStore(quick_path / "kv")

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    for name in ("write", "fsync", "rename"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.put(make_chunk())
        assert names_in(store.path, "tmp") == []
        assert not chunk_path(store.path, key(IDENTITY)).exists()


def test_a_failing_touch_is_no_failing_read(quick_path: Path) -> None:
    store = DiskStore(quick_path / "kv")
    store.put(make_chunk())

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "utime", refuse)
        assert same_bits(store.get(IDENTITY), make_chunk())
    assert store.counters.hits == 1

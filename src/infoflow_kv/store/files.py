"""Reading and writing whole files of the store, so that a crash, a full disk or a hostile entry does no harm.

Written once, never changed: temporary name, write, fsync, rename, fsync of the folder. Read into memory as a
whole: a mapped file that someone cuts would end the process by SIGBUS.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infoflow_kv.store.format import LENGTH_BYTES, DamagedChunkError, payload_start
from infoflow_kv.store.layout import MARKER, QUARANTINE, SUFFIX, TEMPORARY, chunk_path, look

STALE_SECONDS = 3600.0
_BLOCK_BYTES = 2**20
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def open_chunk(root: Path, key: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of the chunk's file. Raises DamagedChunkError for anything but a regular file; never blocks.

    The type is looked at first as well: merely opening some devices has effects.
    """
    path = chunk_path(root, key)
    _check_regular(os.lstat(path).st_mode)
    try:
        fd = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DamagedChunkError("it is not a regular file") from None
        raise
    try:
        info = os.fstat(fd)
        _check_regular(info.st_mode)
        yield fd, info.st_size
    finally:
        os.close(fd)


def read_blocks(fd: int, buffer: memoryview) -> Iterator[memoryview]:
    """The blocks of `buffer`, each filled just before it is handed out and so still in the CPU's cache."""
    for first in range(0, len(buffer), _BLOCK_BYTES):
        block = buffer[first : first + _BLOCK_BYTES]
        filled = 0
        while filled < len(block):
            count = os.readv(fd, [block[filled:]])
            if count == 0:
                raise DamagedChunkError("it became shorter while it was read")
            filled += count
        yield block


def stream_blocks(fd: int, num_bytes: int) -> Iterator[memoryview]:
    """The next `num_bytes` of the file through one small buffer, which each block overwrites."""
    buffer = memoryview(bytearray(min(num_bytes, _BLOCK_BYTES)))
    for first in range(0, num_bytes, _BLOCK_BYTES):
        yield from read_blocks(fd, buffer[: num_bytes - first])


def read_head(fd: int, file_bytes: int) -> bytearray:
    """Everything before the payload. Raises DamagedChunkError if its length cannot be what the file says."""
    head = bytearray(min(file_bytes, LENGTH_BYTES))
    _fill(fd, memoryview(head))
    rest = bytearray(payload_start(head, file_bytes) - len(head))
    _fill(fd, memoryview(rest))
    return head + rest


def publish(root: Path, key: str, parts: Sequence[memoryview], make_room: Callable[[], None] | None = None) -> None:
    """Nothing; on return the chunk is whole, under its name, and survives a power cut. Raises OSError, leaving no temp.

    A chunk of that name is replaced by its equal: whoever wins a race, one whole file stands there. `make_room` is
    called once the file's size is reserved, so that writers in other processes see it in their own count.
    """
    final = chunk_path(root, key)
    make_folder(root / TEMPORARY)
    with _temporary(root / TEMPORARY, key) as (fd, temporary):
        if make_room is not None:
            os.ftruncate(fd, sum(part.nbytes for part in parts))
            make_room()
        _write(fd, parts)
        make_folder(final.parent)
        sync_folder(root)  # also where another process made the folder just now: it may not have got this far
        if not stat.S_ISDIR(os.lstat(final.parent).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(final.parent))
        os.rename(temporary, final)
        sync_folder(final.parent)


def publish_marker(root: Path, content: bytes) -> None:
    """Nothing; on return the store folder has its marker, written the same way as a chunk."""
    with _temporary(root, MARKER) as (fd, temporary):
        _write(fd, [memoryview(content)])
        os.rename(temporary, root / MARKER)
        sync_folder(root)


def make_folder(path: Path) -> bool:
    """Whether the folder was made now (mode 0700) rather than found."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    return True


def sync_folder(path: Path) -> None:
    """Nothing; the names in the folder are on disk. File systems that have no such call (EINVAL) are let pass."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def quarantine(root: Path, key: str, judged: os.stat_result) -> bool:
    """Whether the judged entry was moved away from the chunk's name; False if a writer has replaced it meanwhile."""
    path = chunk_path(root, key)
    now = os.lstat(path)
    if (now.st_dev, now.st_ino, now.st_mtime_ns) != (judged.st_dev, judged.st_ino, judged.st_mtime_ns):
        return False
    make_folder(root / QUARANTINE)
    os.rename(path, root / QUARANTINE / f"{key}.{secrets.token_hex(8)}{SUFFIX}")
    return True


def is_present(root: Path, key: str) -> bool:
    """Whether a regular file stands under the chunk's name. Opens nothing."""
    try:
        return stat.S_ISREG(look(root, key).st_mode)
    except OSError:
        return False


def touch(fd: int) -> None:
    """Nothing; the file counts as just used, where the system allows it. Only the order of eviction depends on it."""
    with contextlib.suppress(OSError):
        os.utime(fd)


def remove(root: Path, key: str) -> bool:
    """Whether anything of the chunk was removed: its file, quarantined copies, leftovers of writers that died.

    The bytes are the document in another form, so none of them may outlive its deletion.
    """
    removed = _remove_file(chunk_path(root, key))
    for folder in (root / QUARANTINE, root / TEMPORARY):
        for name in os.listdir(folder) if folder.is_dir() else ():
            if name.startswith(key + "."):
                is_leftover = folder.name == TEMPORARY
                removed |= _remove_leftover(folder / name, 0.0) if is_leftover else _remove_file(folder / name)
    return removed


def remove_stale(root: Path) -> int:
    """Number of temporary files removed: older than an hour, and not held by a writer that still lives."""
    removed = 0
    for folder, prefix in ((root / TEMPORARY, ""), (root, MARKER + ".")):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith(prefix):
                    removed += _remove_leftover(folder / name, STALE_SECONDS)
    return removed


def _remove_file(path: Path) -> bool:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    sync_folder(path.parent)
    return True


def _remove_leftover(path: Path, older_than_seconds: float) -> bool:
    with contextlib.suppress(OSError):
        if time.time() - os.lstat(path).st_mtime < older_than_seconds:
            return False
        fd = os.open(path, _READ_FLAGS)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its writer still holds it
            os.unlink(path)
            return True
        finally:
            os.close(fd)
    return False


@contextlib.contextmanager
def _temporary(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """A new file of mode 0600, locked as "its writer lives" until the end, removed if anything fails before that.

    It stays open while it gets its name, so that no cleaner finds it unlocked in between. Closing it that late loses
    nothing: what fsync has confirmed, close cannot take back.
    """
    path = folder / f"{prefix}.{secrets.token_hex(8)}"
    fd = os.open(path, _WRITE_FLAGS, 0o600)
    try:
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)  # a cleaner holds it for a moment at most; not every file system can
            if os.fstat(fd).st_nlink == 0:  # one came before the lock
                with _temporary(folder, prefix) as another:
                    yield another
            else:
                yield fd, path
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _write(fd: int, parts: Sequence[memoryview]) -> None:
    """Nothing; all parts are on disk. A failed fsync is final: asked again, the system would say that all is well."""
    for part in parts:
        while part.nbytes:
            part = part[os.write(fd, part) :]
    os.fsync(fd)


def _fill(fd: int, buffer: memoryview) -> None:
    for _ in read_blocks(fd, buffer):
        pass


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise DamagedChunkError("it is not a regular file")

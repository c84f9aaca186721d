"""The bytes of a file or a stream, up to a cap; whatever lies at a path, opening it never waits."""

import os
import stat
from typing import BinaryIO

from infoflow_kv.errors import DocumentError

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def file_bytes(path: str, max_bytes: int) -> bytes:
    """Return a regular file's bytes. Never waits: a pipe or device is refused before and after it is opened."""
    try:
        _require_regular(os.stat(path), max_bytes)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags), "rb") as stream:
            _require_regular(os.fstat(stream.fileno()), max_bytes)
            return capped(stream, max_bytes)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(why(error)) from error


def capped(stream: BinaryIO, max_bytes: int) -> bytes:
    """Return all bytes of a stream, or raise once it has given one more than `max_bytes`."""
    data = bytearray()
    while len(data) <= max_bytes:
        part = stream.read(min(2**20, max_bytes + 1 - len(data)))
        if not part:
            return bytes(data)
        data += part
    raise _too_large(f"more than {max_bytes:,} bytes", max_bytes)


def why(error: Exception) -> str:
    """What the system says of a failure, without numbers and paths."""
    if isinstance(error, PermissionError):
        return "permission denied"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def shown(path: str) -> str:
    """Return the path with characters that cannot be printed on one line (newlines, odd bytes) escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path)


def _require_regular(status: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise DocumentError(f"{kind}, not a file; to read from a pipe give - and redirect it")
    if status.st_size > max_bytes:
        raise _too_large(f"{status.st_size:,} bytes", max_bytes)


def _too_large(size: str, max_bytes: int) -> DocumentError:
    return DocumentError(f"too large: {size}, at most {max_bytes:,} are read; split it or raise max_file_bytes")

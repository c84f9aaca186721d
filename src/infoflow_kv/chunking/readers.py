"""Paths → documents: files, folders, standard input. Whatever the path is, reading it ends and stays under a cap."""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from infoflow_kv.chunking.formats import parse
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.records import Document

MAX_FILE_BYTES = 20 * 2**20
_REASONS_SHOWN = 3
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Documents in the order of the paths, and why each of the others was left out (path, or `path:line` in JSONL)."""

    documents: tuple[Document, ...]
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True)
class _File:
    """One file to read: its `label` for people, where to open it, or why it cannot be."""

    label: str
    path: str = ""
    refusal: str = ""


def read_paths(
    paths: Sequence[str | Path], *, max_file_bytes: int = MAX_FILE_BYTES, stdin: BinaryIO | None = None
) -> ReadResult:
    """Return the documents of files, of folders (all files below, by path) and of standard input (`-`).

    Hidden files below a folder are passed over; links that leave the folder, links to folders and what is not a
    regular file are skipped with the reason, and so is any file that cannot be read. A document's source is the path
    as given; it has a title only where JSONL gives one. The same file twice is two documents. No file is read further
    than `max_file_bytes` + 1.

    Raises DocumentError, in one line, if a path does not exist or if nothing at all could be read; OptionError for a
    cap under 1.

        >>> read_paths(["notes/", "report.pdf"]).documents  # doctest: +SKIP
    """
    if max_file_bytes < 1:
        raise OptionError(f"max_file_bytes is {max_file_bytes}; at least 1 is needed")
    if isinstance(paths, (str, Path)):
        paths = [paths]
    if not paths:
        raise DocumentError("no documents were given; name files, folders, or - for standard input")
    files = [file for given in paths for file in _expand(str(given))]
    documents: list[Document] = []
    skipped: dict[str, str] = {}
    for file in files:
        try:
            found, left_out = _read(file, max_file_bytes, stdin)
        except DocumentError as error:
            skipped[file.label] = str(error)
        else:
            documents.extend(found)
            skipped.update(left_out)
    if not documents:
        raise DocumentError(_nothing_read([str(p) for p in paths], skipped))
    return ReadResult(tuple(documents), skipped)


def _read(file: _File, max_bytes: int, stdin: BinaryIO | None) -> tuple[list[Document], dict[str, str]]:
    if file.refusal:
        raise DocumentError(file.refusal)
    if file.path:
        suffix, data = Path(file.label).suffix, _file_bytes(file.path, max_bytes)
    elif stdin is None:
        raise DocumentError("standard input is not available here; name a file")
    else:
        suffix, data = "", _capped(stdin, max_bytes)
    return parse(data, suffix=suffix, label=file.label, max_characters=max_bytes)


def _expand(given: str) -> Iterator[_File]:
    """Yield the files that a path stands for. Raises DocumentError if there is nothing at the path."""
    if given == "-":
        yield _File(label="-")
        return
    try:
        mode = os.stat(given).st_mode
    except FileNotFoundError as error:
        reason = "is a link to nothing" if os.path.islink(given) else "does not exist"
        raise DocumentError(f"'{shown(given)}' {reason}; check the path") from error
    except PermissionError:
        yield _File(shown(given), refusal="permission denied")
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise DocumentError(f"'{shown(given)}' is not a usable path ({_why(error)}); check it") from error
    else:
        if stat.S_ISDIR(mode):
            yield from sorted(_walk(given), key=lambda file: file.label)
        else:
            yield _File(shown(given), given)


def _walk(root: str) -> Iterator[_File]:
    """Yield the files below a folder in no order; its own stack, so depth does not matter."""
    real_root = os.path.realpath(root)
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as listing:
                entries = [entry for entry in listing if not entry.name.startswith(".")]
        except OSError as error:
            yield _File(shown(folder), refusal=f"the folder cannot be listed ({_why(error)})")
            continue
        for entry in entries:
            if entry.is_symlink():
                yield _linked(entry.path, real_root)
            elif entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                yield _File(shown(entry.path), entry.path)


def _linked(path: str, real_root: str) -> _File:
    """Return the file behind a link in a folder, if the folder holds it too."""
    label, target = shown(path), os.path.realpath(path)
    if os.path.commonpath([target, real_root]) != real_root:
        return _File(label, refusal="a link that leaves the folder; name its target to read it")
    if os.path.isdir(target):
        return _File(label, refusal="a link to a folder; links are not followed into folders")
    if not os.path.exists(target):
        return _File(label, refusal="a link to nothing")
    return _File(label, target)


def _file_bytes(path: str, max_bytes: int) -> bytes:
    """Return a regular file's bytes. Never waits: a pipe or device is refused before and after it is opened."""
    try:
        _require_regular(os.stat(path), max_bytes)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags), "rb") as stream:
            _require_regular(os.fstat(stream.fileno()), max_bytes)
            return _capped(stream, max_bytes)
    except OSError as error:
        raise DocumentError(_why(error)) from error


def _require_regular(status: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise DocumentError(f"{kind}, not a file; to read from a pipe give - and redirect it")
    if status.st_size > max_bytes:
        raise _too_large(f"{status.st_size:,} bytes", max_bytes)


def _capped(stream: BinaryIO, max_bytes: int) -> bytes:
    """Return all bytes of a stream, or raise once it has given one more than `max_bytes`."""
    data = bytearray()
    while len(data) <= max_bytes:
        part = stream.read(min(2**20, max_bytes + 1 - len(data)))
        if not part:
            return bytes(data)
        data += part
    raise _too_large(f"more than {max_bytes:,} bytes", max_bytes)


def _too_large(size: str, max_bytes: int) -> DocumentError:
    return DocumentError(f"too large: {size}, at most {max_bytes:,} are read; split it or raise max_file_bytes")


def _nothing_read(paths: list[str], skipped: dict[str, str]) -> str:
    if len(paths) == 1 and list(skipped) == [shown(paths[0])]:
        return f"cannot read '{shown(paths[0])}': {skipped[shown(paths[0])]}"
    named = ", ".join(f"'{shown(p)}'" for p in paths[:_REASONS_SHOWN]) + (", …" if len(paths) > _REASONS_SHOWN else "")
    if not skipped:
        return f"nothing to read in {named}: no files there (hidden ones are passed over)"
    reasons = "; ".join(f"'{label}': {reason}" for label, reason in list(skipped.items())[:_REASONS_SHOWN])
    more = len(skipped) - _REASONS_SHOWN
    return f"nothing could be read in {named}: {reasons}" + (f"; and {more} more" if more > 0 else "")


def shown(path: str) -> str:
    """Return the path with characters that cannot be printed on one line (newlines, odd bytes) escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path)


def _why(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "permission denied"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)

"""Paths → documents: files, folders, standard input. Whatever the path is, reading it ends and stays under a cap."""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from infoflow_kv.chunking.files import capped, file_bytes, shown, why
from infoflow_kv.chunking.formats import parse
from infoflow_kv.chunking.pages import require_renderer
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.records import Document

MAX_FILE_BYTES = 20 * 2**20
_REASONS_SHOWN = 3


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
    paths: Sequence[str | Path],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    stdin: BinaryIO | None = None,
    pdf_pages: bool = False,
) -> ReadResult:
    """Return the documents of files, of folders (all files below, by path) and of standard input (`-`).

    Hidden files below a folder are passed over; links that leave the folder, links to folders and what is not a
    regular file are skipped with the reason, and so is any file that cannot be read. A document's source is the path
    as given; it has a title only where JSONL gives one. The same file twice is two documents. No file is read further
    than `max_file_bytes` + 1. An image file is a document of one image; it is decoded when it is chunked, and a damaged
    one is refused then. Images that Markdown or HTML refer to are not followed. `pdf_pages`: each page of a PDF becomes
    a document of one image, named `path:page`, instead of its text.

    Raises DocumentError, in one line, if a path does not exist or if nothing at all could be read; OptionError for a
    cap under 1, and for `pdf_pages` without the packages that draw them.

        >>> read_paths(["notes/", "report.pdf"]).documents  # doctest: +SKIP
    """
    if max_file_bytes < 1:
        raise OptionError(f"max_file_bytes is {max_file_bytes}; at least 1 is needed")
    if pdf_pages:
        require_renderer()
    if isinstance(paths, (str, Path)):
        paths = [paths]
    if not paths:
        raise DocumentError("no documents were given; name files, folders, or - for standard input")
    files = [file for given in paths for file in _expand(str(given))]
    documents: list[Document] = []
    skipped: dict[str, str] = {}
    for file in files:
        try:
            found, left_out = _read(file, max_file_bytes, stdin, pdf_pages)
        except DocumentError as error:
            skipped[file.label] = str(error)
        else:
            documents.extend(found)
            skipped.update(left_out)
    if not documents:
        raise DocumentError(_nothing_read([str(p) for p in paths], skipped))
    return ReadResult(tuple(documents), skipped)


def _read(
    file: _File, max_bytes: int, stdin: BinaryIO | None, pdf_pages: bool
) -> tuple[list[Document], dict[str, str]]:
    if file.refusal:
        raise DocumentError(file.refusal)
    if file.path:
        suffix, data = Path(file.label).suffix, file_bytes(file.path, max_bytes)
    elif stdin is None:
        raise DocumentError("standard input is not available here; name a file")
    else:
        suffix, data = "", capped(stdin, max_bytes)
    return parse(data, suffix=suffix, label=file.label, path=file.path, max_bytes=max_bytes, pdf_pages=pdf_pages)


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
        raise DocumentError(f"'{shown(given)}' is not a usable path ({why(error)}); check it") from error
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
            yield _File(shown(folder), refusal=f"the folder cannot be listed ({why(error)})")
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


def _nothing_read(paths: list[str], skipped: dict[str, str]) -> str:
    if len(paths) == 1 and list(skipped) == [shown(paths[0])]:
        return f"cannot read '{shown(paths[0])}': {skipped[shown(paths[0])]}"
    named = ", ".join(f"'{shown(p)}'" for p in paths[:_REASONS_SHOWN]) + (", …" if len(paths) > _REASONS_SHOWN else "")
    if not skipped:
        return f"nothing to read in {named}: no files there (hidden ones are passed over)"
    reasons = "; ".join(f"'{label}': {reason}" for label, reason in list(skipped.items())[:_REASONS_SHOWN])
    more = len(skipped) - _REASONS_SHOWN
    return f"nothing could be read in {named}: {reasons}" + (f"; and {more} more" if more > 0 else "")

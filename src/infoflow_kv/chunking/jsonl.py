"""JSONL → documents: one a line, of text or of parts. Errors name the line; readers.py names the file."""

import json
import os
from collections.abc import Sequence
from typing import Any

from infoflow_kv.chunking.files import file_bytes, shown
from infoflow_kv.chunking.signatures import IMAGES, is_image
from infoflow_kv.chunking.tokens import replace_surrogates
from infoflow_kv.errors import DocumentError
from infoflow_kv.records import Document, Image


def jsonl_documents(text: str, label: str, path: str, max_bytes: int) -> tuple[list[Document], dict[str, str]]:
    """Return one document per line `{text, title?, id?}` or `{parts, title?, id?}`, and why others were left out.

    `parts` is a list of `{text}` and `{image}`; an image is the path of a file in the folder of `path` (the JSONL's
    own; empty: it has none) or below, of at most `max_bytes`. Other fields are ignored; blank documents and those with
    an image that is not there are left out. Without `id` a document is named by its `doc` and `page` if it has both,
    else by file and line. Raises DocumentError that names the first line that is not such an object, or whose images
    lie elsewhere.
    """
    documents: list[Document] = []
    skipped: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = _record(line, number)
        title, body, given = record.get("title") or "", record.get("text") or "", record.get("parts") or ()
        if not body.strip() and not title.strip() and not _says_something(given):
            skipped[f"{label}:{number}"] = "empty: no text in it"
            continue
        try:
            parts = _parts(given, number, path, max_bytes)
        except _MissingImageError as error:
            skipped[f"{label}:{number}"] = str(error)
            continue
        name = record.get("id")
        if name is None or name == "":
            doc, page = record.get("doc"), record.get("page")
            name = f"{label}:{number}" if doc is None or page is None else f"{doc}:{page}"
        documents.append(
            Document(
                text=replace_surrogates(body.replace("\r\n", "\n")),
                title=replace_surrogates(title),
                id=replace_surrogates(str(name)),
                source=label,
                parts=parts,
            )
        )
    if not documents:
        raise DocumentError(next(iter(skipped.values()), "empty: no text in it"))
    return documents, skipped


def looks_like_jsonl(text: str) -> bool:
    """Whether the first line is such an object."""
    first = text.lstrip().split("\n", 1)[0]
    if not first.startswith("{"):
        return False
    try:
        return isinstance(_record(first, 1), dict)
    except DocumentError:
        return False


class _MissingImageError(DocumentError):
    """An image that a line names and that cannot be opened: the line is left out, the others are read."""


def _record(line: str, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise DocumentError(f"line {number} is not JSON ({reason}); each line must be an object with 'text'") from error
    has_parts = isinstance(record, dict) and record.get("parts") is not None
    if not isinstance(record, dict) or not isinstance(record.get("text") if not has_parts else "", str):
        raise DocumentError(f"line {number} is not an object with a string 'text', as every line must be")
    if has_parts and record.get("text") not in (None, ""):
        raise DocumentError(f"line {number} has both 'text' and 'parts'; put the text into 'parts'")
    if has_parts:
        _check_parts(record["parts"], number)
    if not isinstance(record.get("title") or "", str):
        raise DocumentError(f"line {number} has a 'title' that is not a string")
    return record


def _check_parts(parts: Any, number: int) -> None:
    if not isinstance(parts, list):
        raise DocumentError(f'line {number} has \'parts\' that are no list; expected [{{"text": …}}, {{"image": …}}]')
    for place, part in enumerate(parts, start=1):
        kinds = [kind for kind in ("text", "image") if kind in part] if isinstance(part, dict) else []
        if len(kinds) != 1 or not isinstance(part[kinds[0]], str):
            raise DocumentError(
                f"line {number}, part {place} is not an object with either a string 'text' or a string 'image' (a path)"
            )


def _says_something(parts: Sequence[dict[str, str]]) -> bool:
    return any("image" in part or part["text"].strip() for part in parts)


def _parts(given: Sequence[dict[str, str]], number: int, path: str, max_bytes: int) -> tuple[str | Image, ...]:
    return tuple(
        Image(_image(part["image"], f"line {number}, part {place}", path, max_bytes))
        if "image" in part
        else replace_surrogates(part["text"].replace("\r\n", "\n"))
        for place, part in enumerate(given, start=1)
    )


def _image(given: str, where: str, path: str, max_bytes: int) -> str:
    """The path of an image that lies in the JSONL's folder, links followed; what it holds is looked at later."""
    if not path:
        raise DocumentError(
            f"{where}: image '{shown(given)}' has no folder to lie in, as the JSONL is no file; name a file"
        )
    folder = os.path.realpath(os.path.dirname(path))
    try:
        target = os.path.realpath(os.path.join(folder, given))
    except ValueError as error:  # a NUL character in the path
        raise DocumentError(f"{where}: image '{shown(given)}' is not a usable path ({error})") from error
    if os.path.isabs(given) or os.path.commonpath([target, folder]) != folder:
        raise DocumentError(
            f"{where}: image '{shown(given)}' lies outside the JSONL's folder; give a relative path of a file in it"
        )
    try:
        data = file_bytes(target, max_bytes)
    except DocumentError as error:
        raise _MissingImageError(f"{where}: image '{shown(given)}' cannot be read: {error}") from error
    if not is_image(data):
        raise _MissingImageError(
            f"{where}: image '{shown(given)}' is no image of a known kind ({IMAGES}), or its header is damaged"
        )
    return target

"""Vision data files → items: ChartQA's, InfographicVQA's, OCRBench's JSON, VLMEvalKit's tables, lines of one's own.

| layout | file | pictures |
|---|---|---|
| chartqa | a list of `{imgname, query, label}` | `png/` beside the file |
| infovqa | `{data: [{questionId, question, image_local_name, answers}]}`; DocVQA's with `image` | `images/` beside it |
| ocrbench | a list of `{dataset_name, id, image_path, question, answers, type}` | `image_path` from the file's folder |
| vlmeval | TSV or JSON: `index, question, answer, A…, image` or `image_path` | base64, another's index, or a path |
| vision | JSON lines `{_id, question, answers, images, options?, metric?, dataset?, group?}` | paths or `data:` URIs |
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infoflow_kv.chunking import replace_surrogates
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.evaluate.items import check_dataset
from infoflow_kv.evaluate.json_text import cleaned, parsed
from infoflow_kv.evaluate.readers import decoded, file_bytes, finite, records, skip_space, why
from infoflow_kv.evaluate.vision_formats import Source, detect_layout, vision_item
from infoflow_kv.evaluate.vision_items import VisionItem, find_set

_LARGEST_CELL = 2**31 - 1


@dataclass(frozen=True, slots=True)
class VisionLoaded:
    """A file's items in its order, why the others (by id) were left out, its layout and its hash."""

    items: tuple[VisionItem, ...]
    skipped: dict[str, str]
    layout: str
    sha256: str


def read_vision_items(
    path: str | Path, *, rules: str | None = None, dataset: str | None = None, limit: int | None = None
) -> VisionLoaded:
    """Return the items of one file; the first record decides the layout, for all.

    `rules` names one of `vision_items.SETS`, by which the file is asked and scored; needed where the layout does not
    tell (VLMEvalKit's tables but HRBench's, lines of one's own without `metric`). `dataset` names the set in results
    (default: the file, for ChartQA its folder and the file). The whole file is read and checked, pictures by their
    first bytes, then the first `limit` usable items are kept; pictures in base64 stay in memory, each once. Records
    without a visible gold are skipped, for nothing could score them.

    Raises DocumentError, in one line that names the file and the line, for what cannot be read, for a picture that is
    missing, outside the file's folder or none; OptionError for an id that occurs twice, an unknown `rules` and a
    `limit` under 1.

        >>> read_vision_items("ChartQA/test/test_human.json", limit=50).layout  # doctest: +SKIP
        'chartqa'
    """
    if limit is not None and limit < 1:
        raise OptionError(f"limit is {limit}; at least 1 item is needed")
    chosen = None if rules is None else find_set(rules)
    path = Path(path)
    if path.suffix.lower() == ".parquet":
        raise DocumentError(f"'{path}' is a Parquet file, which is not read; convert it to TSV or JSON lines")
    data = file_bytes(path)
    found = list((_table if path.suffix.lower() == ".tsv" else _json)(path, decoded(path, data)))
    if not found:
        raise DocumentError(f"'{path}', line 1: empty, no records in it; give a file with questions about pictures")
    stem = replace_surrogates(path.name.split(".")[0] or path.name)
    pictures = {
        str(record["index"]): record["image"]
        for _, record in found
        if isinstance(record, dict) and "index" in record and isinstance(record.get("image"), str)
    }
    source = Source(path.parent, stem, dataset, chosen, pictures, {})
    items: list[VisionItem] = []
    skipped: dict[str, str] = {}
    first_places: dict[str, str] = {}
    layout = ""
    for number, (place, record) in enumerate(found, start=1):
        try:
            if not isinstance(record, dict):
                raise DocumentError("not an object; every record must be one, {...}")
            layout = layout or detect_layout(record)
            item = vision_item(cleaned(record), layout, number, source)
        except DocumentError as error:
            raise DocumentError(f"{place}: {error}") from error
        if item.id in first_places:
            raise OptionError(
                f"{place}: the id '{item.id}' is taken by {first_places[item.id]}; every item of a run needs its own"
            )
        first_places[item.id] = place
        check_dataset(item.dataset, place)
        if item.answers:
            items.append(item)
        else:
            skipped[item.id] = f"{place}: no gold answer"
    if not items:
        raise DocumentError(f"'{path}': none of its {len(skipped)} records has a gold answer; give a split that has")
    return VisionLoaded(tuple(items[:limit]), skipped, layout, hashlib.sha256(data).hexdigest())


def _json(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each record of a list, of lines, or of the list `data` in one object, with its place."""
    body = text.lstrip()
    if not body.startswith("{"):
        yield from records(path, text)
        return
    try:
        whole = parsed(text, parse_constant=finite, parse_float=finite)
    except ValueError as error:
        if _is_json(body.partition("\n")[0]):
            yield from records(path, text)
            return
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise DocumentError(
            f"'{path}', line {line}: not JSON ({why(error)}); expected a list, one object a line, or an object with "
            "the list 'data'"
        ) from error
    if isinstance(whole.get("data"), list):
        yield from _wrapped(path, text)
    else:
        yield from records(path, text)


def _wrapped(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of `data` in an object that is known to be whole, one by one for their lines."""
    decoder = json.JSONDecoder()
    at = skip_space(text, text.index("{") + 1)
    while True:
        key, at = decoder.raw_decode(text, at)
        at = skip_space(text, skip_space(text, at) + 1)  # behind the colon
        if key == "data" and text[at] == "[":
            break
        _, at = decoder.raw_decode(text, at)
        at = skip_space(text, skip_space(text, at) + 1)  # behind the comma
    at = skip_space(text, at + 1)
    line, counted, number = 1, 0, 0
    while text[at] != "]":
        line, counted, number = line + text.count("\n", counted, at), at, number + 1
        record, at = decoder.raw_decode(text, at)
        yield f"'{path}', line {line}, record {number}", record
        at = skip_space(text, at)
        at = skip_space(text, at + 1) if text[at] == "," else at


def _is_json(text: str) -> bool:
    try:
        parsed(text)
    except ValueError:
        return False
    return True


def _table(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each row of a table with tabs as an object of its filled cells, with the line where it starts."""
    # Pictures in base64 are far over the module's usual limit, which is one for the whole process: put back at once.
    before = csv.field_size_limit(_LARGEST_CELL)
    try:
        rows = _rows(path, text)
    finally:
        csv.field_size_limit(before)
    if not rows:
        return
    place, names = rows[0]
    if len(set(names)) != len(names) or not all(name.strip() for name in names):
        raise DocumentError(f"{place}: the table's head names columns twice or not at all: {', '.join(names[:12])}")
    for place, cells in rows[1:]:
        if len(cells) != len(names):
            raise DocumentError(f"{place}: {len(cells)} cells in a table of {len(names)} columns")
        yield place, {name: cell for name, cell in zip(names, cells, strict=True) if cell.strip()}


def _rows(path: Path, text: str) -> list[tuple[str, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    found: list[tuple[str, list[str]]] = []
    line = 1
    try:
        for cells in reader:
            if cells:
                found.append((f"'{path}', line {line}", cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DocumentError(f"'{path}', line {line}: no table with tabs ({error})") from error
    return found

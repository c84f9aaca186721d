"""Items → a chunks file, which `read_items` gives back as they are."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infoflow_kv.errors import InfoFlowError, OptionError
from infoflow_kv.evaluate.formats import CHUNKS_FIELDS
from infoflow_kv.evaluate.items import Item, check_dataset
from infoflow_kv.evaluate.json_text import cleaned


def write_items(items: Iterable[Item], path: Path | str, *, overwrite: bool = False) -> int:
    """Writes the items as JSON lines in the chunks format, all or nothing, and returns how many they are.

    Lone surrogates are replaced, as `read_items` does. OptionError for a file that is there already (unless
    `overwrite`), for no items at all, for `meta` with a field of the format and for a data set that nothing could score
    (see `check_dataset`); InfoFlowError where the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise OptionError(f"'{path}' is a folder; give a file to write to")
    if path.exists() and not overwrite:
        raise OptionError(f"'{path}' is there already; give another name, or --force to write it anew")
    lines = [json.dumps(cleaned(record(item)), ensure_ascii=False, allow_nan=False) + "\n" for item in items]
    if not lines:
        raise OptionError(f"no items to write to '{path}'")
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(lines), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise InfoFlowError(f"'{path}' cannot be written: {error.strerror or error}") from error
    return len(lines)


def record(item: Item) -> dict[str, Any]:
    """One item as a record of the chunks format; `meta` stands beside the format's own fields."""
    taken = sorted(CHUNKS_FIELDS & item.meta.keys())
    if taken:
        raise OptionError(f"item '{item.id}' has {', '.join(taken)} in its meta, which the chunks format uses itself")
    check_dataset(item.dataset, f"item '{item.id}'")
    return {
        "_id": item.id,
        "dataset": item.dataset,
        "question": item.question,
        "answers": list(item.answers),
        "passages": [{"title": passage.title, "text": passage.text} for passage in item.passages],
        "supporting": list(item.supporting),
        "group": item.group,
        **({"instruction": item.instruction} if item.instruction else {}),
        **item.meta,
    }

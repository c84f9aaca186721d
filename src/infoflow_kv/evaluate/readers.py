"""Data files → items: LongBench, chunk files, CacheBlend's lists, key-value retrieval; and items made to a length."""

import bisect
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infoflow_kv.chunking import replace_surrogates
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.evaluate.formats import detect, item_from
from infoflow_kv.evaluate.items import Item, Passage, check_items, with_passages
from infoflow_kv.evaluate.json_text import cleaned, parsed, shallow
from infoflow_kv.evaluate.metrics import normalise

# Answers that say nothing about the passages that hold them.
_PLAIN_ANSWERS = frozenset({"yes", "no"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file's items in its order, why the others (by id) were left out, its format and its hash."""

    items: tuple[Item, ...]
    skipped: dict[str, str]
    format: str
    sha256: str


def read_items(path: str | Path, limit: int | None = None) -> Loaded:
    """Return the items of one file: JSON lines or one JSON list; the first record decides the format.

    The whole file is read and checked, then the first `limit` usable items are kept. Items of questions about the
    same text, page or section share a `group`. Records that nothing can score (no gold, no question) are skipped.

    Raises DocumentError, in one line that names the file and the line, for what cannot be read; OptionError for an
    id that occurs twice, `supporting` outside the passages, and a `limit` under 1.

        >>> read_items("musique.chunks.jsonl", limit=50).format  # doctest: +SKIP
        'chunks'
    """
    if limit is not None and limit < 1:
        raise OptionError(f"limit is {limit}; at least 1 item is needed")
    path = Path(path)
    data = file_bytes(path)
    stem = replace_surrogates(path.name.split(".")[0] or path.name)  # it names a data set: a file name may be no text
    items: list[Item] = []
    places: list[str] = []
    skipped: dict[str, str] = {}
    format_name = ""
    for number, (place, record) in enumerate(records(path, decoded(path, data)), start=1):
        try:
            if not isinstance(record, dict):
                raise DocumentError("not an object; every record must be one, {...}")
            format_name = format_name or detect(record)
            item = item_from(cleaned(record), format_name, number, stem)
            if item is not None and not item.passages:
                raise DocumentError("no passages: the context has no text")
        except DocumentError as error:
            raise DocumentError(f"{place}: {error}") from error
        if item is None:
            skipped[record["_id"]] = (
                f"{place}: no question: 'input' is empty, and this task's instruction is not in the record"
            )
        else:
            items.append(item)
            places.append(place)
    if not format_name:
        raise DocumentError(f"'{path}', line 1: empty, no records in it; give a file with one JSON object a line")
    kept, unusable = check_items(items, places)
    skipped.update(unusable)
    if not kept:
        raise DocumentError(f"'{path}': none of its {len(skipped)} records can be used: {next(iter(skipped.values()))}")
    return Loaded(tuple(_grouped(kept)[:limit]), skipped, format_name, hashlib.sha256(data).hexdigest())


def fit(item: Item, count_tokens: Callable[[Item], int], limit: int) -> Item | None:
    """Return the item with just as many distractor passages dropped, from the end, that it has at most `limit` tokens.

    An item that fits comes back as it is; otherwise `meta["dropped_passages"]` counts what was dropped. None if the
    gold passages alone are too long, or if it is not known which these are: dropping might then drop the answer.
    """
    if count_tokens(item) <= limit:
        return item
    gold = set(item.supporting)
    droppable = [index for index in reversed(range(len(item.passages))) if index not in gold] if gold else []
    known = item.meta.get("dropped_passages")  # a user's field of this name may hold anything
    before = known if type(known) is int else 0

    def without(count: int) -> Item:
        dropped = set(droppable[:count])
        kept = [index for index in range(len(item.passages)) if index not in dropped]
        passages = [item.passages[index] for index in kept]
        return with_passages(item, passages, kept, {"dropped_passages": before + count})

    # Fewer passages never have more tokens, so the smallest number that fits is found by halving.
    count = bisect.bisect_left(range(len(droppable) + 1), True, lo=1, key=lambda n: count_tokens(without(n)) <= limit)
    return without(count) if count <= len(droppable) else None


def lengthen(
    item: Item,
    pool: Sequence[Item],
    target_tokens: int,
    count_passage_tokens: Callable[[Passage], int],
    seed: int,
) -> Item:
    """Return the item with passages of other items mixed in, as many as fit into `target_tokens` of passage tokens.

    Passages with a gold title, with an answer in them (yes and no apart) or already there are passed over. The item's
    own passages keep their order and are spread over the whole; where no gold passage is marked, all count as gold.
    Filling ends at the first passage that does not fit. `meta` says the seed and the number added. The same seed gives
    the same item. Not for texts in which the order matters.
    """
    rng = random.Random(f"lengthen/{seed}/{item.id}")
    gold = [item.passages[index] for index in item.supporting] or item.passages
    gold_titles = {passage.title.strip().casefold() for passage in gold} - {""}
    answers = [text for text in map(normalise, item.answers) if text and text not in _PLAIN_ANSWERS]
    candidates = [passage for other in pool if other.id != item.id for passage in other.passages]
    rng.shuffle(candidates)
    room = target_tokens - sum(map(count_passage_tokens, item.passages))
    present = set(item.passages)
    added: list[Passage] = []
    for passage in candidates:
        if passage in present or passage.title.strip().casefold() in gold_titles:
            continue
        words = f" {normalise(passage.title)} {normalise(passage.text)} "
        if any(f" {answer} " in words for answer in answers):
            continue
        room -= count_passage_tokens(passage)
        if room < 0:
            break
        present.add(passage)
        added.append(passage)
    if not added:
        return item
    total = len(item.passages) + len(added)
    own_places = dict(zip(sorted(rng.sample(range(total), len(item.passages))), range(len(item.passages)), strict=True))
    fresh = iter(added)
    sources = [own_places.get(place) for place in range(total)]
    passages = [next(fresh) if source is None else item.passages[source] for source in sources]
    return with_passages(item, passages, sources, {"added_passages": len(added), "lengthen_seed": seed})


def file_bytes(path: Path) -> bytes:
    """Return what the file holds. Raises DocumentError for what is no readable file."""
    if path.is_dir():
        raise DocumentError(f"'{path}' is a folder; give one file")
    if not path.exists():
        raise DocumentError(f"'{path}' does not exist; check the path")
    if not path.is_file():
        raise DocumentError(f"'{path}' is not a regular file; give a file of JSON lines or a JSON list")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DocumentError(f"'{path}' cannot be read: {error.strerror or error}") from error


def decoded(path: Path, data: bytes) -> str:
    """Return the file's text. Raises DocumentError with the line for what is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(
            f"'{path}', line {line}: not UTF-8 text (byte 0x{data[error.start]:02x}); convert it to UTF-8"
        ) from error


def records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each record of JSON lines or of one JSON list, with its place. DocumentError for what is not JSON."""
    if text.lstrip().startswith("["):
        yield from _list_records(path, text)
        return
    for number, line_text in enumerate(text.split("\n"), start=1):
        if line_text.strip():
            try:
                record = parsed(line_text, parse_constant=finite, parse_float=finite)
            except ValueError as error:
                raise DocumentError(
                    f"'{path}', line {number}: not JSON ({why(error)}); expected one object a line, or a JSON list"
                ) from error
            yield f"'{path}', line {number}", record


def _list_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a JSON list one by one, since only so their lines are known."""
    decoder = json.JSONDecoder(parse_constant=finite, parse_float=finite)
    line, counted, at, number = 1, 0, text.index("[") + 1, 0
    closed = False
    while not closed:
        at = skip_space(text, at)
        if not number and text.startswith("]", at):
            break
        line, counted, number = line + text.count("\n", counted, at), at, number + 1
        try:
            record, at = decoder.raw_decode(text, at)
            shallow(record)
            at = skip_space(text, at)
            closed = text.startswith("]", at)
            if not closed and not text.startswith(",", at):
                raise ValueError("the list is not closed: ',' or ']' is missing")
            if closed and text[at + 1 :].strip():
                raise ValueError("there is more after the list's ']'")
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"'{path}', line {line}, record {number}: not JSON ({why(error)})") from error
        at += 1
        yield f"'{path}', line {line}, record {number}", record


def skip_space(text: str, at: int) -> int:
    """Return the first place from `at` that holds no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def finite(text: str) -> float:
    """Return the number; ValueError for NaN and infinities, which no row can hold."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def why(error: Exception) -> str:
    """Return what is wrong with JSON, in words."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _grouped(items: Sequence[Item]) -> list[Item]:
    """Return the items with a group for those that share a gold page or section, directly or through others."""
    golds = [_gold_ids(item) for item in items]
    group_of: dict[str, str] = {}
    for ids in golds:
        groups = list(dict.fromkeys(group_of.get(name, name) for name in ids))
        if len(groups) > 1:
            group_of = {name: groups[0] if group in groups else group for name, group in group_of.items()}
        group_of.update(dict.fromkeys(ids, groups[0]) if ids else {})
    return [replace(item, group=group_of[ids[0]]) if ids else item for item, ids in zip(items, golds, strict=True)]


def _gold_ids(item: Item) -> list[str]:
    ids = item.meta.get("passage_ids")
    if item.group or not isinstance(ids, list) or len(ids) != len(item.passages):
        return []
    return [":".join(map(str, i)) if isinstance(i, list) else str(i) for i in (ids[s] for s in item.supporting)]

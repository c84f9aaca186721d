"""One record of a data file → an item, per format. Errors give the reason only; readers.py names file and line."""

import hashlib
from collections.abc import Callable, Mapping, Set
from typing import Any

from infoflow_kv.errors import DocumentError
from infoflow_kv.evaluate.items import CHOICE, LETTERS, Item, Passage
from infoflow_kv.evaluate.passages import marked_passages, pack, pieces

PAIRS_PER_PASSAGE = 5
"""Pairs of a key-value record that go into one passage."""

# What tells a format, in the order of asking: any of the fields is enough, the rest is then missed by name.
_MARKS = {
    "kv_retrieval": ("ordered_kv_records",),
    "cacheblend": ("ctxs",),
    "chunks": ("passages", "supporting"),
    "longbench_v2": ("choice_A", "choice_B"),
    "longbench": ("context", "input"),
}

# What a record of the chunks format may say beside the facts of its task.
CHUNKS_FIELDS = frozenset({"_id", "dataset", "question", "answers", "passages", "supporting", "group", "instruction"})

Record = Mapping[str, Any]


def detect(record: Record) -> str:
    """Return the name of the record's format. Raises DocumentError if it is none of them."""
    for name, marks in _MARKS.items():
        if any(mark in record for mark in marks):
            return name
    known = "; ".join(f"{name} ({' or '.join(marks)})" for name, marks in _MARKS.items())
    raise DocumentError(f"the fields {listed(record)} fit no known format; expected one of: {known}")


def item_from(record: Record, format_name: str, number: int, stem: str) -> Item | None:
    """Return the record's item; None for a LongBench record whose task asks no question (summaries, counting).

    `number` (from 1) and `stem`, the file's name without suffixes, name items of formats that have no ids.
    Raises DocumentError, without the place, for a record that lacks a field or has one of another type.
    """
    return _READERS[format_name](record, number, stem)


def _chunks(record: Record, number: int, stem: str) -> Item:
    passages = _passages(record, "passages")
    supporting = record.get("supporting") or []
    if not isinstance(supporting, list) or any(type(index) is not int for index in supporting):
        raise DocumentError("'supporting' must be a list of passage indices (whole numbers from 0)")
    doc, page = record.get("doc"), record.get("page")
    document = "" if doc is None else str(doc) if page is None else f"{doc}:{page}"
    return Item(
        id=text_of(record, "_id"),
        dataset=_dataset(record, stem),
        question=text_of(record, "question"),
        answers=_answers(record),
        passages=passages,
        supporting=tuple(dict.fromkeys(supporting)),
        group=text_of(record, "group", may_be_blank=True) if "group" in record else document,
        instruction=text_of(record, "instruction", may_be_blank=True) if "instruction" in record else "",
        meta=rest_of(record, CHUNKS_FIELDS),
    )


def _longbench(record: Record, number: int, stem: str) -> Item | None:
    context = text_of(record, "context")
    question = text_of(record, "input", may_be_blank=True)
    identity, answers = text_of(record, "_id"), _answers(record)
    if not question.strip():
        return None
    return Item(
        id=identity,
        dataset=_dataset(record, stem),
        question=question,
        answers=answers,
        passages=_context_passages(context),
        group=_context_group(context),
        meta=rest_of(record, {"_id", "dataset", "input", "answers", "context"}),
    )


def _longbench_v2(record: Record, number: int, stem: str) -> Item:
    context, answer = text_of(record, "context"), text_of(record, "answer")
    choices = {letter: text_of(record, f"choice_{letter}", may_be_blank=True) for letter in LETTERS}
    if answer not in choices:
        raise DocumentError(f"'answer' is '{answer}'; expected one of the letters {', '.join(LETTERS)}")
    question = text_of(record, "question").strip()
    used = {"_id", "question", "answer", "context", *(f"choice_{letter}" for letter in LETTERS)}
    return Item(
        id=text_of(record, "_id"),
        dataset="longbench_v2",
        question="\n".join([question, "Choices:", *(f"({letter}) {text}" for letter, text in choices.items())]),
        answers=(answer,),
        passages=_context_passages(context),
        group=_context_group(context),
        meta={**rest_of(record, used), "choices": choices, "task": CHOICE},
    )


def _cacheblend(record: Record, number: int, stem: str) -> Item:
    return Item(
        id=f"{stem}-{number}",
        dataset=stem,
        question=text_of(record, "question"),
        answers=_answers(record, nested=True),
        passages=_passages(record, "ctxs"),
        meta=rest_of(record, {"question", "answers", "ctxs"}),
    )


def _kv_retrieval(record: Record, number: int, stem: str) -> Item:
    pairs, key, value = field_of(record, "ordered_kv_records"), text_of(record, "key"), text_of(record, "value")
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        raise DocumentError("'ordered_kv_records' must be a list of [key, value], both strings")
    places = [index for index, pair in enumerate(pairs) if pair[0] == key]
    if len(places) != 1 or pairs[places[0]][1] != value:
        raise DocumentError(
            f"the pair of 'key' and 'value' must be in 'ordered_kv_records' once; the key is there {len(places)} times"
        )
    parts = pack([1] * len(pairs), PAIRS_PER_PASSAGE)
    return Item(
        id=f"{stem}-{number}",
        dataset="kv_retrieval",
        question=f'What is the value of the key "{key}"?',
        answers=(value,),
        passages=tuple(Passage("", "\n".join(f'"{pairs[i][0]}": "{pairs[i][1]}"' for i in part)) for part in parts),
        supporting=(places[0] // PAIRS_PER_PASSAGE,),
        meta={
            **rest_of(record, {"ordered_kv_records", "value"}),
            "pairs": len(pairs),
            "pairs_per_passage": PAIRS_PER_PASSAGE,
            "place_in_passage": places[0] % PAIRS_PER_PASSAGE,
        },
    )


_READERS: dict[str, Callable[[Record, int, str], Item | None]] = {
    "chunks": _chunks,
    "longbench": _longbench,
    "longbench_v2": _longbench_v2,
    "cacheblend": _cacheblend,
    "kv_retrieval": _kv_retrieval,
}


def field_of(record: Record, name: str) -> Any:
    """Return the field; DocumentError where the record lacks it."""
    if name not in record:
        raise DocumentError(f"'{name}' is missing (fields here: {listed(record)})")
    return record[name]


def text_of(record: Record, name: str, *, may_be_blank: bool = False) -> str:
    """Return the field, a string; DocumentError for another type and for white space alone."""
    value = field_of(record, name)
    if not isinstance(value, str):
        raise DocumentError(f"'{name}' is {kind_of(value)}; expected a string")
    if not may_be_blank and not value.strip():
        raise DocumentError(f"'{name}' is empty; expected some text")
    return value


def _dataset(record: Record, stem: str) -> str:
    return text_of(record, "dataset") if "dataset" in record else stem


def _answers(record: Record, *, nested: bool = False) -> tuple[str, ...]:
    answers = field_of(record, "answers")
    if nested and isinstance(answers, list):
        answers = [text for entry in answers for text in (entry if isinstance(entry, list) else [entry])]
    if not isinstance(answers, list):
        raise DocumentError(f"'answers' is {kind_of(answers)}; expected a list of strings")
    for answer in answers:
        if not isinstance(answer, str):
            raise DocumentError(f"'answers' holds {kind_of(answer)}; expected strings only")
    return tuple(answers)


def _passages(record: Record, name: str) -> tuple[Passage, ...]:
    entries = field_of(record, name)
    if not isinstance(entries, list):
        raise DocumentError(f"'{name}' is {kind_of(entries)}; expected a list of {{title, text}}")
    if not entries:
        raise DocumentError(f"'{name}' is empty: no passages; give at least one {{title, text}}")
    passages = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DocumentError(f"passage {index} of '{name}' is {kind_of(entry)}; expected {{title, text}}")
        try:
            title = text_of(entry, "title", may_be_blank=True) if entry.get("title") is not None else ""
            passages.append(Passage(title, text_of(entry, "text")))
        except DocumentError as error:
            raise DocumentError(f"passage {index} of '{name}': {error}") from error
    return tuple(passages)


def _context_passages(context: str) -> tuple[Passage, ...]:
    marked = marked_passages(context)
    return tuple(pieces(context) if marked is None else marked)


def rest_of(record: Record, used: Set[str]) -> dict[str, Any]:
    """Return the fields that are not `used`."""
    return {name: value for name, value in record.items() if name not in used}


def _context_group(context: str) -> str:
    """Return a name for the context, so that the questions asked about one text form one cluster."""
    return "context-" + hashlib.sha256(context.encode("utf-8")).hexdigest()[:16]


def listed(record: Record) -> str:
    """Return the names of the first fields, for an error."""
    return ", ".join(f"'{name}'" for name in list(record)[:12]) or "(none)"


def kind_of(value: Any) -> str:
    """Return what JSON calls the value, for an error."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")

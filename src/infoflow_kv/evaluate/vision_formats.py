"""One record of a vision data file → an item, per layout. Errors give the reason; vision_readers.py adds the place."""

import ast
import hashlib
import string
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infoflow_kv.errors import DocumentError, InputError
from infoflow_kv.evaluate.formats import Record, field_of, kind_of, listed, rest_of, text_of
from infoflow_kv.evaluate.items import LETTERS
from infoflow_kv.evaluate.vision_items import SETS, Picture, VisionItem, VisionSet
from infoflow_kv.evaluate.vision_metrics import find_metric
from infoflow_kv.evaluate.vision_pictures import picture_bytes, picture_file

# What tells a layout, in the order of asking.
_MARKS = {
    "chartqa": "imgname",
    "infovqa": "questionId",
    "ocrbench": "dataset_name",
    "vlmeval": "index",
    "vision": "images",
}
# By whose rules a layout is scored where nobody says otherwise; the others hold sets of several kinds.
_RULES = {"chartqa": "chartqa", "infovqa": "infovqa", "ocrbench": "ocrbench"}
# Folders beside the data file in which published copies keep their pictures.
_PLACES = {
    "chartqa": ("png", "."),
    "infovqa": ("images", "infographicsvqa_images", "spdocvqa_images", "."),
    "ocrbench": (".", "OCRBench_Images", "images"),
    "vlmeval": (".", "images"),
    "vision": (".",),
}
# VLMEvalKit's files give a picture once; a text this short is the index of the record that has it.
_LONGEST_INDEX = 64
# No model writes a no-break space; Wikipedia's tables do.
_NO_BREAK = str.maketrans(dict.fromkeys("\u00a0\u202f", " "))


@dataclass(frozen=True, slots=True)
class Source:
    """What the records of one file share. `folder`: no picture comes from outside. `stem`: the file's name.

    `dataset` and `rules` are the caller's wishes, None where the layout decides. `images`: VLMEvalKit's picture texts
    by index. `decoded`: bytes by their base64, so that records of one picture share them.
    """

    folder: Path
    stem: str
    dataset: str | None
    rules: VisionSet | None
    images: Mapping[str, str]
    decoded: MutableMapping[str, bytes]


def detect_layout(record: Record) -> str:
    """Return the name of the record's layout. Raises DocumentError if it is none of them."""
    for name, mark in _MARKS.items():
        if mark in record:
            return name
    known = "; ".join(f"{name} ({mark})" for name, mark in _MARKS.items())
    raise DocumentError(f"the fields {listed(record)} fit no known layout of pictures; expected one of: {known}")


def vision_item(record: Record, layout: str, number: int, source: Source) -> VisionItem:
    """Return the record's item; `number`, from 1, names items of layouts that have no ids.

    Golds that are blank are left out, so an item may come back without any. Raises DocumentError, without the place,
    for a record that lacks a field, has one of another type, or whose picture cannot be had.
    """
    return _READERS[layout](record, number, source)


def _chartqa(record: Record, number: int, source: Source) -> VisionItem:
    # Human and augmented halves lie in files of one folder and are reported apart.
    dataset = source.dataset or f"{source.folder.resolve().name}-{source.stem}"
    return _item(
        record,
        source,
        "chartqa",
        identity=f"{dataset}-{number}",
        dataset=dataset,
        question=text_of(record, "query"),
        answers=_golds(record, "label"),
        pictures=[text_of(record, "imgname")],
        used={"imgname", "query", "label"},
    )


def _infovqa(record: Record, number: int, source: Source) -> VisionItem:
    name = "image_local_name" if "image_local_name" in record else "image"  # InfographicVQA's and DocVQA's
    return _item(
        record,
        source,
        "infovqa",
        identity=_name(record, "questionId"),
        question=text_of(record, "question"),
        answers=_golds(record, "answers"),
        pictures=[text_of(record, name)],
        used={"questionId", "question", "answers", name},
    )


def _ocrbench(record: Record, number: int, source: Source) -> VisionItem:
    identity = _name(record, "id") if "id" in record else str(number)
    return _item(
        record,
        source,
        "ocrbench",
        identity=f"{source.dataset or source.stem}-{identity}",
        question=text_of(record, "question"),
        answers=_golds(record, "answers"),
        pictures=[text_of(record, "image_path")],
        used={"id", "question", "answers", "image_path"},
    )


def _vlmeval(record: Record, number: int, source: Source) -> VisionItem:
    options = {letter: _name(record, letter) for letter in string.ascii_uppercase if record.get(letter) is not None}
    answer = record.get("answer")
    if isinstance(answer, str) and answer.startswith("["):
        record = {**record, "answer": _listed_in_text(answer, "answer")}
    packed = record.get("image") is not None
    pictures = _pictures(record, "image" if packed else "image_path")
    # Rotated options tell HRBench; other files of this layout look alike and must be named.
    rules = "hrbench4k" if "cycle_category" in record else None
    return _item(
        record,
        source,
        "vlmeval",
        identity=f"{source.dataset or source.stem}-{_name(record, 'index')}",
        question=text_of(record, "question"),
        answers=_golds(record, "answer") if record.get("answer") is not None else (),
        pictures=[_by_index(text, source) for text in pictures] if packed else pictures,
        packed=packed,
        used={"index", "question", "answer", "image", "image_path", *options},
        options=options,
        rules=rules,
    )


def _vision(record: Record, number: int, source: Source) -> VisionItem:
    options = record.get("options") or {}
    if not isinstance(options, dict) or not all(isinstance(text, str) for text in options.values()):
        raise DocumentError(f"'options' is {kind_of(options)}; expected an object of letters and texts")
    return _item(
        record,
        source,
        "vision",
        identity=text_of(record, "_id"),
        dataset=text_of(record, "dataset") if "dataset" in record and not source.dataset else "",
        question=text_of(record, "question"),
        answers=_golds(record, "answers"),
        pictures=_pictures(record, "images"),
        used={"_id", "dataset", "question", "answers", "images", "options", "metric", "group"},
        options=options,
        group=text_of(record, "group", may_be_blank=True) if "group" in record else "",
    )


_READERS: dict[str, Callable[[Record, int, Source], VisionItem]] = {
    "chartqa": _chartqa,
    "infovqa": _infovqa,
    "ocrbench": _ocrbench,
    "vlmeval": _vlmeval,
    "vision": _vision,
}


def _item(
    record: Record,
    source: Source,
    layout: str,
    *,
    identity: str,
    question: str,
    answers: tuple[str, ...],
    pictures: Sequence[str],
    used: Set[str],
    packed: bool = False,
    dataset: str = "",
    options: Mapping[str, str] | None = None,
    group: str = "",
    rules: str | None = None,
) -> VisionItem:
    rules = rules or _RULES.get(layout)
    chosen = source.rules or (SETS[rules] if rules else None)
    kind = record.get("type", record.get("category"))
    if "metric" in record:
        metric = text_of(record, "metric")
    elif chosen is not None:
        metric = chosen.metric_of.get(str(kind), chosen.metric)
    else:
        raise DocumentError(
            f"nothing says how to score this layout ('{layout}'); give the rules of a set: {', '.join(SETS)}"
        )
    try:
        find_metric(metric)
    except InputError as error:
        raise DocumentError(str(error)) from error
    letters, places = tuple(options or LETTERS), _PLACES[layout]
    wrong = [gold for gold in answers if metric == "option" and gold.strip().upper() not in letters]
    if wrong:
        raise DocumentError(f"the answer is '{wrong[0]}'; expected one of the letters {', '.join(letters)}")
    images = tuple(
        _unpacked(text, source) if packed or text.startswith("data:") else picture_file(source.folder, text, places)
        for text in pictures
    )
    return VisionItem(
        id=identity,
        dataset=dataset or source.dataset or source.stem,
        question=question,
        answers=answers,
        images=images,
        metric=metric,
        options=dict(options or {}),
        suffix=chosen.suffix if chosen else "",
        max_new_tokens=chosen.max_new_tokens if chosen else 32,
        group=group or _key(pictures[0], images[0]),
        meta=rest_of(record, used),
    )


def _unpacked(text: str, source: Source) -> bytes:
    if text not in source.decoded:
        source.decoded[text] = picture_bytes(text)
    return source.decoded[text]


def _key(name: str, image: Picture) -> str:
    return name if isinstance(image, Path) else "picture-" + hashlib.sha256(image).hexdigest()[:16]


def _by_index(text: str, source: Source) -> str:
    if len(text) > _LONGEST_INDEX:
        return text
    other = source.images.get(text, "")
    if len(other) <= _LONGEST_INDEX:
        raise DocumentError(f"'image' is '{text}', the index of no record that has a picture")
    return other


def _golds(record: Record, name: str) -> tuple[str, ...]:
    return tuple(gold for text in _texts(record, name) if (gold := text.translate(_NO_BREAK)).strip())


def _texts(record: Record, name: str) -> list[str]:
    """Return one string or a list of them as a list."""
    value = field_of(record, name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DocumentError(f"'{name}' is {kind_of(value)}; expected a string or a list of strings")
    return texts


def _pictures(record: Record, name: str) -> list[str]:
    value = field_of(record, name)
    if isinstance(value, str) and value.startswith("["):
        record = {name: _listed_in_text(value, name)}
    texts = _texts(record, name)
    if not texts:
        raise DocumentError(f"'{name}' is empty; expected at least one picture")
    return texts


def _listed_in_text(text: str, name: str) -> list[Any]:
    """Return the list that a cell of a table holds as Python writes it, as VLMEvalKit's files have it."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise DocumentError(f"'{name}' starts like a list and is none: '{text[:40]}'") from error
    if not isinstance(found, list):
        raise DocumentError(f"'{name}' starts like a list and is none: '{text[:40]}'")
    return [str(entry) if isinstance(entry, (int, float)) else entry for entry in found]


def _name(record: Record, name: str) -> str:
    """Return a field that may be a whole number in one file and a text in another."""
    value = field_of(record, name)
    return str(value) if type(value) in (int, float) else text_of(record, name)

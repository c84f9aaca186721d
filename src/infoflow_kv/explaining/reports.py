"""The report of one request, a dictionary that `explain` makes: whether it holds together, what others read of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from infoflow_kv.errors import OptionError

FORMAT = 1
# Any JSON integer is a number, but what is drawn is a float, and per cents and roundings of it must be floats too.
LARGEST = 1e300

TIMINGS = ("load_seconds", "assemble_seconds", "score_seconds", "repair_seconds", "ttft_seconds", "decode_seconds")
USAGE = (
    "context_tokens",
    "prompt_tokens",
    "reusable_tokens",
    "recomputed_tokens",
    "prefilled_tokens",
    "cached_chunks",
    "chunks",
    "new_tokens",
)

# What the fields may be, as error messages call it.
NUMBER = int | float
KINDS = {
    str: "string",
    bool: "truth value",
    Sequence: "list",
    Mapping: "dictionary",
    int: "whole number",
    NUMBER: "number",
}


def selections(report: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that each method chose, as the selection map takes them; OptionError as `check_report`.

    Per method its reusable tokens and its chunks in the request's own order, each with title, number of tokens, scores
    (none where the method does not score), marks and whether it is exact. With the request's question, model, version,
    day and budget.
    """
    check_report(report)
    return {
        **{name: report[name] for name in ("question", "model", "version", "created", "budget")},
        "cover": report.get("cover"),
        "methods": [
            {
                "name": method["name"],
                "reusable": method["usage"]["reusable_tokens"],
                "chunks": [
                    {
                        "title": chunk["title"],
                        "tokens": len(chunk["tokens"]),
                        "scores": list(part["scores"] or ()),
                        "recomputed": list(part["recomputed"]),
                        "exact": part["exact"],
                    }
                    for chunk, part in zip(report["chunks"], method["chunks"], strict=True)
                ],
            }
            for method in report["methods"]
        ],
    }


def check_report(report: Mapping[str, Any]) -> None:
    """OptionError unless the report holds together; afterwards every field that is read is there and of its type."""
    given = report.get("format") if isinstance(report, Mapping) else None
    if type(given) is not int or given != FORMAT:
        raise OptionError(f"the report has format {given!r}, and this version draws format {FORMAT}; make it anew")
    for name in ("question", "model", "created", "version"):
        _field(report, name, str, "the report")
    _number(report, "budget", "the report")
    if report.get("cover") is not None:
        _number(report, "cover", "the report")
    _optional(report, "full_answer", str, "the report")
    for index, token in enumerate(_field(report, "prompt_tokens", Sequence, "the report")):
        _expect(token, str, f"prompt token {index}")
    sizes = []
    for index, chunk in enumerate(_field(report, "chunks", Sequence, "the report")):
        where = f"chunk {index}"
        for name in ("id", "title"):
            _field(chunk, name, str, where)
        tokens = _field(chunk, "tokens", Sequence, where)
        for token in tokens:
            _expect(token, str, f"a token of {where}")
        sizes.append(len(tokens))
        if "images" in chunk:
            _check_images(_field(chunk, "images", Sequence, where), where, len(tokens))
    if sizes and not any(sizes):
        raise OptionError(f"the report has {len(sizes)} chunks without a token; at least one must have some")
    methods = _field(report, "methods", Sequence, "the report")
    if not methods:
        raise OptionError("the report has no methods; it needs at least one")
    for index, method in enumerate(methods):
        _check_method(method, f"method {index}", sizes)


def _check_images(images: Sequence[Any], where: str, size: int) -> None:
    """OptionError unless the images stand one behind the other within the chunk's `size` tokens."""
    end = 0
    for index, image in enumerate(images):
        which = f"image {index} of {where}"
        start, stop, tokens, tiles = (_field(image, name, int, which) for name in ("start", "stop", "tokens", "tiles"))
        if not end <= start < stop <= size or not 1 <= tokens <= stop - start or tiles < 1:
            raise OptionError(
                f"{which} has {tokens} tokens in {tiles} tiles from {start} to {stop}; it needs at least one of each, "
                f"within {end} to {size}"
            )
        end = stop


def _check_method(method: Any, where: str, sizes: list[int]) -> None:
    where = f"method '{_field(method, 'name', str, where)}'"
    for name in ("rule", "source", "answer", "geometry", "layers"):
        _field(method, name, str, where)
    _field(method, "reorder", bool, where)
    _expect(method.get("reason", ""), str, f"'reason' of {where}")
    _optional(method, "same_first_token", bool, where)
    for name in ("kl_first", "js_first"):
        if _optional(method, name, NUMBER, where) is not None:
            _number(method, name, where)
    for group, names in (("usage", USAGE), ("timings", TIMINGS)):
        numbers = _field(method, group, Mapping, where)
        for name in names:
            if _number(numbers, name, f"{group} of {where}") < 0:
                raise OptionError(f"{group} of {where}: '{name}' is {numbers[name]!r}; it cannot be below 0")
    order = _field(method, "order", Sequence, where)
    if any(type(index) is not int for index in order) or sorted(order) != list(range(len(sizes))):
        raise OptionError(f"{where}: 'order' must hold each of the {len(sizes)} chunk indices once, got {list(order)}")
    chunks = _field(method, "chunks", Sequence, where)
    if len(chunks) != len(sizes):
        raise OptionError(f"{where} has {len(chunks)} chunks, and the report has {len(sizes)}; they must agree")
    for index, (chunk, size) in enumerate(zip(chunks, sizes, strict=True)):
        _check_chunk(chunk, f"{where}, chunk {index}", size)


def _check_chunk(chunk: Any, where: str, size: int) -> None:
    _field(chunk, "exact", bool, where)
    _number(chunk, "mass", where)
    marks = _field(chunk, "recomputed", Sequence, where)
    scores = _optional(chunk, "scores", Sequence, where)
    for name, values in (("recomputed", marks), ("scores", scores)):
        if values is not None and len(values) != size:
            raise OptionError(f"{where}: {len(values)} '{name}' for {size} tokens; there must be one for each")
    if any(mark not in (0, 1) for mark in marks):
        raise OptionError(f"{where}: 'recomputed' must be 0 or 1 for each token")
    for position, score in enumerate(scores or ()):
        _finite(score, f"{where}: the score of token {position}")


def _field(record: Any, name: str, kind: Any, where: str) -> Any:
    """The field of this name; OptionError if it is missing or of another kind."""
    if not isinstance(record, Mapping) or name not in record:
        raise OptionError(f"{where} lacks '{name}'")
    return _expect(record[name], kind, f"'{name}' of {where}")


def _optional(record: Any, name: str, kind: Any, where: str) -> Any:
    """The field of this name, which may be None but must be there."""
    return None if isinstance(record, Mapping) and record.get(name, 0) is None else _field(record, name, kind, where)


def _expect(value: Any, kind: Any, what: str) -> Any:
    # A string is a sequence too, and True is an int: neither is ever meant.
    wrong = isinstance(value, str) if kind is Sequence else isinstance(value, bool) and kind is not bool
    if wrong or not isinstance(value, kind):
        raise OptionError(f"{what} is a {type(value).__name__}; a {KINDS[kind]} is needed")
    return value


def _number(record: Any, name: str, where: str) -> float:
    """The finite number of this name."""
    return _finite(_field(record, name, NUMBER, where), f"'{name}' of {where}")


def _finite(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise OptionError(f"{what} is {_shown(value)}; a finite number is needed, at most {LARGEST:g} in size")
    return value


def _shown(value: Any) -> str:
    """The value as an error shows it; Python writes no integer of thousands of digits."""
    return "an integer of many digits" if isinstance(value, int) and abs(value) > LARGEST else repr(value)

"""Rows of `eval predict` read back: one dictionary per item and arm, checked, and pairs of arms on the same items."""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infoflow_kv.errors import InputError, OptionError, unknown_name

Row = dict[str, Any]

FORMAT = 1
ROWS_NAME = "rows.jsonl"
RUN_NAME = "run.json"

_NUMBER = (int, float)
_REQUIRED: dict[str, tuple[type, ...]] = {
    "_id": (str,),
    "dataset": (str,),
    "group": (str,),
    "arm": (str,),
    "method": (str,),
    "budget": (int, float, str, type(None)),
    "geometry": (str,),
    "reorder": (bool,),
    "layers": (str, list, type(None)),
    "prediction": (str, type(None)),
    "answers": (list,),
    "kl_first": _NUMBER,
    "kl_cont": _NUMBER,
    "js_first": _NUMBER,
    "js_cont": _NUMBER,
    "top1": (bool,),
    "prefix": (int,),
    "prefix_of": (int,),
    "margin": _NUMBER,
    "gold_nll": _NUMBER,
    "full_gold_nll": _NUMBER,
    "context_tokens": (int,),
    "prompt_tokens": (int,),
    "reusable_tokens": (int,),
    "recomputed_tokens": (int,),
    "recomputed_share": _NUMBER,
    "recomputed_share_all": _NUMBER,
    "computed_share": _NUMBER,
    "chunks": (int,),
    "ttft_seconds": _NUMBER,
    "token_ids_sha256": (str,),
}
# Absent or null where they were not measured.
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "closed_gold_nll": _NUMBER,
    "closed_prediction": (str,),
    "selection_lift": _NUMBER,
    "rope_mean_of_max": _NUMBER,
    "rope_max": _NUMBER,
    "delta_k": (dict,),
    "delta_v": (dict,),
    "timings": (dict,),
    "stop_reason": (str,),
    "meta": (dict,),
}

_log = logging.getLogger(__name__)


def read_rows(paths: Iterable[Path | str]) -> list[Row]:
    """All rows of these run folders or `rows.jsonl` files, in their order; optional fields are there as None.

    Raises InputError with file and line for a malformed line, a missing or mistyped field, another format version, an
    arm that an item has twice, and arms of one item that did not see the same token ids (reordered arms are exempt).
    The last line of a file may be torn by an interrupted run: it is left out, and the log says so. Runs of different
    weights are refused: their rows share no reference.
    """
    given = _listed(paths)
    read_runs(given)
    found: list[tuple[Row, str]] = []
    for path in given:
        found += _read_file(_rows_file(path))
    if not found:
        raise InputError(f"no rows in {', '.join(map(str, given))}; run `infoflow-kv eval predict` first")
    _check_items(found)
    return [row for row, _ in found]


def read_runs(paths: Iterable[Path | str]) -> list[dict[str, Any]]:
    """The `run.json` records beside these rows, those that exist; InputError where their models differ."""
    runs: list[dict[str, Any]] = []
    places: list[Path] = []
    for path in _listed(paths):
        file = (path if path.is_dir() else path.parent) / RUN_NAME
        if file in places or not file.is_file():
            continue
        try:
            run = json.loads(file.read_bytes())
        except ValueError as error:
            raise InputError(f"{file} is not JSON ({error}); run `eval predict` again into a new folder") from None
        if not isinstance(run, dict):
            raise InputError(f"{file} holds a {type(run).__name__} where a JSON object is expected")
        _check_format(run, str(file))
        for key in ("weights", "dtype"):
            if runs and runs[0].get(key) != run.get(key):
                raise InputError(
                    f"{places[0]} and {file} differ in {key} ({runs[0].get(key)} and {run.get(key)}); distances to "
                    "full prefill compare within one model only: report each run by itself"
                )
        runs.append(run)
        places.append(file)
    return runs


def environments_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The environments that wrote a run's rows; of a record from before they were listed, the one it names."""
    listed = record.get("environments")
    if listed is None:
        listed = [record.get("environment")]
    return [dict(e) for e in listed if isinstance(e, Mapping) and e] if isinstance(listed, list) else []


class Pairs(NamedTuple):
    """Two arms on the items that both have, in the order of the rows."""

    ids: list[str]
    a: list[float]
    b: list[float]
    clusters: list[str]  # items that share a document, or the item alone
    datasets: list[str]


def paired(rows: Sequence[Mapping[str, Any]], arm_a: str, arm_b: str, field: str) -> Pairs:
    """`field` of two arms on the items that both have; items where either value is None are left out.

    OptionError for an arm or a field that no row has.
    """
    arms = {row["arm"] for row in rows}
    for arm in (arm_a, arm_b):
        if arm not in arms:
            raise unknown_name("arm", arm, arms)
    if not any(field in row for row in rows):
        raise unknown_name("field", field, {key for row in rows for key in row})
    other = {row["_id"]: row.get(field) for row in rows if row["arm"] == arm_b}
    pairs = Pairs([], [], [], [], [])
    for row in rows:
        a, b = row.get(field), other.get(row["_id"])
        if row["arm"] != arm_a or a is None or b is None:
            continue
        if not isinstance(a, _NUMBER) or not isinstance(b, _NUMBER):
            raise OptionError(f"field '{field}' is no number ({a!r}); give one of the measured fields")
        pairs.ids.append(row["_id"])
        pairs.a.append(float(a))
        pairs.b.append(float(b))
        pairs.clusters.append(cluster(row))
        pairs.datasets.append(row["dataset"])
    return pairs


def cluster(row: Mapping[str, Any]) -> str:
    """The name of the group that is resampled together; two data sets never share one."""
    return f"{row['dataset']}/{row['group'] or row['_id']}"


def _listed(paths: Iterable[Path | str]) -> list[Path]:
    if isinstance(paths, (str, Path)):
        return [Path(paths)]
    return [Path(path) for path in paths]


def _rows_file(path: Path) -> Path:
    file = path / ROWS_NAME if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"{file} does not exist; give a folder that `infoflow-kv eval predict --out` wrote, or its {ROWS_NAME}"
        )
    return file


def _read_file(file: Path) -> list[tuple[Row, str]]:
    found: list[tuple[Row, str]] = []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            if number == len(lines):  # no line feed behind it: the writer was stopped in the middle
                _log.warning("%s is torn (an interrupted run) and was left out; `eval predict` resumes there", place)
                continue
            raise InputError(f"{place}: not a JSON line ({error}); remove the line or predict the item again") from None
        _check_row(row, place)
        found.append((row, place))
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that can be compared")


def _check_format(record: Mapping[str, Any], place: str) -> None:
    version = record.get("format")
    if version == FORMAT and not isinstance(version, bool):
        return
    if isinstance(version, int) and version > FORMAT:
        todo = "update infoflow-kv to read it"
    else:
        todo = "run `infoflow-kv eval predict` again into a new folder"
    raise InputError(f"{place}: format {version!r}, and this version of infoflow-kv reads format {FORMAT}; {todo}")


def _check_row(row: Any, place: str) -> None:
    if not isinstance(row, dict):
        raise InputError(f"{place}: a {type(row).__name__} where a JSON object is expected")
    _check_format(row, place)
    missing = [field for field in _REQUIRED if field not in row]
    if missing:
        raise InputError(f"{place}: no {', '.join(missing)}; the row was not written by `eval predict`: predict again")
    for field, types in _REQUIRED.items():
        _check_type(field, row[field], types, place)
    for field, types in _OPTIONAL.items():
        if row.setdefault(field, None) is not None:
            _check_type(field, row[field], types, place)
    row["meta"] = row["meta"] or {}
    if not row["answers"] or not all(isinstance(answer, str) for answer in row["answers"]):
        raise InputError(f"{place}: answers is {row['answers']!r}, expected a list of at least one text")
    if not 0 <= row["prefix"] <= row["prefix_of"]:
        raise InputError(f"{place}: prefix {row['prefix']} is not within 0 and prefix_of {row['prefix_of']}")


def _check_type(field: str, value: Any, types: tuple[type, ...], place: str) -> None:
    right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    if not right or (isinstance(value, float) and not math.isfinite(value)):
        expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
        raise InputError(f"{place}: {field} is {value!r}, expected {expected}; predict the item again")


def _check_items(found: Sequence[tuple[Row, str]]) -> None:
    seen: dict[tuple[str, str], str] = {}
    first: dict[str, tuple[Row, str]] = {}
    ids_of: dict[str, tuple[Row, str]] = {}
    for row, place in found:
        item, arm = row["_id"], row["arm"]
        if (item, arm) in seen:
            raise InputError(
                f"{place}: item '{item}' has arm '{arm}' already at {seen[item, arm]}; give each run once, and each "
                "item one id"
            )
        seen[item, arm] = place
        before, there = first.setdefault(item, (row, place))
        for field in ("dataset", "group", "answers"):
            if before[field] != row[field]:
                raise InputError(
                    f"{place}: item '{item}' has {field} {row[field]!r} here and {before[field]!r} at {there}; these "
                    "are two items, give them two ids"
                )
        if row["reorder"]:  # another order of chunks has other token ids on purpose
            continue
        before, there = ids_of.setdefault(item, (row, place))
        if before["token_ids_sha256"] != row["token_ids_sha256"]:
            raise InputError(
                f"{place}: arm '{arm}' of item '{item}' saw other token ids than arm '{before['arm']}' at {there}; "
                "arms compare on the same prompt only: predict both in one run"
            )

"""Rows of `eval predict` read back: one dictionary per item and arm, checked, and pairs of arms on the same items."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infoflow_kv.errors import InputError, OptionError, unknown_name
from infoflow_kv.evaluate.changes import changes
from infoflow_kv.evaluate.items import POOLED
from infoflow_kv.evaluate.json_text import parsed

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
# What an item has in common with itself whatever the arm and the order of its chunks.
_OF_ITEM = ("context_tokens", "prompt_tokens", "chunks", "prefix_of")
_OF_ITEM_NUMBERS = ("margin", "full_gold_nll", "closed_gold_nll")
# How far these may lie apart, relatively and absolutely, where two machines measured them.
_NOISE = {"float32": (1e-3, 1e-3)}
_NOISE_OF_HALVES = (0.05, 0.25)
_OF_ARM = ("method", "budget", "geometry", "reorder", "layers")
# Options that decide what is measured, not how it comes out; and one that is looked at for each data set.
_HARMLESS = ("generate", "kv_error", "prompts")
# What older records lack had this value there; of other options that one of two records lacks, nothing is known.
_ONCE_UNKNOWN = {"lengthen": None}
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
    "prompt_ids_sha256": (str,),
    "meta": (dict,),
}
# Only rows about pictures have these; see `vision_measuring`.
_OF_PICTURES: dict[str, tuple[type, ...]] = {
    "metric": (str,),
    "options": (dict,),
    "tiles": (int,),
    "images_sha256": (str,),
    "reference": (str,),
}

_log = logging.getLogger(__name__)


def read_rows(paths: Iterable[Path | str]) -> list[Row]:
    """All rows of these run folders or `rows.jsonl` files, in their order; optional fields are there as None.

    Raises InputError with file and line for a malformed line, a missing or mistyped field, another format version, an
    arm that an item has twice, one arm name for two things, and arms of one item that were not measured on the same
    prompt (reordered arms read its token ids in another order). The last line of a file may be torn by an interrupted
    run: it is left out, and the log says so. Runs of different weights are refused, for their rows share no reference,
    and so are rows of one data set that were measured with different options.
    """
    given = _listed(paths)
    dtypes = {str(run.get("dtype")) for run in read_runs(given)}
    found: list[tuple[Row, str]] = []
    options_of: dict[str, tuple[Mapping[str, Any], Path]] = {}
    for path in given:
        rows = _read_file(_rows_file(path))
        _check_options(path, {row["dataset"] for row, _ in rows}, options_of)
        found += rows
    if not found:
        raise InputError(f"no rows in {', '.join(map(str, given))}; run `infoflow-kv eval predict` first")
    noise = max((_NOISE.get(dtype, _NOISE_OF_HALVES) for dtype in dtypes), default=_NOISE["float32"])
    _check_items(found, noise)
    _check_arms(found)
    return [row for row, _ in found]


def read_runs(paths: Iterable[Path | str]) -> list[dict[str, Any]]:
    """The `run.json` records beside these rows, those that exist; InputError where their models differ."""
    runs: list[dict[str, Any]] = []
    places: list[Path] = []
    for path in _listed(paths):
        file = _run_file(path)
        if file in places or not file.is_file():
            continue
        run = _read_run(file)
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


def commands_of(environment: Mapping[str, Any]) -> list[str]:
    """The commands that wrote rows in this environment, of all parts of the run; of an older record the first alone."""
    listed = environment.get("commands")
    found = listed if isinstance(listed, list) else [environment.get("command")]
    return [command for command in found if isinstance(command, str) and command]


def worded_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A record's options with words for what older ones wrote as null and as an empty list: arms that write answers."""
    if "generate" not in options:
        return dict(options)
    generate = options["generate"]
    return {**options, "generate": "all" if generate is None else generate or "none"}


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


def _run_file(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / RUN_NAME


def _read_run(file: Path) -> dict[str, Any]:
    try:
        run = parsed(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); run `eval predict` again into a new folder") from None
    if not isinstance(run, dict):
        raise InputError(f"{file} holds a {type(run).__name__} where a JSON object is expected")
    _check_format(run, str(file))
    return run


def _check_options(path: Path, datasets: Iterable[str], options_of: dict[str, tuple[Mapping[str, Any], Path]]) -> None:
    """Nothing; InputError where a data set's rows were measured with other options than those of `options_of`, into
    which its options go where they are the first."""
    file = _run_file(path)
    options = _read_run(file).get("options") if file.is_file() else None
    if not isinstance(options, Mapping):
        return
    for dataset in sorted(datasets):
        before, there = options_of.setdefault(dataset, (options, file))
        found = changes(*_comparable(before, options, dataset))
        if found:
            raise InputError(
                f"{there} and {file} hold rows of data set '{dataset}' that were measured with other options "
                f"({'; '.join(found)}); report each run by itself, or predict both with the same options"
            )


def _comparable(
    before: Mapping[str, Any], now: Mapping[str, Any], dataset: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of two records' options changes the rows of a data set."""
    known = [{**_ONCE_UNKNOWN, **options} for options in (before, now)]
    prompts = [(options.get("prompts") or {}).get(dataset) for options in known]
    both = [key for key in known[0] if key in known[1] and key not in _HARMLESS]
    if all(prompt is not None for prompt in prompts):  # each stands in the place of the instruction
        both = [key for key in both if key != "instruction"]
    first, second = (
        {**{key: options[key] for key in both}, "prompt": prompt}
        for options, prompt in zip(known, prompts, strict=True)
    )
    return first, second


def _read_file(file: Path) -> list[tuple[Row, str]]:
    found: list[tuple[Row, str]] = []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            row = parsed(line, parse_constant=_refuse_constant)
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
    for field, types in _OF_PICTURES.items():
        if field in row:
            _check_type(field, row[field], types, place)
    row["meta"] = row["meta"] or {}
    if not row["answers"] or not all(isinstance(answer, str) for answer in row["answers"]):
        raise InputError(f"{place}: answers is {row['answers']!r}, expected a list of at least one text")
    if not 0 <= row["prefix"] <= row["prefix_of"]:
        raise InputError(f"{place}: prefix {row['prefix']} is not within 0 and prefix_of {row['prefix_of']}")
    if row["dataset"] == POOLED:
        raise InputError(f"{place}: '{POOLED}' is what all data sets together are called; give this one another name")


def _check_type(field: str, value: Any, types: tuple[type, ...], place: str) -> None:
    right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    if not right or (isinstance(value, float) and not math.isfinite(value)):
        expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
        raise InputError(f"{place}: {field} is {value!r}, expected {expected}; predict the item again")


def _check_items(found: Sequence[tuple[Row, str]], noise: tuple[float, float]) -> None:
    seen: dict[tuple[str, str], str] = {}
    first: dict[str, tuple[Row, str]] = {}
    facts: dict[tuple[str, str], tuple[Any, str, str]] = {}  # item and field → value, arm and place that came first
    for row, place in found:
        item, arm = row["_id"], row["arm"]
        if (item, arm) in seen:
            raise InputError(
                f"{place}: item '{item}' has arm '{arm}' already at {seen[item, arm]}; give each run once, and each "
                "item one id"
            )
        seen[item, arm] = place
        before, there = first.setdefault(item, (row, place))
        for field in ("dataset", "group", "answers", "metric", "options", "reference"):
            was, now = before.get(field), row.get(field)
            if was != now:
                raise InputError(
                    f"{place}: item '{item}' has {field} {now!r} here and {was!r} at {there}; these are two items, "
                    "give them two ids"
                )
        for field, value in _of_item(row).items():
            known, other, there = facts.setdefault((item, field), (value, arm, place))
            near = field in _OF_ITEM_NUMBERS and math.isclose(known, value, rel_tol=noise[0], abs_tol=noise[1])
            if known != value and not near:
                other_things = {"token_ids_sha256": "token ids", "images_sha256": "pictures"}
                what = f"saw other {other_things[field]}" if field in other_things else ""
                what = what or f"has another {field} ({value}, not {known})"
                raise InputError(
                    f"{place}: arm '{arm}' of item '{item}' {what} than arm '{other}' at {there}; arms compare on the "
                    "same prompt and model only: predict both in one run"
                )


def _of_item(row: Row) -> dict[str, Any]:
    """What every row of an item must say alike, as far as this row says it."""
    # Another order of chunks has other token ids on purpose; older rows do not say those of the order given.
    ids = row["prompt_ids_sha256"] or (None if row["reorder"] else row["token_ids_sha256"])
    # Pictures of one size have the same ids.
    said = {"token_ids_sha256": ids, "images_sha256": row.get("images_sha256")}
    said |= {field: row[field] for field in (*_OF_ITEM, *_OF_ITEM_NUMBERS)}
    return {field: value for field, value in said.items() if value is not None}


def _check_arms(found: Sequence[tuple[Row, str]]) -> None:
    """Nothing; InputError where one arm name stands for two things, as `layers=auto` does after a calibration."""
    first: dict[str, tuple[Row, str]] = {}
    for row, place in found:
        before, there = first.setdefault(row["arm"], (row, place))
        for field in _OF_ARM:
            if before[field] != row[field]:
                raise InputError(
                    f"{place}: arm '{row['arm']}' has {field} {row[field]} here and {before[field]} at {there}; under "
                    "one name they would be averaged: report each run by itself, or predict both with one calibration"
                )

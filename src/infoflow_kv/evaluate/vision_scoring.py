"""Predictions about pictures → each set's published number, and every arm against `none` and `full`, paired by item.

A row needs no distances to full prefill: rows of `eval predict` will do, and so will another program's predictions.
"""

import json
import logging
import math
import statistics as st
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infoflow_kv.errors import InputError
from infoflow_kv.evaluate.items import POOLED
from infoflow_kv.evaluate.json_text import parsed
from infoflow_kv.evaluate.results import FORMAT, ROWS_NAME, Row, cluster
from infoflow_kv.evaluate.scoring import Comparison, Estimate, estimate, paired_comparisons
from infoflow_kv.evaluate.statistics import paired_bootstrap
from infoflow_kv.evaluate.vision_metrics import BINARY_FIELDS, FIELDS, METRICS, vision_values

REFERENCES = ("none", "full")
"""The arms that the others are held against: reuse without repair, and full prefill."""

_REQUIRED: dict[str, tuple[type, ...]] = {
    "_id": (str,),
    "dataset": (str,),
    "arm": (str,),
    "metric": (str,),
    "prediction": (str, type(None)),
    "answers": (list,),
}
_OPTIONAL: dict[str, tuple[type, ...]] = {"group": (str,), "options": (dict,), "meta": (dict,)}
# What every arm of an item must say alike: else it was asked or scored another way.
_OF_ITEM = ("dataset", "group", "metric", "answers", "options")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VisionScore:
    """One arm on one data set by one measure, 0..1; `part` is the value of the fact that it was broken down by.

    `mean` is the published number: of HRBench4K the mean of its option cycles' accuracies, of `pooled` the mean of the
    data sets'. `interval` is that of the mean over items, pictures resampled.
    """

    dataset: str
    arm: str
    field: str
    part: str
    n: int
    mean: float
    interval: Estimate


@dataclass(frozen=True, slots=True)
class VisionComparison(Comparison):
    """An arm's paired difference to `none` or `full` on one data set.

    `test` says where the p-value is from: "mcnemar", exact and two-sided, for hits and misses, or "sign-flip" over
    pictures for ANLS. The tally's wins and losses are McNemar's discordant pairs.
    """

    dataset: str
    test: str


def read_predictions(paths: Iterable[Path | str] | Path | str) -> list[Row]:
    """Return all rows of these run folders or JSON-lines files, in their order.

    A row needs `_id, dataset, arm, metric, prediction, answers`, and may have `group, options, meta`; other fields stay
    as they are. The last line of a file may be torn by an interrupted run: it is left out, and the log says so.

    Raises InputError with file and line for a malformed line, a missing or mistyped field, an unknown metric, an answer
    that nothing can be scored against, an arm that an item has twice and arms of one item that differ in how it is
    asked or scored.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    found: list[Row] = []
    arms: dict[tuple[str, str], str] = {}
    first: dict[str, tuple[Row, str]] = {}
    for path in map(Path, given):
        for row, place in _read_file(path / ROWS_NAME if path.is_dir() else path):
            item, arm = row["_id"], row["arm"]
            if (item, arm) in arms:
                raise InputError(
                    f"{place}: item '{item}' has arm '{arm}' already at {arms[item, arm]}; give each run once"
                )
            arms[item, arm] = place
            before, there = first.setdefault(item, (row, place))
            for field in _OF_ITEM:
                if before[field] != row[field]:
                    raise InputError(
                        f"{place}: item '{item}' has {field} {row[field]!r} here and {before[field]!r} at {there}; "
                        "arms compare on the same item only"
                    )
            found.append(row)
    if not found:
        raise InputError(f"no rows in {', '.join(map(str, given))}; predict on a vision set first")
    return found


def score_vision(
    rows: Sequence[Mapping[str, Any]], *, by: str | None = None, resamples: int = 10_000, seed: int = 0
) -> list[VisionScore]:
    """Return one record a data set, arm and measure in the order of the rows, then the pooled ones.

    `by` names a fact in `meta` (ChartQA's `kind`, OCRBench's `type`, HRBench4K's `category`): one record a value of it,
    and items without it are left out. Pooled records weigh data sets equally; there are some for measures that several
    data sets have (ChartQA's two halves), of the arms that ran on all of these. Rows without a prediction do not count.
    """
    measured = _measured(rows)
    found: list[VisionScore] = []
    for dataset in dict.fromkeys(row["dataset"] for row in measured):
        for arm in dict.fromkeys(row["arm"] for row in measured):
            ours = [row for row in measured if (row["dataset"], row["arm"]) == (dataset, arm)]
            for field in _fields(ours):
                parts: dict[str, list[Row]] = {}
                for row in ours:
                    if field in row and (by is None or by in row["meta"]):
                        parts.setdefault("" if by is None else str(row["meta"][by]), []).append(row)
                found += [_score(dataset, arm, field, part, kept, resamples, seed) for part, kept in parts.items()]
    return found + (_pooled(measured, found, resamples, seed) if by is None else [])


def compare_vision(
    rows: Sequence[Mapping[str, Any]],
    references: Sequence[str] = REFERENCES,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[VisionComparison]:
    """Return every arm against each of the `references` that ran, on the items that both answered.

    Where images were cut in tiles, arms are held against the reference that cut them alike; full prefill cuts nothing
    and is compared with all.

    First each data set by each measure, then pooled ones as in `score_vision`. p-values are McNemar's exact two-sided
    ones over items, for ANLS sign flips over pictures; Holm's adjustment is over the arms that one reference is
    compared with on one data set by one measure. Intervals resample pictures, which McNemar's test knows nothing of: of
    sets that ask a picture several times, read the interval first.
    """
    measured = _measured(rows)
    found: list[VisionComparison] = []
    for scope, field, kept in _scopes(measured):
        arms = list(dict.fromkeys(row["arm"] for row in kept))
        binary = field in BINARY_FIELDS
        for reference in (arm for name in references for arm in arms if name == arm.partition("[tiles=")[0]):
            others = [arm for arm in arms if arm != reference and _compares(kept, arm, reference)]
            for c in paired_comparisons(kept, reference, field, others, binary=binary, resamples=resamples, seed=seed):
                values = (c.arm, c.reference, c.field, c.difference, c.p, c.p_holm, c.tally)
                found.append(VisionComparison(*values, scope, "mcnemar" if binary else "sign-flip"))
    return found


def _compares(rows: Sequence[Row], arm: str, reference: str) -> bool:
    """Whether two arms cut images alike, as far as rows say that, or one is full prefill."""
    tiles = {row["arm"]: row.get("tiles") for row in rows}
    a, b = tiles[arm], tiles[reference]
    return a is None or b is None or 0 in (a, b) or a == b


def as_json(scores: Sequence[VisionScore], comparisons: Sequence[VisionComparison]) -> dict[str, Any]:
    """Return both as JSON takes them: an unbounded end of an interval is null, a tally has names.

    >>> as_json([], [])
    {'scores': [], 'differences': []}
    """
    differences = [{**asdict(c), "difference": _bounded(c.difference), "tally": c.tally._asdict()} for c in comparisons]
    return {
        "scores": [{**asdict(s), "interval": _bounded(s.interval)} for s in scores],
        "differences": differences,
    }


def _bounded(given: Estimate) -> dict[str, Any]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(given).items()}


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows with the scores of their predictions as fields."""
    plain = [{key: value for key, value in row.items() if key not in FIELDS} for row in rows]
    return [{"group": "", "meta": {}, **row, **vision_values(row, row["prediction"])} for row in plain]


def _fields(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The measures that some row has, in the order of the table."""
    return [field for field in FIELDS if any(field in row for row in rows)]


def _scopes(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """Data set, measure and rows of all that is compared; pooled ones last."""
    found: list[tuple[str, str, list[Row]]] = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        ours = [row for row in rows if row["dataset"] == dataset]
        found += [(dataset, field, [row for row in ours if field in row]) for field in _fields(ours)]
    return found + [(POOLED, field, kept) for field, kept in _poolable(rows)]


def _poolable(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The measures that several data sets have, with the rows of the arms that have them on all of these."""
    found: list[tuple[str, list[Row]]] = []
    for field in _fields(rows):
        ours = [row for row in rows if field in row]
        datasets = {row["dataset"] for row in ours}
        ran: dict[str, set[str]] = {}
        for row in ours:
            ran.setdefault(row["arm"], set()).add(row["dataset"])
        kept = [row for row in ours if ran[row["arm"]] == datasets]
        if len(datasets) > 1 and kept:
            found.append((field, kept))
    return found


def _score(
    dataset: str, arm: str, field: str, part: str, rows: Sequence[Row], resamples: int, seed: int
) -> VisionScore:
    return VisionScore(
        dataset, arm, field, part, len(rows), _mean(rows, field), _interval(rows, field, resamples, seed)
    )


def _pooled(rows: Sequence[Row], scores: Sequence[VisionScore], resamples: int, seed: int) -> list[VisionScore]:
    found: list[VisionScore] = []
    for field, kept in _poolable(rows):
        for arm in dict.fromkeys(row["arm"] for row in kept):
            ours = [row for row in kept if row["arm"] == arm]
            mean = st.fmean(s.mean for s in scores if (s.arm, s.field) == (arm, field))
            found.append(VisionScore(POOLED, arm, field, "", len(ours), mean, _interval(ours, field, resamples, seed)))
    return found


def _mean(rows: Sequence[Row], field: str) -> float:
    """The mean over items; of metrics that say so, over the values of a fact that every row has."""
    over = METRICS[rows[0]["metric"]].mean_over
    parts: dict[str, list[float]] = {}
    for row in rows:
        parts.setdefault(str(row["meta"].get(over, "")), []).append(row[field])
    if "" in parts:
        return st.fmean(row[field] for row in rows)
    return st.fmean(st.fmean(values) for values in parts.values())


def _interval(rows: Sequence[Row], field: str, resamples: int, seed: int) -> Estimate:
    clusters, datasets = [cluster(row) for row in rows], [row["dataset"] for row in rows]
    return estimate(paired_bootstrap([row[field] for row in rows], clusters, datasets, resamples, seed), clusters)


def _read_file(file: Path) -> list[tuple[Row, str]]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror or error}; give a run's folder or a file of JSON lines"
        ) from error
    found: list[tuple[Row, str]] = []
    for number, line in enumerate(lines, start=1):
        place = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            row = parsed(line)
        except ValueError as error:
            if number == len(lines):  # no line feed behind it: the writer was stopped in the middle
                _log.warning("%s is torn (an interrupted run) and was left out", place)
                continue
            why = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise InputError(f"{place}: not a JSON line ({why}); remove it or predict the item again") from None
        found.append((_checked(row, place), place))
    return found


def _checked(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{place}: a {type(row).__name__} where a JSON object is expected")
    if row.get("format", FORMAT) != FORMAT:
        raise InputError(f"{place}: format {row['format']!r}, and this version of infoflow-kv reads format {FORMAT}")
    missing = [field for field in _REQUIRED if field not in row]
    if missing:
        raise InputError(f"{place}: no {', '.join(missing)}; a prediction on a vision set has {', '.join(_REQUIRED)}")
    checked: Row = {**row, **{field: types[0]() for field, types in _OPTIONAL.items() if row.get(field) is None}}
    for field, types in {**_REQUIRED, **_OPTIONAL}.items():
        if not isinstance(checked[field], types):
            expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise InputError(f"{place}: {field} is {checked[field]!r}, expected {expected}")
    if checked["metric"] not in METRICS:
        raise InputError(f"{place}: metric is '{checked['metric']}'; expected one of {', '.join(METRICS)}")
    if not checked["answers"] or not all(isinstance(answer, str) and answer.strip() for answer in checked["answers"]):
        raise InputError(f"{place}: answers is {checked['answers']!r}, expected a list of at least one visible text")
    if not all(isinstance(text, str) for text in checked["options"].values()):
        raise InputError(f"{place}: options is {checked['options']!r}, expected letters with texts")
    if checked["dataset"] == POOLED:
        raise InputError(f"{place}: '{POOLED}' is what all data sets together are called; give this one another name")
    return checked

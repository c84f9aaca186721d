"""Rows → numbers: what each arm reaches on each data set, and its paired difference to a reference arm."""

import statistics as st
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.evaluate import items
from infoflow_kv.evaluate.measures import DECIDED_BY, MEASURES, fields_of, measure, task_value
from infoflow_kv.evaluate.results import Row, cluster, paired
from infoflow_kv.evaluate.statistics import (
    Interval,
    Tally,
    gate,
    holm,
    mcnemar_p,
    paired_bootstrap,
    recovery,
    sign_flip_p,
    wins_ties_losses,
)
from infoflow_kv.evaluate.vision_metrics import BINARY_FIELDS

POOLED = items.POOLED
FEWEST_CLUSTERS = 6
"""With fewer no sign-flip p can be under .05, and a percentile interval holds the truth less often than it says."""
_BINARY = ("top1", "identical", "exact_match", "choice", "hit", *BINARY_FIELDS)


@dataclass(frozen=True, slots=True)
class Summary:
    """One measure over items. Of a pooled score each number is the mean of the data sets' numbers."""

    n: int
    mean: float
    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class Estimate(Interval):
    """An interval that says of how many clusters it is, over all its data sets."""

    clusters: int

    @property
    def is_weak(self) -> bool:
        """True where there are too few clusters for the interval to be trusted."""
        return self.clusters < FEWEST_CLUSTERS


@dataclass(frozen=True, slots=True)
class Score:
    """One arm on one data set, or with equal weights on those of `pooled_datasets` (`dataset` = "pooled").

    `summaries` lacks the measures that no item has (the lift without gold passages, F1 without predictions).
    """

    dataset: str
    arm: str
    method: str
    budget: float | str | None
    geometry: str
    layers: str
    reorder: bool
    n: int
    summaries: Mapping[str, Summary]


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm's mean paired difference to the reference arm: arm − reference, equal weights over data sets.

    `tally` counts items where the arm is better than, equal to and worse than the reference.
    """

    arm: str
    reference: str
    field: str
    difference: Estimate
    p: float
    p_holm: float
    tally: Tally


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether full prefill beats the closed book on a data set by a task measure.

    `passed` is None where nobody knows: nothing was measured (`n` is 0), or of too few clusters to say.
    """

    dataset: str
    field: str
    n: int
    full: float | None
    closed: float | None
    passed: bool | None
    clusters: int = 0

    @property
    def why(self) -> str:
        """The verdict in words."""
        if self.passed is not None:
            return f"full prefill {'beats' if self.passed else 'does not beat'} the model without context"
        if not self.n:
            return "not measured"
        return f"too few documents to say ({self.clusters} of at least {FEWEST_CLUSTERS})"


def score(rows: Sequence[Mapping[str, Any]], *, gated: Sequence[Gate] | None = None) -> list[Score]:
    """One record a data set and arm in the order of the rows, then one pooled record an arm.

    Pooled numbers weigh data sets equally, and all arms are pooled over the same ones (`pooled_datasets`); without such
    data sets there is no pooled record. Task measures pool only those where the model can do the task (`gates`).
    """
    measured = measure(rows)
    closed = {(g.dataset, g.field) for g in (gates(rows) if gated is None else gated) if not g.passed}
    parts: dict[tuple[str, str], list[Row]] = {}
    for row in measured:
        parts.setdefault((row["dataset"], row["arm"]), []).append(row)
    scores = [_score(dataset, part) for (dataset, _), part in parts.items()]
    core = core_datasets(scores)
    pooled_over = {field: pooled_datasets(scores, field) for field in MEASURES}
    pooled: list[Score] = []
    for arm in dict.fromkeys(row["arm"] for row in measured) if core else ():
        pooled.append(_pool([s for s in scores if s.arm == arm and s.dataset in core], closed, pooled_over))
    return scores + pooled


def core_datasets(scores: Iterable[Score]) -> list[str]:
    """The data sets on which every arm ran."""
    arms: dict[str, set[str]] = {}
    for s in scores:
        if s.dataset != POOLED:
            arms.setdefault(s.dataset, set()).add(s.arm)
    every = set().union(*arms.values())
    return [dataset for dataset, ran in arms.items() if ran == every]


def pooled_datasets(scores: Sequence[Score], field: str) -> list[str]:
    """The data sets over which a measure is pooled, the same for every arm.

    Those on which every arm ran, and of them those where each arm has the measure that has it on any of them: an arm
    that wrote answers on some sets only must not stand beside one that wrote them on all.
    """
    core = core_datasets(scores)
    having = {d: {s.arm for s in scores if s.dataset == d and field in s.summaries} for d in core}
    wanted = set().union(*having.values())
    return [dataset for dataset in core if having[dataset] and having[dataset] == wanted]


def compare(
    rows: Sequence[Mapping[str, Any]],
    reference_arm: str,
    field: str,
    *,
    arms: Sequence[str] | None = None,
    gated: Sequence[Gate] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Comparison]:
    """Every other arm (or these `arms`) against the reference on the items that both have, in the order of the rows.

    Items that share a document are resampled together, data sets by themselves. p-values are sign-flip ones, or
    McNemar's exact ones where a measure says yes or no of each item (top1, identical, exact match, choice, needles),
    which knows items only; they are adjusted by Holm over the arms compared here. For a task measure, data sets that
    fail its gate are left out (`gated`: the result of `gates` on these rows, where it is known already). Arms that
    share no item with the reference are left out. OptionError for an unknown arm or measure.
    """
    if field not in MEASURES:
        raise unknown_name("measure", field, MEASURES)
    kept = _counted(rows, field, gated)
    known = list(dict.fromkeys(row["arm"] for row in rows))
    for arm in (reference_arm, *(arms or ())):
        if arm not in known:
            raise unknown_name("arm", arm, known)
    others = [arm for arm in arms or known if arm != reference_arm]
    lower, binary = MEASURES[field].better == "lower", field in _BINARY
    return paired_comparisons(
        kept, reference_arm, field, others, lower=lower, binary=binary, resamples=resamples, seed=seed
    )


def paired_comparisons(
    rows: Sequence[Mapping[str, Any]],
    reference_arm: str,
    field: str,
    arms: Sequence[str],
    *,
    lower: bool = False,
    binary: bool = False,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Comparison]:
    """These arms against the reference by a field of the rows, as `compare` says; nothing else is looked at.

    `lower`: lower is better. `binary`: the field says yes or no, so that McNemar's test takes it where all values are.
    """
    left = {row["arm"] for row in rows}
    sign = -1.0 if lower else 1.0
    found: list[tuple[str, Estimate, float, Tally]] = []
    for arm in arms:
        if not {arm, reference_arm} <= left:
            continue
        pairs = paired(rows, arm, reference_arm, field)
        if not pairs.ids:
            continue
        differences = np.subtract(pairs.a, pairs.b)
        labels = (pairs.clusters, pairs.datasets, resamples, seed)
        tally = wins_ties_losses(sign * differences)
        interval = estimate(paired_bootstrap(differences, *labels), pairs.clusters)
        hits = binary and all(value in (0, 1) for value in (*pairs.a, *pairs.b))
        p = mcnemar_p(pairs.a, pairs.b) if hits else sign_flip_p(differences, *labels)
        found.append((arm, interval, p, tally))
    adjusted = holm([p for _, _, p, _ in found]) if found else ()
    return [
        Comparison(arm, reference_arm, field, interval, p, p_holm, tally)
        for (arm, interval, p, tally), p_holm in zip(found, adjusted, strict=True)
    ]


def interval_of(
    rows: Sequence[Mapping[str, Any]],
    arm: str,
    field: str,
    *,
    gated: Sequence[Gate] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Estimate | None:
    """The arm's mean with its interval, clusters and data sets as in `compare`; None where no item has the measure."""
    if field not in MEASURES:
        raise unknown_name("measure", field, MEASURES)
    kept = [row for row in _counted(rows, field, gated) if row["arm"] == arm and row[field] is not None]
    if not kept:
        return None
    clusters, datasets = [cluster(row) for row in kept], [row["dataset"] for row in kept]
    values = [float(row[field]) for row in kept]
    return estimate(paired_bootstrap(values, clusters, datasets, resamples, seed), clusters)


def gates(rows: Sequence[Mapping[str, Any]], *, resamples: int = 10_000, seed: int = 0) -> list[Gate]:
    """Per data set and task measure, whether full prefill beats the model without any context.

    The gold answer's NLL decides on ΔNLL, F1 by LongBench on itself and on exact match, the paper's F1 on itself, found
    answers on `hit`, letters on `choice`. `passed` is None where the arm `full` or its closed-book run is missing, and
    where fewer than `FEWEST_CLUSTERS` clusters were measured: such a set does not count either, for nobody knows.
    """
    found: list[Gate] = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        full = [row for row in rows if row["dataset"] == dataset and row["arm"] == "full"]
        tasks = {field for row in rows if row["dataset"] == dataset for field in fields_of(row)}
        for field in (f for f in MEASURES if f == "nll_delta" or (f in tasks and f not in DECIDED_BY)):
            pairs = [(row, *pair) for row in full if (pair := _open_and_closed(row, field)) is not None]
            if not pairs:
                found.append(Gate(dataset, field, 0, None, None, None))
                continue
            opened, closed = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
            # A loss is negated, so that higher is better; the record tells it as it is.
            sign = -1.0 if field == "nll_delta" else 1.0
            clusters = [cluster(row) for row, _, _ in pairs]
            passed: bool | None = None
            if len(set(clusters)) >= FEWEST_CLUSTERS:
                better, worse = [sign * x for x in opened], [sign * x for x in closed]
                passed = gate(better, worse, clusters, resamples=resamples, seed=seed)
            means = st.fmean(opened), st.fmean(closed)
            found.append(Gate(dataset, field, len(pairs), *means, passed, len(set(clusters))))
    return found


def recovered(
    rows: Sequence[Mapping[str, Any]],
    field: str,
    *,
    gated: Sequence[Gate] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Estimate | None]:
    """Per arm, the share of the gap between `none` and `full` that it closes; None where the gap may be 0.

    Empty without the arms `none` and `full`. Of the other arms only the items that all three have count.
    """
    if field not in MEASURES:
        raise unknown_name("measure", field, MEASURES)
    kept = _counted(rows, field, gated)
    arms = list(dict.fromkeys(row["arm"] for row in kept))
    if not {"none", "full"} <= set(arms):
        return {}
    values = {arm: {r["_id"]: r for r in kept if r["arm"] == arm and r[field] is not None} for arm in arms}
    found: dict[str, Estimate | None] = {}
    for arm in arms:
        items = [item for item in values[arm] if item in values["none"] and item in values["full"]]
        if arm in ("none", "full") or not items:
            continue
        none, ours, full = ([float(values[a][item][field]) for item in items] for a in ("none", arm, "full"))
        clusters = [cluster(values[arm][item]) for item in items]
        datasets = [values[arm][item]["dataset"] for item in items]
        share = recovery(none, ours, full, clusters, datasets, resamples, seed)
        found[arm] = None if share is None else estimate(share, clusters)
    return found


def estimate(interval: Interval, clusters: Sequence[str]) -> Estimate:
    """The interval with the number of its clusters, from one label an item."""
    return Estimate(interval.mean, interval.low, interval.high, interval.n, len(set(clusters)))


def _counted(rows: Sequence[Mapping[str, Any]], field: str, gated: Sequence[Gate] | None) -> list[Row]:
    """The measured rows without those of data sets that a task measure cannot judge."""
    measured = measure(rows)
    if MEASURES[field].kind != "task":
        return measured
    decides = DECIDED_BY.get(field, field)
    closed = {g.dataset for g in (gates(rows) if gated is None else gated) if g.field == decides and not g.passed}
    return [row for row in measured if row["dataset"] not in closed]


def _open_and_closed(row: Mapping[str, Any], field: str) -> tuple[float, float] | None:
    """The measure of full prefill and of the closed book on one item, if both are there."""
    if field == "nll_delta":
        closed = row.get("closed_gold_nll")
        return None if closed is None else (float(row["gold_nll"]), float(closed))
    ours = task_value(row, field, row["prediction"], row["answers"])
    theirs = task_value(row, field, row.get("closed_prediction"), row["answers"])
    return None if ours is None or theirs is None else (ours, theirs)


def _score(dataset: str, rows: Sequence[Row]) -> Score:
    summaries = {}
    for field in MEASURES:
        values = [float(row[field]) for row in rows if row.get(field) is not None]
        if values:
            p95 = float(np.percentile(values, 95))
            summaries[field] = Summary(len(values), st.fmean(values), st.median(values), p95)
    one = rows[0]
    layers = one["layers"] if isinstance(one["layers"], str) else ",".join(map(str, one["layers"] or ()))
    for field in ("method", "budget", "geometry", "reorder"):
        if any(row[field] != one[field] for row in rows):
            raise OptionError(
                f"arm '{one['arm']}' has rows of different {field}; an arm's name must say all that differs: predict "
                "the arms again in one run"
            )
    return Score(
        dataset, one["arm"], one["method"], one["budget"], one["geometry"], layers, one["reorder"], len(rows), summaries
    )


def _pool(scores: Sequence[Score], closed: set[tuple[str, str]], pooled_over: Mapping[str, Sequence[str]]) -> Score:
    summaries = {}
    for field in MEASURES:
        parts = [
            s.summaries[field]
            for s in scores
            if field in s.summaries
            and s.dataset in pooled_over[field]
            and (s.dataset, DECIDED_BY.get(field, field)) not in closed
        ]
        if parts:
            mean, median, p95 = (st.fmean(getattr(p, name) for p in parts) for name in ("mean", "median", "p95"))
            summaries[field] = Summary(sum(p.n for p in parts), mean, median, p95)
    one = scores[0]
    return Score(
        POOLED,
        one.arm,
        one.method,
        one.budget,
        one.geometry,
        one.layers,
        one.reorder,
        sum(s.n for s in scores),
        summaries,
    )

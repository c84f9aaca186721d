"""Findings → the points of each figure, all arms of a figure over the same items."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infoflow_kv.evaluate.facts import are_numbers
from infoflow_kv.evaluate.figures.layers import members
from infoflow_kv.evaluate.figures.needle import FLOOR, shown_field
from infoflow_kv.evaluate.findings import Findings, is_ablation, variant
from infoflow_kv.evaluate.measures import is_needle, is_tracking
from infoflow_kv.evaluate.results import Row, cluster
from infoflow_kv.evaluate.scoring import Estimate, Score, estimate, interval_of
from infoflow_kv.evaluate.statistics import paired_bootstrap

_USUAL_BUDGET = 0.15
_MOST_PANELS = 9


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows of several arms on the items that all of them have; `left` names arms that have too few of them."""

    rows: tuple[Row, ...]
    arms: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def n(self) -> int:
        """How many items these are."""
        return len({row["_id"] for row in self.rows})

    def of(self, arm: str) -> list[Row]:
        """The rows of one arm."""
        return [row for row in self.rows if row["arm"] == arm]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The points of one figure, what they are made of, and which arms of the same rows it does not show."""

    points: list[dict[str, Any]]
    shared: Shared
    unshown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    field: str = ""


def share(rows: Sequence[Row], arms: Sequence[str]) -> Shared:
    """These arms on their common items: means over different items must not stand in one figure.

    An arm with which less than half of a data set's items would be left is left out, the fullest arms first.
    """
    items: dict[str, dict[str, set[str]]] = {arm: {} for arm in arms}
    for row in rows:
        if row["arm"] in items:
            items[row["arm"]].setdefault(row["dataset"], set()).add(row["_id"])
    most = {
        d: max((len(i.get(d, ())) for i in items.values()), default=0)
        for d in dict.fromkeys(row["dataset"] for row in rows)
    }
    common: dict[str, set[str]] | None = None
    kept = []
    for arm in sorted(arms, key=lambda arm: -sum(map(len, items[arm].values()))):
        both = {d: items[arm].get(d, set()) & (common[d] if common else items[arm].get(d, set())) for d in most}
        if all(2 * len(both[d]) >= most[d] for d in most):
            common = both
            kept.append(arm)
    every = set().union(*(common or {}).values())
    return Shared(
        tuple(row for row in rows if row["arm"] in kept and row["_id"] in every),
        tuple(arm for arm in arms if arm in kept),
        tuple(arm for arm in arms if arm not in kept),
    )


def budget_points(findings: Findings, field: str) -> Drawn:
    """{arm, method, share, value, low, high, clusters} of each arm; layer and geometry variants have figures of their
    own."""
    scores = [s for s in findings.of(findings.scopes[0]) if s.method != "full" and field in s.summaries]
    shown = [s for s in scores if not is_ablation(s.arm)]
    shared = _share(findings, [s.arm for s in shown], field)
    points = [
        {
            "arm": line_of(s),
            "method": s.method,
            "share": _mean(shared.of(s.arm), "recomputed_share"),
            "value": _mean(shared.of(s.arm), field),
            **bounds(_interval(findings, shared, s.arm, field)),
        }
        for s in shown
        if s.arm in shared.arms
    ]
    return Drawn(points, shared, tuple(s.arm for s in scores if s not in shown))


def pareto_points(findings: Findings, field: str, middle: Callable[[Sequence[float]], float] = fmean) -> Drawn:
    """{arm, method, budget, x, y} of each arm, x the `middle` of its items' `field`, y its mean KL; layer variants
    have a figure of their own."""
    scores = [s for s in findings.of(findings.scopes[0]) if field in s.summaries and "kl_cont" in s.summaries]
    shown = [s for s in scores if set(variant(s.arm)) != {"layers"}]
    shared = _share(findings, [s.arm for s in shown], field)
    points = [
        {
            "arm": line_of(s),
            "method": s.method,
            "budget": s.budget if s.method not in ("full", "none") else None,
            "x": _mean(shared.of(s.arm), field, middle),
            "y": _mean(shared.of(s.arm), "kl_cont"),
        }
        for s in shown
        if s.arm in shared.arms
    ]
    return Drawn(points, shared, tuple(s.arm for s in scores if s not in shown))


def line_of(s: Score) -> str:
    """What a line through several budgets is called: the arm without its number; an automatic budget is no place on
    such a line and keeps its own name."""
    return s.arm if isinstance(s.budget, str) else s.arm.rpartition("@")[0] or s.arm


def layer_points(findings: Findings) -> dict[tuple[str, float | str | None], Drawn]:
    """Per method and budget that have layer variants: one record a layer or set; nearest to the usual budget first."""
    groups: dict[tuple[str, float | str | None], list[Score]] = {}
    scores = findings.of(findings.scopes[0])
    for s in scores:
        if set(variant(s.arm)) == {"layers"}:
            groups.setdefault((s.method, s.budget), []).append(s)
    found = {}
    for key in sorted(groups, key=lambda key: (key[0], _from_usual(key[1]))):
        plain = [s for s in scores if (s.method, s.budget) == key and not variant(s.arm)]
        ours = plain + groups[key]
        shared = _share(findings, [s.arm for s in ours], "kl_cont")
        found[key] = Drawn([_layer_point(findings, shared, s) for s in ours if s.arm in shared.arms], shared)
    return found


def num_layers(findings: Findings) -> int | None:
    """How many layers the model has, as far as the rows tell: by measured keys and values, or the last layer that any
    arm scored with; None where no row names one."""
    last = -1
    for row in findings.rows:
        last = max([last, *(members(row["layers"]) or ())])
        for field in ("delta_k", "delta_v"):
            last = max([last, *(len(part) - 1 for part in (row.get(field) or {}).values() if isinstance(part, list))])
    return last + 1 or None


def _layer_point(findings: Findings, shared: Shared, s: Score) -> dict[str, Any]:
    point = {"kl_cont": _mean(shared.of(s.arm), "kl_cont"), **bounds(_interval(findings, shared, s.arm, "kl_cont"))}
    asked = variant(s.arm).get("layers")
    name = asked or f"{s.layers} (default)"
    one = members(asked)
    if one is not None and len(one) == 1:
        return {"layer": one[0], **point}
    return {"layers": members(s.layers) or one or name, "name": name, **point}


def needle_points(findings: Findings, dataset: str, hits: bool = True) -> Drawn:
    """The data set's whole needles at any place in their passage: the others have their own tables. `hits`: False for
    their log-probabilities alone."""
    needles = [row for row in findings.rows if row["dataset"] == dataset and is_needle(row)]
    rows = [
        row
        for row in needles
        if row["meta"].get("kind") == "one"
        and row["meta"].get("place") is None
        and are_numbers(row["meta"], "length", "depth")
    ]
    arms = _shown(findings, dataset, rows)
    shared = share(rows, arms)
    points = [
        {
            "arm": row["arm"],
            "length": row["meta"]["length"],
            "depth": round(100 * row["meta"]["depth"], 6),
            # None, as without a prediction: the picture then shows the log-probability.
            "accuracy": row["hit"] if hits else None,
            "log_probability": -row["gold_nll"],
        }
        for arm in shared.arms
        for row in shared.of(arm)
    ]
    cells: dict[tuple[Any, ...], int] = {}
    for point in points:
        cell = (point["arm"], point["length"], point["depth"])
        cells[cell] = cells.get(cell, 0) + 1
    notes = [f"whole needles at any place in their passage, {_range(cells.values())} a cell"]
    others = {row["_id"] for row in needles} - {row["_id"] for row in rows}
    if others:
        notes.append(f"not drawn: {len(others)} items whose needle is cut, spread or placed, or not told")
    return Drawn(points, shared, _unshown(rows, arms), tuple(notes), shown_field(points) if points else "")


def at_floor(points: Sequence[Mapping[str, Any]], *facts: str) -> bool:
    """Whether at some value of the facts (a length, an order and a number of hops) no arm finds much at all."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for point in points:
        if point["accuracy"] is not None:
            cell = found.setdefault(tuple(point[fact] for fact in facts), {})
            cell.setdefault(point["arm"], []).append(float(point["accuracy"]))
    return any(max(fmean(values) for values in cell.values()) < FLOOR for cell in found.values())


def hop_points(findings: Findings, dataset: str, hits: bool = True) -> Drawn:
    """A point for each arm, order and number of hops of the data set; without `hits` log-probabilities alone."""
    tracking = [row for row in findings.rows if row["dataset"] == dataset and is_tracking(row)]
    rows = [row for row in tracking if are_numbers(row["meta"], "hops")]
    arms = _shown(findings, dataset, rows)
    shared = share(rows, arms)
    cells: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for arm in shared.arms:
        for row in shared.of(arm):
            meta = row["meta"]
            cells.setdefault((arm, str(meta.get("order") or ""), int(meta["hops"])), []).append(row)
    points: list[dict[str, Any]] = [
        {
            "arm": arm,
            "method": part[0]["method"],
            "order": order,
            "hops": hops,
            "accuracy": fmean(r["hit"] for r in part) if hits and all(r["hit"] is not None for r in part) else None,
            "log_probability": -fmean(r["gold_nll"] for r in part),
        }
        for (arm, order, hops), part in cells.items()
    ]
    field = shown_field(points) if points else ""
    for point, part in zip(points, cells.values(), strict=True):
        values = [r["hit"] if field == "accuracy" else -r["gold_nll"] for r in part]
        clusters = [cluster(r) for r in part]
        point |= bounds(estimate(paired_bootstrap(values, clusters, resamples=findings.resamples), clusters))
    notes = [f"{_range(map(len, cells.values()))} a point"] if cells else []
    if others := {row["_id"] for row in tracking} - {row["_id"] for row in rows}:
        notes.append(f"not drawn: {len(others)} items whose number of hops is not told")
    return Drawn(points, shared, _unshown(rows, arms), tuple(notes), field)


def bounds(interval: Estimate | None) -> dict[str, Any]:
    """The ends of an interval for a picture, None where it is unbounded or missing, and its number of clusters."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return {"low": None, "high": None, "clusters": 0}
    return {"low": interval.low, "high": interval.high, "clusters": interval.clusters}


def _share(findings: Findings, arms: Sequence[str], field: str) -> Shared:
    rows = [row for row in findings.rows_of(findings.scopes[0], field) if row[field] is not None]
    return share(rows, [arm for arm in arms if any(row["arm"] == arm for row in rows)])


def _mean(rows: Sequence[Row], field: str, middle: Callable[[Sequence[float]], float] = fmean) -> float:
    """The mean over data sets of the middle of their items: data sets weigh equally."""
    parts: dict[str, list[float]] = {}
    for row in rows:
        parts.setdefault(row["dataset"], []).append(float(row[field]))
    return fmean(middle(part) for part in parts.values())


def _interval(findings: Findings, shared: Shared, arm: str, field: str) -> Estimate | None:
    return interval_of(shared.of(arm), arm, field, gated=findings.gated, resamples=findings.resamples)


def _shown(findings: Findings, dataset: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arms for one picture: `full`, `none`, and the main arms at the budget nearest to 15 %."""
    arms = {row["arm"] for row in rows}
    here = [s.budget for s in findings.of(dataset) if s.arm in arms]
    budgets = [budget for budget in findings.budgets if budget in here]
    numbers = [budget for budget in budgets if isinstance(budget, (int, float))]
    budget: float | str | None = min(numbers, key=_from_usual) if numbers else next(iter(budgets), None)
    scores = findings.at(dataset, None)
    if budget is not None:
        scores += findings.at(dataset, budget)
    return [s.arm for s in scores if s.arm in arms][:_MOST_PANELS]


def _unshown(rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> tuple[str, ...]:
    return tuple(arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm not in arms)


def _range(counts: Any) -> str:
    found = sorted(set(counts)) or [0]
    many = str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
    return f"{many} {'item' if found == [1] else 'items'}"


def _from_usual(budget: float | str | None) -> float:
    return abs(budget - _USUAL_BUDGET) if isinstance(budget, (int, float)) else math.inf

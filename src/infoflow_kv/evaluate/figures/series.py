"""Findings → the data of each figure; a figure without data is left out."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from infoflow_kv.evaluate.figures.budgets import draw_budgets
from infoflow_kv.evaluate.figures.hops import draw_hops
from infoflow_kv.evaluate.figures.layers import draw_layers
from infoflow_kv.evaluate.figures.needle import draw_needle, shown_field
from infoflow_kv.evaluate.figures.pareto import draw_pareto
from infoflow_kv.evaluate.figures.selection import draw_selection
from infoflow_kv.evaluate.findings import Findings, is_ablation, variant
from infoflow_kv.evaluate.measures import is_needle, is_tracking
from infoflow_kv.evaluate.niah import TASK as NEEDLES
from infoflow_kv.evaluate.results import cluster
from infoflow_kv.evaluate.scoring import FEWEST_CLUSTERS, POOLED, Estimate, Score, estimate, interval_of
from infoflow_kv.evaluate.statistics import paired_bootstrap
from infoflow_kv.evaluate.tables import code
from infoflow_kv.evaluate.variable_tracking import TASK as TRACKING

_TIMES = (
    "Times are one run an item, perhaps on a shared machine; of arms that reuse KV they start with the KV in memory "
    "and include up to 15 teacher-forced rows, so they are an upper bound: `infoflow-kv bench` measures times"
)
_USUAL_BUDGET = 0.15
_MOST_PANELS = 9


@dataclass(frozen=True, slots=True)
class Plate:
    """One figure of a report: its file name without suffix, what it shows, and the call that draws it.

    `dataset` and `task`: of a figure that belongs to a made data set.
    """

    name: str
    caption: str
    draw: Callable[[Path], list[Path]]
    dataset: str = ""
    task: str = ""


def plates(findings: Findings, explained: Mapping[str, Any] | None = None) -> list[Plate]:
    """The figures that these findings have data for, nothing drawn yet."""
    found: list[Plate] = []
    scope = _named(findings)
    for field, words in (("kl_cont", "KL to full prefill, nats"), ("js_cont", "JS divergence to full prefill, bits")):
        budgets = _budgets(findings, field)
        if any(point["share"] for point in budgets):
            name = f"budgets-{field[:2]}"
            caption = f"{words}, over the share of recomputed tokens, with 95 % intervals{_few(budgets)} ({scope})"
            found.append(Plate(name, caption, _bind(draw_budgets, budgets, name, quality=words)))
    for field, cost in (
        ("computed_share", "rows computed, share of reusable tokens (mean over layers)"),
        ("ttft_ratio", "time to first token, share of full prefill's (upper bound)"),
    ):
        points = _pareto(findings, field)
        if len(points) > 1:
            name = "pareto-rows" if field == "computed_share" else "pareto-ttft"
            caption = f"Quality against cost: KL to full prefill over {cost} ({scope})"
            caption += f". {_TIMES}" if field == "ttft_ratio" else ""
            found.append(Plate(name, caption, _bind(draw_pareto, points, name, cost=cost)))
    for (method, budget), points in _layers(findings).items():
        name = f"layers-{method}"
        caption = f"Layers whose attention scores the tokens: {method} at {budget}{_few(points)} ({scope})"
        if len(points) > 1 and name not in {plate.name for plate in found}:
            found.append(Plate(name, caption, _bind(draw_layers, points, name, method=method)))
    for task, base, words, records, draw in (
        (NEEDLES, "needle", "Needle in a haystack by depth and length", _needles, draw_needle),
        (TRACKING, "hops", "Variable tracking by the number of hops, with 95 % intervals", _hops, draw_hops),
    ):
        data = {dataset: made for dataset in findings.datasets if (made := records(findings, dataset))}
        for (dataset, made), name in zip(data.items(), _names(base, list(data)), strict=True):
            caption = f"{words}{_few(made)}: {code(dataset)}"
            found.append(Plate(name, caption, _bind(draw, made, name), dataset, task))
    if explained is not None:
        caption = "Which tokens of one request were recomputed"
        found.append(Plate("selection", caption, _bind(draw_selection, explained, "selection")))
    return found


def _bind(draw: Callable[..., list[Path]], data: Any, name: str, **options: Any) -> Callable[[Path], list[Path]]:
    return lambda folder: draw(data, folder, name=name, **options)


def _budgets(findings: Findings, field: str) -> list[dict[str, Any]]:
    points = []
    for s in findings.of(findings.scopes[0]):
        if s.method == "full" or is_ablation(s.arm) or field not in s.summaries:
            continue
        interval = _interval(findings, s.arm, field)
        # A line runs over the budgets of a method, so its name is the arm's without the budget.
        name = s.arm.rpartition("@")[0] or s.arm
        share = s.summaries["recomputed_share"].mean
        value = s.summaries[field].mean
        points.append(
            {
                "arm": name,
                "method": s.method,
                "share": share,
                "value": value,
                **_bounds(interval),
            }
        )
    return points


def _pareto(findings: Findings, field: str) -> list[dict[str, Any]]:
    return [
        {
            "method": s.method,
            "geometry": s.geometry,
            "budget": s.budget,
            "x": s.summaries[field].mean,
            "y": s.summaries["kl_cont"].mean,
        }
        for s in findings.of(findings.scopes[0])
        if field in s.summaries and set(variant(s.arm)) <= {"geometry"}
    ]


def _layers(findings: Findings) -> dict[tuple[str, float | str | None], list[dict[str, Any]]]:
    """Per method and budget that have layer variants: one record a layer or set; nearest to the usual budget first."""
    groups: dict[tuple[str, float | str | None], list[Score]] = {}
    scores = findings.of(findings.scopes[0])
    for s in scores:
        if set(variant(s.arm)) == {"layers"}:
            groups.setdefault((s.method, s.budget), []).append(s)
    found = {}
    for key in sorted(groups, key=lambda key: (key[0], _from_usual(key[1]))):
        plain = [s for s in scores if (s.method, s.budget) == key and not variant(s.arm)]
        found[key] = [_layer_point(findings, s) for s in plain + groups[key]]
    return found


def _layer_point(findings: Findings, s: Score) -> dict[str, Any]:
    interval = _interval(findings, s.arm, "kl_cont")
    named = variant(s.arm).get("layers") or f"{s.layers} (default)"
    parts = named.split(",")
    point: dict[str, Any] = {
        "kl_cont": s.summaries["kl_cont"].mean,
        **_bounds(interval),
    }
    if all(part.strip().isdigit() for part in parts):
        members = [int(part) for part in parts]
        return {"layer": members[0], **point} if len(members) == 1 else {"layers": members, **point}
    return {"layers": named, **point}


def _needles(findings: Findings, dataset: str) -> list[dict[str, Any]]:
    """The data set's whole needles at any place in their passage: the others have their own tables."""
    rows = [
        row
        for row in findings.rows
        if row["dataset"] == dataset
        and is_needle(row)
        and row["meta"].get("kind") == "one"
        and row["meta"].get("place") is None
        and _are_numbers(row["meta"], "length", "depth")
    ]
    return [
        {
            "arm": row["arm"],
            "length": row["meta"]["length"],
            "depth": round(100 * row["meta"]["depth"], 6),
            "accuracy": row["hit"],  # None without a prediction: the picture then shows the log-probability
            "log_probability": -row["gold_nll"],
        }
        for arm in _shown(findings, dataset, rows)
        for row in rows
        if row["arm"] == arm
    ]


def _hops(findings: Findings, dataset: str) -> list[dict[str, Any]]:
    """A point for each arm, order and number of hops of the data set."""
    rows = [
        row
        for row in findings.rows
        if row["dataset"] == dataset and is_tracking(row) and _are_numbers(row["meta"], "hops")
    ]
    cells: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for arm in _shown(findings, dataset, rows):
        for row in rows:
            if row["arm"] == arm:
                meta = row["meta"]
                cells.setdefault((arm, str(meta.get("order") or ""), int(meta["hops"])), []).append(row)
    points: list[dict[str, Any]] = [
        {
            "arm": arm,
            "method": part[0]["method"],
            "order": order,
            "hops": hops,
            "accuracy": None if any(r["hit"] is None for r in part) else fmean(r["hit"] for r in part),
            "log_probability": -fmean(r["gold_nll"] for r in part),
        }
        for (arm, order, hops), part in cells.items()
    ]
    shown = shown_field(points) if points else ""
    for point, part in zip(points, cells.values(), strict=True):
        values = [r["hit"] if shown == "accuracy" else -r["gold_nll"] for r in part]
        clusters = [cluster(r) for r in part]
        point |= _bounds(estimate(paired_bootstrap(values, clusters, resamples=findings.resamples), clusters))
    return points


def _are_numbers(meta: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(meta.get(name), (int, float)) for name in names)


def _names(base: str, datasets: Sequence[str]) -> list[str]:
    """A file name for each data set's figure: the bare one where there is one alone."""
    if len(datasets) == 1:
        return [base]
    names: list[str] = []
    for dataset in datasets:
        name = f"{base}-{re.sub(r'[^A-Za-z0-9._-]+', '-', dataset)}"
        names.append(f"{name}-{len(names) + 1}" if name in names else name)
    return names


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


def _named(findings: Findings) -> str:
    """The data sets of the first figures, for their captions."""
    scope = findings.scopes[0]
    if scope != POOLED:
        return code(scope)
    if len(findings.core) == len(findings.datasets):
        return "pooled over all data sets"
    return f"pooled over {', '.join(map(code, findings.core))}"


def _interval(findings: Findings, arm: str, field: str) -> Estimate | None:
    rows = findings.rows_of(findings.scopes[0], field)
    return interval_of(rows, arm, field, gated=findings.gated, resamples=findings.resamples)


def _few(points: Sequence[Mapping[str, Any]]) -> str:
    """What a caption says where an interval is of too few clusters; "" where none is."""
    least = min((p["clusters"] for p in points if p.get("low") is not None), default=FEWEST_CLUSTERS)
    return f" (few clusters: {least})" if least < FEWEST_CLUSTERS else ""


def _from_usual(budget: float | str | None) -> float:
    return abs(budget - _USUAL_BUDGET) if isinstance(budget, (int, float)) else math.inf


def _bounds(interval: Estimate | None) -> dict[str, Any]:
    """The ends of an interval for a picture, None where it is unbounded or missing, and its number of clusters."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return {"low": None, "high": None, "clusters": 0}
    return {"low": interval.low, "high": interval.high, "clusters": interval.clusters}

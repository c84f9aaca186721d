"""Findings → the data of each figure; a figure without data is left out."""

import math
from collections.abc import Callable, Mapping
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
from infoflow_kv.evaluate.results import cluster
from infoflow_kv.evaluate.scoring import Score, interval_of, is_needle, is_tracking
from infoflow_kv.evaluate.statistics import Interval, paired_bootstrap

_USUAL_BUDGET = 0.15
_MOST_PANELS = 9


@dataclass(frozen=True, slots=True)
class Plate:
    """One figure of a report: its file name without suffix, what it shows, and the call that draws it."""

    name: str
    caption: str
    draw: Callable[[Path], list[Path]]


def plates(findings: Findings, explained: Mapping[str, Any] | None = None) -> list[Plate]:
    """The figures that these findings have data for, nothing drawn yet."""
    found: list[Plate] = []
    scope = findings.scopes[0]
    for field, words in (("kl_cont", "KL to full prefill, nats"), ("js_cont", "JS divergence to full prefill, bits")):
        budgets = _budgets(findings, field)
        if any(point["share"] for point in budgets):
            name = f"budgets-{field[:2]}"
            caption = f"{words}, over the share of recomputed tokens, with 95 % intervals ({scope})"
            found.append(Plate(name, caption, _bind(draw_budgets, budgets, name, quality=words)))
    for field, cost in (
        ("computed_share", "rows computed, share of reusable tokens (mean over layers)"),
        ("ttft_ratio", "time to first token, share of full prefill's"),
    ):
        points = _pareto(findings, field)
        if len(points) > 1:
            name = "pareto-rows" if field == "computed_share" else "pareto-ttft"
            caption = f"Quality against cost: KL to full prefill over {cost} ({scope})"
            found.append(Plate(name, caption, _bind(draw_pareto, points, name, cost=cost)))
    for (method, budget), points in _layers(findings).items():
        name = f"layers-{method}"
        caption = f"Layers whose attention scores the tokens: {method} at {budget} ({scope})"
        if len(points) > 1 and name not in {plate.name for plate in found}:
            found.append(Plate(name, caption, _bind(draw_layers, points, name, method=method)))
    needles = _needles(findings)
    if needles:
        caption = "Needle in a haystack by depth and length"
        found.append(Plate("needle", caption, _bind(draw_needle, needles, "needle")))
    hops = _hops(findings)
    if hops:
        caption = "Variable tracking by the number of hops, with 95 % intervals"
        found.append(Plate("hops", caption, _bind(draw_hops, hops, "hops")))
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
        interval = interval_of(findings.rows, s.arm, field, gated=findings.gated, resamples=findings.resamples)
        # A line runs over the budgets of a method, so its name is the arm's without the budget.
        name = s.arm.rpartition("@")[0] or s.arm
        share = s.summaries["recomputed_share"].mean
        value = s.summaries[field].mean
        points.append({"arm": name, "method": s.method, "share": share, "value": value, **_bounds(interval)})
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
    interval = interval_of(findings.rows, s.arm, "kl_cont", gated=findings.gated, resamples=findings.resamples)
    named = variant(s.arm).get("layers") or f"{s.layers} (default)"
    parts = named.split(",")
    point: dict[str, Any] = {"kl_cont": s.summaries["kl_cont"].mean, **_bounds(interval)}
    if all(part.strip().isdigit() for part in parts):
        members = [int(part) for part in parts]
        return {"layer": members[0], **point} if len(members) == 1 else {"layers": members, **point}
    return {"layers": named, **point}


def _needles(findings: Findings) -> list[dict[str, Any]]:
    return [
        {
            "arm": row["arm"],
            "length": row["meta"]["length"],
            "depth": round(100 * row["meta"]["depth"], 6),
            "accuracy": row["hit"] or 0.0,  # nothing was generated: the picture falls back to the log-probability
            "log_probability": -row["gold_nll"],
        }
        for arm in _shown(findings, is_needle)
        for row in findings.rows
        if row["arm"] == arm and is_needle(row)
    ]


def _hops(findings: Findings) -> list[dict[str, Any]]:
    cells: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for arm in _shown(findings, is_tracking):
        for row in findings.rows:
            if row["arm"] == arm and is_tracking(row):
                meta = row["meta"]
                cells.setdefault((arm, str(meta.get("order") or ""), int(meta["hops"])), []).append(row)
    points = [
        {
            "arm": arm,
            "method": part[0]["method"],
            "order": order,
            "hops": hops,
            "accuracy": fmean(r["hit"] or 0.0 for r in part),
            "log_probability": -fmean(r["gold_nll"] for r in part),
        }
        for (arm, order, hops), part in cells.items()
    ]
    shown = shown_field(points) if points else ""
    for point, part in zip(points, cells.values(), strict=True):
        values = [(r["hit"] or 0.0) if shown == "accuracy" else -r["gold_nll"] for r in part]
        point |= _bounds(paired_bootstrap(values, [cluster(r) for r in part], resamples=findings.resamples))
    return points


def _shown(findings: Findings, belongs: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    """Arms for one picture: `full`, `none`, and the main arms at the budget nearest to 15 %."""
    arms = {row["arm"] for row in findings.rows if belongs(row)}
    numbers = [budget for budget in findings.budgets if isinstance(budget, (int, float))]
    budget: float | str | None = min(numbers, key=_from_usual) if numbers else next(iter(findings.budgets), None)
    scores = findings.at(findings.scopes[0], None)
    if budget is not None:
        scores += findings.at(findings.scopes[0], budget)
    return [s.arm for s in scores if s.arm in arms][:_MOST_PANELS]


def _from_usual(budget: float | str | None) -> float:
    return abs(budget - _USUAL_BUDGET) if isinstance(budget, (int, float)) else math.inf


def _bounds(interval: Interval | None) -> dict[str, float | None]:
    """The ends of an interval for a picture; None where it is unbounded or missing."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return {"low": None, "high": None}
    return {"low": interval.low, "high": interval.high}

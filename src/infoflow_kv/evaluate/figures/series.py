"""The figures of a report: which there are, and what their captions say; a figure without data is left out."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from infoflow_kv.evaluate.figures.budgets import draw_budgets
from infoflow_kv.evaluate.figures.hops import draw_hops
from infoflow_kv.evaluate.figures.layers import draw_layers
from infoflow_kv.evaluate.figures.needle import draw_needle
from infoflow_kv.evaluate.figures.pareto import draw_pareto
from infoflow_kv.evaluate.figures.points import (
    Drawn,
    at_floor,
    budget_points,
    hop_points,
    layer_points,
    needle_points,
    num_layers,
    pareto_points,
)
from infoflow_kv.evaluate.figures.selection import draw_selection
from infoflow_kv.evaluate.findings import Findings
from infoflow_kv.evaluate.niah import TASK as NEEDLES
from infoflow_kv.evaluate.scoring import FEWEST_CLUSTERS, POOLED
from infoflow_kv.evaluate.tables import code
from infoflow_kv.evaluate.variable_tracking import TASK as TRACKING

_TIMES = (
    "Times are one run an item, perhaps on a shared machine; of arms that reuse KV they start with the KV in memory "
    "and include up to 15 teacher-forced rows, so they are an upper bound: `infoflow-kv bench` measures times"
)
_APART = "points of one place stand a little apart, so that their intervals do not hide each other"
FOUND = {"accuracy": "found, %", "log_probability": "log-probability of the answer, nats a token"}


@dataclass(frozen=True, slots=True)
class Plate:
    """One figure of a report: its file name without suffix, what it shows, and the call that draws it.

    `dataset` and `task`: of a figure that belongs to a made data set; `field`: whether it shows what is found
    ("accuracy") or the "log_probability" of it.
    """

    name: str
    caption: str
    draw: Callable[[Path], list[Path]]
    dataset: str = ""
    task: str = ""
    field: str = ""


# The names that a report's figures may have, for a report that is written where another one stands.
NAMES = re.compile(r"(budgets-(kl|js)|pareto-(rows|ttft)|layers-.+|(needle|hops)(-.+)?|selection)\.(png|svg)")


def plates(findings: Findings, explained: Mapping[str, Any] | None = None) -> list[Plate]:
    """The figures that these findings have data for, nothing drawn yet."""
    found: list[Plate] = []
    scope = _named(findings)
    for field, words in (("kl_cont", "KL to full prefill, nats"), ("js_cont", "JS divergence to full prefill, bits")):
        drawn = budget_points(findings, field)
        if any(point["share"] for point in drawn.points):
            name = f"budgets-{field[:2]}"
            caption = f"{words}, over the share of recomputed tokens, {_intervals(drawn.points)} ({scope})"
            caption = _told(caption, _items(drawn), _APART, _elsewhere(drawn, "the layer and geometry variants"))
            found.append(Plate(name, caption, _bind(draw_budgets, drawn.points, name, quality=words)))
    for field, cost, middle in (
        ("computed_share", "rows computed, share of reusable tokens (mean over layers)", fmean),
        ("ttft_ratio", "time to first token, share of full prefill's (median of items; upper bound)", median),
    ):
        drawn = pareto_points(findings, field, middle)
        if len(drawn.points) > 1:
            name = "pareto-rows" if field == "computed_share" else "pareto-ttft"
            caption = f"Quality against cost: KL to full prefill over {cost} ({scope})"
            times = _TIMES if field == "ttft_ratio" else ""
            caption = _told(caption, _items(drawn), _elsewhere(drawn, "the layer variants"), times)
            found.append(Plate(name, caption, _bind(draw_pareto, drawn.points, name, cost=cost)))
    last = num_layers(findings)
    for (method, budget), drawn in layer_points(findings).items():
        name = f"layers-{re.sub(r'[^A-Za-z0-9._-]+', '-', method)}"
        caption = f"Layers whose attention scores the tokens: {code(method)} at {budget}, {_intervals(drawn.points)}"
        if len(drawn.points) > 1 and name not in {plate.name for plate in found}:
            options = {"method": method, "num_layers": last}
            caption = _told(f"{caption} ({scope})", _items(drawn))
            found.append(Plate(name, caption, _bind(draw_layers, drawn.points, name, **options)))
    for task, base, title, made_by, draw, facts in (
        (NEEDLES, "needle", "Needle in a haystack by depth and length", needle_points, draw_needle, ("length",)),
        (TRACKING, "hops", "Variable tracking by the number of hops", hop_points, draw_hops, ("order", "hops")),
    ):
        data = {dataset: made for dataset in findings.datasets if (made := made_by(findings, dataset)).points}
        for (dataset, made), name in zip(data.items(), _names(base, list(data)), strict=True):
            shown = {name: made}
            # Where nobody finds anything, the log-probability still tells the arms apart.
            if made.field == "accuracy" and at_floor(made.points, *facts):
                shown[f"{name}-logprob"] = made_by(findings, dataset, hits=False)
            for file, drawn in shown.items():
                caption = f"{title}: {code(dataset)}, {FOUND[drawn.field]}"
                more = (_intervals(drawn.points), _APART) if task == TRACKING else ()
                caption = _told(caption, *drawn.notes, _items(drawn), *more, _elsewhere(drawn))
                found.append(Plate(file, caption, _bind(draw, drawn.points, file), dataset, task, drawn.field))
    if explained is not None:
        caption = "Which tokens of one request were recomputed"
        found.append(Plate("selection", caption, _bind(draw_selection, explained, "selection")))
    return found


def _bind(draw: Callable[..., list[Path]], data: Any, name: str, **options: Any) -> Callable[[Path], list[Path]]:
    return lambda folder: draw(data, folder, name=name, **options)


def _told(*parts: str) -> str:
    return ". ".join(part[:1].upper() + part[1:] for part in parts if part)


def _items(drawn: Drawn) -> str:
    """On how many items every arm of a figure stands, and which arms are left out for that."""
    left = ", ".join(map(code, drawn.shared.left))
    items = f"every arm is over the same {drawn.shared.n} {'item' if drawn.shared.n == 1 else 'items'}"
    return f"{items}; left out, as they have too few of them: {left}" if left else items


def _elsewhere(drawn: Drawn, variants: str = "") -> str:
    """Which arms of the same rows a figure does not show: variants with sections of their own, or other budgets too."""
    many = len(drawn.unshown)
    if not many:
        return ""
    if variants:
        return f"not drawn: {variants} ({many}), which have sections of their own"
    return f"not drawn: other budgets and variants ({many} {'arm' if many == 1 else 'arms'})"


def _names(base: str, datasets: Sequence[str]) -> list[str]:
    """A file name for each data set's figure: the bare one where there is one alone."""
    if len(datasets) == 1:
        return [base]
    names: list[str] = []
    for dataset in datasets:
        name = f"{base}-{re.sub(r'[^A-Za-z0-9._-]+', '-', dataset)}"
        names.append(f"{name}-{len(names) + 1}" if name in names else name)
    return names


def _named(findings: Findings) -> str:
    """The data sets of the first figures, for their captions."""
    scope = findings.scopes[0]
    if scope != POOLED:
        return code(scope)
    if len(findings.core) == len(findings.datasets):
        return "pooled over all data sets"
    return f"pooled over {', '.join(map(code, findings.core))}"


def _intervals(points: Sequence[Mapping[str, Any]]) -> str:
    """What a caption says of the intervals that are drawn."""
    drawn = [p["clusters"] for p in points if p.get("low") is not None]
    if not drawn:
        return "without intervals (too few documents)"
    few = f" (few clusters: {min(drawn)})" if min(drawn) < FEWEST_CLUSTERS else ""
    return f"with {'intervals' if few else '95 % intervals'}{few}"

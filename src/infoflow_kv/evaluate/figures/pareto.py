"""Speed against quality: what an arm costs across, how far it stays from full prefill up."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.evaluate.figures import style

_DASHES = ("-", "--", ":", "-.")


def draw_pareto(
    data: Sequence[Mapping[str, Any]],
    folder: Path | str,
    name: str = "pareto",
    cost: str = "rows computed, share of reusable tokens (mean over layers)",
    quality: str = "KL to full prefill, nats",
) -> list[Path]:
    """PNG and SVG; `data`: records {arm, method, budget, x, y}. Lower left is better.

    One line through the budgets of an `arm`, which is named without them. Budgets of such lines are written above
    their points; an arm of one point has its budget in its name. Points that no other one beats on both axes (the
    Pareto front) are filled, the others hollow. Full prefill is named in the title and left out where the others stand
    far from it, so that they get the room.
    """
    style.require(data, "the speed and quality figure", ("arm", "method", "budget", "x", "y"))
    others = [r for r in data if r["method"] != "full"]
    far = bool(others) and len(others) < len(data) and max(float(r["x"]) for r in others) < 0.6
    shown = others if far else list(data)
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for record in shown:
        lines.setdefault(str(record["arm"]), []).append(record)
    dashes: dict[str, int] = {}  # lines of each method so far
    with style.drawing(name):
        figure = style.new_figure(max(4.4, 0.9 + 0.2 * len(lines)))
        axes = figure.subplots()
        ends = []
        for arm, points in lines.items():
            points.sort(key=lambda r: float(r["x"]))
            method = str(points[0]["method"])
            ink, dash = style.colour(method), _DASHES[dashes.get(method, 0) % len(_DASHES)]
            dashes[method] = dashes.get(method, 0) + 1
            x, y = [float(r["x"]) for r in points], [float(r["y"]) for r in points]
            axes.plot(x, y, color=ink, linestyle=dash, linewidth=1.4)
            for at, height, record in zip(x, y, points, strict=True):
                filled = ink if _on_front(record, data) or style.marker(method) == "x" else "white"
                axes.scatter(
                    [at], [height], s=34, marker=style.marker(method), facecolors=filled,
                    edgecolors=None if style.marker(method) == "x" else ink, zorder=3, clip_on=False,
                )  # fmt: skip
            budget = _written(points[0]) if len(points) == 1 else ""
            ends.append((x[-1], y[-1], f"{arm}@{budget}" if budget else arm, ink))
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(True, axis="both")
        axes.set_xlabel(cost)
        axes.set_ylabel(quality)
        title = "lower left is better; filled: no other arm drawn is better on both axes"
        if far:
            full = next(r for r in data if r["method"] == "full")
            title += f"; full prefill: {float(full['x']):.3g} and {float(full['y']):.3g}"
        axes.set_title(title, fontweight="normal", fontsize=9)
        style.label_ends(axes, ends)
        _write_budgets(axes, [points for points in lines.values() if len(points) > 1])
        return style.save(figure, folder, name)


def _on_front(record: Mapping[str, Any], data: Sequence[Mapping[str, Any]]) -> bool:
    x, y = float(record["x"]), float(record["y"])
    return not any(float(o["x"]) <= x and float(o["y"]) <= y and (float(o["x"]) < x or float(o["y"]) < y) for o in data)


def _written(record: Mapping[str, Any]) -> str:
    """A budget as a share of tokens, "15%"; "" where there is none that is a number."""
    budget = record["budget"]
    is_share = isinstance(budget, (int, float)) and not isinstance(budget, bool) and 0 < budget < 1
    return f"{100 * budget:g}%" if is_share else ""


def _write_budgets(axes: Any, lines: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Each budget once, above the highest of its points: lines at a budget stand near one another."""
    budgets: dict[str, list[Mapping[str, Any]]] = {}
    for points in lines:
        for record in points:
            if text := _written(record):
                budgets.setdefault(text, []).append(record)
    for text, records in budgets.items():
        top = max(records, key=lambda r: float(r["y"]))
        axes.annotate(
            text, (float(top["x"]), float(top["y"])), xytext=(0, 7), textcoords="offset points", ha="center",
            fontsize=8.5, color=style.MUTED,
        )  # fmt: skip

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
    """PNG and SVG; `data`: records {method, geometry, budget, x, y}. Lower left is better.

    One line a method and geometry through its budgets, which are written beside the points; points that no other one
    beats on both axes (the Pareto front) are filled, the others hollow. Full prefill is named in the title and left
    out where the others stand far from it, so that they get the room.
    """
    style.require(data, "the speed and quality figure", ("method", "geometry", "budget", "x", "y"))
    geometries = list(dict.fromkeys(str(record["geometry"]) for record in data))
    others = [r for r in data if r["method"] != "full"]
    far = bool(others) and len(others) < len(data) and max(float(r["x"]) for r in others) < 0.6
    shown = others if far else list(data)
    lines = list(dict.fromkeys((str(r["method"]), str(r["geometry"])) for r in shown))
    with style.drawing(name):
        figure = style.new_figure(4.4)
        axes = figure.subplots()
        ends = []
        for method, geometry in lines:
            points = [r for r in shown if (str(r["method"]), str(r["geometry"])) == (method, geometry)]
            points.sort(key=lambda r: float(r["x"]))
            ink = style.colour(method)
            x, y = [float(r["x"]) for r in points], [float(r["y"]) for r in points]
            axes.plot(x, y, color=ink, linestyle=_DASHES[geometries.index(geometry) % len(_DASHES)], linewidth=1.4)
            for at, height, record in zip(x, y, points, strict=True):
                filled = ink if _on_front(record, data) or style.marker(method) == "x" else "white"
                axes.scatter(
                    [at], [height], s=34, marker=style.marker(method), facecolors=filled,
                    edgecolors=None if style.marker(method) == "x" else ink, zorder=3, clip_on=False,
                )  # fmt: skip
            words = method if geometry == "GLOBAL" or len(geometries) == 1 else f"{method}, {geometry}"
            ends.append((x[-1], y[-1], words, ink))
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(True, axis="both")
        axes.set_xlabel(cost)
        axes.set_ylabel(quality)
        title = "lower left is better; filled: no other arm is better on both axes"
        if far:
            full = next(r for r in data if r["method"] == "full")
            title += f"; full prefill: {float(full['x']):.3g} and {float(full['y']):.3g}"
        axes.set_title(title, fontweight="normal", fontsize=9)
        style.label_ends(axes, ends)
        _write_budgets(axes, shown)
        return style.save(figure, folder, name)


def _on_front(record: Mapping[str, Any], data: Sequence[Mapping[str, Any]]) -> bool:
    x, y = float(record["x"]), float(record["y"])
    return not any(float(o["x"]) <= x and float(o["y"]) <= y and (float(o["x"]) < x or float(o["y"]) < y) for o in data)


def _write_budgets(axes: Any, data: Sequence[Mapping[str, Any]]) -> None:
    """Each budget once, above the highest of its points: all methods at a budget stand near one another."""
    budgets: dict[str, list[Mapping[str, Any]]] = {}
    for record in data:
        if isinstance(record["budget"], (int, float)) and 0 < record["budget"] < 1:
            budgets.setdefault(f"{100 * record['budget']:g}%", []).append(record)
    for text, records in budgets.items():
        top = max(records, key=lambda r: float(r["y"]))
        axes.annotate(
            text, (float(top["x"]), float(top["y"])), xytext=(0, 7), textcoords="offset points", ha="center",
            fontsize=8.5, color=style.MUTED,
        )  # fmt: skip

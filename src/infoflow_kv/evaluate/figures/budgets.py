"""Quality over the share of recomputed tokens, with intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.evaluate.figures import style


def draw_budgets(
    data: Sequence[Mapping[str, Any]],
    folder: Path | str,
    name: str = "budgets",
    quality: str = "KL to full prefill, nats",
) -> list[Path]:
    """PNG and SVG; `data`: records {arm, method, share, value, low, high}, `share` the real recomputed share (0..1).

    One line an arm without its budget (dashed: a variant of its method), with bars from `low` to `high` (None: no
    bar). A line of one point at share 0 (`none`) is drawn as a level to get below.
    """
    style.require(data, "the budget figure", ("arm", "method", "share", "value", "low", "high"))
    arms = list(dict.fromkeys(str(record["arm"]) for record in data))
    right = 100 * max(float(record["share"]) for record in data) or 1.0
    with style.drawing(name):
        figure = style.new_figure(4.2)
        axes = figure.subplots()
        ends = []
        for place, arm in enumerate(arms):
            points = sorted((r for r in data if r["arm"] == arm), key=lambda r: float(r["share"]))
            method = str(points[0]["method"])
            ink = style.colour(method)
            y = [float(r["value"]) for r in points]
            if len(points) == 1 and not points[0]["share"]:
                axes.axhline(y[0], color=ink, linestyle="--", linewidth=1.2)
                if points[0]["low"] is not None:
                    axes.axhspan(float(points[0]["low"]), float(points[0]["high"]), color=ink, alpha=0.1, linewidth=0)
                ends.append((right, y[0], f"{arm} (nothing recomputed)", style.MUTED))
                continue
            x = [100 * float(r["share"]) + 0.006 * right * (place - (len(arms) - 1) / 2) for r in points]
            axes.plot(x, y, color=ink, marker=style.marker(method), linestyle="--" if "[" in arm else "-")
            for at, record in zip(x, points, strict=True):
                if record["low"] is not None:
                    bounds = (float(record["low"]), float(record["high"]))
                    axes.plot([at, at], bounds, color=ink, linewidth=1.1, alpha=0.6)
            ends.append((x[-1], y[-1], arm, ink))
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, right * 1.03)
        axes.set_xlabel("recomputed tokens, % of the reusable ones")
        axes.set_ylabel(quality)
        style.label_ends(axes, ends)
        return style.save(figure, folder, name)

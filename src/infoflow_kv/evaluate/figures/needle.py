"""Heat maps of the needle test: one panel an arm, depth of the needle down, length of the context across."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infoflow_kv.evaluate.figures import style

# Where no arm finds more than this, the model cannot say the value; its log-probability shows more.
FLOOR = 0.10


def draw_needle(data: Sequence[Mapping[str, Any]], folder: Path | str, name: str = "needle") -> list[Path]:
    """PNG and SVG of found needles; `data`: records {arm, length, depth, accuracy, log_probability}.

    `depth` in percent, `length` in tokens, `log_probability` of the answer in nats a token. Shows the accuracy, or the
    log-probability where no arm reaches 10 % or where a record has no accuracy (None: nothing was generated). A cell
    without records stays grey.
    """
    style.require(data, "the needle figure", ("arm", "length", "depth", "accuracy", "log_probability"))
    arms = list(dict.fromkeys(str(record["arm"]) for record in data))
    lengths = sorted({int(record["length"]) for record in data})
    depths = sorted({float(record["depth"]) for record in data})
    field = shown_field(data)
    grids = {arm: _grid([r for r in data if r["arm"] == arm], lengths, depths, field) for arm in arms}
    filled = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    low, high = (0.0, 1.0) if field == "accuracy" else (float(filled.min()), float(filled.max()))
    columns = min(3, len(arms))
    lines = -(-len(arms) // columns)
    with style.drawing(name):
        import matplotlib

        figure = style.new_figure(0.7 + lines * (0.75 + 0.2 * len(depths)))
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        colours = matplotlib.colormaps["viridis"].with_extremes(bad="#e6e6e6")
        image = None
        for panel, arm in zip(panels.flat, arms, strict=False):
            grid = grids[arm]
            image = panel.imshow(grid, aspect="auto", cmap=colours, vmin=low, vmax=high if high > low else low + 1)
            panel.set_title(style.words(arm))
            panel.grid(False)
            panel.spines[:].set_visible(False)
            panel.tick_params(length=0)
            panel.set_xticks(range(len(lengths)), [_thousands(length) for length in lengths])
            panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
            for (row, column), value in np.ndenumerate(grid):
                if np.isfinite(value):
                    bright = (value - low) / (high - low or 1) > 0.55
                    text = _percent(value) if field == "accuracy" else f"{value:.1f}".replace("-", "−")
                    ink = "#1a1a1a" if bright else "white"
                    panel.text(column, row, text, ha="center", va="center", fontsize=8, color=ink)
        for panel in list(panels.flat)[len(arms) :]:
            panel.set_axis_off()
        for column in range(columns):  # a column's lowest panel may stand above an empty place
            lowest = panels[(len(arms) - 1 - column) // columns, column]
            lowest.tick_params(labelbottom=True)
        figure.supxlabel("context length, tokens", fontsize=10)
        figure.supylabel("depth of the needle, %", fontsize=10)
        if image is not None:
            words = "found, %" if field == "accuracy" else "log-probability of the answer, nats a token"
            bar = figure.colorbar(image, ax=panels, shrink=0.9, aspect=30, label=words, format=_tick(field))
            bar.outline.set_visible(False)
        return style.save(figure, folder, name)


def shown_field(data: Sequence[Mapping[str, Any]]) -> str:
    """ "accuracy", or "log_probability" where no arm's mean accuracy reaches the floor or some record has none."""
    if any(record["accuracy"] is None for record in data):
        return "log_probability"
    values: dict[str, list[float]] = {}
    for record in data:
        values.setdefault(str(record["arm"]), []).append(float(record["accuracy"]))
    return "accuracy" if max(sum(v) / len(v) for v in values.values()) >= FLOOR else "log_probability"


def _grid(
    records: Sequence[Mapping[str, Any]], lengths: list[int], depths: list[float], field: str
) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    cells: dict[tuple[int, int], list[float]] = {}
    for record in records:
        cell = depths.index(float(record["depth"])), lengths.index(int(record["length"]))
        cells.setdefault(cell, []).append(float(record[field]))
    grid = np.full((len(depths), len(lengths)), np.nan)
    for cell, values in cells.items():
        grid[cell] = np.mean(values)
    return grid


def _thousands(length: int) -> str:
    return f"{length / 1000:.3g}K" if length >= 1000 else str(length)


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _tick(field: str) -> Any:
    return (lambda value, place: _percent(value)) if field == "accuracy" else None

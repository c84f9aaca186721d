"""Quality over the layers that score: one point a layer, dashed lines for sets of layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.evaluate.figures import style

SETS_SHOWN = ("all", "relative", "best 8")


def draw_layers(
    data: Sequence[Mapping[str, Any]],
    folder: Path | str,
    name: str = "layers",
    method: str = "infoflow",
    num_layers: int | None = None,
    title: str = "",
) -> list[Path]:
    """PNG and SVG of distance to full prefill by scoring layer; `data`: records {layer or layers, kl_cont, low, high}.

    `layer` is a number; `layers` names a set ("all", "relative"), drawn as a line over all layers, or lists its
    members, drawn as a bar at each run of neighbours with a thin line between; `name` may name such a set. `low` and
    `high` may be None. The axis covers the model's `num_layers`; None: the layers that the records name.
    """
    style.require(data, "the layer figure", ("kl_cont",))
    single = sorted((r for r in data if r.get("layer") is not None), key=lambda r: int(r["layer"]))
    sets = [r for r in data if r.get("layer") is None]
    style.require(sets or single, "the layer figure", ("kl_cont", "layer" if not sets else "layers"))
    ink = style.colour(method)
    with style.drawing(name):
        from matplotlib.ticker import MaxNLocator

        figure = style.new_figure(3.7)
        axes = figure.subplots()
        ends: list[tuple[float, float, str, str]] = []
        if single:
            x = [int(r["layer"]) for r in single]
            bounded = [r for r in single if r.get("low") is not None and r.get("high") is not None]
            axes.fill_between(
                [int(r["layer"]) for r in bounded],
                [float(r["low"]) for r in bounded],
                [float(r["high"]) for r in bounded],
                color=ink,
                alpha=0.15,
                linewidth=0,
            )
            axes.plot(x, [float(r["kl_cont"]) for r in single], color=ink, marker="o", markersize=4)
            ends.append((x[-1], float(single[-1]["kl_cont"]), "one layer", ink))
        named = [int(r["layer"]) for r in single] + [layer for r in sets for layer in members(r["layers"]) or ()]
        last = max([1 if not named else 0, *named, (num_layers or 0) - 1])
        axes.set_xlim(-0.5, last + 0.5)
        dashes = ["--", ":", "-."]
        shades = ["#a61c1c", "#5b4ea0", "#8c6d1f", "#262626"]
        for place, record in enumerate(sorted(sets, key=lambda r: float(r["kl_cont"]))):
            listed = members(record["layers"]) or []
            start, stop = (min(listed) - 0.4, max(listed) + 0.4) if listed else (-0.5, last + 0.5)
            y, shade = float(record["kl_cont"]), shades[place % len(shades)]
            runs = _runs(listed)
            if len(runs) > 1:  # layers between two runs are no members
                axes.plot([start, stop], [y, y], color=shade, linewidth=0.6, alpha=0.5)
                for first, end in runs:
                    axes.plot([first - 0.4, end + 0.4], [y, y], color=shade, linewidth=2.6, solid_capstyle="butt")
            else:
                axes.plot([start, stop], [y, y], color=shade, linestyle=dashes[place % len(dashes)])
            if record.get("low") is not None and record.get("high") is not None:
                at = start + 0.4 + 0.25 * place  # a little apart, for sets that begin at one layer
                axes.plot([at, at], [float(record["low"]), float(record["high"])], color=shade, linewidth=1, alpha=0.6)
            words = f"layers: {record['name']}" if record.get("name") else _name(record["layers"])
            ends.append((stop, y, words, shade))
        axes.set_ylim(0, axes.get_ylim()[1] * 1.03)
        axes.set_xlabel("layer whose attention scores the tokens (first layer: 0)")
        axes.set_ylabel("KL to full prefill, nats")
        axes.set_title(style.words(title), fontweight="normal", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.label_ends(axes, ends)
        return style.save(figure, folder, name)


def draw_calibration(measurements: Mapping[str, Any], folder: Path | str) -> list[Path]:
    """The layer figure of a profile's `measurements` of `infoflow`: every single layer, the sets that people ask about,
    and the set that was chosen, the one with the smallest JS divergence."""
    curve = [{key: value for key, value in point.items() if key != "layers"} for point in measurements["curve"]]
    ours = [s for s in measurements["sets"] if s["method"] == "infoflow"]
    chosen = min(ours, key=lambda s: float(s["js_cont"]), default=None)
    sets = [
        {**s, "name": s["set"] + (" (chosen)" if s is chosen else "")}
        for s in ours
        if s["set"] in SETS_SHOWN or s is chosen
    ]
    title = f"method infoflow, budget {measurements['budget']:g}, {measurements['items']} items; chosen by its JS"
    return draw_layers([*curve, *sets], folder, num_layers=len(curve), title=title)


def members(layers: Any) -> list[int] | None:
    """The layers of "2-6,12" or [2, 3]; None of a name like "relative" or of anything else."""
    parts = layers.split(",") if isinstance(layers, str) else layers if isinstance(layers, list) else []
    found: list[int] = []
    for part in parts:
        first, _, last = str(part).strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and len(first + last) < 9):
            return None
        found += range(int(first), min(int(last or first), int(first) + 10_000) + 1)
    return found or None


def _runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


def _name(layers: Any) -> str:
    listed = members(layers)
    if listed is None:
        return f"layers: {layers}"
    runs = (f"{first}–{last}" if first < last else str(first) for first, last in _runs(listed))
    return f"layers {', '.join(runs)}"

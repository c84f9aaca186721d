"""Quality over the layers that score: one point a layer, dashed lines for sets of layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.evaluate.figures import style

SETS_SHOWN = ("all", "relative", "best 8")


def draw_layers(
    data: Sequence[Mapping[str, Any]], folder: Path | str, name: str = "layers", method: str = "infoflow"
) -> list[Path]:
    """PNG and SVG of distance to full prefill by scoring layer; `data`: records {layer or layers, kl_cont, low, high}.

    `layer` is a number; `layers` names a set ("all", "relative") or lists its members, and is drawn as a dashed line,
    over its members' range where they are listed. `low` and `high` may be None.
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
            last = x[-1]
        else:
            last = max((max(_members(r["layers"]), default=1) for r in sets), default=1)
        axes.set_xlim(-0.5, last + 0.5)
        dashes = ["--", ":", "-."]
        shades = ["#a61c1c", "#5b4ea0", "#8c6d1f", "#262626"]
        for place, record in enumerate(sorted(sets, key=lambda r: float(r["kl_cont"]))):
            members = _members(record["layers"])
            start, stop = (min(members) - 0.4, max(members) + 0.4) if members else (-0.5, last + 0.5)
            y, shade = float(record["kl_cont"]), shades[place % len(shades)]
            axes.plot([start, stop], [y, y], color=shade, linestyle=dashes[place % len(dashes)])
            ends.append((stop, y, _name(record["layers"]), shade))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("layer whose attention scores the tokens (first layer: 0)")
        axes.set_ylabel("KL to full prefill, nats")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.label_ends(axes, ends)
        return style.save(figure, folder, name)


def draw_calibration(measurements: Mapping[str, Any], folder: Path | str) -> list[Path]:
    """The layer figure of a profile's `measurements`: every single layer, and the sets that people ask about."""
    curve = [{key: value for key, value in point.items() if key != "layers"} for point in measurements["curve"]]
    sets = [
        {**s, "layers": s["set"]} for s in measurements["sets"] if s["method"] == "infoflow" and s["set"] in SETS_SHOWN
    ]
    return draw_layers([*curve, *sets], folder)


def _members(layers: Any) -> list[int]:
    return [] if isinstance(layers, str) else [int(layer) for layer in layers]


def _name(layers: Any) -> str:
    if isinstance(layers, str):
        return f"layers: {layers}"
    members = sorted(int(layer) for layer in layers)
    if len(members) > 1 and members == list(range(members[0], members[-1] + 1)):
        return f"layers {members[0]}–{members[-1]}"
    return "layers " + ", ".join(map(str, members))

"""Variable tracking: what is found as the chain of variables gets longer, one line an arm."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.evaluate.figures import style
from infoflow_kv.evaluate.figures.needle import shown_field


def draw_hops(data: Sequence[Mapping[str, Any]], folder: Path | str, name: str = "hops") -> list[Path]:
    """PNG and SVG of variable tracking; `data`: records {arm, method, hops, accuracy, log_probability, low, high}.

    `low` and `high` bound what is shown: the accuracy, or the log-probability where no arm reaches 10 % or where a
    record's accuracy is None; records may give the bounds as None. An `order` in the records makes one panel an order
    of the hops.
    """
    style.require(data, "the hops figure", ("arm", "method", "hops", "accuracy", "log_probability"))
    arms = list(dict.fromkeys(str(record["arm"]) for record in data))
    field = shown_field(data)
    scale = 100.0 if field == "accuracy" else 1.0
    orders = list(dict.fromkeys(str(record.get("order") or "") for record in data))
    with style.drawing(name):
        figure = style.new_figure(0.6 + 3.2 * len(orders))
        # One scale for all: heights of two panels are compared.
        panels = figure.subplots(len(orders), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        hops = sorted({int(record["hops"]) for record in data})
        labels = []
        for panel, order in zip(panels, orders, strict=True):
            ends = []
            for place, arm in enumerate(arms):
                points = [r for r in data if r["arm"] == arm and str(r.get("order") or "") == order]
                points.sort(key=lambda r: float(r["hops"]))
                if not points:
                    continue
                ink = style.colour(points[0]["method"])
                # Intervals of arms that stand on one value would hide each other.
                x = [float(r["hops"]) + 0.035 * (place - (len(arms) - 1) / 2) for r in points]
                y = [scale * float(r[field]) for r in points]
                panel.plot(x, y, color=ink, marker=style.marker(points[0]["method"]))
                for at, record in zip(x, points, strict=True):
                    if record.get("low") is not None and record.get("high") is not None:
                        bounds = (scale * float(record["low"]), scale * float(record["high"]))
                        panel.plot([at, at], bounds, color=ink, linewidth=1, alpha=0.6)
                ends.append((x[-1], y[-1], arm, ink))
            if order:
                panel.set_title(f"hops in {style.words(order)} order")
            panel.set_ylabel("variables found, %" if field == "accuracy" else "log-probability, nats a token")
            if field == "accuracy":
                panel.set_ylim(-4, 104)
            labels.append((panel, ends))
        for panel, ends in labels:  # when the last panel has set the common scale
            panel.set_xticks(hops)
            panel.set_xlim(hops[0] - 0.5, hops[-1] + 0.5)  # with one number of hops the points stand around it
            panel.tick_params(labelbottom=True)
            style.label_ends(panel, ends)
        panels[-1].set_xlabel("hops from the value to the last variable")
        return style.save(figure, folder, name)

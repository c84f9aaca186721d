"""Writes docs/results.md and docs/figures from the laboratory's rows under benchmarks/results/lab.

`--check` compares the page only: the figures follow from the same rows.
"""

# ruff: noqa: E501 - Markdown

import json
import sys
from pathlib import Path

from infoflow_kv.evaluate.figures import draw_layers
from infoflow_kv.evaluate.figures.series import plates
from infoflow_kv.evaluate.findings import find
from infoflow_kv.evaluate.report import render_markdown
from infoflow_kv.evaluate.results import read_rows, read_runs

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "benchmarks" / "results" / "lab"
CALIBRATION = ROOT / "benchmarks" / "results" / "calibration.json"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"
RESAMPLES = 2_000


def runs() -> list[Path]:
    return sorted(path.parent for path in LAB.glob("*/rows.jsonl"))


def calibration_part() -> str:
    """The layer sweep behind the embedded model's layer sets."""
    record = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    found = record["measurements"]
    lines = ["| method | set | layers | KL cont. | 95 % interval | JS cont. |", "|---|---|---|---:|---|---:|"]
    for s in sorted(found["sets"], key=lambda s: (s["method"], s["js_cont"])):
        interval = f"[{s['low']:.3f}, {s['high']:.3f}]"
        lines.append(
            f"| {s['method']} | {s['set']} | `{s['layers']}` | {s['kl_cont']:.4f} | {interval} | {s['js_cont']:.4f} |"
        )
    return "\n".join(
        [
            "## Calibration",
            "",
            f"`infoflow-kv calibrate` on {found['items']} questions from the ends of the three files, none of them",
            f"among those above, at budget {found['budget']:g}. The set with the smallest mean JS divergence is what `auto`",
            "takes for the embedded model. The intervals are wide: so few questions do not tell the leading sets apart;",
            "that the paper's relative depth is worse on this model was seen on every sample.",
            "",
            *lines,
            "",
            "![Distance to full prefill by scoring layer](figures/layers.svg)",
            "",
        ]
    )


def page() -> str:
    rows = read_rows(runs())
    return render_markdown(rows, read_runs(runs()), "figures/", resamples=RESAMPLES) + "\n" + calibration_part()


def draw() -> None:
    for plate in plates(find(read_rows(runs()), read_runs(runs()), resamples=RESAMPLES)):
        plate.draw(FIGURES)
    found = json.loads(CALIBRATION.read_text(encoding="utf-8"))["measurements"]
    curve = [{k: v for k, v in c.items() if k != "layers"} for c in found["curve"]]
    shown = ("all", "relative", "best 8")
    sets = [{**s, "layers": s["set"]} for s in found["sets"] if s["method"] == "infoflow" and s["set"] in shown]
    draw_layers([*curve, *sets], FIGURES)


if __name__ == "__main__":
    if "--check" in sys.argv:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page()
        print(f"{PAGE.relative_to(ROOT)} is stale; run `make docs`" if stale else "results: ok")
        sys.exit(stale)
    PAGE.write_text(page(), encoding="utf-8")
    draw()

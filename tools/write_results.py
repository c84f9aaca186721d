"""Writes docs/results.md and docs/figures from the laboratory's rows under benchmarks/results/lab.

`--check` compares the page only: the figures follow from the same rows.
"""

# ruff: noqa: E501 - Markdown

import json
import sys
from pathlib import Path

from infoflow_kv.evaluate.figures import draw_calibration
from infoflow_kv.evaluate.figures.series import plates
from infoflow_kv.evaluate.findings import find
from infoflow_kv.evaluate.report import render_markdown
from infoflow_kv.evaluate.results import paired, read_rows, read_runs
from infoflow_kv.evaluate.statistics import paired_bootstrap, ratio_interval

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "benchmarks" / "results" / "lab"
CALIBRATION = ROOT / "benchmarks" / "results" / "calibration.json"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"
RESAMPLES = 2_000


SETS = ("2wikimqa", "hotpotqa", "musique")  # the sets on which every arm ran: only these are pooled


def runs() -> list[Path]:
    return [LAB / name for name in SETS if (LAB / name / "rows.jsonl").exists()]


def calibration() -> dict:
    return json.loads(CALIBRATION.read_text(encoding="utf-8"))["measurements"]


def calibration_part() -> str:
    """The layer sweep behind the embedded model's layer sets."""
    found = calibration()
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
            "takes for the embedded model. The intervals are wide: so few questions do not tell the leading sets apart.",
            "",
            *lines,
            "",
            "![Distance to full prefill by scoring layer](figures/layers.svg)",
            "",
        ]
    )


def rivals_part(rows: list[dict]) -> str:
    """The two claims of the method, as paired comparisons with the rivals on the items that both arms have."""
    arms = {row["arm"] for row in rows}
    pairs = [
        (ours, rival)
        for ours, rivals in (
            ("infoflow@0.15", ("cacheblend@0.15", "cacheblend-gradual@0.15", "epic@0.15")),
            ("influence@0.15", ("cacheblend@0.15", "cacheblend-gradual@0.15", "epic@0.15", "infoflow@0.15")),
            ("infoflow@0.05", ("cacheblend@0.15",)),
            ("influence@0.05", ("cacheblend@0.15",)),
            ("infoflow[layers=relative]@0.15", ("infoflow@0.15",)),
            ("infoflow[geometry=HL-HP]@0.15", ("infoflow@0.15",)),
            ("infoflow[geometry=HL-TP]@0.15", ("infoflow@0.15",)),
            ("infoflow[geometry=TL-TP]@0.15", ("infoflow@0.15",)),
        )
        for rival in rivals
        if ours in arms and rival in arms
    ]
    lines = ["| arm | against | items | KL ÷ | KL − | JS ÷ | JS − |", "|---|---|---:|---:|---:|---:|---:|"]
    for ours, rival in pairs:
        cells = []
        for field in ("kl_cont", "js_cont"):
            p = paired(rows, ours, rival, field)
            labels = (p.clusters, p.datasets, RESAMPLES)
            ratio = ratio_interval(p.a, p.b, *labels)
            difference = paired_bootstrap([a - b for a, b in zip(p.a, p.b, strict=True)], *labels)
            cells += [
                f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
                f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]",
            ]
        lines.append(f"| `{ours}` | `{rival}` | {len(p.ids)} | {' | '.join(cells)} |")
    return "\n".join(
        [
            "## Against the rivals",
            "",
            "Ratios of means and paired differences, each with its 95 % bootstrap interval; data sets weigh equally. Below 1",
            "and below 0: the arm is closer to full prefill.",
            "",
            *lines,
            "",
        ]
    )


def page() -> str:
    rows = read_rows(runs())
    found = calibration()["ids"]
    assert not {row["_id"] for row in rows} & set(found), "an item was both calibrated on and measured"
    parts = [render_markdown(rows, read_runs(runs()), "figures/", resamples=RESAMPLES), rivals_part(rows)]
    return "\n".join([*parts, calibration_part()])


def draw() -> None:
    for plate in plates(find(read_rows(runs()), read_runs(runs()), resamples=RESAMPLES)):
        plate.draw(FIGURES)
    draw_calibration(calibration(), FIGURES)


if __name__ == "__main__":
    if "--check" in sys.argv:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page()
        print(f"{PAGE.relative_to(ROOT)} is stale; run `make docs`" if stale else "results: ok")
        sys.exit(stale)
    PAGE.write_text(page(), encoding="utf-8")
    draw()

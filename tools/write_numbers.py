"""Writes every number in the README from benchmarks/results: blocks between `<!-- NAME -->` and `<!-- /NAME -->`.

`--check` only compares. A number that no run gave has no way into the page.
"""

# ruff: noqa: E501 - Markdown

import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

from infoflow_kv.evaluate.results import read_rows
from infoflow_kv.evaluate.statistics import ratio_interval

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "README.md"
NAMES = {"plain": "Transformers, full prefill", "full": "this engine, full prefill", "none": "reuse, no repair"}


def records(name: str) -> list[dict]:
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def first_tokens() -> list[dict]:
    """What `infoflow-kv bench ttft` measured from warm disk at the longest context that each dtype has; else the runs
    of the benchmark before it."""
    warm = [
        r for r in records("bench/ttft.jsonl") if r["state"] in (None, "warm-disk") and r["model"] == "smollm2-135m"
    ]
    lengths = [{r["context_tokens"] for r in warm if r["dtype"] == dtype} for dtype in {r["dtype"] for r in warm}]
    longest = max(set.intersection(*lengths), default=0) if lengths else 0
    return [r for r in warm if r["context_tokens"] == longest] or records("ttft.jsonl")


def ttft() -> str:
    """The latest measurement of each arm and dtype."""
    latest = {(r["dtype"], r["arm"], r["budget"]): r for r in first_tokens()}
    rows = ["| dtype | arm | TTFT, s (median) | times sooner than full prefill | ideal |", "|---|---|---|---|---|"]
    for (dtype, arm, budget), r in sorted(
        latest.items(), key=lambda item: (item[0][0] != "float32", -item[1]["ttft_seconds_median"])
    ):
        name = NAMES.get(arm, arm if budget is None else f"{arm}, budget {budget:g}")
        rows.append(
            f"| {dtype} | {name} | {r['ttft_seconds_median']:.2f} | {r['times_sooner_than_full']:.2f} | "
            f"{r['ideal_times_sooner']:.2f} |"
        )
    first = next(iter(latest.values()), None)
    if first is None:
        return "(not measured yet)"
    env = first["environment"]
    ideal = "FLOPs of full prefill ÷ FLOPs of the rows computed" if "work" in first else "all rows ÷ rows computed"
    note = (
        f"SmolLM2-135M, {first['context_tokens']} context tokens, {first['chunks']} chunks read from disk, "
        f"{env['processor']}, {env['threads']} threads, torch {env['torch']}, Transformers {env['transformers']}, "
        f"{env['date']}. A small model on a CPU: read the ratios. *Ideal*: {ideal}."
    )
    return "\n".join(rows) + "\n\n" + note


LAB_ARMS = (
    "none", "random@0.15", "epic@0.15", "cacheblend@0.15", "cacheblend-gradual@0.15", "infoflow@0.15",
    "influence@0.15", "oracle@0.15", "cacheblend@0.05", "infoflow@0.05", "influence@0.05",
)  # fmt: skip
LAB_SETS = ("2wikimqa", "hotpotqa", "musique")


def lab() -> str:
    """Distance to full prefill over the items that have every arm, data sets weighted equally."""
    folders = [RESULTS / "lab" / name for name in LAB_SETS if (RESULTS / "lab" / name / "rows.jsonl").exists()]
    if not folders:
        return "(not measured yet)"
    rows = [row for row in read_rows(folders) if row["arm"] in LAB_ARMS]
    by_item = Counter(row["_id"] for row in rows)
    rows = [row for row in rows if by_item[row["_id"]] == len(LAB_ARMS)]
    counts = Counter(row["dataset"] for row in rows if row["arm"] == "none")
    strata = {arm: [r["dataset"] for r in rows if r["arm"] == arm] for arm in LAB_ARMS}
    rival = {r["_id"]: r for r in rows if r["arm"] == "cacheblend@0.15"}
    lines = [
        "| arm | rows computed | KL, continued | JS, continued | same first token | KL ÷ CacheBlend's at 0.15 |",
        "|---|---|---|---|---|---|",
    ]
    for arm in LAB_ARMS:
        own = [r for r in rows if r["arm"] == arm]
        means = [
            statistics.fmean(statistics.fmean(float(r[field]) for r in own if r["dataset"] == name) for name in counts)
            for field in ("computed_share", "kl_cont", "js_cont", "top1")
        ]
        ratio = ratio_interval(
            [r["kl_cont"] for r in own], [rival[r["_id"]]["kl_cont"] for r in own], strata=strata[arm], resamples=2_000
        )
        shown = "1" if arm == "cacheblend@0.15" else f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        lines.append(f"| `{arm}` | {means[0]:.1%} | {means[1]:.4f} | {means[2]:.4f} | {means[3]:.0%} | {shown} |")
    items = ", ".join(f"{count} of {name}" for name, count in counts.items())
    return (
        "\n".join(lines)
        + f"\n\nSmolLM2-135M in float32, {items}; KL in nats and JS in bits against plain Transformers' full "
        "prefill, mean over up to 16 places; ratios with 95 % bootstrap intervals. *Rows computed*: mean over layers "
        "(CacheBlend runs every row through two layers). `oracle` needs the full prefill and is a bound. A small model: see "
        "[what it can show](docs/results.md#what-this-can-show)."
    )


def demo() -> str:
    path = RESULTS / "demo.txt"
    return "```text\n" + path.read_text(encoding="utf-8").rstrip() + "\n```" if path.exists() else "(not run yet)"


BLOCKS = {"ttft": ttft, "lab": lab, "demo": demo}


def filled(page: str) -> str:
    for name, make in BLOCKS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", page)
    return page


if __name__ == "__main__":
    now = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        print("README numbers: ok" if filled(now) == now else "README.md has stale numbers; run `make docs`")
        sys.exit(filled(now) != now)
    PAGE.write_text(filled(now), encoding="utf-8")

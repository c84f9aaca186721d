"""Writes every number in the README from benchmarks/results: blocks between `<!-- NAME -->` and `<!-- /NAME -->`.

`--check` only compares. A number that no run gave has no way into the page.
"""

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "README.md"
NAMES = {"plain": "Transformers, full prefill", "full": "this engine, full prefill", "none": "reuse, no repair"}


def records(name: str) -> list[dict]:
    path = RESULTS / name
    return [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []


def ttft() -> str:
    """The latest measurement of each arm and dtype."""
    latest = {(r["dtype"], r["arm"], r["budget"]): r for r in records("ttft.jsonl")}
    rows = ["| dtype | arm | TTFT, s (median) | times sooner than full prefill | ideal |", "|---|---|---|---|---|"]
    for (dtype, arm, budget), r in sorted(
        latest.items(), key=lambda item: (item[0][0] != "float32", -item[1]["ttft_seconds_median"])
    ):
        name = NAMES.get(arm, f"{arm}, budget {budget:g}")
        rows.append(
            f"| {dtype} | {name} | {r['ttft_seconds_median']:.2f} | {r['times_sooner_than_full']:.2f} | "
            f"{r['ideal_times_sooner']:.2f} |"
        )
    first = next(iter(latest.values()), None)
    if first is None:
        return "(not measured yet)"
    env = first["environment"]
    note = (
        f"SmolLM2-135M, {first['context_tokens']} context tokens, {first['chunks']} chunks read from disk, "
        f"{env['processor']}, {env['threads']} threads, torch {env['torch']}, Transformers {env['transformers']}, "
        f"{env['date']}. A small model on a CPU: read the ratios. *Ideal*: all rows ÷ rows computed."
    )
    return "\n".join(rows) + "\n\n" + note


def fidelity() -> str:
    """Mean and median distances of each arm."""
    found: dict[tuple[str, float], list[dict]] = {}
    for r in records("fidelity.jsonl"):
        found.setdefault((r["arm"], r["budget"]), []).append(r)
    if not found:
        return "(not measured yet)"
    rows = ["| arm | budget | KL, first token | KL, continued | JS, continued |", "|---|---|---|---|---|"]
    for (arm, budget), items in found.items():
        cells = []
        for key in ("kl_first", "kl_cont", "js_cont"):
            values = [item[key] for item in items]
            cells.append(f"{statistics.fmean(values):.3f} (median {statistics.median(values):.3f})")
        rows.append(f"| {arm} | {budget:g} | {' | '.join(cells)} |")
    count = len(next(iter(found.values())))
    return (
        "\n".join(rows)
        + f"\n\nMeans over {count} questions; KL in nats, JS in bits, against plain Transformers' full prefill."
    )


def demo() -> str:
    path = RESULTS / "demo.txt"
    return "```text\n" + path.read_text(encoding="utf-8").rstrip() + "\n```" if path.exists() else "(not run yet)"


BLOCKS = {"ttft": ttft, "fidelity": fidelity, "demo": demo}


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

"""Writes the tables of docs/vlm.md from benchmarks/results/vision.jsonl into blocks `<!-- NAME -->` … `<!-- /NAME -->`.

`--check` only compares. A number that no run gave has no way into the page.
"""

import json
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "vlm.md"
RESULTS = ROOT / "benchmarks" / "results" / "vision.jsonl"
TITLES = {"qwen3_vl": "Qwen3-VL", "qwen2_5_vl": "Qwen2.5-VL", "idefics3": "Idefics3 (SmolVLM)"}
UNMEASURED = "(not measured yet)"

Record = dict[str, Any]


def records() -> list[Record]:
    """One record for each family, seed and number of tiles."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def digits(number: float) -> str:
    """Two significant digits, small numbers as powers of ten; results are kept to a millionth."""
    if not number:
        return "under 1e-6"
    if number < 1e-3:
        return f"{number:.0e}".replace("e-0", "e-")
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def exactness(found: list[Record]) -> str:
    """What no repair loses and what full repair leaves, for each family and number of tiles."""
    lines = [
        "| family | context tokens (visual) | tiles | KL, no repair | same tokens, no repair | largest KL, r = 1 |",
        "|---|---|---|---|---|---|",
    ]
    for family, title in TITLES.items():
        ours = [r for r in found if r["family"] == family]
        sizes = f"{fmean(r['context_tokens'] for r in ours):.0f} ({fmean(r['image_tokens'] for r in ours):.0f})"
        for tiles in sorted({r["tiles"] for r in ours}):
            rows = [r["arms"] for r in ours if r["tiles"] == tiles]
            none = fmean(fmean(arms["none"]["kl"]) for arms in rows)
            same = fmean(fmean(arms["none"]["same"]) for arms in rows)
            whole = max(max(arms["all"]["kl"]) for arms in rows)
            cells = [title, sizes, str(tiles), digits(none), f"{100 * same:.0f} %", digits(whole)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + note(found)


def fidelity(found: list[Record]) -> str:
    """What each selector leaves of the KL of no repair, and how often it chooses full prefill's token."""
    names = [name for name in found[0]["arms"] if "@" in name]
    shares = sorted({float(name.partition("@")[2]) for name in names})
    columns = [f"r = {share:g}" for share in shares]
    lines = ["| tiles | selector | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(shares)]
    for tiles in sorted({r["tiles"] for r in found}):
        rows = [r["arms"] for r in found if r["tiles"] == tiles]
        lines.append(f"| {tiles} | nothing | " + " | ".join([cell(rows, "none")] * len(shares)) + " |")
        for selector in dict.fromkeys(name.partition("@")[0] for name in names):
            shown = [cell(rows, f"{selector}@{share:g}") for share in shares]
            lines.append(f"| {tiles} | `{selector}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def cell(rows: list[dict[str, Any]], arm: str) -> str:
    """KL as a share of that without repair, a mean over models, and the share of full prefill's tokens."""
    left = fmean(fmean(arms[arm]["kl"]) / fmean(arms["none"]["kl"]) for arms in rows)
    same = fmean(fmean(arms[arm]["same"]) for arms in rows)
    return f"{left:.2f}, {100 * same:.0f} %"


def note(found: list[Record]) -> str:
    """Of what the numbers are."""
    first, environment = found[0], found[0]["environment"]
    seeds = len({r["seed"] for r in found})
    return (
        f"{first['items']} contexts of two texts and four pictures ({first['pictures']}), {seeds} random models "
        f"a family, float32, {first['places']} places of full prefill's own answer; torch {environment['torch']}, "
        f"Transformers {environment['transformers']}, {environment['date']}."
    )


def filled(text: str, found: list[Record]) -> str:
    """The page with its blocks written anew."""
    blocks = {"EXACTNESS": exactness, "FIDELITY": fidelity}
    for name, made in blocks.items():
        body = made(found) if found else UNMEASURED
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if len(re.findall(pattern, text, re.DOTALL)) != 1:
            raise SystemExit(f"{PAGE.relative_to(ROOT)}: no block {name}, or more than one")
        text = re.sub(pattern, lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before, records())
    if "--check" in sys.argv and before != after:
        print(f"{PAGE.relative_to(ROOT)} is stale; run `make docs`")
        sys.exit(1)
    if before != after:
        PAGE.write_text(after, encoding="utf-8")
    print(f"vision: ok ({len(records())} records)")

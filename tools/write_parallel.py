"""Writes the tables of docs/parallel.md into blocks `<!-- NAME -->` … `<!-- /NAME -->`: the cost model's, and those of
benchmarks/results/parallel.jsonl, what was measured.

`--check` only compares. A number that no run and no formula gave has no way into the page.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.parallel import cost_cells, cost_tables

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "parallel.md"
RESULTS = ROOT / "benchmarks" / "results" / "parallel.jsonl"
UNMEASURED = "Nothing is measured yet."
# What tells two records apart, of which the later counts; and what a table is about.
SUBJECT = (
    "model", "dtype", "device", "threads", "ranks", "token_ids_sha256", "chunks", "arm", "budget", "cached", "link",
)  # fmt: skip
TABLE = ("model", "dtype", "device", "threads", "context_tokens", "chunks", "link")

Record = dict[str, Any]


def records(path: Path = RESULTS) -> list[Record]:
    """What was measured; nothing where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A Markdown table; its first `words` columns are words, the others numbers."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * words + "---:|" * (len(columns) - words)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def modelled(made: cost_cells.Table) -> str:
    """A table of the cost model under its title."""
    return f"{made.title}.\n\n" + table(made.columns, made.rows, made.words)


def measured(found: list[Record]) -> str:
    """A table for each model, length and link: the arms beside the ring, with what each rank sends."""
    if not found:
        return UNMEASURED
    latest = {tuple(json.dumps(r.get(field)) for field in SUBJECT): r for r in found}
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in latest.values():
        groups.setdefault(tuple(record.get(field) for field in TABLE), []).append(record)
    return "\n\n".join(one_table(group) for group in groups.values())


def one_table(rows: list[Record]) -> str:
    """The arms of one model, length and link."""
    first = rows[0]
    rings = {r["ranks"]: r for r in rows if r["arm"] == "ring"}
    ring_is_there = all(r["ranks"] in rings for r in rows)
    link = f"links like {first['link']} ({first['link_mbit']:.3g} Mbit/s)" if first.get("link") else "loopback"
    where = first["environment"]
    runs = f"medians of {first['repeats']}" if first["repeats"] > 1 else "one run each"
    title = (
        f"`{first['model']}`, {first['dtype']}, {first['context_tokens']:,} context tokens in {first['chunks']} "
        f"chunks, {link}, {first['threads']} thread{'s' * (first['threads'] != 1)} a rank, {runs} "
        f"({where['processor']}, {where['cores']} cores, torch {where['torch']}, {where['date']})."
    )
    columns = ["arm", "ranks", "layout", "TTFT, s", "spread", "sent by a rank, MB", "on the wire, MB"]
    columns += ["ring ÷ this, time", "this ÷ ring, bytes"] if ring_is_there else []
    cells = []
    for r in rows:
        sent, wire = r.get("sent_bytes"), r.get("interface_bytes")
        row = [
            f"`{r['arm']}`" if r["layout"] else "full prefill",  # by one rank: no ring
            str(r["ranks"]),
            r["layout"] if r["arm"] not in ("ring", "gather") and r["ranks"] > 1 else "",
            f"{r['ttft_seconds_median']:.3g}",
            f"{100 * r['spread']:.0f}%" if r["repeats"] > 1 else "",
            "" if sent is None else f"{sent / 1e6:,.2f}",
            f"{wire / 1e6:,.2f}" if wire else "",
        ]
        if ring_is_there:
            ring = rings[r["ranks"]]
            ours, its = (sent, ring.get("sent_bytes")) if sent is not None else (wire, ring.get("interface_bytes"))
            row.append(f"{ring['ttft_seconds_median'] / r['ttft_seconds_median']:.2f}")
            row.append(f"{ours / its:.2f}" if ours and its else "")
        cells.append(row)
    return title + "\n\n" + table(columns, cells, 1)


def filled(text: str, found: list[Record]) -> str:
    """The page with its blocks written anew."""
    blocks = {
        "table5": modelled(cost_cells.table5_cells(cost_tables.table5())),
        "bytes_and_ratios": modelled(cost_cells.bytes_cells(cost_tables.bytes_and_ratios())),
        "break_even": modelled(cost_cells.break_even_cells(cost_tables.break_even())),
        "measured": measured(found),
    }
    for name, body in blocks.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if len(re.findall(pattern, text, re.DOTALL)) != 1:
            raise SystemExit(f"docs/parallel.md: no block {name}, or more than one")
        text = re.sub(pattern, lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)
    return text


def main(arguments: Sequence[str], page: Path = PAGE, results: Path = RESULTS) -> int:
    """0; 1 where `--check` finds the page stale."""
    found = records(results)
    before = page.read_text(encoding="utf-8")
    after = filled(before, found)
    if before != after and "--check" in arguments:
        print(f"docs/{page.name} is stale; run `make docs`")
        return 1
    if before != after:
        page.write_text(after, encoding="utf-8")
    print(f"parallel: ok ({len(found)} records)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

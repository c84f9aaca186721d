"""Writes docs/benchmarks.md from benchmarks/results/bench/*.jsonl, the records of `infoflow-kv bench`.

`--check` compares only. Without records there is no page. Of records about the same thing the latest counts.
"""

# ruff: noqa: E501 - Markdown

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "bench"
PAGE = ROOT / "docs" / "benchmarks.md"

Record = dict
# What tells two records of one benchmark apart; the later of two that agree in all of it counts.
SUBJECT = (
    "benchmark", "model", "dtype", "device", "threads", "token_ids_sha256", "engine", "arm", "budget", "state",
    "heads", "kv_heads", "head_dim", "keys", "rows", "new_tokens", "plans",
)  # fmt: skip
NAMES = {"plain": "Transformers, full prefill", "full": "this engine, full prefill", "none": "reuse, no repair"}
STAGES = ("load", "assemble", "score", "repair", "rest")
OPENING = """# Benchmarks

Made by `make docs` from `benchmarks/results/bench/`, the records of [`infoflow-kv bench`](cli.md#infoflow-kv-bench). Small
models on a CPU: read the ratios, not the seconds. All arms of a table took turns, another one first each time; times are
medians, *spread* is (highest − lowest) ÷ median. *Ideal* is the FLOPs of full prefill ÷ those of the rows that were
really chosen, at the keys that they really see: what the arm would give if it computed at full prefill's own rate and all
else cost nothing. The distance to it is what is left to mend."""


def read(folder: Path) -> list[Record]:
    """All records of the folder, the latest of each subject, in the order in which subjects came up."""
    latest: dict[tuple, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            latest[tuple(json.dumps(record.get(field)) for field in SUBJECT)] = record
    return list(latest.values())


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table; its first `left` columns are words, the others numbers."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * left + "---:|" * (len(columns) - left)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def arm_name(r: Record) -> str:
    name = NAMES.get(r["arm"], f"`{r['arm']}`")
    return name if r.get("budget") is None else f"`{r['arm']}@{r['budget']:g}`"


def number(value: float | None) -> str:
    """Three significant digits, or all before the point; empty for nothing."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f}"


def groups(records: Sequence[Record], *fields: str) -> dict[tuple, list[Record]]:
    found: dict[tuple, list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record.get(field) for field in fields), []).append(record)
    return dict(sorted(found.items(), key=lambda item: [str(v).zfill(8) for v in item[0]]))


def run_name(r: Record) -> str:
    """Model, dtype and threads; the kernel has no model."""
    threads = f"{r['threads']} thread{'s' * (r['threads'] != 1)}"
    return ", ".join(filter(None, (r.get("model"), r["dtype"], threads)))


def heading(r: Record) -> str:
    return f"### {run_name(r)}, {r['context_tokens']:,} context tokens, medians of {r['repeats']} rounds"


def machines(records: Sequence[Record]) -> str:
    """What the records were measured on: one line for each kind of machine, threads and versions."""
    lines = []
    for r in records:
        env = r["environment"]
        line = (
            f"{env.get('processor', '?')}, torch {env.get('torch', '?')}, "
            f"Transformers {env.get('transformers', '?')}, {env.get('date', '?')}"
        )
        if line not in lines:
            lines.append(line)
    return "Measured on: " + "; ".join(lines) + "."


def ceilings_of(records: Sequence[Record]) -> str:
    """The bare rates of the machine in the runs behind these records."""
    best: dict[str, Record] = {}
    for r in records:
        seen = best.setdefault(r["dtype"], dict(r["ceilings"]))
        for name, value in r["ceilings"].items():
            seen[name] = max(seen[name], value)
    rows = [
        (
            dtype,
            number(c["linear_gflops_per_second"]),
            number(c["attention_gflops_per_second"]),
            number(c["copy_gb_per_second"]),
            number(c["read_gb_per_second"]),
        )
        for dtype, c in sorted(best.items())
    ]
    return table(("dtype", "weight products, GFLOP/s", "attention products, GFLOP/s", "copy, GB/s", "read, GB/s"), rows)


def unplanned(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if not r.get("plans")]


def ttft(records: Sequence[Record]) -> str:
    parts = ["## Time to first token", machines(records)]
    for own in groups(unplanned(records), "model", "dtype", "threads", "context_tokens").values():
        rows = [
            (
                arm_name(r),
                r["state"] or "",
                number(r["ttft_seconds_median"]),
                percent(r["spread"]),
                number(r["times_sooner_than_full"]),
                number(r["ideal_times_sooner"]),
                number(r["times_sooner_than_plain"]),
                number(r["ideal_seconds_at_ceilings"]),
                number(r["mean_rank"]),
            )
            for r in sorted(own, key=lambda r: -r["ttft_seconds_median"])
        ]
        columns = (
            "arm", "chunks", "TTFT, s", "spread", "× sooner than full", "ideal", "× sooner than Transformers",
            "s at the machine's ceilings", "mean rank of chosen rows",
        )  # fmt: skip
        parts += [
            heading(own[0]),
            table(columns, rows, 2),
        ]
    parts += [
        (
            "*Mean rank*: where the recomputed tokens stand, as a share of the context; a late row sees more keys. *warm-disk*: the "
            "store is opened anew for each request and the files lie in the system's page cache; *cold*: the chunks are prefilled and "
            "stored on the way. Bare rates of the machine in these runs:"
        ),
        ceilings_of(records),
    ]
    return "\n\n".join(parts)


def stages(records: Sequence[Record]) -> str:
    staged = [r for r in unplanned(records) if r["stages"] and r["state"]]
    if not staged:
        return ""
    rows = []
    for r in sorted(
        staged, key=lambda r: (run_name(r), r["context_tokens"], r["state"], str(r["arm"]), r["budget"] or 0)
    ):
        whole = sum(r["stages"].values()) or 1.0
        cells = [percent(r["stages"][stage] / whole) for stage in STAGES]
        rows.append((run_name(r), arm_name(r), r["state"], f"{r['context_tokens']:,}", *cells))
    return "## Share of each stage\n\n" + table(("run", "arm", "chunks", "context tokens", *STAGES), rows, 3)


def planner(records: Sequence[Record]) -> str:
    """Short contexts and large budgets, where full prefill may be the quicker way."""
    own = [r for r in records if r.get("plans") and r["state"]]
    if not own:
        return ""
    rows = [
        (
            run_name(r),
            f"{r['context_tokens']:,}",
            arm_name(r),
            r["state"],
            number(r["ttft_seconds_median"]),
            number(r.get("predicted_seconds")),
            number(1 / r["times_sooner_than_full"]),
            "full prefill" if r.get("picked_full") else "reuse",
        )
        for r in sorted(
            own, key=lambda r: (run_name(r), r["context_tokens"], str(r["arm"]), r["budget"] or 0, r["state"])
        )
    ]
    columns = ("run", "context tokens", "arm", "chunks", "TTFT, s", "predicted, s", "÷ full prefill's", "picked")
    words = "Requests that may take full prefill instead of reuse, where that is predicted to be quicker by 5 % and a tenth of a second."
    return "\n\n".join(["## The planner", words, table(columns, rows, 2)])


def growth(records: Sequence[Record]) -> str:
    """TTFT over context length, arm by arm; a table for each model, as their lengths differ."""
    tables = []
    for own in groups([r for r in unplanned(records) if r["state"] in (None, "warm-disk")], "model").values():
        lengths = sorted({r["context_tokens"] for r in own})
        if len(lengths) < 2:
            continue
        rows = []
        for arm in groups(own, "dtype", "threads", "arm", "budget").values():
            at = {r["context_tokens"]: r["ttft_seconds_median"] for r in arm}
            cells = [number(at.get(length)) for length in lengths]
            rows.append((run_name(arm[0]), arm_name(arm[0]), *cells, number(exponent(at))))
        tables.append(table(("run", "arm", *(f"{length:,}" for length in lengths), "exponent"), rows, 2))
    words = "TTFT in seconds over context tokens; chunks from warm disk. *Exponent* x: TTFT grows like Nˣ from the shortest context to the longest."
    return "\n\n".join(["## Growth with the context", words, *tables]) if tables else ""


def exponent(at: dict[int, float]) -> float | None:
    """x of Nˣ between the shortest and the longest context; None where there is one only."""
    short, long = min(at), max(at)
    return math.log(at[long] / at[short]) / math.log(long / short) if short < long else None


def kv_bytes(records: Sequence[Record]) -> str:
    sizes = {(r["model"], r["dtype"]): r["kv_bytes_per_token"] for r in records}
    rows = [(model, dtype, f"{size:,}") for (model, dtype), size in sorted(sizes.items())]
    return "## KV bytes per token\n\n" + table(("model", "dtype", "bytes per token"), rows, 2)


def attention(records: Sequence[Record]) -> str:
    rows = [
        (
            run_name(r),
            f"{r['heads']}/{r['kv_heads']}/{r['head_dim']}",
            r["arm"],
            f"{r['keys']:,}",
            f"{r['rows']:,}",
            number(r["mean_rank"]),
            number(1000 * r["seconds_median"]),
            number(1000 * r["ideal_seconds"]),
            number(r["rate_ratio"]),
            f"{r['max_error']:.0e}",
        )
        for r in records
    ]
    columns = (
        "run", "heads/KV/width", "rows drawn", "keys", "rows", "mean rank", "ms", "ideal, ms", "rate ÷ causal SDPA's", "max error",
    )  # fmt: skip
    return "\n\n".join(
        [
            "## The staircase kernel",
            (
                "One layer, in pairs of a row and a key per second, against causal SDPA on the full square (`causal`). `-anew`: the cuts "
                "are made for this layer alone; a request makes them once for all. Errors against float64."
            ),
            machines(records),
            table(columns, rows, 3),
        ]
    )


def ingest(records: Sequence[Record]) -> str:
    rows = [
        (
            run_name(r),
            f"`{r['arm']}`",
            f"{r['tokens']:,}",
            number(r["tokens_per_second"]),
            percent(r["spread"]),
            number(r["ideal_tokens_per_second"]),
            number(r["share_of_plain_rate"]),
        )
        for r in records
    ]
    columns = ("run", "arm", "tokens", "tokens/s", "spread", "ideal", "÷ plain full prefill")
    return "\n\n".join(
        [
            "## Ingestion",
            (
                "`plain`: Transformers on all of the text as one sequence; `plain-chunks`: on each chunk by itself, nothing stored; "
                "`disk-movement`: with the second prefill that `influence` wants."
            ),
            machines(records),
            table(columns, rows, 2),
        ]
    )


def decode(records: Sequence[Record]) -> str:
    rows = [
        (
            run_name(r),
            "Transformers' generate" if r["arm"] == "plain" else "this engine",
            f"{r['context_tokens']:,}",
            number(r["tokens_per_second"]),
            percent(r["spread"]),
            number(r["ideal_tokens_per_second"]),
            number(r["share_of_plain_rate"]),
            "yes" if r["same_ids"] else "no",
        )
        for r in records
    ]
    columns = ("run", "arm", "context tokens", "tokens/s", "spread", "ideal", "÷ Transformers", "same ids")
    words = "Tokens after the first, greedy, same ids. The ideal reads every weight and all KV once a token."
    return "\n\n".join(["## Decoding", words, machines(records), table(columns, rows, 2)])


def memory(records: Sequence[Record]) -> str:
    rows = [
        (
            run_name(r),
            arm_name(r),
            f"{r['context_tokens']:,}",
            megabytes(r["above_weights_bytes_median"]),
            percent(r["spread"]),
            megabytes(r["ideal_bytes"]),
            number(r["times_kv"]),
            megabytes(r["peak_bytes"]),
        )
        for r in records
    ]
    columns = (
        "run",
        "arm",
        "context tokens",
        "peak above weights, MB",
        "spread",
        "the context's KV, MB",
        "÷ KV",
        "whole peak, MB",
    )
    words = (
        "One request in a process of its own; chunks from warm disk. No request can do with less than its context's KV; one "
        "that reuses is meant to stay under 1.3 × that and 32 MB of workspace above the weights. (With torch's huge pages, "
        "`THP_MEM_ALLOC_ENABLE=1`, assembly is a little quicker and the peak twice the KV.)"
    )
    return "\n\n".join(["## Peak memory", words, machines(records), table(columns, rows, 2)])


def compare(records: Sequence[Record]) -> str:
    parts = [
        "## Other engines",
        (
            "The same token ids, turn by turn. `prefill`: nothing cached; `reordered`: after a request with the same chunks in another "
            "order. Each peer at its own settings: [the scripts](../benchmarks/peers/)."
        ),
        machines(records),
    ]
    for own in groups(records, "model", "dtype", "threads", "context_tokens").values():
        ran = [r for r in own if "error" not in r]
        rows = [
            (
                f"{r['engine']} {r['version']}".strip(),
                f"`{r['arm']}`",
                number(r["ttft_seconds_median"]),
                percent(r["spread"]),
                number(r["times_sooner_than_own_full"]),
                number(r["decode_tokens_per_second"]),
                "yes" if r["same_first_token_as_full"] else "no",
            )
            for r in sorted(ran, key=lambda r: -r["ttft_seconds_median"])
        ]
        columns = (
            "engine",
            "arm",
            "TTFT, s",
            "spread",
            "× sooner than our full prefill",
            "decoded tokens/s",
            "same first token",
        )
        parts += [
            heading(own[0]),
            table(columns, rows, 2),
        ]
        said = {r["engine"]: r["notes"] for r in ran if r["notes"]} | {
            r["engine"]: r["error"] for r in own if "error" in r
        }
        parts += ["\n".join(f"- {name}: {' '.join(words.split())}" for name, words in said.items())] if said else []
    return "\n\n".join(parts)


SECTIONS: tuple[tuple[str, tuple[Callable[[Sequence[Record]], str], ...]], ...] = (
    ("ttft", (ttft, stages, growth, planner, kv_bytes)),
    ("attention", (attention,)),
    ("ingest", (ingest,)),
    ("decode", (decode,)),
    ("memory", (memory,)),
    ("compare", (compare,)),
)


def page(records: Sequence[Record]) -> str:
    """The page; empty without records."""
    made = []
    for name, sections in SECTIONS:
        own = [r for r in records if r["benchmark"] == name]
        made += [section(own) for section in sections] if own else []
    return "\n\n".join([OPENING, *filter(None, made)]) + "\n" if made else ""


def main(arguments: Sequence[str], folder: Path = RESULTS, path: Path = PAGE) -> int:
    """The exit code: 1 where the page is stale under --check."""
    text = page(read(folder))
    if "--check" in arguments:
        now = path.read_text(encoding="utf-8") if path.exists() else ""
        print("benchmarks: ok" if now == text else f"{path.name} is stale; run `make docs`")
        return int(now != text)
    if text:
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

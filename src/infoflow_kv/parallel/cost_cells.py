"""The cost model's records as cells of tables, for the command line and docs/parallel.md alike. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infoflow_kv.parallel.cost_times import FEWEST_RANK_TOKENS

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """What a table shows; its first `words` columns are words, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 0


_TABLE5 = (
    ("paper, 1 GPU", "paper_one_gpu"),
    ("paper, ring", "paper_ring"),
    ("paper, InfoFlow", "paper_infoflow"),
    ("1 GPU", "one_gpu"),
    ("ring, contiguous", "ring_contiguous"),
    ("ring, balanced", "ring_balanced"),
    ("ours, c = N/4", "infoflow_rank_chunks"),
    ("ours, c = 2K", "infoflow"),
    ("ideal, c = 2K", "ideal"),
    ("chunks cached", "infoflow_cached"),
    ("ideal, cached", "ideal_cached"),
    ("better kernels: ring", "better_kernels_ring_balanced"),
    ("better: ours, c = 2K", "better_kernels_infoflow"),
    ("better: cached", "better_kernels_infoflow_cached"),
)


def table5_cells(records: Sequence[Record]) -> Table:
    """Milliseconds, one row a context length."""
    rows = [(length(r["tokens"]), *(_milliseconds(r, key) for _, key in _TABLE5)) for r in records]
    first = records[0]
    title = f"Milliseconds, {first['model']} on {first['ranks']} devices, {first['share']:.0%} recomputed"
    return Table(title, ("tokens", *(name for name, _ in _TABLE5)), tuple(rows))


def bytes_cells(records: Sequence[Record]) -> Table:
    """GB that one rank sends and times, one row for each model, ranks and length, with all links beside each other."""
    links = list(dict.fromkeys(r["link"] for r in records))
    found: dict[tuple[str, int, int], dict[str, Record]] = {}
    for r in records:
        found.setdefault((r["model"], r["ranks"], r["tokens"]), {})[r["link"]] = r
    rows = []
    for (model, ranks, tokens), by_link in found.items():
        r = by_link[links[0]]
        sent = [gigabytes(r[key]) for key in ("ring_bytes", "q_bytes", "heads_bytes", "heads_bytes_cached")]
        times = [
            f"{took(x['ring_seconds'])} / {took(x['infoflow_seconds'])}: {x['times_sooner']:.2f}× "
            f"({x['times_sooner_cached']:.1f}×)"
            for x in (by_link[link] for link in links)
        ]
        rows.append((model, str(ranks), length(tokens), sent[0], sent[1], r["heads_layout"], *sent[2:], *times))
    columns = ("model", "P", "tokens", "ring, GB", "Q, GB", "layout", "H or HQ, GB", "cached, GB", *links)
    first = records[0]
    title = (
        f"GB sent by one rank; on each link balanced ring / ours: times sooner (with chunks cached); "
        f"{first['share']:.0%} recomputed"
    )
    return Table(title, columns, tuple(rows), words=1)


def break_even_cells(records: Sequence[Record]) -> Table:
    """Tokens, one row for each model and ranks; in brackets with chunks cached."""
    links = list(dict.fromkeys(r["link"] for r in records))
    found: dict[tuple[str, int], dict[str, Record]] = {}
    for r in records:
        found.setdefault((r["model"], r["ranks"]), {})[r["link"]] = r
    rows = []
    for (model, ranks), by_link in found.items():
        cells = [
            f"{_from(r['break_even_tokens'], ranks)} ({_from(r['break_even_tokens_cached'], ranks)})"
            for r in (by_link[link] for link in links)
        ]
        rows.append((model, str(ranks), *cells))
    title = f"Tokens from which on ours is quicker than a balanced ring (with chunks cached); {records[0]['share']:.0%}"
    return Table(f"{title} recomputed", ("model", "P", *links), tuple(rows), words=1)


def length(tokens: int) -> str:
    """`32K`, or `1M`; powers of two.

    >>> length(32768), length(2**20)
    ('32K', '1M')
    """
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 1024}K"


def gigabytes(num_bytes: float) -> str:
    """Three significant digits.

    >>> gigabytes(822e6), gigabytes(15.03e9), gigabytes(120.26e9)
    ('0.822', '15.0', '120')
    """
    value = num_bytes / 1e9
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.{2 if value >= 1 else 3}f}"


def took(seconds: float) -> str:
    """`605 ms`, or `39.4 s` from ten seconds on."""
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{1e3 * seconds:,.0f} ms"


def _milliseconds(record: Record, key: str) -> str:
    """The paper's own number with the digits that it has, others in whole milliseconds."""
    return f"{1e3 * record[f'{key}_seconds']:,.{1 if key.startswith('paper') else 0}f}"


def _from(tokens: int | None, ranks: int) -> str:
    """`13,040`; `≤ 1,024` at the least length that is looked at, `never` for None."""
    if tokens is None:
        return "never"
    return f"{'≤ ' if tokens <= FEWEST_RANK_TOKENS * ranks else ''}{tokens:,}"

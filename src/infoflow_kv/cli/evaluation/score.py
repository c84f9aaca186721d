"""`infoflow-kv eval score`: rows → a table per data set and paired differences."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoflow_kv.cli import options
from infoflow_kv.cli.output import emit, emit_json, emit_table

if TYPE_CHECKING:
    from infoflow_kv.evaluate.findings import Findings
    from infoflow_kv.evaluate.scoring import Comparison, Score

# The measures whose differences are told: distances on every data set, answers where the model can do the task.
COMPARED = ("kl_cont", "js_cont", "nll_delta", "f1_longbench", "choice", "hit")

Runs = Annotated[
    list[str],
    typer.Argument(metavar="DIR", help="Folders that `eval predict` wrote, or their rows.jsonl.", show_default=False),
]
Reference = Annotated[
    str | None,
    typer.Option(metavar="METHOD", help="The method that the others are compared with.", show_default="infoflow"),
]


def score(runs: Runs, reference: Reference = None, as_json: options.Json = False) -> int:
    """Score rows: distance to full prefill, answers, and each arm's paired difference to the reference method.

    KL in nats and JS in bits over full prefill's own continuation; F1 and exact match by LongBench's rules, in per
    cent. Differences are arm − reference at the same budget on the same items, data sets weighted equally, with a 95 %
    bootstrap interval over documents; p by sign flips (McNemar's exact test where an item is right or wrong), adjusted
    by Holm over the arms of a budget. Answers count only on data sets where full prefill beats the model without any
    context, which takes at least six documents to say. Pooled numbers are over the data sets on which every arm ran.

    Questions about pictures are also scored by their set's published rule, every arm against no repair at the same
    tiles and against full prefill.

    Examples:

    \b
        infoflow-kv eval score runs/musique
        infoflow-kv eval score runs/* --reference cacheblend --json
    """
    from infoflow_kv.evaluate.findings import find
    from infoflow_kv.evaluate.results import read_rows, read_runs

    rows = read_rows(runs)
    findings = find(rows, read_runs(runs), reference)
    pictured = [row for row in rows if row.get("metric") is not None]
    differences = {field: compared(findings, field) for field in COMPARED}
    if as_json:
        emit_json(
            {
                "reference": findings.reference,
                "scores": [asdict(s) for s in findings.scores],
                "differences": [difference(c) for found in differences.values() for c in found],
                "gates": [{**asdict(g), "why": g.why} for g in findings.gated],
                **pictures_as_json(pictured),
            }
        )
        return 0
    for scope in (*findings.datasets, *(s for s in findings.scopes if s not in findings.datasets)):
        emit(f"{scope}:")
        table(findings.of(scope))
        emit("")
    if len(findings.datasets) > 1 and set(findings.core) != set(findings.datasets):
        emit(f"pooled: {', '.join(findings.core) or 'nothing'} (the data sets on which every arm ran)")
    if any(differences.values()) or not pictured:
        tell_differences(findings, differences)
    tell_pictures(pictured)
    for g in findings.gated:
        if not g.passed:
            emit(f"{g.dataset} does not count for {g.field}: {g.why}")
    return 0


def table(scores: "list[Score]") -> None:
    """Nothing; one row an arm, as results."""
    from infoflow_kv.evaluate.digits import NOTHING, percent, plain

    titles = {"f1_longbench": "F1 %", "exact_match": "EM %", "choice": "right %", "hit": "found %"}
    fields = [f for f in titles if any(f in s.summaries for s in scores)]

    def mean(s: "Score", field: str) -> float | None:
        return s.summaries[field].mean if field in s.summaries else None

    rows = []
    for s in scores:
        kl = s.summaries.get("kl_cont")
        cells = [s.arm, s.n, plain(kl.mean if kl else None), plain(kl.median if kl else None)]
        cells += [plain(mean(s, "js_cont")), percent(mean(s, "top1"))]
        cells += [percent(mean(s, f)) if f in s.summaries else NOTHING for f in fields]
        rows.append([*cells, percent(mean(s, "recomputed_share"))])
    shown = [titles[f] for f in fields]
    columns = ["arm", "n", "KL mean", "KL median", "JS mean", "top-1 %", *shown, "recomputed %"]
    emit_table(columns, rows, right=range(1, len(columns)))


def compared(findings: "Findings", field: str) -> "list[Comparison]":
    """Every arm with a budget against the reference method's arm at that budget.

    A reference method without a budget is held against all arms, those without a budget among them.
    """
    scope = findings.scopes[0]
    scores = [s for s in findings.of(scope) if field in s.summaries]
    unbudgeted = [s for s in scores if "@" not in s.arm]
    alone = next((s.arm for s in unbudgeted if s.method == findings.reference), None)
    groups = [(findings.reference_at(b) or alone, [s for s in scores if s.budget == b and s not in unbudgeted])
              for b in findings.budgets]  # fmt: skip
    groups.append((alone, unbudgeted))
    found: list[Comparison] = []
    for arm, others in groups:
        if arm is not None:
            found += findings.against(scope, arm, [s.arm for s in others], field).values()
    return found


def tell_differences(findings: "Findings", differences: "dict[str, list[Comparison]]") -> None:
    """Nothing; one row an arm and measure, as results."""
    from infoflow_kv.evaluate.digits import probability
    from infoflow_kv.evaluate.measures import MEASURES
    from infoflow_kv.evaluate.tables import interval

    rows = []
    for field, found in differences.items():
        scale = 100 if MEASURES[field].percent else 1
        for c in found:
            tally = f"{c.tally.wins}/{c.tally.ties}/{c.tally.losses}"
            title = MEASURES[field].title + (", %" if MEASURES[field].percent else "")
            cells = (title, c.arm, c.reference, c.difference.n, interval(c.difference, scale))
            rows.append((*cells, probability(c.p_holm), tally))
    if not rows:
        emit(f"no arm shares a budget and items with {findings.reference}: nothing to compare{hint(findings)}")
        return
    where = "" if findings.core or len(findings.datasets) == 1 else f" on {findings.scopes[0]}"
    emit(f"differences to the reference, paired by item{where}:")
    columns = ("measure", "arm", "reference", "n", "difference [95 %]", "p (Holm)", "better/equal/worse")
    emit_table(columns, rows, right=(3, 4, 5, 6))
    emit("")


def pictures_as_json(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What of the scores is there where rows are about pictures."""
    from infoflow_kv.evaluate.vision_scoring import as_json, compare_vision, score_vision

    return {"pictures": as_json(score_vision(rows), compare_vision(rows))} if rows else {}


def tell_pictures(rows: list[dict[str, Any]]) -> None:
    """Nothing; each set's published number and every arm's paired difference to the bounds, as results."""
    if not rows:
        return
    from infoflow_kv.evaluate.digits import percent, probability
    from infoflow_kv.evaluate.tables import interval
    from infoflow_kv.evaluate.vision_metrics import FIELDS
    from infoflow_kv.evaluate.vision_scoring import compare_vision, score_vision

    emit("scores by each set's published rule, in per cent:")
    columns = ("data set", "measure", "arm", "n", "score")
    emit_table(
        columns, [(s.dataset, FIELDS[s.field], s.arm, s.n, percent(s.mean)) for s in score_vision(rows)], right=(3, 4)
    )
    emit("")
    found = [
        (
            *(c.dataset, FIELDS[c.field], c.arm, c.reference, c.difference.n, interval(c.difference, 100)),
            *(probability(c.p_holm), c.test, f"{c.tally.wins}/{c.tally.ties}/{c.tally.losses}"),
        )
        for c in compare_vision(rows)
    ]
    if found:
        emit("differences to no repair and to full prefill, paired by item, in points:")
        titles = ("n", "difference [95 %]", "p (Holm)", "test", "better/equal/worse")
        emit_table(("data set", "measure", "arm", "reference", *titles), found, right=(4, 5, 6, 8))
        emit("")


def hint(findings: "Findings") -> str:
    """What could be compared instead: the bounds have no budget, but they may have the same items."""
    scope = findings.scopes[0]
    items: dict[str, set[str]] = {}
    for row in findings.rows_of(scope, "kl_cont"):
        items.setdefault(row["method"], set()).add(row["_id"])
    ours = items.get(findings.reference, set())
    for method in ("none", "full"):
        if method != findings.reference and ours & items.get(method, set()):
            return f"; `--reference {method}` compares all arms with that bound"
    return ""


def difference(c: "Comparison") -> dict[str, Any]:
    """The comparison as JSON takes it: an unbounded end is null."""
    record = asdict(c)
    bounds = record["difference"]
    record["difference"] = {k: v if math.isfinite(v) else None for k, v in bounds.items()}
    record["tally"] = c.tally._asdict()
    return record

"""The tables of a report, each as Markdown; "" where there is nothing to tell."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from infoflow_kv.evaluate import digits
from infoflow_kv.evaluate.facts import RANGES, are_numbers
from infoflow_kv.evaluate.figures.style import words
from infoflow_kv.evaluate.findings import Findings, variant
from infoflow_kv.evaluate.measures import DECIDED_BY, MEASURES
from infoflow_kv.evaluate.results import cluster
from infoflow_kv.evaluate.scoring import POOLED, Comparison, Estimate, Score, recovered

MARK = "†"  # the interval of the difference excludes 0, and is of enough clusters


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right; "" without lines."""
    if not lines:
        return ""
    rules = ["---" if place == 0 or column in ("arm", "document") else "---:" for place, column in enumerate(columns)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rules, *lines))


def code(text: Any) -> str:
    """Foreign text as Markdown code, harmless in a table."""
    shown = words(text).replace("`", "'").replace("|", "¦").strip()
    return f"`{shown}`" if shown else digits.NOTHING


def distance(findings: Findings, scope: str) -> str:
    """KL and JS to full prefill, with the paired difference to the reference method at the same budget."""
    lines = []
    for budget in (None, *findings.budgets):
        against = _against(findings, scope, budget, "kl_cont")
        best = None if budget is None else findings.winner(scope, budget, "kl_cont")
        for s in findings.at(scope, budget):
            kl = _spread(s, "kl_cont")
            others = [_spread(s, field) for field in ("js_cont", "kl_first", "js_first")]
            difference = _difference(against.get(s.arm))
            lines.append([code(s.arm), str(s.n), f"**{kl}**" if s.arm == best else kl, *difference, *others])
    titles = ["KL cont.", f"KL cont. − {findings.reference}", "p (Holm)", "better/equal/worse"]
    return table(["arm", "n", *titles, "JS cont.", "KL first", "JS first"], lines)


def agreement(findings: Findings, scope: str) -> str:
    """How often the greedy tokens are full prefill's, and what the gold answer loses."""
    lines = []
    for budget in (None, *findings.budgets):
        against = _against(findings, scope, budget, "nll_delta")
        for s in findings.at(scope, budget):
            cells = [_counted(findings, s, f) for f in ("top1", "prefix_share", "identical", "nll_delta")]
            cells.append(_mean(s, "selection_lift"))
            lines.append([code(s.arm), str(s.n), *cells, _difference(against.get(s.arm))[0]])
    titles = ["same first token, %", "common prefix, %", "identical, %", "ΔNLL", "lift"]
    return table(["arm", "n", *titles, f"ΔNLL − {findings.reference}"], lines)


def answers(findings: Findings, field: str) -> str:
    """A task measure: a column a data set that passed its gate, the pooled mean, and the difference to the reference.

    A single data set has one column, its mean.
    """
    decides = DECIDED_BY.get(field, field)
    passed = [g.dataset for g in findings.gated if g.field == decides and g.passed]
    if not passed:
        return ""
    lines = []
    for budget in (None, *findings.budgets):
        against = _against(findings, POOLED, budget, field)
        best = None if budget is None else findings.winner(POOLED, budget, field, lower=False)
        for arm in (s.arm for s in findings.arms_at(budget)):
            by_set = {s.dataset: s for s in findings.scores if s.arm == arm and field in s.summaries}
            if not by_set.keys() & {*passed, POOLED}:
                continue
            cells = [_mean(by_set[dataset], field) if dataset in by_set else digits.NOTHING for dataset in passed]
            pooled = by_set.get(POOLED)
            n, mean = (
                (digits.NOTHING,) * 2 if pooled is None else (str(pooled.summaries[field].n), _mean(pooled, field))
            )
            difference = _difference(against.get(arm), scale=100)
            lines.append([code(arm), n, *cells, f"**{mean}**" if arm == best else mean, *difference])
    shown = ["pooled", f"pooled − {findings.reference}", "p (Holm)", "better/equal/worse"]
    return table(["arm", "n", *map(code, passed), *shown], lines)


def found_by(findings: Findings, dataset: str, task: str, fact: str) -> str:
    """Share of found answers of a made task on a data set, a column a value of this fact of its items (kind, …)."""
    rows = [
        row
        for row in findings.rows
        if row["dataset"] == dataset
        and row["meta"].get("task") == task
        and row["hit"] is not None
        and (isinstance(row["meta"].get(fact), str) or (fact in RANGES and are_numbers(row["meta"], fact)))
    ]
    values = sorted({row["meta"][fact] for row in rows}, key=lambda value: (str(type(value)), value))
    lines = []
    for budget in (None, *findings.budgets):
        for s in findings.at(dataset, budget):
            ours = [row for row in rows if row["arm"] == s.arm]
            parts = [[row["hit"] for row in ours if row["meta"][fact] == value] for value in values]
            if ours:
                lines.append([code(s.arm), str(len(ours)), *(digits.percent(fmean(p) if p else None) for p in parts)])
    return table(["arm", "n", *(f"{fact} {code(value)}" for value in values)], lines)


def recovery_table(findings: Findings) -> str:
    """The share of the gap between `none` and `full` that each arm closes."""
    fields, scope = ("kl_cont", "js_cont", "kl_first", "nll_delta"), findings.scopes[0]
    shares = {
        f: recovered(findings.rows_of(scope, f), f, gated=findings.gated, resamples=findings.resamples) for f in fields
    }
    lines = []
    for budget in (None, *findings.budgets):
        for s in findings.at(scope, budget):
            cells = [interval(shares[field].get(s.arm), 100, signed=False) for field in fields]
            if any(cell != digits.NOTHING for cell in cells):
                lines.append([code(s.arm), *cells])
    return table(["arm", *(f"{MEASURES[field].title}, %" for field in fields)], lines)


def gate_table(findings: Findings) -> str:
    """Every data set and task measure with the verdict of its gate."""
    lines = []
    for g in findings.gated:
        show = digits.percent if MEASURES[g.field].percent else digits.plain
        title = "NLL of the gold answer" if g.field == "nll_delta" else f"{MEASURES[g.field].title}, %"
        verdict = {True: "counts", False: f"**{g.why}**", None: f"{g.why}, does not count"}[g.passed]
        lines.append([code(g.dataset), title, str(g.n), show(g.full), show(g.closed), verdict])
    return table(["data set", "measure", "n", "full prefill", "no context", "verdict"], lines)


def ablation(findings: Findings, kind: str) -> str:
    """Arms that differ in `kind` alone ("geometry", "layers") beside the plain arm of the same method and budget."""
    scope, lines = findings.scopes[0], []
    for budget in (None, *findings.budgets):
        scores = findings.at(scope, budget, main=False)
        for method in dict.fromkeys(s.method for s in scores if set(variant(s.arm)) == {kind}):
            ours = [s for s in scores if s.method == method and set(variant(s.arm)) <= {kind}]
            plain = next((s.arm for s in ours if not variant(s.arm)), None)
            against = {} if plain is None else findings.against(scope, plain, [s.arm for s in ours], "kl_cont")
            for s in ours:
                setting = variant(s.arm).get(kind) or f"{s.geometry if kind == 'geometry' else s.layers} (default)"
                cells = [_counted(findings, s, field) for field in ("kl_cont", "js_cont", "top1", "nll_delta")]
                difference = _difference(against.get(s.arm))[:2]
                lines.append([code(s.method), str(s.budget), code(setting), str(s.n), *cells, *difference])
    titles = ["KL cont.", "JS cont.", "same first token, %", "ΔNLL", "KL cont. − default", "p (Holm)"]
    return table(["method", "budget", kind, "n", *titles], lines)


def budget_table(findings: Findings) -> str:
    """The shares that were really recomputed, against the budget that was asked for."""
    lines, scope = [], findings.scopes[0]
    rows = findings.rows_of(scope, "recomputed_share")
    for budget in (None, *findings.budgets):
        for s in findings.at(scope, budget):
            ours = [row["recomputed_share"] for row in rows if row["arm"] == s.arm]
            span = f"{digits.percent(min(ours))} to {digits.percent(max(ours))}"
            asked = digits.NOTHING if budget is None else _budget(budget)
            cells = [_mean(s, f) for f in ("recomputed_share", "recomputed_share_all", "computed_share")]
            times = [_median(s, "ttft_seconds"), _median(s, "ttft_ratio")]
            lines.append([code(s.arm), asked, cells[0], span, *cells[1:], *times])
    return table(
        [
            "arm",
            "asked, %",
            "of reusable, %",
            "least to most",
            "of all tokens, %",
            "rows computed, %",
            "TTFT median, s",
            "TTFT ÷ full, median of items",
        ],
        lines,
    )


def data_table(findings: Findings) -> str:
    """What the data sets hold; reusable tokens as arms find them that reuse and keep the order of the chunks."""
    lines = []
    for dataset in findings.datasets:
        ours = [row for row in findings.rows if row["dataset"] == dataset]
        rows = {row["_id"]: row for row in ours}.values()
        reusing = {row["_id"]: row for row in ours if row["method"] != "full" and not row["reorder"]}.values()
        documents = len({cluster(row) for row in rows})
        cells = [f"{fmean(row[f] for row in rows):.0f}" for f in ("chunks", "context_tokens")]
        cells.append(f"{fmean(row['reusable_tokens'] for row in reusing):.0f}" if reusing else digits.NOTHING)
        lines.append([code(dataset), str(len(rows)), str(documents), *cells])
    return table(["data set", "items", "clusters", "chunks", "context tokens", "reusable tokens"], lines)


def deviations(findings: Findings) -> str:
    """Relative distance of keys and values to full prefill's, mean over layers and items."""
    lines, scope = [], findings.scopes[0]
    rows = findings.rows_of(scope, "kl_cont")
    for budget in (None, *findings.budgets):
        for s in findings.at(scope, budget):
            ours = [row for row in rows if row["arm"] == s.arm]
            cells = [_layer_mean(ours, f, part) for f in ("delta_k", "delta_v") for part in ("repaired", "reused")]
            if any(cell is not None for cell in cells):
                lines.append([code(s.arm), *map(digits.plain, cells)])
    return table(["arm", "ΔK recomputed", "ΔK reused", "ΔV recomputed", "ΔV reused"], lines)


def _layer_mean(rows: Sequence[Mapping[str, Any]], field: str, part: str) -> float | None:
    values = [fmean(row[field][part]) for row in rows if row.get(field) and row[field].get(part)]
    return fmean(values) if values else None


def _against(findings: Findings, scope: str, budget: float | str | None, field: str) -> dict[str, Comparison]:
    reference = None if budget is None else findings.reference_at(budget)
    if budget is None or reference is None:
        return {}
    arms = [s.arm for s in findings.at(scope, budget) if field in s.summaries]
    return findings.against(scope, reference, arms, field)


def _difference(found: Comparison | None, scale: float = 1.0) -> list[str]:
    """Three cells: the difference, marked where its interval excludes 0; the adjusted p-value; the tally."""
    if found is None:
        return [digits.NOTHING] * 3
    text = interval(found.difference, scale)
    marked = f"{text} {MARK}" if found.difference.excludes_zero and not found.difference.is_weak else text
    tally = found.tally
    return [marked, digits.probability(found.p_holm), f"{tally.wins}/{tally.ties}/{tally.losses}"]


def interval(given: Estimate | None, scale: float = 1.0, signed: bool = True) -> str:
    """Mean and bounds as `digits.interval` writes them; it is said where they come from few clusters."""
    text = digits.interval(given, scale, signed)
    bounded = given is not None and math.isfinite(given.high - given.low)
    return f"{text} ({few(given.clusters)})" if given is not None and bounded and given.is_weak else text


def few(clusters: int) -> str:
    """The words for an interval of too few clusters."""
    return f"few clusters: {clusters}"


def _counted(findings: Findings, s: Score, field: str) -> str:
    """The mean; a dash for a task measure where the data set fails its gate."""
    return _mean(s, field) if findings.counts(s.dataset, field) else digits.NOTHING


def _spread(s: Score, field: str) -> str:
    summary = s.summaries.get(field)
    if summary is None:
        return digits.NOTHING
    return " / ".join(map(digits.plain, (summary.mean, summary.median, summary.p95)))


def _mean(s: Score, field: str) -> str:
    summary = s.summaries.get(field)
    value = None if summary is None else summary.mean
    return digits.percent(value) if MEASURES[field].percent else digits.plain(value)


def _median(s: Score, field: str) -> str:
    summary = s.summaries.get(field)
    return digits.plain(None if summary is None else summary.median)


def _budget(budget: float | str) -> str:
    return code(budget) if isinstance(budget, str) else f"{100 * budget:g}"


def rotation(findings: Findings) -> str:
    """RoPE similarity of the selected tokens to the prompt, mean over the items of each data set."""
    lines = []
    for budget in (None, *findings.budgets):
        for arm in (s.arm for s in findings.arms_at(budget)):
            cells = []
            for dataset in findings.datasets:
                rows = [r for r in findings.rows if r["arm"] == arm and r["dataset"] == dataset]
                means = [r["rope_mean_of_max"] for r in rows if r.get("rope_mean_of_max") is not None]
                largest = [r["rope_max"] for r in rows if r.get("rope_max") is not None]
                cells.append(f"{fmean(means):.4f} / {fmean(largest):.4f}" if means and largest else digits.NOTHING)
            if any(cell != digits.NOTHING for cell in cells):
                lines.append([code(arm), *cells])
    return table(["arm", *map(code, findings.datasets)], lines)

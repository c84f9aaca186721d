"""The report of the laboratory: Markdown and one self-contained HTML page, from results only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.evaluate import digits, tables
from infoflow_kv.evaluate.figures.series import Plate, plates
from infoflow_kv.evaluate.findings import Findings, find
from infoflow_kv.evaluate.measures import DECIDED_BY, MEASURES
from infoflow_kv.evaluate.niah import TASK as NEEDLES
from infoflow_kv.evaluate.page import render_page
from infoflow_kv.evaluate.results import cluster, environments_of
from infoflow_kv.evaluate.scoring import FEWEST_CLUSTERS, POOLED
from infoflow_kv.evaluate.variable_tracking import TASK as TRACKING

TITLE = "Results of the laboratory"
_FIGURES = "figures"


def write_report(
    rows: Sequence[Mapping[str, Any]],
    run_records: Sequence[Mapping[str, Any]],
    folder: Path | str,
    *,
    explained: Mapping[str, Any] | None = None,
    reference: str | None = None,
    resamples: int = 10_000,
) -> list[Path]:
    """`report.md`, `report.html` and `figures/*` written into `folder`; equal results give equal files.

    `explained` adds the selection map of one request; `reference` is the method that the others are compared with
    (default: infoflow). OptionError where matplotlib is missing, before anything is written.
    """
    findings = find(rows, run_records, reference, resamples)
    shown = plates(findings, explained)
    folder = Path(folder)
    files = [file for plate in shown for file in plate.draw(folder / _FIGURES)]
    folder.mkdir(parents=True, exist_ok=True)
    markdown = _render(findings, shown, f"{_FIGURES}/")
    text, page = folder / "report.md", folder / "report.html"
    text.write_text(markdown, encoding="utf-8")
    pictures = {f"{_FIGURES}/{file.name}": file.read_text(encoding="utf-8") for file in files if file.suffix == ".svg"}
    page.write_text(render_page(markdown, TITLE, pictures), encoding="utf-8")
    return [text, page, *files]


def render_markdown(
    rows: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    figures_prefix: str = "figures/",
    *,
    explained: Mapping[str, Any] | None = None,
    reference: str | None = None,
    resamples: int = 10_000,
    title: str = TITLE,
) -> str:
    """The report as Markdown; its pictures are SVGs at `figures_prefix` + name, as `write_report` names them."""
    findings = find(rows, runs, reference, resamples)
    return _render(findings, plates(findings, explained), figures_prefix, title)


def _render(findings: Findings, shown: Sequence[Plate], prefix: str, title: str = TITLE) -> str:
    pictures = {plate.name: f"![{plate.caption}]({prefix}{plate.name}.svg)" for plate in shown}
    blocks = [f"# {title}", *_ran(findings), *_reading(findings)]
    blocks += _section("What this can show", "\n".join(f"- {line}" for line in _limits(findings)))
    scope = findings.scopes[0]
    first = [pictures.get(name, "") for name in ("budgets-kl", "budgets-js", "pareto-rows", "pareto-ttft")]
    named = _named(findings, scope)
    blocks += _section(f"Distance to full prefill: {named}", tables.distance(findings, scope), *first)
    blocks += _section(f"Agreement with full prefill: {named}", tables.agreement(findings, scope))
    blocks += _section(
        "Recovery",
        f"The share of the gap between `none` and full prefill that an arm closes, a ratio of means over {named}, "
        f"with its 95 % interval; {digits.NOTHING} where the gap itself may be 0.",
        tables.recovery_table(findings),
    )
    blocks += _answers(findings)
    for dataset in findings.datasets:
        for title, task, facts in (
            ("Needles", NEEDLES, ("kind", "place")),
            ("Variable tracking", TRACKING, ("hops", "order")),
        ):
            # Without generated answers there is no table, but there are log-probabilities.
            made = [tables.found_by(findings, dataset, task, fact) for fact in facts]
            drawn = [pictures[plate.name] for plate in shown if (plate.dataset, plate.task) == (dataset, task)]
            blocks += _section(f"{title}: {tables.code(dataset)}, found in %", *made, *drawn)
    blocks += _section("Gate", _GATE, tables.gate_table(findings))
    blocks += _section("Geometry", tables.ablation(findings, "geometry"))
    layers = [picture for name, picture in pictures.items() if name.startswith("layers-")]
    blocks += _section("Layers", tables.ablation(findings, "layers"), *layers)
    blocks += _section("Budgets", _BUDGETS, tables.budget_table(findings))
    blocks += _section("RoPE similarity", _ROTATION, tables.rotation(findings))
    blocks += _section("Keys and values", _DEVIATIONS, tables.deviations(findings))
    blocks += _section("One request", pictures.get("selection", ""))
    for dataset in findings.scopes[1:]:
        blocks += _section(f"Data set {tables.code(dataset)}: distance", tables.distance(findings, dataset))
        blocks += _section(f"Data set {tables.code(dataset)}: agreement", tables.agreement(findings, dataset))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _section(title: str, *parts: str) -> list[str]:
    """A heading with its parts; nothing at all where no part but prose is left."""
    filled = [part for part in parts if part]
    if not any(part.startswith(("|", "![", "- ", "###")) for part in filled):
        return []
    return [f"## {title}", *filled]


def _named(findings: Findings, scope: str) -> str:
    if scope != POOLED:
        return tables.code(scope)
    num, core = len(findings.datasets), len(findings.core)
    return f"{'all data sets' if core == num else f'{core} of {num} data sets'}, equal weights"


def _ran(findings: Findings) -> list[str]:
    lines: list[list[str]] = []
    for run in findings.runs:
        for key in ("model", "weights", "dtype"):
            lines.append([key, tables.code(run.get(key, ""))])
        for environment in environments_of(run) or [run.get("environment") or {}]:
            lines += [[key, tables.code(value)] for key, value in _flat(environment)]
        lines += [[f"option {key}", tables.code(value)] for key, value in _flat(run.get("options") or {})]
        for data in run.get("data") or ():
            name = str(data.get("file", "")).replace("\\", "/").rsplit("/", 1)[-1]
            lines.append(["data", f"{tables.code(name)}, SHA-256 {tables.code(str(data.get('sha256', ''))[:16])}…"])
    unique = [list(line) for line in dict.fromkeys(map(tuple, lines))]
    arms = ", ".join(tables.code(arm) for arm in dict.fromkeys(row["arm"] for row in findings.rows))
    missing = "No `run.json` came with these rows: model and machine are unknown." if not findings.runs else ""
    ran = ["## What ran", missing, tables.table(["fact", "value"], unique).replace("---:", "---")]
    return [*ran, f"Arms: {arms}.", tables.data_table(findings)]


def _flat(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in record.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key} ")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            found.append((f"{prefix}{key}".replace("|", "¦").replace("_", " "), shown))
    return found


def _reading(findings: Findings) -> list[str]:
    places = {(run.get("options") or {}).get("continuation") for run in findings.runs} - {None}
    continuation = " or ".join(map(str, sorted(places, key=str))) or "16"
    text = _READING.replace("REFERENCE", findings.reference).replace("CONTINUATION", continuation)
    return ["## How to read the tables", text.strip()]


def _limits(findings: Findings) -> list[str]:
    items, scope = len({row["_id"] for row in findings.rows}), findings.scopes[0]
    counts = [s.n for s in findings.of(scope)]
    lines = [
        f"{items} items. An interval holds for items like these and this model; it says nothing of other models.",
        *_SMALL.strip().splitlines(),
    ]
    devices = {str((run.get("environment") or {}).get("device", "")) for run in findings.runs}
    if any("cuda" in device for device in devices):
        lines.append("Times hold for the machine above and one request at a time.")
    else:
        lines.append("Times on a CPU show the ratio of work, not what a GPU or a server takes.")
    lines.append(_TIMES)
    lines += _pooling(findings)
    if min(counts) != max(counts):
        lines.append(
            f"Arms cover between {min(counts)} and {max(counts)} items: compare them by the paired differences, which "
            "use common items only, not by their means."
        )
    alone = [d for d in findings.datasets if len({cluster(r) for r in findings.rows if r["dataset"] == d}) == 1]
    if alone:
        names = ", ".join(map(tables.code, alone))
        lines.append(f"All items of {names} share one document: intervals there and of all data sets are unbounded.")
    return lines


def _pooling(findings: Findings) -> list[str]:
    """What is pooled and what is not, where that needs words."""
    core, every = findings.core, {s.arm for s in findings.scores}
    if len(findings.datasets) == 1:
        return ["One data set only: nothing here is pooled."]
    lacking = []
    for dataset in findings.datasets:
        absent = sorted(every - {s.arm for s in findings.of(dataset)})
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            lacking.append(f"{tables.code(dataset)} (without {', '.join(map(tables.code, absent[:3]))}{more})")
    if not lacking:
        return []
    left = f"left out: {', '.join(lacking)}."
    if core:
        return [f"Pooled numbers are over {', '.join(map(tables.code, core))}, where every arm ran; {left}"]
    first = tables.code(findings.scopes[0])
    alone = f"the first tables and the figures are of {first} alone, the other data sets follow below"
    return [f"Nothing is pooled, for no data set has every arm: {alone}; {left}"]


def _answers(findings: Findings) -> list[str]:
    blocks: list[str] = []
    for field, protocol in (
        ("f1_longbench", "LongBench's `qa_f1_score`: the whole prediction counts."),
        ("exact_match", "The prediction equals an answer after LongBench's normalisation."),
        ("f1_paper", _PAPER),
        ("choice", "The first letter A to D that the prediction gives is the right one."),
    ):
        made = tables.answers(findings, field)
        failed = [g.dataset for g in findings.gated if g.field == DECIDED_BY.get(field, field) and not g.passed]
        note = f"Left out by the gate: {', '.join(map(tables.code, failed))}." if failed else ""
        title = {"f1_longbench": "longbench", "f1_paper": "paper"}.get(field)
        heading = f"Answers: {MEASURES[field].title}" + (f" (protocol `{title}`)" if title else "") + ", %"
        blocks += _section(heading, protocol, note, made)
    return blocks


_READING = f"""
- KL in nats and Jensen–Shannon divergence (JS) in bits compare next-token distributions with full prefill of the same \
token ids: *first* at the first answer token, *cont.* as a mean over up to CONTINUATION places of full prefill's own \
greedy continuation. Cells show mean / median / 95th percentile; pooled, each is the mean of the data sets' numbers.
- Pooled: equal weights over the data sets on which **every** arm of this report ran, so that no number stands beside \
one over other data sets; a measure that some arms lack on some of them (answers) is pooled where all have it that \
have it at all. The other data sets have tables of their own.
- ΔNLL: nats a token that the gold answer loses against full prefill; {digits.NOTHING} on a data set that fails its \
gate, and such sets are not pooled. Lift: share of gold passages among the recomputed tokens ÷ their share of the \
reusable tokens.
- Differences are paired by item: arm − `REFERENCE` at the same budget, with a 95 % bootstrap interval over documents, \
data sets weighted equally. {tables.MARK}: the interval excludes 0. p: sign-flip test over documents, for measures \
that are yes or no McNemar's exact test over items; adjusted by Holm within a budget.
- *few clusters*: items that share a document are one cluster, and of fewer than {FEWEST_CLUSTERS} clusters no \
interval is one of 95 %: take it as a range of what was seen. It gets no {tables.MARK} and nothing is bold by it.
- Bold: better than **every** other arm at its budget, where each interval excludes 0 and each adjusted p is under \
.05; where no arm is, nothing is bold. `full`, `none` and `oracle` are bounds and win nothing.
"""
_SMALL = """
A small model answers few questions at all: its F1 stands near the floor and moves on few items. Distance to full \
prefill is the primary measure; it tells how well reuse keeps *this model's* behaviour, good or bad, not how good the \
answers are.
Which layers and which method come first differs between models: a ranking found on a small model is a hypothesis \
about a large one.
"""
_PAPER = (
    "The parsing of InfoFlow KV's released evaluation: first line, cut at the first comma or semicolon. Predictions "
    "are those of the table above; the paper's own prompts differ. Not comparable with LongBench's numbers."
)
_TIMES = (
    "TTFT here comes from one run an item, perhaps beside other work on the machine. Of arms that reuse KV it starts "
    "with the KV in memory and includes the teacher-forced continuation (up to 15 rows more than a first token needs), "
    "so it is an upper bound; full prefill's includes neither. Use `infoflow-kv bench` for timings."
)
_GATE = (
    "A data set counts for a task measure only where full prefill beats the same model without any context, with its "
    "interval above 0. Distances to full prefill count everywhere."
)
_BUDGETS = (
    "Budgets as they came out: recomputed tokens among the reusable ones (the first chunk, the prompt's head and the "
    "question apart) and among all context tokens; rows computed count every layer, so that methods which compute some "
    "layers in full pay for them here. TTFT is an upper bound for arms that reuse KV, see What this can show."
)
_DEVIATIONS = (
    "‖X − X_full‖ ÷ ‖X_full‖ of keys (after RoPE) and values over context tokens, recomputed and reused ones apart; "
    "mean over layers and items."
)

_ROTATION = (
    "Mean-of-max / max, as in the paper's Table 2. RoPE turns coordinate pair k of a token at p by p·θ_k; what "
    "two tokens' rotations have in common is the mean over k of cos((p_i − p_j)·θ_k). For each selected token the "
    "largest value over the prompt's rows is taken; the first number is its mean over the selected tokens, the second "
    "its largest value, both averaged over items. The paper gives no formula; this one is derived from its description."
)

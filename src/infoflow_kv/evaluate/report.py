"""The report of the laboratory: Markdown and one self-contained HTML page, from results only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate import digits, tables, vision_tables
from infoflow_kv.evaluate.figures.series import NAMES, Plate, plates
from infoflow_kv.evaluate.findings import Findings, find, variant
from infoflow_kv.evaluate.measures import DECIDED_BY, MEASURES
from infoflow_kv.evaluate.niah import TASK as NEEDLES
from infoflow_kv.evaluate.page import render_page
from infoflow_kv.evaluate.results import cluster, commands_of, environments_of, worded_options
from infoflow_kv.evaluate.scoring import FEWEST_CLUSTERS, POOLED
from infoflow_kv.evaluate.variable_tracking import TASK as TRACKING

TITLE = "Results of the laboratory"
_FIGURES = "figures"
# What the two files of a report start with.
_MADE = {"report.md": f"# {TITLE}\n".encode(), "report.html": f"<title>{TITLE}</title>".encode()}


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
    (default: infoflow). A report that stands in `folder` is replaced, with the figures that this one lacks removed.
    OptionError where matplotlib is missing or the folder holds other files than a report's, before anything is written.
    """
    findings = find(rows, run_records, reference, resamples)
    shown = plates(findings, explained)
    folder = Path(folder)
    _check_own(folder)
    files = [file for plate in shown for file in plate.draw(folder / _FIGURES)]
    for old in (folder / _FIGURES).glob("*"):
        if NAMES.fullmatch(old.name) and old not in files:
            old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    markdown = _render(findings, shown, f"{_FIGURES}/", explained=explained)
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
    return _render(findings, plates(findings, explained), figures_prefix, title, explained)


def _check_own(folder: Path) -> None:
    """Nothing; OptionError if the folder holds anything that no report wrote."""
    foreign = []
    for file in sorted(folder.glob("[!.]*")):
        if file.name == _FIGURES and file.is_dir():
            foreign += [f"{_FIGURES}/{f.name}" for f in sorted(file.glob("[!.]*")) if not NAMES.fullmatch(f.name)]
        elif file.name not in _MADE or not file.is_file() or _MADE[file.name] not in file.read_bytes()[:400]:
            foreign.append(file.name)
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise OptionError(
            f"'{folder}' holds files that are no report's ({', '.join(foreign[:3])}{more}); give a new folder, or one "
            "that holds a report and nothing else"
        )


def _render(
    findings: Findings,
    shown: Sequence[Plate],
    prefix: str,
    title: str = TITLE,
    explained: Mapping[str, Any] | None = None,
) -> str:
    pictures = {plate.name: f"![{plate.caption}]({prefix}{plate.name}.svg)" for plate in shown}
    blocks = [f"# {title}", *_ran(findings), *_reading(findings)]
    blocks += _section("What this can show", "\n".join(f"- {line}" for line in _limits(findings)))
    scope = findings.scopes[0]
    first = [pictures.get(name, "") for name in ("budgets-kl", "budgets-js", "pareto-rows", "pareto-ttft")]
    named = _named(findings, scope)
    made = tables.distance(findings, scope)
    blocks += _section(f"Distance to full prefill: {named}", made, _absent(findings, made), *first)
    made = tables.agreement(findings, scope)
    blocks += _section(f"Agreement with full prefill: {named}", made, _absent(findings, made))
    made = tables.recovery_table(findings)
    blocks += _section(
        "Recovery",
        f"The share of the gap between `none` and full prefill that an arm closes, a ratio of means over {named}, "
        f"with its 95 % interval; {digits.NOTHING} where the gap itself may be 0.",
        made,
        _absent(findings, made, "the gap may be 0, or no item has the arm with `none` and `full`", ("full", "none")),
    )
    if not made:
        blocks += ["## Recovery", _NO_RECOVERY]
    blocks += _answers(findings)
    blocks += _section(
        "Questions about pictures", vision_tables.NOTE, *vision_tables.of_rows(findings.rows, findings.resamples)
    )
    for dataset in findings.datasets:
        for title, task, facts in (
            ("Needles", NEEDLES, ("kind", "place")),
            ("Variable tracking", TRACKING, ("hops", "order")),
        ):
            # Without generated answers there is no table, but there are log-probabilities.
            found = [tables.found_by(findings, dataset, task, fact) for fact in facts]
            drawn = [plate for plate in shown if (plate.dataset, plate.task) == (dataset, task)]
            # A heading must not say "found" over a picture of log-probabilities.
            odd = bool(drawn) and all(plate.field == "log_probability" for plate in drawn)
            heading = f"{title}: {tables.code(dataset)}" + ("" if odd else ", found in %")
            above = "Found in %:" if odd and any(found) else ""
            blocks += _section(heading, above, *found, *(pictures[plate.name] for plate in drawn))
    blocks += _section("Gate", _GATE, tables.gate_table(findings))
    blocks += _section("Geometry", tables.ablation(findings, "geometry"))
    layers = [picture for name, picture in pictures.items() if name.startswith("layers-")]
    blocks += _section("Layers", tables.ablation(findings, "layers"), *layers)
    made = tables.budget_table(findings)
    blocks += _section("Budgets", _BUDGETS, made, _absent(findings, made))
    made = tables.rotation(findings)
    blocks += _section("RoPE similarity", _ROTATION, made, _absent(findings, made, "no tokens chosen, or not measured"))
    made = tables.deviations(findings)
    blocks += _section("Keys and values", _DEVIATIONS, made, _absent(findings, made, "not measured"))
    blocks += _section("One request", _request(explained or {}), pictures.get("selection", ""))
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


def _absent(findings: Findings, made: str, why: str = "did not run here", without: Sequence[str] = ()) -> str:
    """Where the arms are that a table does not show, or why they are not there; "" where it shows all."""
    if not made:
        return ""
    groups: dict[str, list[str]] = {}
    for arm, method in {row["arm"]: row["method"] for row in findings.rows}.items():
        if f"| {tables.code(arm)} |" not in made and method not in without:
            kind = "+".join(variant(arm))
            reason = {"layers": "see Layers", "geometry": "see Geometry"}.get(kind, why)
            groups.setdefault(reason, []).append(tables.code(arm))
    told = (f"{', '.join(arms)} ({reason})" for reason, arms in groups.items())
    return f"Not in this table: {'; '.join(told)}." if groups else ""


def _request(explained: Mapping[str, Any]) -> str:
    """What the explained request was, as far as its record tells."""
    told = []
    for name, title in (("question", "Question"), ("model", "model"), ("created", "day"), ("version", "version")):
        if explained.get(name):
            told.append(f"{title}: {tables.code(explained[name])}")
    if explained.get("budget") is not None:
        budget, cover = explained["budget"], explained.get("cover")
        share = f"{100 * budget:.3g} % of the reusable tokens"
        auto = "" if cover is None else f"automatic, covering {100 * cover:.3g} % of the predicted influence, at most "
        told.append(f"budget: {auto}{share}")
    return "; ".join(told) + "." if told else ""


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
            for key, value in _flat({k: v for k, v in environment.items() if k != "commands"}):
                values = commands_of(environment) if key == "command" else [value]
                lines += [[key, tables.code(shown)] for shown in values]
        lines += _options(run, findings.runs)
        for data in run.get("data") or ():
            name = str(data.get("file", "")).replace("\\", "/").rsplit("/", 1)[-1]
            lines.append(["data", f"{tables.code(name)}, SHA-256 {tables.code(str(data.get('sha256', ''))[:16])}…"])
    unique = [list(line) for line in dict.fromkeys(map(tuple, lines))]
    arms = ", ".join(tables.code(arm) for arm in dict.fromkeys(row["arm"] for row in findings.rows))
    missing = "No `run.json` came with these rows: model and machine are unknown." if not findings.runs else ""
    ran = ["## What ran", missing, tables.table(["fact", "value"], unique).replace("---:", "---")]
    return [*ran, f"Arms: {arms}.", tables.data_table(findings)]


def _options(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The options of a run, in words; what not all runs share says for which data sets it holds."""
    every = [dict(_flat(worded_options(r.get("options") or {}))) for r in runs]
    files = [str(data.get("file", "")).partition(".")[0] for data in run.get("data") or ()]
    names = ", ".join(tables.code(name) for name in run.get("datasets") or files)
    lines = []
    for key, value in _flat(worded_options(run.get("options") or {})):
        shown = tables.code("none" if value is None else value)
        shared = all(options.get(key) == value for options in every)
        lines.append([f"option {key}", shown if shared or not names else f"{shown} ({names})"])
    return lines


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
    untold: list[str] = []
    for field, protocol in (
        ("f1_longbench", "LongBench's `qa_f1_score`: the whole prediction counts."),
        ("exact_match", "The prediction equals an answer after LongBench's normalisation."),
        ("f1_paper", _PAPER),
        ("choice", "The first letter A to D that the prediction gives is the right one."),
    ):
        made = tables.answers(findings, field)
        closed = [g for g in findings.gated if g.field == DECIDED_BY.get(field, field) and not g.passed]
        failed = "; ".join(f"{tables.code(g.dataset)} ({g.why})" for g in closed)
        note = f"Left out by the gate: {failed}." if failed else ""
        title = {"f1_longbench": "longbench", "f1_paper": "paper"}.get(field)
        heading = f"Answers: {MEASURES[field].title}" + (f" (protocol `{title}`)" if title else "") + ", %"
        blocks += _section(heading, protocol, note, made)
        if not made and any(field in s.summaries for s in findings.scores):
            untold.append(MEASURES[field].title)
    if untold:  # what was measured must not vanish without a word
        told = "no data set passes the gate; the section Gate tells why, and `infoflow-kv eval score` shows the means"
        blocks += ["## Answers that no table shows", f"{', '.join(untold)}: {told}."]
    return blocks


_READING = f"""
- KL in nats and Jensen–Shannon divergence (JS) in bits compare next-token distributions with full prefill of the same \
token ids: *first* at the first answer token, *cont.* as a mean over up to CONTINUATION places of full prefill's own \
greedy continuation. Cells show mean / median / 95th percentile; pooled, each is the mean of the data sets' numbers.
- Pooled: equal weights over the data sets on which **every** arm of this report ran, so that no number stands beside \
one over other data sets; a measure that some arms lack on some of them (answers) is pooled where all have it that \
have it at all. The other data sets have tables of their own.
- ΔNLL: nats a token that the gold answer loses against full prefill; {digits.NOTHING} on a data set that does not \
pass its gate, and such sets are not pooled. Lift: share of gold passages among the recomputed tokens ÷ their share of \
the reusable tokens.
- Differences are paired by item: arm − `REFERENCE` at the same budget, with a 95 % bootstrap interval over documents, \
data sets weighted equally. {tables.MARK}: the interval excludes 0. p: sign-flip test over documents, for measures \
that are yes or no McNemar's exact test over items; adjusted by Holm within a budget.
- *few clusters*: items that share a document are one cluster, and of fewer than {FEWEST_CLUSTERS} clusters no \
interval is one of 95 %: take it as a range of what was seen. It gets no {tables.MARK} and nothing is bold by it.
- Bold: better than **every** other arm at its budget, where each interval excludes 0 and each adjusted p is under \
.05; where no arm is, nothing is bold. `full`, `none` and `oracle` are bounds and win nothing.
"""
_NO_RECOVERY = (
    "No arm's recovery can be told: that takes the arms `none` and `full` on the items of a third arm, and a gap "
    "between the two that is not 0 within its interval."
)
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
    f"interval above 0 and at least {FEWEST_CLUSTERS} documents: fewer are too few to say, either way. Distances "
    "to full prefill count everywhere."
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

"""What is measured of a row: distances, agreement, answers by the rules of the row's task, cost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infoflow_kv.evaluate.items import is_choice
from infoflow_kv.evaluate.metrics import choice_letter, contains_all, exact_match, paper_f1, qa_f1
from infoflow_kv.evaluate.niah import TASK as NEEDLES
from infoflow_kv.evaluate.results import Row
from infoflow_kv.evaluate.variable_tracking import TASK as TRACKING
from infoflow_kv.evaluate.vision_metrics import FIELDS, fields_scored, vision_values

DECIDED_BY = {"exact_match": "f1_longbench", "strict": "relaxed"}
"""Task measures whose gate is that of another one."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What is measured of a row. `better` says which way is good; None: neither, it says what was done."""

    name: str
    title: str
    better: Literal["lower", "higher"] | None
    kind: Literal["fidelity", "task", "cost"]
    percent: bool = False


MEASURES: dict[str, Measure] = {
    m.name: m
    for m in (
        Measure("kl_cont", "KL, continuation", "lower", "fidelity"),
        Measure("kl_first", "KL, first token", "lower", "fidelity"),
        Measure("js_cont", "JS, continuation", "lower", "fidelity"),
        Measure("js_first", "JS, first token", "lower", "fidelity"),
        Measure("top1", "same first token", "higher", "fidelity", percent=True),
        Measure("prefix_share", "common greedy prefix", "higher", "fidelity", percent=True),
        Measure("identical", "identical continuation", "higher", "fidelity", percent=True),
        Measure("nll_delta", "ΔNLL of the gold answer", "lower", "task"),
        Measure("f1_longbench", "F1, LongBench", "higher", "task", percent=True),
        Measure("exact_match", "exact match", "higher", "task", percent=True),
        Measure("f1_paper", "F1, paper", "higher", "task", percent=True),
        Measure("choice", "right letter", "higher", "task", percent=True),
        Measure("hit", "found", "higher", "task", percent=True),
        *(Measure(field, title, "higher", "task", percent=True) for field, title in FIELDS.items()),
        Measure("selection_lift", "lift of gold passages", "higher", "fidelity"),
        Measure("recomputed_share", "recomputed, of reusable", None, "cost", percent=True),
        Measure("recomputed_share_all", "recomputed, of all", None, "cost", percent=True),
        Measure("computed_share", "rows computed, mean of layers", None, "cost", percent=True),
        Measure("ttft_seconds", "TTFT, s", "lower", "cost"),
        Measure("ttft_ratio", "TTFT ÷ full prefill's", "lower", "cost"),
    )
}


def measure(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows with every measure of MEASURES as a field, None where it was not measured.

    Rows that were measured before are kept. `hit` is there for needles (1 if every answer occurs) and variable tracking
    (the share of answers that occur), `choice` where the answer is a letter, F1 and exact match for all other items.
    """
    rows = list(rows)
    full_seconds = {row["_id"]: row["ttft_seconds"] for row in rows if row["arm"] == "full"}
    # A report compares many times: its rows are measured once.
    return [
        dict(row) if "ttft_ratio" in row else {**row, **_measured(row, full_seconds.get(row["_id"]))} for row in rows
    ]


def _measured(row: Mapping[str, Any], full_seconds: float | None) -> dict[str, float | None]:
    prediction, answers = row["prediction"], row["answers"]
    return {
        "top1": float(row["top1"]),
        # A continuation of no tokens (full prefill stops at once) is shared in full.
        "prefix_share": row["prefix"] / row["prefix_of"] if row["prefix_of"] else 1.0,
        "identical": float(row["prefix"] == row["prefix_of"]),
        "nll_delta": row["gold_nll"] - row["full_gold_nll"],
        "ttft_ratio": row["ttft_seconds"] / full_seconds if full_seconds else None,
        **{field: task_value(row, field, prediction, answers) for field in (*_TASKS, *FIELDS)},
    }


def task_value(row: Mapping[str, Any], field: str, prediction: str | None, answers: Sequence[str]) -> float | None:
    """The task measure of one prediction; None where there is none, or the row is of another task."""
    if prediction is None or field not in fields_of(row):
        return None
    if field in FIELDS:
        return vision_values(row, prediction)[field]
    if field == "hit":
        share = contains_all(prediction, answers)
        return share if is_tracking(row) else float(share == 1)
    return float(_TASKS[field](prediction, answers))


def _is_right_letter(prediction: str, answers: Sequence[str]) -> bool:
    return choice_letter(prediction) in answers


_TASKS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "f1_longbench": qa_f1,
    "exact_match": exact_match,
    "f1_paper": paper_f1,
    "choice": _is_right_letter,
    "hit": contains_all,
}


def fields_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The task measures that a row can have. Of a made task only the value counts, of a choice only the letter: F1
    would measure how the answer is worded."""
    if is_needle(row) or is_tracking(row):
        return ("hit",)
    if row.get("metric") is not None:  # a question about a picture: its own rule alone
        return fields_scored(row["metric"])
    return ("choice",) if is_choice(row["meta"]) else ("f1_longbench", "exact_match", "f1_paper")


def is_needle(row: Mapping[str, Any]) -> bool:
    """True for a made needle item."""
    return bool(row["meta"].get("task") == NEEDLES)


def is_tracking(row: Mapping[str, Any]) -> bool:
    """True for a made variable-tracking item."""
    return bool(row["meta"].get("task") == TRACKING)

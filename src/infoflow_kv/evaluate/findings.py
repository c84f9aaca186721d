"""All that a report is made of: measured rows, scores, gates, and which arm stands for what."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infoflow_kv.errors import InputError, unknown_name
from infoflow_kv.evaluate.measures import DECIDED_BY, MEASURES, measure
from infoflow_kv.evaluate.results import Row
from infoflow_kv.evaluate.scoring import (
    POOLED,
    Comparison,
    Gate,
    Score,
    compare,
    core_datasets,
    gates,
    pooled_datasets,
    score,
)

# Bounds that the others are held against; they win nothing.
BOUNDS = ("full", "none", "oracle")
_VARIANT = re.compile(r"\[(.*)\]")


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of one run or several; `reference` is the method that the others are compared with."""

    rows: tuple[Row, ...]
    runs: tuple[Mapping[str, Any], ...]
    scores: tuple[Score, ...]
    gated: tuple[Gate, ...]
    reference: str
    resamples: int

    @property
    def datasets(self) -> list[str]:
        """The data sets in the order of the rows."""
        return list(dict.fromkeys(row["dataset"] for row in self.rows))

    @property
    def scopes(self) -> list[str]:
        """ "pooled" and every data set; only these where there is one alone, or none on which every arm ran."""
        return [POOLED, *self.datasets] if len(self.datasets) > 1 and self.core else self.datasets

    @property
    def core(self) -> list[str]:
        """The data sets that pooled numbers are over: those on which every arm ran."""
        return core_datasets(self.scores)

    def rows_of(self, scope: str, field: str) -> list[Row]:
        """The rows of a data set, or those over which a measure is pooled."""
        datasets = pooled_datasets(self.scores, field) if scope == POOLED else [scope]
        return [row for row in self.rows if row["dataset"] in datasets]

    def counts(self, scope: str, field: str) -> bool:
        """False for a task measure on a data set that fails its gate, or where nobody knows whether it would pass."""
        decides = DECIDED_BY.get(field, field)
        closed = {g.dataset for g in self.gated if g.field == decides and not g.passed}
        return MEASURES[field].kind != "task" or scope not in closed

    @property
    def budgets(self) -> list[float | str]:
        """Budgets of all arms that have one: numbers ascending, then automatic ones."""
        found = {s.budget for s in self.scores if s.method not in ("full", "none") and s.budget is not None}
        return sorted(found, key=lambda budget: (isinstance(budget, str), budget))

    def of(self, scope: str) -> list[Score]:
        """The scores on one data set, or the pooled ones."""
        return [s for s in self.scores if s.dataset == scope]

    def at(self, scope: str, budget: float | str | None, main: bool = True) -> list[Score]:
        """The scores of arms at a budget; None: of those that have none (`full`, `none`, rules of fixed size). `main`
        leaves geometry and layer variants out."""
        scores = [s for s in self.of(scope) if not main or not is_ablation(s.arm)]
        if budget is None:
            return [s for s in scores if s.method in ("full", "none") or s.budget is None]
        return [s for s in scores if s.method not in ("full", "none") and s.budget == budget]

    def arms_at(self, budget: float | str | None) -> list[Score]:
        """One score of each arm at a budget as in `at`, whatever data sets it ran on: the pooled one where there is."""
        found: dict[str, Score] = {}
        for scope in self.scopes:
            for s in self.at(scope, budget):
                found.setdefault(s.arm, s)
        return list(found.values())

    def reference_at(self, budget: float | str) -> str | None:
        """The plain arm of the reference method at this budget, if it ran."""
        for s in self.scores:
            if s.method == self.reference and s.budget == budget and not variant(s.arm):
                return s.arm
        return None

    def against(self, scope: str, arm: str, arms: Sequence[str], field: str) -> dict[str, Comparison]:
        """Comparisons of these arms with one, by arm."""
        rows = self.rows_of(scope, field)
        present = {row["arm"] for row in rows}
        others = [other for other in arms if other != arm and other in present]
        if arm not in present or not others:
            return {}
        found = compare(rows, arm, field, arms=others, gated=self.gated, resamples=self.resamples)
        return {c.arm: c for c in found}

    def winner(self, scope: str, budget: float | str, field: str, lower: bool = True) -> str | None:
        """The arm that is better than every other at this budget beyond doubt.

        None where one interval holds 0, or where one is of too few clusters to say.
        """
        scores = [s for s in self.at(scope, budget) if s.method not in BOUNDS and field in s.summaries]
        if len(scores) < 2:
            return None
        best = sorted(scores, key=lambda s: s.summaries[field].mean, reverse=not lower)[0].arm
        found = self.against(scope, best, [s.arm for s in scores], field)
        sure = len(found) == len(scores) - 1 and all(is_sure(c) for c in found.values())
        return best if sure else None


def find(
    rows: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]] = (),
    reference: str | None = None,
    resamples: int = 10_000,
) -> Findings:
    """Findings of these rows; the reference method is `infoflow` if it ran, else the first method with a budget.

    InputError without rows, OptionError for a reference that did not run.
    """
    if not rows:
        raise InputError("no rows to report; run `infoflow-kv eval predict` first")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    if reference is None:
        ranked = [m for m in methods if m not in BOUNDS]
        reference = "infoflow" if "infoflow" in methods else (ranked or methods)[0]
    elif reference not in methods:
        raise unknown_name("reference method", reference, methods)
    gated = gates(rows, resamples=resamples)
    scores = score(rows, gated=gated)
    return Findings(tuple(measure(rows)), tuple(runs), tuple(scores), tuple(gated), reference, resamples)


def is_sure(comparison: Comparison) -> bool:
    """True where the interval is of enough clusters and excludes 0, and the p-value stays under .05 after Holm's
    adjustment."""
    difference = comparison.difference
    return difference.excludes_zero and not difference.is_weak and comparison.p_holm < 0.05


def variant(arm: str) -> dict[str, str]:
    """How an arm differs from its method's default, by its name.

    "infoflow[layers=all]@0.15" gives {"layers": "all"}. Commas part the differences; a part without `=` continues the
    value before it ("layers=22,23").
    """
    match = _VARIANT.search(arm)
    found: dict[str, str] = {}
    for part in match[1].split(",") if match else ():
        key, equals, value = part.partition("=")
        if equals or not found:
            found[key.strip()] = value.strip()
        else:
            last = next(reversed(found))
            found[last] += f",{part.strip()}"
    return found


def is_ablation(arm: str) -> bool:
    """True for arms that differ from their method in geometry alone or in layers alone: they have their own tables."""
    return set(variant(arm)) in ({"geometry"}, {"layers"})

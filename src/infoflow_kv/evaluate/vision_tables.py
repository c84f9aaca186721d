"""The tables of a vision run as Markdown; "" where there is nothing to tell."""

from collections.abc import Mapping, Sequence
from typing import Any

from infoflow_kv.evaluate import digits
from infoflow_kv.evaluate.tables import code, interval, table
from infoflow_kv.evaluate.vision_metrics import FIELDS
from infoflow_kv.evaluate.vision_scoring import VisionComparison, VisionScore, compare_vision, score_vision

NOTE = (
    "By each set's published rule; answers count on every set here, whatever the model gains from the pictures. p: "
    "McNemar's exact test over items, for ANLS sign flips over pictures, adjusted by Holm over the arms that one "
    "reference is compared with. Arms are held against `none` at their own number of tiles."
)


def of_rows(rows: Sequence[Mapping[str, Any]], resamples: int = 10_000) -> tuple[str, str]:
    """The tables of scores and of differences of those rows that are about pictures."""
    pictured = [row for row in rows if row.get("metric") is not None]
    return score_table(score_vision(pictured, resamples=resamples)), difference_table(
        compare_vision(pictured, resamples=resamples)
    )


def score_table(scores: Sequence[VisionScore]) -> str:
    """Every arm's number on every data set, in per cent, with the interval of its mean over items."""
    parted = any(s.part for s in scores)
    lines = []
    for s in scores:
        cells = [code(s.dataset), FIELDS[s.field], *([code(s.part)] if parted else []), code(s.arm), str(s.n)]
        lines.append([*cells, digits.percent(s.mean), interval(s.interval, 100, signed=False)])
    parts = ["part"] if parted else []
    return table(["data set", "measure", *parts, "arm", "n", "score, %", "mean of items [95 %], %"], lines)


def difference_table(comparisons: Sequence[VisionComparison]) -> str:
    """Every arm against `none` and `full`: the paired difference in points, the test, the items that changed sides."""
    lines = []
    for c in comparisons:
        tally = f"{c.tally.wins}/{c.tally.ties}/{c.tally.losses}"
        cells = [code(c.dataset), FIELDS[c.field], code(c.arm), code(c.reference), str(c.difference.n)]
        p = [digits.probability(c.p), digits.probability(c.p_holm), c.test]
        lines.append([*cells, interval(c.difference, 100), *p, tally])
    titles = ["n", "difference [95 %], points", "p", "p (Holm)", "test", "better/equal/worse"]
    return table(["data set", "measure", "arm", "reference", *titles], lines)

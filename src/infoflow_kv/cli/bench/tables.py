"""Cells of the tables that the benchmarks print. Imports no torch."""

from typing import Any

from infoflow_kv.cli.output import seconds, share

Record = dict[str, Any]


def spread(record: Record) -> str:
    """The range over the repeats as a share of the median."""
    return f"{100 * record['spread']:.0f}%"


def times(value: float | None) -> str:
    """`6.7×`; a dash for nothing."""
    return "-" if value is None else f"{value:.2f}×"


def took(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def rate(value: float | None) -> str:
    """A number per second with three significant digits, or all digits before the point.

    >>> rate(1234.5), rate(3.456)
    ('1,234', '3.46')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def arm_name(record: Record) -> str:
    """`infoflow@0.15`, or the arm's name where it has no budget."""
    return str(record["arm"]) if record.get("budget") is None else f"{record['arm']}@{record['budget']:g}"


def stage_shares(record: Record) -> str:
    """`load 3%, repair 97%`: the stages of a request as shares of all of it; those under one per cent are left out."""
    stages = record.get("stages") or {}
    whole = sum(stages.values())
    shown = [f"{name} {share(value, whole)}" for name, value in stages.items() if whole and value >= 0.01 * whole]
    return ", ".join(shown) or "-"

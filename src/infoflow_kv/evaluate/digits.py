"""Numbers as a table shows them, with as many digits as they bear."""

import math

from infoflow_kv.evaluate.statistics import Interval

NOTHING = "–"


def plain(value: float | None) -> str:
    """About three significant digits: 12.3, 1.23, 0.123, 0.0123, 4e-06; a dash for None.

    >>> plain(0.25963), plain(12.345), plain(0.0)
    ('0.260', '12.3', '0')
    """
    if value is None:
        return NOTHING
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-4:
        return _minus(f"{value:.0e}")
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return _minus(f"{value:.{decimals}f}")


def percent(value: float | None) -> str:
    """A share as per cent with one decimal, without the sign; a dash for None.

    >>> percent(0.1537)
    '15.4'
    """
    return NOTHING if value is None else _minus(f"{100 * value:.1f}")


def interval(given: Interval | None, scale: float = 1.0, signed: bool = True) -> str:
    """Mean and bounds, all to the second significant digit of the half-width.

    >>> interval(Interval(0.04356, 0.03923, 0.04809, 20))
    '+0.0436 [+0.0392, +0.0481]'
    """
    if given is None:
        return NOTHING
    mean, low, high = (scale * value for value in (given.mean, given.low, given.high))
    half = (high - low) / 2
    sign = "+" if signed else ""
    if not math.isfinite(half):
        return f"{_minus(f'{mean:{sign}.3g}')} [too few documents for an interval]"
    decimals = 3 if half == 0 else min(6, max(0, 1 - math.floor(math.log10(half))))
    if mean == low == high == 0:
        return "0 [0, 0]"
    shown = [_minus(f"{value:{sign}.{decimals}f}") for value in (mean, low, high)]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def probability(p: float) -> str:
    """A p-value: three decimals, or that it is below them.

    >>> probability(0.0312), probability(0.0001)
    ('0.031', '< 0.001')
    """
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _minus(text: str) -> str:
    """The text with a real minus sign, save in an exponent."""
    return "−" + text[1:] if text.startswith("-") else text

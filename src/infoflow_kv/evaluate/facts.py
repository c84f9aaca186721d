"""Numbers that the items of made tasks carry in `meta`: a user's file may hold anything there."""

from collections.abc import Mapping
from typing import Any

# Context length in tokens, depth as a share of the context, hops of a chain: least and most that a table or a figure
# can show.
RANGES: dict[str, tuple[float, float]] = {"length": (1, 1e9), "depth": (0, 1), "hops": (1, 1e6)}
_WHOLE = ("length", "hops")


def are_numbers(meta: Mapping[str, Any], *names: str) -> bool:
    """Whether each of these facts is there and within its range; True and False are no numbers.

    >>> are_numbers({"length": 4000, "depth": 0.5}, "length", "depth"), are_numbers({"depth": -5}, "depth")
    (True, False)
    """
    return all(_is_number(name, meta.get(name)) for name in names)


def _is_number(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    low, high = RANGES[name]
    # Compared first: an integer of 400 digits is no float.
    return low <= value <= high and (name not in _WHOLE or value == int(value))

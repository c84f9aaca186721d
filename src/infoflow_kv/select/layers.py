"""Layer sets: which layers' attention counts."""

import math
import re

from infoflow_kv.errors import OptionError

# Layers 22-25 of a 32-layer model, as relative depth: the default (docs/method.md, section 4).
RELATIVE_FIRST, RELATIVE_LAST = 22 / 32, 25 / 32


def layer_set(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers of `all`, `relative`, `22-25`, `3,7,9-11` or, as shares of the depth, `0.5-0.75`; OptionError if
    malformed or outside the model.

    >>> layer_set("relative", 32)
    (22, 23, 24, 25)
    >>> layer_set("0.5-0.75", 8)
    (4, 5, 6)
    >>> layer_set("0,2-3", 30)
    (0, 2, 3)
    """
    if text == "all":
        return tuple(range(num_layers))
    if text == "relative":
        return by_depth(RELATIVE_FIRST, RELATIVE_LAST, num_layers)
    if shares := re.fullmatch(r"\s*([01]\.\d{1,9})\s*-\s*([01]\.\d{1,9})\s*", text):
        first_share, last_share = float(shares[1]), float(shares[2])
        if not first_share <= last_share <= 1:
            raise OptionError(f"layers '{text}' are no range of depth; expected shares like 0.5-0.75, at most 1.0")
        return by_depth(first_share, last_share, num_layers)
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise OptionError(
                f"layers '{text}' cannot be read; expected auto, profile, all, relative, numbers like 22-25 or "
                "3,7,9-11, or shares of the depth like 0.5-0.75"
            )
        first = int(match[1])
        found.update(range(first, min(int(match[2] or first), num_layers) + 1))
        if first > int(match[2] or first) or max(first, int(match[2] or first)) >= num_layers:
            raise OptionError(f"layers '{text}' are outside the model's 0-{num_layers - 1}")
    return tuple(sorted(found))


def by_depth(first: float, last: float, num_layers: int) -> tuple[int, ...]:
    """The layers between two shares of the depth, at least one."""
    start = min(math.floor(first * num_layers), num_layers - 1)
    return tuple(range(start, min(max(start, math.floor(last * num_layers)), num_layers - 1) + 1))


def layers_text(layers: tuple[int, ...]) -> str:
    """`0-29`, `20-23` or `3,7,9-11`: what `layer_set` reads back."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)

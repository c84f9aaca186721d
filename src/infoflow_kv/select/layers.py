"""Layer sets: which layers' attention counts."""

import math
import re

from infoflow_kv.errors import OptionError

# Layers 22-25 of a 32-layer model, as relative depth: the default (docs/method.md, section 4).
RELATIVE_FIRST, RELATIVE_LAST = 22 / 32, 25 / 32


def layer_set(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers of `all`, `relative`, `22-25` or `3,7,9-11`; OptionError if malformed or outside the model.

    >>> layer_set("relative", 32)
    (22, 23, 24, 25)
    >>> layer_set("0,2-3", 30)
    (0, 2, 3)
    """
    if text == "all":
        return tuple(range(num_layers))
    if text == "relative":
        first = math.floor(RELATIVE_FIRST * num_layers)
        return tuple(range(first, max(first, math.floor(RELATIVE_LAST * num_layers)) + 1))
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise OptionError(
                f"layers '{text}' cannot be read; expected auto, all, relative, or numbers like 22-25 or 3,7,9-11"
            )
        first = int(match[1])
        found.update(range(first, min(int(match[2] or first), num_layers) + 1))
        if first > int(match[2] or first) or max(first, int(match[2] or first)) >= num_layers:
            raise OptionError(f"layers '{text}' are outside the model's 0-{num_layers - 1}")
    return tuple(sorted(found))

"""How two records differ, in words that show where: `seed: 0, now 3; prompts: none, now {"musique": …}`."""

import json
from collections.abc import Mapping
from typing import Any

WHOLE = 60  # characters of a value that are shown; of a longer one, these from a little before the difference on
_BEFORE = 15


def changes(before: Any, now: Any, name: str = "") -> list[str]:
    """One text for each value that differs, objects entry by entry; in one line each, empty where nothing differs.

    >>> changes({"seed": 0, "prompts": None}, {"seed": 3, "prompts": {"boats": "{context}"}})
    ['seed: 0, now 3', 'prompts: none, now {"boats": "{context}"}']
    """
    if before == now:
        return []
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = dict.fromkeys([*before, *now])
        found = [changes(before.get(key), now.get(key), f"{name} of {key}" if name else str(key)) for key in keys]
        return [text for texts in found for text in texts]
    first, second = _beside(_text(before), _text(now))
    return [f"{name}: {first}, now {second}" if name else f"{first}, now {second}"]


def _text(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _beside(first: str, second: str) -> tuple[str, str]:
    """Both texts, long ones cut to where they differ."""
    if max(len(first), len(second)) <= WHOLE:
        return first, second
    shorter = min(len(first), len(second))
    common = next((place for place in range(shorter) if first[place] != second[place]), shorter)
    start = max(0, common - _BEFORE)

    def cut(text: str) -> str:
        shown = text[start : start + WHOLE]
        return ("…" if start else "") + shown + ("…" if start + WHOLE < len(text) else "")

    return cut(first), cut(second)

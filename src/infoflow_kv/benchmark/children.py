"""What processes that were started for a measurement said: their result, or why there is none."""

import json
from typing import Any

LONGEST = 300  # characters of a reason


def last_object(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object: engines write what they like before and after."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return None


def last_words(text: str) -> str:
    """The end of what went to stderr, in one line; of a traceback its last line, which names the error.

    >>> last_words("Traceback (most recent call last):\\n  File ...\\nModuleNotFoundError: No module named 'vllm'\\n")
    "ModuleNotFoundError: No module named 'vllm'"
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("Traceback ") for line in lines):
        lines = lines[-1:]
    return " ".join(lines)[-LONGEST:] or "it said nothing"

"""JSON that is read and written: every failure to read it is a ValueError in words, what is written is UTF-8."""

import json
from typing import Any, TypeVar

from infoflow_kv.chunking import replace_surrogates

T = TypeVar("T")

DEEPEST = 100
"""Lists and objects inside each other that are read; far under where Python's own recursion ends."""


def parsed(text: str | bytes, **hooks: Any) -> Any:
    """What the JSON text says; `hooks` as `json.loads` takes them. ValueError for what is no JSON or nested too deep.

    >>> parsed('{"a": [1]}')
    {'a': [1]}
    """
    try:
        return shallow(json.loads(text, **hooks))
    except RecursionError:
        raise ValueError("nested too deep") from None


def shallow(value: T) -> T:
    """The value as it is; ValueError where more than DEEPEST lists and objects stand inside each other."""
    level: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        held = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level = [child for children in held for child in children]
        if not level:
            return value
    raise ValueError("nested too deep")


def cleaned(value: Any) -> Any:
    """The value with lone surrogates replaced in every text: they have no UTF-8 form and could not be saved."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, (list, tuple)):
        return [cleaned(entry) for entry in value]
    return {cleaned(name): cleaned(entry) for name, entry in value.items()} if isinstance(value, dict) else value

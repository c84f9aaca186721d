"""Lists in one option: `1000,2000` or `one,split`."""

from collections.abc import Callable
from typing import TypeVar

from infoflow_kv.errors import OptionError

T = TypeVar("T")


def split_list(text: str) -> list[str]:
    """The parts between commas, blank ones left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, option: str, kind: Callable[[str], T]) -> list[T]:
    """The numbers of a list; OptionError, which names the option, for what is none and for an empty list.

    >>> numbers("1, 2", "--hops", int)
    [1, 2]
    """
    found = []
    for part in split_list(text):
        try:
            found.append(kind(part))
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise OptionError(f"{option} holds '{part}', which is not {wanted}; give a list like 1,2,3") from None
    if not found:
        raise OptionError(f"{option} is '{text}'; give at least one number")
    return found

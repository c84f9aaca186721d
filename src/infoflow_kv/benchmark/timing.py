"""Interleaved timing: all arms once per repeat, so that what the machine does meanwhile meets all of them alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from infoflow_kv.errors import OptionError

T = TypeVar("T")
# (done, total, what goes on now)
OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """Seconds and results of one arm, repeat by repeat."""

    seconds: tuple[float, ...]
    results: tuple[T, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        return min(self.seconds)

    @property
    def high(self) -> float:
        return max(self.seconds)

    @property
    def p90(self) -> float:
        """The smallest of the seconds that 90 % of them do not exceed."""
        return sorted(self.seconds)[math.ceil(0.9 * len(self.seconds)) - 1]

    @property
    def spread(self) -> float:
        """(high − low) ÷ median; 0 where all took no time."""
        return (self.high - self.low) / self.median if self.median > 0 else 0.0

    def record(self, name: str = "seconds") -> dict[str, Any]:
        """Median, p90, range and all values, as fields that begin with `name`; `spread`."""
        return {
            f"{name}_median": tidy(self.median),
            f"{name}_p90": tidy(self.p90),
            f"{name}_min": tidy(self.low),
            f"{name}_max": tidy(self.high),
            "spread": tidy(self.spread),
            name: [tidy(value) for value in self.seconds],
        }


def measure(
    arms: Mapping[str, Callable[[], T]],
    repeats: int,
    warmup: int = 1,
    *,
    seconds_of: Callable[[T], float] | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Timed[T]]:
    """The timings of each arm, after `warmup` uncounted rounds. Every repeat starts with the next arm.

    `seconds_of`: the seconds of a call by its result, where set-up inside the call must not count; the call's own
    duration by default. An arm ends when its result is there: on a GPU it must wait for the device. OptionError for
    fewer than one repeat, no arms or a negative warm-up.
    """
    if not arms or repeats < 1 or warmup < 0:
        raise OptionError(f"{len(arms)} arms, {repeats} repeats and {warmup} warm-ups; expected at least 1, 1 and 0")
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    results: dict[str, list[T]] = {name: [] for name in arms}
    done, total = 0, (warmup + repeats) * len(arms)
    for turn in range(warmup + repeats):
        for name in rotated(list(arms), turn):
            if on_step is not None:
                on_step(done, total, f"{name}, {'warm-up' if turn < warmup else f'repeat {turn - warmup + 1}'}")
            start = time.perf_counter()
            result = arms[name]()
            took = time.perf_counter() - start
            done += 1
            if turn >= warmup:
                seconds[name].append(took if seconds_of is None else seconds_of(result))
                results[name].append(result)
    if on_step is not None:
        on_step(done, total, "done")
    return {name: Timed(tuple(seconds[name]), tuple(results[name])) for name in arms}


def rotated(names: list[T], turn: int) -> list[T]:
    """The names in their order, another one first each turn.

    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    first = turn % len(names)
    return names[first:] + names[:first]


def wait_for(device: torch.device) -> None:
    """Nothing; all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tidy(value: float) -> float:
    """The number with six significant digits: what a clock gives beyond them is noise.

    >>> tidy(0.123456789)
    0.123457
    """
    return float(f"{value:.6g}")

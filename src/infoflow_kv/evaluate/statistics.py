"""Intervals and p-values for paired differences of two arms on the same items; numpy only, every random step seeded.

`clusters` holds one label an item: items with the same label share a document, so they are resampled and sign-flipped
together; an empty label makes the item its own cluster. `strata` holds one label an item, usually its data set: the
statistic becomes the mean over strata of the strata's means, and clusters are drawn within each stratum.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from infoflow_kv.errors import OptionError

Values: TypeAlias = Sequence[float] | npt.NDArray[Any]
Labels: TypeAlias = Sequence[Hashable] | npt.NDArray[Any]
_Array: TypeAlias = npt.NDArray[np.float64]

_CONFIDENCE = 0.95
_FEWEST_RESAMPLES = 100
# Random numbers drawn at a time, so that 10,000 resamples of many items do not fill the memory.
_DRAWS_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic of `n` items with its 95 % interval.

    One cluster alone says nothing about spread: the interval is then unbounded, -inf..inf.
    """

    mean: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """True where the whole interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


class Tally(NamedTuple):
    """How many items went which way."""

    wins: int
    ties: int
    losses: int


@dataclass(frozen=True, slots=True)
class _Stratum:
    """Per cluster: the sums of its items' columns `[clusters, columns]` and its number of items `[clusters]`."""

    sums: _Array
    counts: _Array


def paired_bootstrap(
    differences: Values,
    clusters: Labels | None = None,
    strata: Labels | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The mean of `differences` with its percentile bootstrap interval, whole clusters resampled within strata.

    `differences` are those of two arms on the same items. OptionError if they are empty, not finite, or not as many
    as the labels.

    >>> interval = paired_bootstrap([0.1, 0.3, 0.2, 0.4])
    >>> interval.mean, interval.excludes_zero
    (0.25, True)
    """
    column = _numbers(differences, "differences")
    groups = _strata(column[:, None], "differences", clusters, strata)
    low, high = _percentiles(_replicates(groups, resamples, seed)[:, 0], groups)
    return Interval(float(_statistic(groups)[0]), low, high, len(column))


def ratio_interval(
    numerators: Values,
    denominators: Values,
    clusters: Labels | None = None,
    strata: Labels | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The ratio of the two means (not the mean of ratios) with its percentile bootstrap interval, items kept paired.

    A resample whose denominator is 0 or has the other sign could belong to either end, so it counts against both:
    the interval becomes unbounded where 0 is a plausible denominator. OptionError if the mean denominator is 0.

    >>> ratio_interval([1, 2, 3], [2, 4, 6])
    Interval(mean=0.5, low=0.5, high=0.5, n=3)
    """
    above, below = _numbers(numerators, "numerators"), _numbers(denominators, "denominators")
    _same_length(above, "numerators", below, "denominators")
    groups = _strata(np.stack([above, below], axis=1), "numerators", clusters, strata)
    numerator, denominator = _statistic(groups)
    if denominator == 0:
        raise OptionError("the mean of denominators is 0; expected a mean that can be divided by")
    replicates = _replicates(groups, resamples, seed)
    usable = replicates[:, 1] * np.sign(denominator) > 0
    ratios = np.divide(replicates[:, 0], replicates[:, 1], where=usable, out=np.zeros(len(replicates)))
    low, _ = _percentiles(np.where(usable, ratios, -np.inf), groups)
    _, high = _percentiles(np.where(usable, ratios, np.inf), groups)
    return Interval(float(numerator / denominator), low, high, len(above))


def recovery(
    none: Values,
    method: Values,
    full: Values,
    clusters: Labels | None = None,
    strata: Labels | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval | None:
    """The share of the gap between no recomputation and full prefill that a method closes: a ratio of means.

    (none - method) / (none - full): 0 is as bad as no recomputation, 1 as good as full prefill. None where the
    interval of the gap itself contains 0, for then there is nothing to recover.

    >>> recovery(none=[4, 6, 5], method=[1, 1, 1], full=[0, 0, 0]).mean
    0.8
    >>> recovery(none=[1, -1, 0], method=[0, 0, 0], full=[0, 0, 0]) is None
    True
    """
    worst, ours, best = _numbers(none, "none"), _numbers(method, "method"), _numbers(full, "full")
    _same_length(worst, "none", ours, "method")
    _same_length(worst, "none", best, "full")
    gap = worst - best
    if not paired_bootstrap(gap, clusters, strata, resamples, seed).excludes_zero:
        return None
    return ratio_interval(worst - ours, gap, clusters, strata, resamples, seed)


def gate(
    full_scores: Values,
    closed_scores: Values,
    clusters: Labels | None = None,
    strata: Labels | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> bool:
    """True where full prefill beats the run without any context: the interval of the mean difference is above 0.

    Higher scores are better; of a loss, pass the negative.

    >>> gate(full_scores=[1, 1, 0, 1], closed_scores=[0, 0, 0, 1])
    False
    """
    full, closed = _numbers(full_scores, "full_scores"), _numbers(closed_scores, "closed_scores")
    _same_length(full, "full_scores", closed, "closed_scores")
    return paired_bootstrap(full - closed, clusters, strata, resamples, seed).low > 0


def sign_flip_p(
    differences: Values,
    clusters: Labels | None = None,
    strata: Labels | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> float:
    """The two-sided p-value of the mean difference under random signs of the clusters' differences.

    Exact where all sign patterns are at most `resamples` many; else (hits + 1) / (resamples + 1).

    >>> sign_flip_p([0.2, 0.1, 0.4, 0.3])
    0.125
    """
    _check_resampling(resamples, seed)
    groups = _strata(_numbers(differences, "differences")[:, None], "differences", clusters, strata)
    shares = np.concatenate([group.sums[:, 0] / group.counts.sum() for group in groups])
    shares = shares[shares != 0]  # a flipped 0 changes nothing, and without it more cases are exact
    # Sums of the same numbers in another order differ in the last bits; a tie must stay a tie.
    extreme = abs(shares.sum()) - 1e-12 * np.abs(shares).sum()
    patterns = 2 ** len(shares)
    if patterns <= resamples:
        bits = (np.arange(patterns)[:, None] >> np.arange(len(shares))) & 1
        return float(np.mean(np.abs((2 * bits - 1) @ shares) >= extreme))
    rng, hits = np.random.default_rng(seed), 0
    for rows in _batches(resamples, len(shares)):
        signs = 2 * rng.integers(2, size=(rows.stop - rows.start, len(shares))) - 1
        hits += int(np.sum(np.abs(signs @ shares) >= extreme))
    return (hits + 1) / (resamples + 1)


def mcnemar_p(a: Values, b: Values) -> float:
    """The exact two-sided p-value of McNemar's test for two arms' hits (0 or 1) on the same items.

    Only items where the arms disagree count; 1 where they never do.

    >>> mcnemar_p([1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0])
    0.0625
    """
    first, second = _hits(a, "a"), _hits(b, "b")
    _same_length(first, "a", second, "b")
    only_first, only_second = int(np.sum(first > second)), int(np.sum(second > first))
    disagreements = only_first + only_second
    tail = sum(math.comb(disagreements, hits) for hits in range(min(only_first, only_second) + 1))
    p: float = 2 * tail / 2**disagreements  # one division of whole numbers: exact for any number of items
    return min(1.0, p)


def holm(p_values: Values) -> tuple[float, ...]:
    """The p-values adjusted for many comparisons by Holm's step-down rule, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    (0.03, 0.06, 0.06)
    """
    given = _numbers(p_values, "p_values")
    for place, value in enumerate(given):
        if not 0 <= value <= 1:
            raise OptionError(f"p_values[{place}] is {value}; expected a probability in 0..1")
    adjusted, least = np.empty_like(given), 0.0
    for rank, place in enumerate(np.argsort(given, kind="stable")):
        least = max(least, min(1.0, float((len(given) - rank) * given[place])))
        adjusted[place] = least
    return tuple(adjusted.tolist())


def wins_ties_losses(differences: Values, tolerance: float = 0.0) -> Tally:
    """How many differences are above, within and below ±`tolerance`.

    >>> wins_ties_losses([0.5, 0.0, -0.1, 0.2])
    Tally(wins=2, ties=1, losses=1)
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise OptionError(f"tolerance is {tolerance!r}; expected a finite number that is not negative")
    column = _numbers(differences, "differences")
    wins, losses = int(np.sum(column > tolerance)), int(np.sum(column < -tolerance))
    return Tally(wins, len(column) - wins - losses, losses)


def _statistic(groups: Sequence[_Stratum]) -> _Array:
    """Of each column, the mean over strata of the strata's means."""
    means: _Array = np.stack([group.sums.sum(axis=0) / group.counts.sum() for group in groups])
    return np.asarray(means.mean(axis=0), dtype=np.float64)


def _replicates(groups: Sequence[_Stratum], resamples: int, seed: int) -> _Array:
    """The statistic of each resample, `[resamples, columns]`."""
    _check_resampling(resamples, seed)
    rng = np.random.default_rng(seed)
    total = np.zeros((resamples, groups[0].sums.shape[1]))
    for group in groups:
        clusters = len(group.counts)
        for rows in _batches(resamples, clusters):
            drawn = rng.integers(clusters, size=(rows.stop - rows.start, clusters))
            # Clusters differ in size, so a resample has its own number of items.
            total[rows] += group.sums[drawn].sum(axis=1) / group.counts[drawn].sum(axis=1)[:, None]
    return total / len(groups)


def _percentiles(replicates: _Array, groups: Sequence[_Stratum]) -> tuple[float, float]:
    """The ends of the percentile interval; unbounded where a stratum has one cluster.

    Order statistics, rounded outwards and never interpolated: interpolating next to an infinite ratio gives NaN.
    """
    if any(len(group.counts) < 2 for group in groups):
        return -math.inf, math.inf
    ordered, last = np.sort(replicates), len(replicates) - 1
    tail = (1 - _CONFIDENCE) / 2
    return float(ordered[math.floor(tail * last)]), float(ordered[math.ceil((1 - tail) * last)])


def _batches(resamples: int, clusters: int) -> Iterator[slice]:
    """Slices that cover all resamples, each of at most `_DRAWS_AT_ONCE` random numbers."""
    size = max(1, _DRAWS_AT_ONCE // max(1, clusters))
    for start in range(0, resamples, size):
        yield slice(start, min(start + size, resamples))


def _strata(columns: _Array, name: str, clusters: Labels | None, strata: Labels | None) -> list[_Stratum]:
    """The items grouped by stratum and, within it, by cluster: a label in two strata is two clusters."""
    items = len(columns)
    for labels, what in ((clusters, "clusters"), (strata, "strata")):
        if labels is not None and len(labels) != items:
            raise OptionError(
                f"{what} has {len(labels)} labels but {name} has {items} items; expected one label an item"
            )
    members: dict[Hashable, dict[Hashable, list[int]]] = {}
    for item in range(items):
        label = None if clusters is None else clusters[item]
        own = label is None or label == ""
        cluster = ("item", item) if own else ("cluster", label)
        members.setdefault(None if strata is None else strata[item], {}).setdefault(cluster, []).append(item)
    return [
        _Stratum(
            np.stack([columns[places].sum(axis=0) for places in grouped.values()]),
            np.array([len(places) for places in grouped.values()], dtype=np.float64),
        )
        for grouped in members.values()
    ]


def _numbers(values: Values, name: str) -> _Array:
    """`values` as a float64 array; OptionError unless it is a non-empty list of finite numbers."""
    if len(values) == 0:
        raise OptionError(f"{name} is empty; expected one number an item")
    for place, value in enumerate(values):
        if not (isinstance(value, (Real, np.bool_)) and math.isfinite(value)):
            raise OptionError(
                f"{name}[{place}] is {value!r}; expected a finite number, so leave such items out of all arms"
            )
    return np.asarray(values, dtype=np.float64)


def _hits(values: Values, name: str) -> _Array:
    """`values` as an array of 0 and 1; OptionError for anything else."""
    column = _numbers(values, name)
    for place, value in enumerate(column):
        if value not in (0, 1):
            raise OptionError(f"{name}[{place}] is {value}; expected a hit or a miss, 1 or 0")
    return column


def _same_length(first: _Array, first_name: str, second: _Array, second_name: str) -> None:
    if len(first) != len(second):
        raise OptionError(
            f"{first_name} has {len(first)} items but {second_name} has {len(second)}; expected the same items in both"
        )


def _check_resampling(resamples: int, seed: int) -> None:
    if resamples < _FEWEST_RESAMPLES:
        raise OptionError(f"resamples is {resamples}; expected at least {_FEWEST_RESAMPLES}, usually 10,000")
    if seed < 0:
        raise OptionError(f"seed is {seed}; expected an integer that is not negative")

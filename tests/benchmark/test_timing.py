"""Arms take turns: every repeat runs each once, another one first; warm-ups run and do not count."""

from collections.abc import Callable

import pytest

from infoflow_kv.benchmark.timing import Timed, measure, rotated
from infoflow_kv.errors import OptionError


def writing(calls: list[str], name: str) -> Callable[[], int]:
    def run() -> int:
        calls.append(name)
        return len(calls)

    return run


def test_arms_are_interleaved_and_the_first_one_rotates() -> None:
    calls: list[str] = []
    timed = measure({name: writing(calls, name) for name in "abc"}, repeats=3, warmup=1)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    # Results of the warm-up are gone; the others stand in the order of their repeats.
    assert timed["a"].results == (6, 8, 10)
    assert timed["c"].results == (5, 7, 12)
    assert all(len(own.seconds) == 3 and own.low >= 0 for own in timed.values())


def test_seconds_may_come_from_the_result() -> None:
    values = iter([9.0, 1.0, 3.0, 2.0])
    [own] = measure({"a": lambda: next(values)}, repeats=3, seconds_of=lambda result: result).values()
    assert own.seconds == (1.0, 3.0, 2.0)
    assert (own.median, own.low, own.high, own.p90, own.spread) == (2.0, 1.0, 3.0, 3.0, 1.0)


def test_ninety_per_cent_do_not_exceed_p90() -> None:
    timed = Timed(tuple(float(second) for second in range(20, 0, -1)), (None,) * 20)
    assert timed.p90 == 18.0


def test_every_step_is_told_with_its_number() -> None:
    told: list[tuple[int, int, str]] = []
    measure({"a": int, "b": int}, repeats=1, warmup=1, on_step=lambda *step: told.append(step))
    assert told == [
        (0, 4, "a, warm-up"),
        (1, 4, "b, warm-up"),
        (2, 4, "b, repeat 1"),
        (3, 4, "a, repeat 1"),
        (4, 4, "done"),
    ]


def test_the_record_has_median_p90_range_spread_and_all_values() -> None:
    record = Timed((1.0, 2.0), (None, None)).record("ttft_seconds")
    assert record == {
        "ttft_seconds_median": 1.5,
        "ttft_seconds_p90": 2.0,
        "ttft_seconds_min": 1.0,
        "ttft_seconds_max": 2.0,
        "spread": 0.666667,
        "ttft_seconds": [1.0, 2.0],
    }


@pytest.mark.parametrize(("arms", "repeats", "warmup"), [({}, 1, 0), ({"a": int}, 0, 0), ({"a": int}, 1, -1)])
def test_nothing_to_measure_is_refused(arms: dict[str, Callable[[], int]], repeats: int, warmup: int) -> None:
    with pytest.raises(OptionError, match="expected at least 1, 1 and 0"):
        measure(arms, repeats, warmup)


def test_rotation_goes_round() -> None:
    assert [rotated(["a", "b"], turn)[0] for turn in range(4)] == ["a", "b", "a", "b"]

"""The tower cache: one run for a picture, the oldest out first."""

import threading

import pytest
import torch

from infoflow_kv.errors import OptionError
from infoflow_kv.models.vision import Encoded, TowerCache


def features(value: float, num_visual: int = 4) -> Encoded:
    return Encoded(torch.full((num_visual, 8), float(value)), torch.zeros(0, num_visual, 8))


SIZE = features(0).num_bytes


def test_a_picture_is_run_once_and_the_oldest_goes_first() -> None:
    cache = TowerCache(2 * SIZE)
    for name in ("a", "b", "a", "c"):
        assert cache.get(name, lambda name=name: features(ord(name))).embeddings[0, 0] == ord(name)
    assert (cache.runs, cache.hits, len(cache), cache.num_bytes) == (3, 1, 2, 2 * SIZE)
    cache.get("a", lambda: features(0))  # used last before c: still there
    assert (cache.runs, cache.hits) == (3, 2)
    cache.get("b", lambda: features(1))
    assert cache.runs == 4


@pytest.mark.parametrize("max_bytes", [0, SIZE - 1])
def test_what_is_larger_than_the_cache_is_not_kept(max_bytes: int) -> None:
    cache = TowerCache(max_bytes)
    for _ in range(2):
        cache.get("a", lambda: features(1))
    assert (cache.runs, cache.hits, len(cache), cache.num_bytes) == (2, 0, 0, 0)
    with pytest.raises(OptionError, match="-1 bytes"):
        TowerCache(-1)


def test_threads_that_ask_at_once_share_one_run() -> None:
    cache = TowerCache(10 * SIZE)
    is_running, may_end = threading.Event(), threading.Event()
    found: list[Encoded] = []

    def run() -> Encoded:
        is_running.set()
        assert may_end.wait(20)
        return features(5)

    threads = [threading.Thread(target=lambda: found.append(cache.get("a", run))) for _ in range(4)]
    threads[0].start()
    assert is_running.wait(20)
    for thread in threads[1:]:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4 and all(one is found[0] for one in found)
    assert (cache.runs, cache.hits) == (1, 3)


def test_a_failed_run_is_told_and_tried_again() -> None:
    cache = TowerCache(10 * SIZE)

    def fail() -> Encoded:
        raise RuntimeError("no memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            cache.get("a", fail)
    assert cache.get("a", lambda: features(2)).embeddings[0, 0] == 2
    assert (cache.runs, cache.hits, len(cache)) == (3, 0, 1)

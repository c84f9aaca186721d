"""Several processes on one store, some of them killed. The scenarios are in `store_processes.py`."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import infoflow_kv
from infoflow_kv.store import DiskStore


@dataclass(frozen=True)
class Played:
    results: dict[str, Any]
    disk: Path
    stderr: str


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, quick_module_path: Path) -> Played:
    """All scenarios, in one process that imports torch once."""
    disk = tmp_path_factory.mktemp("processes")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "store_processes.py"), str(disk), str(quick_module_path)],
        env={**os.environ, "PYTHONPATH": str(Path(infoflow_kv.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Played(json.loads(done.stdout), disk, done.stderr)


def test_kill_9_at_any_moment(played: Played) -> None:
    """Row 1: no damaged chunk, no acknowledged chunk lost."""
    result = played.results["kill_at_random"]
    assert result["problems"] == []
    assert result["acknowledged"] >= 3
    assert result["cut_short"] >= 3, "the kills did hit writes"
    for path in (played.disk / "kv" / "tmp").iterdir():
        os.utime(path, (0, 0))
    DiskStore(played.disk / "kv")
    assert os.listdir(played.disk / "kv" / "tmp") == []


def test_kill_9_before_and_after_each_call(played: Played) -> None:
    result = played.results["kill_at_each_call"]
    assert result["problems"] == []
    assert result["runs"] > 40


def test_four_processes_write_the_same_chunks(played: Played) -> None:
    """Row 10, D02: no exception, one sound file each, no leftovers."""
    result = played.results["write_the_same"]
    assert result["statuses"] == [0, 0, 0, 0], played.stderr
    assert (result["sound"], result["chunks"], result["tmp"]) == (12, 12, [])
    assert result["other"] == ["infoflow-store.json", "tmp"]


def test_two_processes_keep_one_limit(played: Played) -> None:
    """Row 19, D07: `du` stays within the limit, although each writes ten times as much."""
    result = played.results["keep_within_limit"]
    assert result["statuses"] == [0, 0], played.stderr
    # Our walk takes time, so it may see a chunk that went and the one that came for it: one for each writer.
    assert result["peak"] <= result["limit"] + 2 * result["size"]
    assert result["peak"] > result["limit"] - 4 * result["size"], "the limit was reached"
    assert result["sound"] == result["chunks"] > 10


def test_reads_are_right_while_others_write_and_delete(played: Played) -> None:
    """Rows 11 and 12, D04."""
    result = played.results["read_while_evicted"]
    assert result["statuses"] == [0, 0], played.stderr
    assert (result["wrong"], result["bad"]) == (0, 0), played.stderr
    assert result["hits"] > 20
    assert result["misses"] > 5

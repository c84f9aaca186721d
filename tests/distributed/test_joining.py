"""What a process is told that was not started as a rank, or whose others do not come."""

import socket
import time
from typing import Any

import pytest
from ranks import free_port, run_ranks

from infoflow_kv.errors import InputError, OptionError, ParallelError
from infoflow_kv.parallel.environment import Place, from_environment
from infoflow_kv.parallel.group import Group

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_place() -> None:
    assert from_environment(GOOD) == Place(rank=1, size=2, local_rank=1)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_missing_variable(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is not set; .*torchrun"):
        from_environment({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "2"),
        ("RANK", "-1"),
        ("RANK", ""),
        ("RANK", "one"),
        ("RANK", "²"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "1.5"),
        ("LOCAL_RANK", "2"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_ADDR", ""),
    ],
)
def test_a_variable_without_sense(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=name) as caught:
        from_environment(GOOD | {name: value})
    assert "expected" in str(caught.value) and "torchrun" in str(caught.value)


def test_join_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (GOOD | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    with Group.join() as group:
        assert (group.rank, group.size, group.local_rank) == (0, 1, 0)
        assert group.world.all_gather is not None
    monkeypatch.delenv("RANK")
    with pytest.raises(InputError, match="RANK is not set"):
        Group.join()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_limits_out_of_range(seconds: float) -> None:
    with pytest.raises(OptionError, match="timeout 'decode' is"):
        Group(Place(0, 1, 0), timeouts={"decode": seconds})
    with pytest.raises(OptionError, match="timeout 'timeout_seconds' is"):
        Group(Place(0, 1, 0), timeout_seconds=seconds)


def test_a_limit_for_a_phase_that_there_is_not() -> None:
    with pytest.raises(OptionError, match="unknown phase 'lod'; did you mean 'load'"):
        Group(Place(0, 1, 0), timeouts={"lod": 5.0})


def test_nccl_alone_is_refused_and_a_rank_without_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages and CPU stores need gloo beside it; no GPU is touched before that is said."""
    with pytest.raises(OptionError, match="nccl carries no tensors on CPUs, and some are; give cpu:gloo,cuda:nccl"):
        Group(Place(0, 2, 0), backend="nccl")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(
        OptionError, match="local rank 1 has no GPU of its own: there are 1 here;.*give the backend gloo"
    ):
        Group(Place(1, 2, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_rank_does_not_come(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (GOOD | {"RANK": str(rank), "MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(ParallelError, match=f"rank {rank} of 2, phase 'join'.*did not answer within 1 seconds"):
        Group.join(timeout_seconds=1.0)
    assert time.monotonic() - start < 10.0


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        variables = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in (GOOD | variables).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ParallelError, match="phase 'join': the port of MASTER_PORT is taken on this machine"):
            Group.join(timeout_seconds=5.0)


def joins_twice(group: Group) -> Any:
    with pytest.raises(OptionError, match="already in a process group"):
        Group.join()
    with pytest.raises(OptionError, match="2 head shards do not divide 3 ranks"):
        group.team(2)
    with pytest.raises(OptionError, match="0 head shards"):
        group.team(0)
    group.world.agree("it still works")
    return None


def test_joining_twice_and_wrong_teams() -> None:
    run_ranks(joins_twice, 3)

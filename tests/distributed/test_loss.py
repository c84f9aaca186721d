"""A rank that is killed, stopped or fails: every other one gets its ParallelError in time, and ends."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ended, Loss, free_port, run_ranks, thorough, watch_ranks

from infoflow_kv.errors import ComputeError, ParallelError
from infoflow_kv.parallel.group import Group

PHASES = ("load", "move", "score", "repair", "decode")
LIMIT = 2.0  # seconds of an exchange in these tests


def request(group: Group) -> Any:
    """All exchanges, as a request makes them, in teams and in the world; every phase involves every rank."""
    heads, sequence = group.team(2)
    rows = torch.ones(1000, 64)
    size = group.size
    with group.phase("load"):
        group.world.agree("the same")
    with group.phase("move"):
        heads.all_to_all(rows, [500, 500], [500, 500])
        sequence.all_gather(rows, [1000] * sequence.size)
    with group.phase("score"):
        group.world.all_gather(rows, [1000] * size)
    with group.phase("repair"):
        for _ in range(size):
            rows = group.world.shift(rows, rows.shape).wait()
    with group.phase("decode"):
        for step in range(3):
            group.world.broadcast(rows, step % size)
            sequence.all_gather(rows, [1000] * sequence.size)
            heads.all_gather(rows, [1000] * heads.size)
    return "done"


def assert_told(ended: Ended, within: float) -> None:
    """It ended by itself, with the error, and without any other complaint."""
    assert ended.status == 1, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("infoflow_kv.errors.ParallelError: rank "), ended.stderr
    assert "was lost or did not answer within" in last
    assert "Warning" not in ended.stderr and "Exception ignored" not in ended.stderr, ended.stderr
    assert ended.seconds < within, f"{ended.seconds} s"
    assert ended.result is None


def test_nobody_is_lost() -> None:
    assert run_ranks(request, 4, timeout_seconds=LIMIT * 5) == ["done"] * 4


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, thorough(3)])
def test_killed(phase: str, rank: int) -> None:
    """The closed connection tells, long before the limit. Rank 0 holds the store in which the ranks met."""
    ended = watch_ranks(request, 4, timeout_seconds=60.0, lose=Loss(rank, phase))
    assert ended[rank].status == -signal.SIGKILL
    for other in set(range(4)) - {rank}:
        assert_told(ended[other], within=10.0)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_processes_end(name: str) -> None:
    """Nothing that the group leaves behind, a thread or a connection, keeps Python from ending."""
    seconds = 60.0 if name == "SIGKILL" else LIMIT
    ended = watch_ranks(request, 4, timeout_seconds=seconds, lose=Loss(0, "repair", name), ends_fully=True)
    for other in (1, 2, 3):
        assert_told(ended[other], within=40.0)  # on a busy machine, Python's own end takes seconds


@pytest.mark.parametrize(
    ("rank", "phase"), [(0, "score"), (3, "repair"), *(thorough(1, phase) for phase in ("load", "move", "decode"))]
)
def test_stopped(rank: int, phase: str) -> None:
    """Its connections stay open: the limit tells."""
    ended = watch_ranks(request, 4, timeout_seconds=LIMIT, lose=Loss(rank, phase, "SIGSTOP"))
    assert ended[rank].status == -signal.SIGKILL, "the harness ended it"
    for other in set(range(4)) - {rank}:
        assert_told(ended[other], within=10.0)


def connects(group: Group, signal_name: str) -> Any:
    """Rank 0, which holds the store, goes when the others are about to be connected through it."""

    def goes(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), getattr(signal, signal_name))

    if group.rank == 0:
        dist.new_group = goes
    group.team(2)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_lost_while_teams_are_connected(name: str) -> None:
    ended = watch_ranks(connects, 4, name, timeout_seconds=LIMIT, lose=Loss(0, "is told by itself"))
    for other in (1, 2, 3):
        assert_told(ended[other], within=15.0)


def asks_for_other_teams(group: Group) -> None:
    with pytest.raises(ParallelError, match="were given another request"):
        group.team(2 if group.rank else 3)


def test_other_teams_on_another_rank() -> None:
    run_ranks(asks_for_other_teams, 6)


def fails(group: Group, kind: str) -> None:
    """Rank 1 raises between two exchanges, or makes other calls than the others."""
    group.world.agree("the same")
    with group.phase("score"):
        if group.rank == 1:
            if kind == "raises":
                raise ComputeError("NaN in logits")
            return
        group.world.all_gather(torch.ones(2), [2] * group.size)


@pytest.mark.parametrize("kind", ["raises", "leaves"])
def test_a_rank_that_fails_ends_the_others(kind: str) -> None:
    ended = watch_ranks(fails, 3, kind, timeout_seconds=60.0)
    for other in (0, 2):
        assert_told(ended[other], within=15.0)
    if kind == "raises":
        assert ended[1].status == 1 and "ComputeError: NaN in logits" in ended[1].stderr
    else:
        assert ended[1].status == 0


def told_by_another_team(group: Group) -> Any:
    """Rank 3 goes; 2 waits for it, and 0 and 1 for 2 or for each other. 2 catches its error and does not end."""
    heads, sequence = group.team(2)
    group.world.agree("the same")
    if group.rank == 3:
        return "gone"
    start = time.monotonic()
    team = {0: sequence, 1: group.world, 2: heads}[group.rank]
    with pytest.raises(ParallelError) as caught:
        team.all_gather(torch.ones(2), [2] * team.size)
    took = time.monotonic() - start
    with pytest.raises(ParallelError, match="failed before"):
        group.world.agree("again")
    with pytest.raises(ParallelError, match="failed before"):
        group.team(2)[0].all_gather(torch.ones(2), [2] * 2)
    time.sleep(3 if group.rank == 2 else 0)
    assert caught.value.rank == group.rank
    return took


def test_the_news_crosses_teams() -> None:
    """The first to fail closes all its connections, also while its caller still holds the error."""
    *others, last = run_ranks(told_by_another_team, 4, timeout_seconds=50.0)
    assert last == "gone"
    assert max(others) < 8.0, others  # of which 5 are what the one that goes waits for the others


def stops_in_a_short_phase(group: Group) -> Any:
    """The limit is the phase's, while it lasts; the error names the phase and its limit."""
    start = time.monotonic()

    def comes_late() -> None:
        with group.phase("outer"), group.phase("decode"):
            assert group.timeout_seconds == 1.0
            time.sleep(3 if group.rank == 0 else 0)
            group.world.agree("the same")

    with pytest.raises(ParallelError) as caught:
        comes_late()
    assert group.phase_name == "" and caught.value.phase == "decode"
    return [time.monotonic() - start, str(caught.value)]


def limited(group: Group, port: int) -> Any:
    """Joins anew with limits by phase: the harness's group has none."""
    group.close()
    os.environ["MASTER_PORT"] = str(port)
    with Group.join(30.0, timeouts={"decode": 1.0}) as other:
        assert other.timeout_seconds == 30.0
        with other.phase("load"):
            assert other.timeout_seconds == 30.0
            other.world.agree("the same")
        return stops_in_a_short_phase(other)


def test_limits_by_phase() -> None:
    first, second = run_ranks(limited, 2, free_port())
    assert 3.0 <= first[0] < 5.0 and 1.0 <= second[0] < 2.5
    assert "rank 1 of 2, phase 'decode': another rank was lost or did not answer within 1 seconds" in second[1]


def disagree(group: Group) -> str:
    with group.phase("load"), pytest.raises(ParallelError) as caught:
        group.world.agree("request" if group.rank != 2 else "another")
    assert caught.value.phase == "load" and caught.value.rank == group.rank
    group.world.agree("it still works")
    return str(caught.value)


def test_disagreement() -> None:
    for rank, message in enumerate(run_ranks(disagree, 4)):
        assert message.startswith(
            f"rank {rank} of 4, phase 'load': rank(s) 2 were given another request than rank 0: expected"
        )


def waits_for_nobody(group: Group) -> Any:
    """A shift that is waited for too late, and leaving twice."""
    shift = group.world.shift(torch.ones(4), (4,))
    group.close()
    group.close()
    with pytest.raises(ParallelError):
        shift.wait()
    return "left"


def test_leaving_with_an_exchange_under_way() -> None:
    assert run_ranks(waits_for_nobody, 2) == ["left"] * 2

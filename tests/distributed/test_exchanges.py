"""Every exchange against its obvious result, for all dtypes and splits, and its bytes against the formula."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks

from infoflow_kv.parallel.counting import ByteCounter
from infoflow_kv.parallel.group import Group, Team

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def part(rank: int, rows: int, dtype: torch.dtype, width: int = 3) -> torch.Tensor:
    """Rows that tell whose they are, non-contiguous in memory."""
    values = torch.arange(width * rows).reshape(width, rows).T + 100 * rank
    return values.to(dtype)


def counts_of(size: int) -> list[list[int]]:
    return [[2] * size, list(range(size)), list(range(size, 0, -1)), [0] * (size - 1) + [3], [0] * size]


def check_all_gather(team: Team, counter: ByteCounter, dtype: torch.dtype) -> None:
    for counts in counts_of(team.size):
        before = counter.total
        own = part(team.index, counts[team.index], dtype)
        found = team.all_gather(own, counts)
        assert found.dtype == dtype
        assert torch.equal(found, torch.cat([part(i, count, dtype) for i, count in enumerate(counts)]))
        assert counter.total - before == (team.size - 1) * own.numel() * own.element_size(), counts


def check_all_to_all(team: Team, counter: ByteCounter, dtype: torch.dtype) -> None:
    size, me = team.size, team.index
    tables = [
        [[1] * size] * size,
        [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)],
        [[0] * size for _ in range(size)],
        [[4 if (i, j) == (0, size - 1) else 0 for j in range(size)] for i in range(size)],
    ]
    for table in tables:
        before = counter.total
        sends, receives = table[me], [row[me] for row in table]
        own = torch.cat([part(me * 10 + j, count, dtype) for j, count in enumerate(sends)])
        found = team.all_to_all(own, sends, receives)
        expected = torch.cat([part(i * 10 + me, count, dtype) for i, count in enumerate(receives)])
        assert found.dtype == dtype and torch.equal(found, expected), table
        assert counter.total - before == (sum(sends) - sends[me]) * 3 * own.element_size(), table


def check_ring(team: Team, counter: ByteCounter, dtype: torch.dtype) -> None:
    """All parts, of different sizes (one is empty), go once round."""
    sizes = [2 * i for i in range(team.size)]
    held, before, sent = part(team.index, sizes[team.index], dtype), counter.total, 0
    for step in range(1, team.size):
        source = (team.index - step) % team.size
        shift = team.shift(held, (sizes[source], 3))
        sent += held.numel() * held.element_size()
        held = shift.wait()
        assert held is shift.wait()
        assert held.dtype == dtype and torch.equal(held, part(source, sizes[source], dtype))
    assert counter.total - before == sent


def check_broadcast(team: Team, counter: ByteCounter, dtype: torch.dtype) -> None:
    for source in range(team.size):
        before, own = counter.total, part(team.index, 2, dtype)
        kept = own.clone()
        assert torch.equal(team.broadcast(own, source), part(source, 2, dtype))
        assert torch.equal(own, kept)
        receivers = team.size - 1 if team.index == source else 0
        assert counter.total - before == receivers * own.numel() * own.element_size()


def exchange_everything(group: Group) -> dict[str, int]:
    with ByteCounter(group) as counter:
        for team in teams(group):
            for dtype in DTYPES:
                with group.phase("gathers"):
                    check_all_gather(team, counter, dtype)
                    check_all_to_all(team, counter, dtype)
                with group.phase("rings"):
                    check_ring(team, counter, dtype)
                    check_broadcast(team, counter, dtype)
        before = counter.total
        group.world.agree("the same")
        group.world.agree(b"the same")
        assert counter.total - before == 2 * 32 * (group.size - 1)
    return counter.by_phase()


def teams(group: Group) -> Iterator[Team]:
    yield group.world
    for shards in (1, 2, 4):
        if group.size % shards == 0:
            yield from group.team(shards)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_exchange(size: int) -> None:
    phases = run_ranks(exchange_everything, size)
    assert len(phases) == size
    for found in phases:
        assert set(found) <= {"gathers", "rings", ""}
        assert all(found.values()) or size == 1


def shapes(group: Group) -> Any:
    """Rows of more axes and of none, single numbers, width 0, and a tensor that wants a gradient."""
    world = group.world
    whole = torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2)
    assert torch.equal(world.all_gather(whole, [2] * world.size), torch.cat([whole] * world.size))
    single = torch.tensor([world.index])
    assert world.all_gather(single, [1] * world.size).tolist() == list(range(world.size))
    assert world.all_gather(torch.empty(2, 0), [2] * world.size).shape == (2 * world.size, 0)
    assert world.all_to_all(torch.empty(world.size, 0), [1] * world.size, [1] * world.size).shape == (world.size, 0)
    wanting = torch.ones(2, 2, requires_grad=True)
    assert not world.all_gather(wanting, [2] * world.size).requires_grad
    flags = torch.tensor([True, False])
    assert world.broadcast(flags, 0).dtype == torch.bool
    number = torch.tensor(7 + world.index)
    assert world.broadcast(number, 1).item() == 8
    assert world.shift(number, ()).wait().item() == 7 + (world.index - 1) % world.size
    with torch.inference_mode():
        assert torch.equal(world.all_gather(whole, [2] * world.size), torch.cat([whole] * world.size))


def test_shapes() -> None:
    run_ranks(shapes, 2)


def wrong_sizes(group: Group) -> list[str]:
    """Refused before anything is sent: the group still works afterwards."""
    world, two = group.world, torch.zeros(2, 3)
    other = world.ranks[1 - world.index]
    calls = [
        lambda: world.all_gather(two, [2]),
        lambda: world.all_gather(two, [1, 1]),
        lambda: world.all_gather(torch.tensor(1), [1, 1]),
        lambda: world.all_to_all(two, [1, 2], [1, 2]),
        lambda: world.all_to_all(two, [3, -1], [3, -1]),
        lambda: world.all_to_all(two, [1, 1], [1]),
        lambda: world.all_to_all(two, [2 - other, other], [2, 2]),
        lambda: world.broadcast(two, 2),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError, match="expected one count|not in a team") as caught:
            call()
        messages.append(str(caught.value))
    assert world.all_gather(two, [2, 2]).shape == (4, 3)
    return messages


def test_sizes_that_contradict_each_other() -> None:
    for messages in run_ranks(wrong_sizes, 2):
        assert len(set(messages)) == len(messages)


def team_places(group: Group, shards: int) -> Any:
    heads, sequence = group.team(shards)
    assert group.team(shards) == (heads, sequence), "made once"
    return [heads.ranks, heads.index, sequence.ranks, sequence.index]


def test_teams() -> None:
    assert run_ranks(team_places, 4, 2) == [
        [[0, 1], 0, [0, 2], 0],
        [[0, 1], 1, [1, 3], 0],
        [[2, 3], 0, [0, 2], 1],
        [[2, 3], 1, [1, 3], 1],
    ]
    assert run_ranks(team_places, 2, 1) == [[[0], 0, [0, 1], 0], [[1], 0, [0, 1], 1]]
    assert run_ranks(team_places, 2, 2) == [[[0, 1], 0, [0], 0], [[0, 1], 1, [1], 0]]


def overlap(group: Group) -> Any:
    """Two shifts at once, other exchanges between start and wait."""
    world = group.world
    first = world.shift(torch.full((1000, 100), float(world.index)), (1000, 100))
    second = world.shift(torch.full((3,), 10.0 + world.index), (3,))
    gathered = world.all_gather(torch.tensor([world.index]), [1] * world.size)
    before = (world.index - 1) % world.size
    assert second.wait().tolist() == [10.0 + before] * 3
    assert torch.equal(first.wait(), torch.full((1000, 100), float(before)))
    return gathered.tolist()


def test_shifts_overlap() -> None:
    assert run_ranks(overlap, 3) == [[0, 1, 2]] * 3


def reduce_and_ask(group: Group) -> dict[str, int]:
    """Operations that the teams do not use, as a peer's ring does: functional ones, too."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    world, own = dist.group.WORLD, torch.zeros(8)
    with ByteCounter(group) as counter, group.phase("peer"):
        dist.all_reduce(own)
        # torch 2.13 renamed it and warns of the old name.
        gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
        gathered = gather(own, 0, world)
        split = functional.all_to_all_single(own, [2] * group.size, [2] * group.size, world)
        functional.wait_tensor(gathered), functional.wait_tensor(split)
        dist.barrier()
        with pytest.raises(Exception, match="does not know what '.*' sends"):
            dist.reduce(own, 0)
    return {operation: count for (phase, operation), count in counter.sent.items() if phase == "peer"}


def test_bytes_of_other_operations() -> None:
    size, own = 4, 32
    expected = {"all_reduce": 2 * (size - 1) * own // size, "all_gather": (size - 1) * own, "all_to_all": 24}
    assert run_ranks(reduce_and_ask, size) == [expected] * size


def test_alone_needs_no_process_group() -> None:
    with Group.alone() as group, group.phase("load"):
        assert group.phase_name == "load"
        own = part(0, 3, torch.float32)
        assert group.world.all_gather(own, [3]) is own
        assert group.world.shift(own, own.shape).wait() is own
        with pytest.raises(ValueError, match="not"):
            group.world.shift(own, (1, 1))
        group.world.agree("anything")
        assert [team.size for team in group.team(1)] == [1, 1]
        assert not torch.distributed.is_initialized()
    assert group.phase_name == ""


def test_phases_are_told() -> None:
    told: list[str] = []
    group = Group.alone(on_phase=told.append)
    for name in itertools.chain(("load", "score"), ("repair",)):
        with group.phase(name):
            pass
    assert told == ["load", "score", "repair"]

"""The ranks that answer one request together, their teams, and the phase that they are in."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist

from infoflow_kv.errors import OptionError, ParallelError, unknown_name
from infoflow_kv.parallel.environment import Place, from_environment
from infoflow_kv.parallel.team import Shift, Team
from infoflow_kv.parallel.waiting import Waiting, started

__all__ = ["Group", "Shift", "Team"]

# What a request goes through, by the names that errors, byte counts and `timeouts` give it; "prepare" is everything
# before the first one.
REQUEST_PHASES = ("begin", "load", "move", "score", "repair", "decode")
PHASES = ("prepare", *REQUEST_PHASES)
# How long `close` waits for ranks that are still at their last exchange.
_FAREWELL_SECONDS = 5.0
_FAREWELL_TAG = 1  # shifts have 0
_BOTH = "cpu:gloo,cuda:nccl"


class Group:
    """All ranks of one run. Make it with `Group.join()`, or `Group.alone()` for one process; then close it.

    Attributes: `rank`, `size`, `local_rank`, `world` (the Team of all ranks), `phase_name`.
    """

    def __init__(
        self,
        place: Place,
        timeout_seconds: float = 60.0,
        backend: str | None = None,
        on_phase: Callable[[str], None] | None = None,
        timeouts: Mapping[str, float] | None = None,
    ) -> None:
        if unknown := sorted(set(timeouts or {}) - set(PHASES)):
            raise unknown_name("phase", unknown[0], PHASES)
        for name, seconds in [("timeout_seconds", timeout_seconds), *(timeouts or {}).items()]:
            if not (math.isfinite(seconds) and seconds >= 0.001):
                raise OptionError(f"timeout '{name}' is {seconds}; expected a number of seconds, at least 0.001")
        self.rank, self.size, self.local_rank = place.rank, place.size, place.local_rank
        self._seconds = timeout_seconds
        self._timeouts = dict(timeouts or {})
        self._on_phase = on_phase
        self._teams: dict[int, tuple[Team, Team]] = {}
        self._waiting = Waiting(self.rank, self.size, timeout_seconds, self._destroy)
        self._alive = False
        self._staged = False
        if self.size > 1:
            self._connect(backend)
        self.world = Team(self._waiting, range(self.size), self._world_process_group(), self._staged)

    @classmethod
    def join(
        cls,
        timeout_seconds: float = 60.0,
        backend: str | None = None,
        on_phase: Callable[[str], None] | None = None,
        timeouts: Mapping[str, float] | None = None,
    ) -> "Group":
        """This process's place among the ranks that torchrun started; returns when all have come.

        `timeout_seconds` bounds every exchange, `timeouts` those of single phases, by a name of `PHASES`. `backend`:
        gloo, and NCCL for tensors on GPUs where there are any (a GPU for each rank then), unless given: for models on
        CPUs give "gloo". `on_phase` is called with the name of each phase that begins. Raises OptionError if torchrun's
        variables are missing or make no sense, ParallelError if a rank does not come.
        """
        return cls(from_environment(os.environ), timeout_seconds, backend, on_phase, timeouts)

    @classmethod
    def alone(cls, on_phase: Callable[[str], None] | None = None) -> "Group":
        """A group of this process only: it exchanges nothing and needs no torchrun."""
        return cls(Place(rank=0, size=1, local_rank=0), on_phase=on_phase)

    @property
    def phase_name(self) -> str:
        """The phase that this rank is in: "join" at first, "" between the phases."""
        return self._waiting.phase_name

    @property
    def timeout_seconds(self) -> float:
        """The limit of one exchange, in the present phase."""
        return self._waiting.seconds

    @contextlib.contextmanager
    def phase(self, name: str, times: float = 1.0) -> Iterator[None]:
        """While it lasts: errors and byte counts bear its name, and its timeout holds. Waits for nobody.

        `times`: how many times the usual limit it gets, where it was given none of its own.
        """
        before = self._waiting.phase_name, self._waiting.seconds
        self._enter(name, self._timeouts.get(name, times * self._seconds))
        try:
            if self._on_phase is not None:
                self._on_phase(name)
            yield
        finally:
            self._enter("" if before[0] == "join" else before[0], before[1])

    def team(self, head_shards: int) -> tuple[Team, Team]:
        """(heads, sequence): the ranks that share one part of the sequence, and those that hold the same heads.

        Ranks g·u … g·u + u - 1 are heads team g, for u head shards. All ranks must ask for the same; the first call
        connects them, and sends a few bytes. Raises OptionError if the number of ranks is no multiple of
        `head_shards`, ParallelError if the ranks do not agree.
        """
        if head_shards < 1 or self.size % head_shards:
            raise OptionError(
                f"{head_shards} head shards do not divide {self.size} ranks; give a divisor of the number of ranks"
            )
        if head_shards not in self._teams:
            self._teams[head_shards] = self._make_teams(head_shards)
        return self._teams[head_shards]

    def close(self) -> None:
        """Leaves the group, after a short wait for ranks at their last exchange; more calls do nothing."""
        if not self._alive:
            return
        self._apply_timeout(_FAREWELL_SECONDS)
        with contextlib.suppress(ParallelError):  # the request is over: whoever is missing now is not missed
            self._say_farewell()
        self._destroy()

    def abandon(self) -> None:
        """Leaves the group at once, in the middle of something: every other rank gets a ParallelError."""
        self._destroy()

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._destroy()  # at once: it tells the other ranks

    def _say_farewell(self) -> None:
        """Returns when all ranks are here: to close a connection may cost another rank what it has not read yet.

        By single messages with their own tag: gloo ends a process in which two different collectives meet.
        """
        own = torch.zeros(1, dtype=torch.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._waiting.guard():
            works = started(
                *(dist.isend(own, rank, tag=_FAREWELL_TAG) for rank in others),
                *(dist.irecv(torch.empty_like(own), rank, tag=_FAREWELL_TAG) for rank in others),
            )
        self._waiting.finish(works)

    def _connect(self, backend: str | None) -> None:
        if dist.is_initialized():
            raise OptionError(
                "this process is already in a process group; close the group before joining again, and leave "
                "torch.distributed.init_process_group to Group.join"
            )
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        backend = backend or (_BOTH if cuda else "gloo")
        if backend == "nccl":
            raise OptionError(f"the backend nccl carries no tensors on CPUs, and some are; give {_BOTH}")
        self._staged = "nccl" not in backend
        if not self._staged and self.local_rank >= torch.cuda.device_count():
            raise OptionError(
                f"local rank {self.local_rank} has no GPU of its own: there are {torch.cuda.device_count()} here; "
                "start at most one rank for each, or give the backend gloo"
            )
        if not self._staged:
            # Without it a lost rank would end this process from a thread of NCCL's, with no error to catch.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            torch.cuda.set_device(self.local_rank)
        timeout = timedelta(seconds=self._seconds)
        self._waiting.connect(
            lambda: dist.init_process_group(backend, timeout=timeout, rank=self.rank, world_size=self.size)
        )
        self._alive = True

    def _world_process_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self._alive else None

    def _make_teams(self, shards: int) -> tuple[Team, Team]:
        heads = [range(first, first + shards) for first in range(0, self.size, shards)]
        sequence = [range(first, self.size, shards) for first in range(shards)]
        return self._make_team(heads), self._make_team(sequence)

    def _make_team(self, parts: list[range]) -> Team:
        """This rank's part as a team. Connects all parts, in one order on all ranks, as torch wants it."""
        mine = next(part for part in parts if self.rank in part)
        if len(mine) == self.size:
            return self.world
        if len(mine) == 1:
            return Team(self._waiting, mine, None)
        # A rank that is gone shows here at once; while it is waited for to connect, only after the limit.
        self.world.agree(f"teams {parts}")
        found: dist.ProcessGroup | None = None
        timeout = timedelta(seconds=self._waiting.seconds)
        for part in parts:
            made = self._waiting.connect(partial(dist.new_group, list(part), timeout=timeout))
            found = made if part == mine else found
        return Team(self._waiting, mine, found, self._staged)

    def _enter(self, name: str, seconds: float) -> None:
        self._waiting.phase_name = name
        if seconds != self._waiting.seconds:
            self._apply_timeout(seconds)

    def _apply_timeout(self, seconds: float) -> None:
        """Also to the process groups: leaving one waits until its own limit, however short our wait was."""
        self._waiting.seconds = seconds
        for team in self._all_teams():
            if team.process_group is not None:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), team.process_group)

    def _all_teams(self) -> list[Team]:
        teams = [team for pair in self._teams.values() for team in pair]
        return list(dict.fromkeys([self.world, *teams]))

    def _destroy(self) -> None:
        """Closes all connections, so that every other rank notices at once."""
        if not self._alive:
            return
        self._alive = False
        self._waiting.broken = True
        for team in self._all_teams():
            team.process_group = None
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

"""The bounded wait: whatever goes wrong with another rank becomes a ParallelError, and never a hang."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from infoflow_kv.errors import ParallelError

_Made = TypeVar("_Made")
# Torch has a limit of its own, which says more; ours comes after it.
_GRACE_SECONDS = 1.0


class Waiting:
    """What all teams of one group share: where the request is, how long an exchange may take, whether it has failed.

    Attributes: `phase_name`, `seconds` (the limit of one exchange), `broken` (an exchange failed: no more are tried).
    """

    def __init__(self, rank: int, size: int, seconds: float, on_failure: Callable[[], None]) -> None:
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.phase_name = "join"
        self.broken = False
        self._on_failure = on_failure

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around everything that talks to other ranks; raises ParallelError for every failure of the backend."""
        if self.broken:
            raise self.error("an exchange failed before, and the group has ended")
        try:
            yield
        except ParallelError:
            raise
        except RuntimeError as error:  # gloo, NCCL and the store raise it and its subclasses, and no other
            self.broken = True
            self._on_failure()
            reason = f"another rank was lost or did not answer within {self.seconds:g} seconds"
            if "EADDRINUSE" in str(error):
                reason = "the port of MASTER_PORT is taken on this machine, and another one is needed"
            raise self.error(reason) from error

    def connect(self, work: Callable[[], _Made]) -> _Made:
        """What the work gives, which meets other ranks to connect them; raises ParallelError after the limit.

        In a thread of its own: torch asks rank 0 with no limit of time, and rank 0 may hang.
        """
        made: list[_Made] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                made.append(work())
            except BaseException as error:  # noqa: BLE001  # handed over to the caller's thread
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        with self.guard():
            thread.start()
            thread.join(self.seconds + _GRACE_SECONDS)
            if thread.is_alive():
                raise RuntimeError("the ranks were not connected in time")
            if failed:
                raise failed[0]
        return made[0]

    def finish(self, works: list[dist.Work]) -> None:
        """Returns when all exchanges are done; raises ParallelError after the limit, counted from now."""
        deadline = time.monotonic() + self.seconds
        try:
            with self.guard():
                for work in works:
                    # 0 would mean no limit at all.
                    left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
                    if work.wait(left) is False:
                        raise RuntimeError("the exchange was not done in time")
        finally:
            # The traceback keeps this list; a work in it would keep the connections open, and other ranks waiting.
            works.clear()

    def error(self, reason: str) -> ParallelError:
        """The error for this rank and phase."""
        return ParallelError(
            f"rank {self.rank} of {self.size}, phase '{self.phase_name}': {reason}; the request ends on all ranks. "
            "Look for the first error in the output of the other ranks, then start all ranks again (if none "
            "failed and they are only slow, with a longer timeout)",
            self.phase_name,
            self.rank,
        )


def started(*works: dist.Work | Sequence[dist.Work] | None) -> list[dist.Work]:
    """The works that there are, in one list: torch gives None where there is nothing to do."""
    found: list[dist.Work] = []
    for work in works:
        if isinstance(work, Sequence):
            found.extend(work)
        elif work is not None:
            found.append(work)
    return found

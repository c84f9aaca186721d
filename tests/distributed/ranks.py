"""Runs a function on several ranks: real processes, gloo over the loopback, no pickle.

A launcher process (`rank_launcher.py`) imports torch once for all tests and forks the ranks, so that a run takes a
fraction of a second. Functions must stand at the top level of a file; their arguments travel as JSON, their results
as JSON or, if it is a dict of tensors, as safetensors.
"""

import atexit
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import infoflow_kv
from infoflow_kv.benchmark.sp import free_port


def thorough(*values: Any) -> Any:
    """Parameters of a test that only `make test-thorough` runs: more of what others show, too long for every change."""
    return pytest.param(*values, marks=pytest.mark.thorough)


@dataclass(frozen=True)
class Loss:
    """Rank `rank` sends itself the signal ("SIGKILL", "SIGSTOP") when the phase begins, for the `time`-th time."""

    rank: int
    phase: str
    signal: str = "SIGKILL"
    time: int = 1


@dataclass(frozen=True)
class Ended:
    """How a rank ended: exit status (minus the signal if one killed it), output, and its result, if it came so far.

    `seconds` from the loss of a rank, or else from the start, to this rank's end.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    result: Any


class _Launcher:
    def __init__(self) -> None:
        path = [str(Path(infoflow_kv.__file__).parents[1]), *filter(None, sys.path)]
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_launcher.py"))],
            env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the launcher of ranks ended with {self.process.wait()}"
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()  # its order to end
        self.process.wait()
        self.process.stdout.close()


_launchers: list[_Launcher] = []


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0, timeout_seconds: float = 30.0
) -> list[Any]:
    """What `function(group, *args)` gives on each rank, in order of rank.

    Raises AssertionError with the ranks' tracebacks if one fails or all are not done within `timeout` seconds, after
    which none is left alive. `timeout_seconds` is the group's.
    """
    ended = watch_ranks(function, size, *args, timeout=timeout, timeout_seconds=timeout_seconds)
    failed = [f"rank {rank}: {one.status}\n{one.stderr}" for rank, one in enumerate(ended) if one.status]
    assert not failed, "\n".join(failed)
    return [one.result for one in ended]


def watch_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 60.0,
    timeout_seconds: float = 30.0,
    lose: Loss | None = None,
    ends_fully: bool = False,
) -> list[Ended]:
    """How each rank ended; raises nothing if they fail. A rank that is stopped is killed when the others have ended.

    A rank that ends with an exception has status 1 and the traceback on stderr; status -9 for all that were alive
    after `timeout` seconds. `ends_fully`: as any Python process, with its exit handlers; else by `_exit`, at once.
    """
    if not _launchers:
        _launchers.append(_Launcher())
    with tempfile.TemporaryDirectory(prefix="infoflow-ranks-") as folder:
        order = {
            "file": inspect.getsourcefile(function),
            "module": function.__module__,
            "function": function.__qualname__,
            "size": size,
            "args": args,
            "timeout": timeout,
            "timeout_seconds": timeout_seconds,
            "port": free_port(),
            "ends_fully": ends_fully,
            "lose": asdict(lose) if lose else None,
            "folder": folder,
        }
        answer = _launchers[0].run(order)
        assert "error" not in answer, answer["error"]
        return [
            Ended(
                status,
                (Path(folder) / f"{rank}.out").read_text(),
                (Path(folder) / f"{rank}.err").read_text(),
                seconds,
                _result(Path(folder), rank),
            )
            for rank, (status, seconds) in enumerate(answer["ended"])
        ]


def _result(folder: Path, rank: int) -> Any:
    if (folder / f"{rank}.safetensors").exists():
        return load_file(folder / f"{rank}.safetensors")
    path = folder / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None

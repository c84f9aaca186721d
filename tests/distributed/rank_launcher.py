"""Forks the ranks that `ranks.py` asks for: an order as JSON on a line of stdin, an answer on a line of stdout."""

import gc
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first exchange under a ByteCounter would import it in every rank
from safetensors.torch import save_file

from infoflow_kv.parallel.group import Group


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # nothing else may print among the answers
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = play(order)
        except Exception:
            answer = {"error": traceback.format_exc()}
        os.write(answers, (json.dumps(answer) + "\n").encode())


def play(order: dict[str, Any]) -> dict[str, Any]:
    """Starts all ranks and waits for them; none is alive afterwards."""
    function = load(order)
    start = time.monotonic()
    ranks = [fork(order, function, rank) for rank in range(order["size"])]
    lost = order["lose"]["rank"] if order["lose"] else None
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < len(ranks):
        waited_for = set(range(len(ranks))) - set(ended) - {lost}
        if not waited_for or time.monotonic() > start + order["timeout"]:
            for rank in set(range(len(ranks))) - set(ended):
                os.kill(ranks[rank], signal.SIGKILL)
                ended[rank] = os.waitstatus_to_exitcode(os.waitpid(ranks[rank], 0)[1]), time.monotonic()
            break
        for rank in set(range(len(ranks))) - set(ended):
            found, status = os.waitpid(ranks[rank], os.WNOHANG)
            if found:
                ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.005)
    moment = Path(order["folder"]) / "lost"
    zero = float(moment.read_text()) if moment.exists() else start
    return {"ended": [[ended[rank][0], ended[rank][1] - zero] for rank in range(len(ranks))]}


def load(order: dict[str, Any]) -> Callable[..., Any]:
    """The function, from its file: imported here, once for all ranks and runs."""
    name = order["module"] if order["module"] != "__main__" else Path(order["file"]).stem
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, order["file"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(order["file"]).parent))
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    found = getattr(module, order["function"])
    assert callable(found)
    return found  # type: ignore[no-any-return]


def fork(order: dict[str, Any], function: Callable[..., Any], rank: int) -> int:
    """The id of the process of a rank. Unless it is asked to end fully, it leaves out Python's own end: seconds."""
    gc.freeze()  # what is loaded now is for the launcher to collect, not for each rank at its end
    child = os.fork()
    if child:
        return child
    folder = Path(order["folder"])
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["size"], "MASTER_PORT": order["port"]}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    status = 1
    try:
        with Group.join(order["timeout_seconds"], on_phase=loses(order, rank)) as group:
            result = function(group, *order["args"])
            if isinstance(result, dict) and any(isinstance(value, torch.Tensor) for value in result.values()):
                save_file({name: value.contiguous() for name, value in result.items()}, folder / f"{rank}.safetensors")
            else:
                (folder / f"{rank}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    if order["ends_fully"]:
        raise SystemExit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def loses(order: dict[str, Any], rank: int) -> Callable[[str], None]:
    """What the rank does when a phase begins: if it is the one to be lost, and there, it goes."""
    lose, times = order["lose"], 0

    def on_phase(name: str) -> None:
        nonlocal times
        if lose and lose["rank"] == rank and lose["phase"] == name:
            times += 1
            if times == lose["time"]:
                (Path(order["folder"]) / "lost").write_text(str(time.monotonic()))
                os.kill(os.getpid(), getattr(signal, lose["signal"]))

    return on_phase


if __name__ == "__main__":
    main()

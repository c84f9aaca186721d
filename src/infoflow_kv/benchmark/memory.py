"""How much memory does one request take beside the weights? Measured by a process of its own for each arm."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import infoflow_kv
from infoflow_kv.benchmark.arms import PLAIN, Arm, make_arms
from infoflow_kv.benchmark.children import last_object, last_words
from infoflow_kv.benchmark.context import Request, Setting
from infoflow_kv.benchmark.timing import OnStep, Timed, measure, tidy
from infoflow_kv.benchmark.work import shape_of
from infoflow_kv.errors import ComputeError
from infoflow_kv.methods import find_method
from infoflow_kv.store import DiskStore

CHILD = "infoflow_kv.benchmark.one_request"


def measure_memory(
    setting: Setting,
    tokens: int,
    methods: Sequence[str] = ("infoflow",),
    budgets: Sequence[float] = (0.15,),
    *,
    scratch: Path | None = None,
    timeout_seconds: float = 3600,
    on_step: OnStep | None = None,
) -> list[dict[str, Any]]:
    """One record per arm: peak memory above what was resident just before the request, in bytes.

    The child loads the model and touches all weights with a short request first, so that they are resident; where the
    system allows, the high-water mark is then set back (`peak_is_reset`). On a GPU it is the allocator's peak. Warm
    disk for arms that reuse. ComputeError, with its last words, where a child fails.
    """
    arms = make_arms(methods, budgets, ("warm-disk",))
    request, shape = setting.request(tokens), shape_of(setting.model)
    with tempfile.TemporaryDirectory(prefix="infoflow-bench-", dir=scratch) as folder:
        store = Path(folder) / "kv"
        needy = [arm.method for arm in arms if arm != PLAIN and find_method(arm.method).needs]
        setting.engine(DiskStore(store), (needy or ["infoflow"])[0]).add(request.documents)
        runs = {arm.name: _child(setting, request, arm, store, Path(folder), timeout_seconds) for arm in arms}
        # The first run of a process is all there is: nothing to warm up.
        timed = measure(
            runs, setting.repeats, 0, seconds_of=lambda found: float(found["request_seconds"]), on_step=on_step
        )
    kv_bytes = request.prompt.context_tokens * shape.kv_bytes_per_token
    return [_record(setting, request, arm, timed[arm.name], kv_bytes) for arm in arms]


def _record(
    setting: Setting, request: Request, arm: Arm, timed: Timed[dict[str, Any]], kv_bytes: int
) -> dict[str, Any]:
    above = Timed(tuple(float(found["above_bytes"]) for found in timed.results), timed.results)
    last = timed.results[-1]
    return setting.described("memory", request) | {
        "arm": arm.method,
        "budget": arm.budget,
        "state": arm.state,
        **above.record("above_weights_bytes"),
        "peak_bytes": last["peak_bytes"],
        "resident_before_bytes": last["before_bytes"],
        "weights_bytes": last["weights_bytes"],
        "peak_is_reset": last["peak_is_reset"],
        "kv_bytes": kv_bytes,
        "times_kv": tidy(above.median / kv_bytes),
        # A request cannot do with less than its own context.
        "ideal_bytes": kv_bytes,
        "environment": dict(setting.environment),
    }


def _child(
    setting: Setting, request: Request, arm: Arm, store: Path, folder: Path, timeout_seconds: float
) -> Callable[[], dict[str, Any]]:
    job = {
        "model": setting.model_name or setting.model.name,
        "dtype": str(setting.model.dtype).removeprefix("torch."),
        "device": str(setting.model.device),
        "threads": torch.get_num_threads(),
        "chunk_tokens": setting.chunk_tokens,
        "question": setting.question,
        "documents": [asdict(document) for document in request.documents],
        "token_ids": list(request.prompt.token_ids) if arm == PLAIN else None,
        "store": str(store) if arm.state is not None else None,
        "method": arm.method,
        "budget": arm.budget,
    }
    path = folder / f"{len(list(folder.glob('*.json')))}.json"
    path.write_text(json.dumps(job), encoding="utf-8")

    def run() -> dict[str, Any]:
        return run_child([sys.executable, "-m", CHILD, str(path)], arm.name, timeout_seconds)

    return run


def run_child(command: Sequence[str], name: str, timeout_seconds: float) -> dict[str, Any]:
    """The JSON object in the last line of the command's stdout; ComputeError with the end of its stderr otherwise."""
    source = str(Path(infoflow_kv.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=os.environ | {"PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired:
        raise ComputeError(f"the process of {name} did not end in {timeout_seconds:g} seconds") from None
    found = last_object(done.stdout) if done.returncode == 0 else None
    if found is None:
        raise ComputeError(f"the process of {name} ended with exit code {done.returncode}: {last_words(done.stderr)}")
    return found

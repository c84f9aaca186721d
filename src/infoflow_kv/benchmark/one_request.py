"""The child process of `memory`: loads the model, runs one request, tells its peak memory as one JSON line.

python -m infoflow_kv.benchmark.one_request JOB.json
"""

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infoflow_kv.benchmark.arms import plain_of, run_plain
from infoflow_kv.engine import Engine
from infoflow_kv.models import LanguageModel, load, quiet_transformers
from infoflow_kv.records import Document
from infoflow_kv.store import DiskStore

WARM_UP = "The harbour office keeps a book of every ship that came in. " * 8


def main(path: str) -> None:
    """Nothing; the record is on stdout."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    quiet_transformers()
    model = load(job["model"], dtype=job["dtype"], device=job["device"])
    run = request_of(job, model)
    # Weights are mapped from their file and become resident when they are first read.
    Engine(model, None, method="full").answer("What is kept?", [WARM_UP], max_new_tokens=1)
    sys.stdout.write(json.dumps(watched(run, model)) + "\n")


def request_of(job: dict[str, Any], model: LanguageModel) -> Callable[[], object]:
    """The one request, ready to run."""
    if job["token_ids"] is not None:
        plain = plain_of(model)
        return lambda: run_plain(plain, job["token_ids"])
    store = DiskStore(job["store"]) if job["store"] is not None else None
    budget = 1.0 if job["budget"] is None else job["budget"]
    engine = Engine(model, store, method=job["method"], budget=budget, chunk_tokens=job["chunk_tokens"])
    documents = [Document(**fields) for fields in job["documents"]]
    return lambda: engine.answer(job["question"], documents, max_new_tokens=1)


def watched(run: Callable[[], object], model: LanguageModel) -> dict[str, Any]:
    """Memory in bytes before and at the peak of `run`."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
        before, is_reset = torch.cuda.memory_allocated(model.device), True
    else:
        is_reset = reset_peak()
        before = resident_bytes() or peak_bytes()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(model.device) if on_gpu else peak_bytes()
    weights = {p.data_ptr(): p.nbytes for p in model.plain().parameters()}
    return {
        "before_bytes": before,
        "peak_bytes": peak,
        "above_bytes": max(0, peak - before),
        "peak_is_reset": is_reset,
        "weights_bytes": sum(weights.values()),
        "request_seconds": seconds,
    }


def reset_peak() -> bool:
    """Whether the system's high-water mark of this process starts anew from now (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return True
    return False


def resident_bytes() -> int:
    """Bytes resident now; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    return 0


def peak_bytes() -> int:
    """The most that was resident; kilobytes on Linux, bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(sys.argv[1])

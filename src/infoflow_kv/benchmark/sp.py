"""Sequence parallelism, measured: a request over several processes of this machine, links as slow as wanted.

The links between namespaces are scaled to the processor: bytes per second in the proportion to this machine's FLOP/s in
which a real link stands to a GPU's. Compute and traffic then weigh about as they would there.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from infoflow_kv.benchmark.children import last_words
from infoflow_kv.benchmark.links import Links, links, missing
from infoflow_kv.benchmark.sp_job import SpJob
from infoflow_kv.benchmark.timing import tidy
from infoflow_kv.errors import ComputeError, OptionError, unknown_name
from infoflow_kv.parallel.cost import LINKS
from infoflow_kv.parallel.cost_tables import paper_machine

# A product of the shapes of a decoder layer; float32 or bfloat16 as the job's.
_RATE_PROGRAM = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[2]))
dtype = getattr(torch, sys.argv[1])
a, b = torch.rand(512, 1024, dtype=dtype), torch.rand(1024, 3072, dtype=dtype)
with torch.inference_mode():
    end, done, start = time.monotonic() + 2.5, 0, 0.0
    while time.monotonic() < end:
        if not start and time.monotonic() > end - 2.0:
            start, done = time.monotonic(), 0
        a @ b
        done += 1
print(2 * 512 * 1024 * 3072 * done / (time.monotonic() - start))
"""


def rank_flops(ranks: int, dtype: str, threads: int) -> float:
    """FLOP/s of one rank in matrix products while all of them compute."""
    command = [sys.executable, "-c", _RATE_PROGRAM, dtype, str(threads)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(ranks)]
    return statistics.mean(float(one.communicate()[0]) for one in started)


def scaled_bits_per_second(link: str, flops: float, itemsize: int) -> float:
    """The rate that stands to `flops` as the named link does to a GPU of the paper's, for values of `itemsize` bytes
    where the GPU has 2. OptionError for an unknown link."""
    known = {one.name.casefold().replace(" ", "-"): one for one in LINKS}
    found = known.get(link.casefold())
    if found is None:
        raise unknown_name("link", link, known)
    return 8 * found.bytes_per_second * flops / paper_machine().linear_flops * itemsize / 2


def measure_sp(
    job: SpJob,
    ranks: int,
    link: str | None = None,
    on_step: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """One record per arm: TTFT from the request on all ranks to the first token on rank 0, stages, bytes by phase. Arms
    that so many ranks or the model do not allow are left out, which `on_note` is told.

    `link`: a link's name, to which the ranks' links are scaled; None: the loopback. OptionError where links cannot be
    made here, ComputeError where a rank fails.
    """
    say = on_step or (lambda _: None)
    if link is not None and (why := missing()) is not None:
        raise OptionError(f"links of a chosen speed cannot be made here: {why}; leave --link out")
    flops = rate = 0.0
    if link is not None:
        say("measuring this machine's rate")
        flops = rank_flops(ranks, job.dtype, job.threads)
        rate = scaled_bits_per_second(link, flops, 2 if job.dtype != "float32" else 4)
    path, who = Path(job.folder) / f"job{ranks}.json", f"{ranks} rank{'s' * (ranks > 1)}"
    job.write(path)
    with nullcontext() if link is None else links(ranks, f"{int(rate)}bit") as made:
        say(who + (f", links of {rate / 1e6:.1f} Mbit/s" if link else ""))
        seen = run_ranks(path, ranks, made, job, free_port())
    for label, reason in seen[0]["left_out"].items():
        (on_note or say)(f"{who}, {label} is left out: {reason}")
    return [
        record(job, ranks, seen, label)
        | {"link": link, "link_mbit": tidy(rate / 1e6), "rank_gflops": tidy(flops / 1e9)}
        for label in seen[0]["arms"]
    ]


def run_ranks(path: Path, ranks: int, made: Links | None, job: SpJob, port: int) -> list[dict[str, Any]]:
    """What each rank saw; ComputeError with the first complaint where one failed."""
    started: list[subprocess.Popen[str]] = []
    logs = [path.with_suffix(f".{rank}.log") for rank in range(ranks)]
    streams = ExitStack()
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", "infoflow_kv.benchmark.sp_rank", str(path)]
            started.append(
                subprocess.Popen(
                    command if made is None else made.command(rank, command),
                    env={**os.environ, **variables(rank, ranks, made, port), "OMP_NUM_THREADS": str(job.threads)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=streams.enter_context(logs[rank].open("w", encoding="utf-8")),
                    text=True,
                )
            )
        while any(one.poll() is None for one in started):
            if any(one.poll() not in (None, 0) for one in started):
                time.sleep(5)  # the others notice, and say why
                break
            time.sleep(0.2)
        failed = [rank for rank, one in enumerate(started) if one.poll() not in (None, 0)]
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()
            one.wait()
        streams.close()
    if failed:
        said = {rank: last_words(logs[rank].read_text(encoding="utf-8")) for rank in failed}
        # Of the others it is only known that they lost one.
        first = next((rank for rank, words in said.items() if "ParallelError" not in words), failed[0])
        raise ComputeError(f"rank {first} of {ranks} failed: {said[first]}")
    folder = path.parent
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def variables(rank: int, ranks: int, made: Links | None, port: int) -> Mapping[str, str]:
    """What `Group.join` needs."""
    if made is not None:
        return made.environment(rank, port)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {key: str(value) for key, value in place.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def record(job: SpJob, ranks: int, seen: Sequence[dict[str, Any]], label: str) -> dict[str, Any]:
    """The record of one arm."""
    arm = next(arm for arm in job.arms if arm.label == label)
    own = [one["arms"][label] for one in seen]
    first = own[0]["rounds"]
    seconds = [one["seconds"] for one in first]
    middle = statistics.median(seconds)
    counted = max((one.get("sent_bytes") or {} for one in own), key=lambda sent: sum(sent.values()))
    tokens = {one["first_token"] for rank in own for one in rank["rounds"]}
    if len(tokens) != 1:
        raise ComputeError(f"ranks or rounds of {label} gave different first tokens: {sorted(tokens)}")
    return {
        "benchmark": "sp",
        "model": job.model,
        "dtype": job.dtype,
        "device": job.device,
        "threads": job.threads,
        "ranks": ranks,
        "chunk_tokens": job.chunk_tokens,
        **seen[0]["prompt"],
        "arm": label,
        "layout": first[0]["layout"],
        "cached": arm.cached,
        "budget": None if arm.name != "infoflow" else arm.budget,
        "repeats": job.repeats,
        "ttft_seconds_median": tidy(middle),
        "ttft_seconds": seconds,
        "spread": tidy((max(seconds) - min(seconds)) / middle),
        "stages": {name: tidy(statistics.median(one["stages"][name] for one in first)) for name in first[0]["stages"]},
        "first_token": tokens.pop(),
        "recomputed_tokens": first[0]["recomputed_tokens"],
        # Of the rank that sends most.
        "sent_bytes": sum(counted.values()) if job.counts else None,
        "sent_bytes_by_phase": counted if job.counts else None,
        "interface_bytes": max(turn["interface_bytes"] for one in own for turn in one["rounds"]),
    }


def measure_all(
    job: SpJob,
    ranks: Sequence[int],
    link: str | None,
    on_step: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """The records of each number of ranks, one after the other as they are measured, each in a folder of its own."""
    for size in ranks:
        with tempfile.TemporaryDirectory(prefix="sp-", dir=job.folder or None) as folder, cleaned_when_terminated():
            found = measure_sp(replace(job, folder=folder), size, link, on_step, on_note)
        yield found


@contextmanager
def cleaned_when_terminated() -> Iterator[None]:
    """While it lasts, SIGTERM unwinds the stack, so that ranks and namespaces go too; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

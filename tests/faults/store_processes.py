"""Plays several processes on one store and prints as JSON what happened: `store_processes.py DISK MEMORY`.

torch is imported once, here; the processes are forks, so that forty kills take seconds.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

import torch
from store_chunks import make_chunk, make_identity, same_bits

from infoflow_kv.store import DiskStore, key, verify

CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "lstat", "listdir")


def fork(work: Callable[[], object]) -> int:
    """The id of a child that does the work and ends; status 1 if it raised."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def wait(child: int) -> int:
    """0, an exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_random(root: Path, kills: int) -> dict[str, Any]:
    """A writer is killed at a random moment, `kills` times; what it had reported as stored must be there and sound."""
    identities = [make_identity(tokens=1500, first=n) for n in range(6)]
    chunks = [make_chunk(identity, seed=n) for n, identity in enumerate(identities)]
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    draw = random.Random(0)
    acknowledged: set[str] = set()
    problems, leftovers, cut_short = [], 0, 0
    for kill in range(kills):

        def write(kill: int = kill) -> None:
            store = DiskStore(root)
            for n in itertools.count(kill):
                chunk = chunks[n % len(chunks)]
                store.put(chunk)
                os.write(write_end, key(chunk.identity).encode())

        child = fork(write)
        time.sleep(draw.uniform(0.001, 0.06))
        os.kill(child, signal.SIGKILL)
        if wait(child) != -signal.SIGKILL:
            problems.append("the writer ended by itself")
        try:
            while reports := os.read(read_end, 64 * 64):
                acknowledged |= {reports[i : i + 64].decode() for i in range(0, len(reports), 64)}
        except BlockingIOError:
            pass
        if (root / "infoflow-store.json").exists():
            report = verify(root)
            problems += [f"{name}: {reason}" for name, reason in report.damaged + report.unreadable]
            problems += [f"{name} was lost" for name in sorted(acknowledged - set(DiskStore(root).keys()))]
            now = len(os.listdir(root / "tmp")) if (root / "tmp").is_dir() else 0
            cut_short += now > leftovers
            leftovers = now
    store = DiskStore(root)
    problems += [
        f"{name} is another chunk"
        for name, chunk in ((key(c.identity), c) for c in chunks)
        if name in acknowledged and not same_bits(store.get(chunk.identity), chunk)
    ]
    return {"acknowledged": len(acknowledged), "problems": problems, "leftovers": leftovers, "cut_short": cut_short}


def kill_at_each_call(root: Path) -> dict[str, Any]:
    """The writer is killed before and after its first, second, … call to the system, on a store with an old chunk."""
    identity = make_identity()
    old, new = make_chunk(identity, seed=1), make_chunk(identity)
    problems: list[str] = []
    runs = 0
    for prepared in (False, True):
        for after in (False, True):
            for nth in range(1, 100):
                place = root / f"{prepared}-{after}-{nth}"
                if prepared:
                    DiskStore(place).put(old)

                def write(place: Path = place, nth: int = nth, after: bool = after) -> None:
                    count = 0

                    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
                        def call(*args: Any, **options: Any) -> Any:
                            nonlocal count
                            count += 1
                            dies = count == nth
                            if dies and not after:
                                os.kill(os.getpid(), signal.SIGKILL)
                            result = real(*args, **options)
                            if dies:
                                os.kill(os.getpid(), signal.SIGKILL)
                            return result

                        return call

                    for name in CALLS:
                        setattr(os, name, wrap(getattr(os, name)))
                    DiskStore(place).put(new)

                status = wait(fork(write))
                if status == 0:
                    break
                runs += 1
                if status != -signal.SIGKILL:
                    problems.append(f"{place.name} ended with {status}")
                store = DiskStore(place)  # a killed start must not lock the folder
                found = store.get(identity)
                if not (same_bits(found, new) or (same_bits(found, old) if prepared else found is None)):
                    problems.append(f"{place.name} holds something else")
                if store.counters.damaged:
                    problems.append(f"{place.name} is damaged")
                store.put(new)
                if not same_bits(store.get(identity), new):
                    problems.append(f"{place.name} cannot be written again")
    return {"runs": runs, "problems": problems}


def write_the_same(root: Path, processes: int) -> dict[str, Any]:
    """Every process writes and reads the same chunks at once, from the making of the folder on."""
    chunks = [make_chunk(make_identity(tokens=40, first=n), seed=n) for n in range(12)]
    start = time.monotonic() + 0.2

    def work(seed: int) -> None:
        while time.monotonic() < start:
            pass
        store = DiskStore(root)
        for round_ in range(4):
            for chunk in random.Random(round_ * 100 + seed).sample(chunks, len(chunks)):
                store.put(chunk)
                assert same_bits(store.get(chunk.identity), chunk)
        assert store.counters.damaged == store.counters.read_failures == 0

    children = [fork(lambda seed=seed: work(seed)) for seed in range(processes)]  # type: ignore[misc]
    statuses = [wait(child) for child in children]
    report = verify(root)
    return {
        "statuses": statuses,
        "sound": report.sound,
        "chunks": report.chunks,
        "tmp": os.listdir(root / "tmp"),
        "other": sorted(name for name in os.listdir(root) if len(name) != 2),
    }


def keep_within_limit(root: Path, processes: int) -> dict[str, Any]:
    """Every process writes ten times the limit; the folder is measured all the while."""
    limit, tokens = 400_000, 200
    size = 16_384  # of one file, in blocks

    def work(seed: int) -> None:
        for start in range(0, 120, 60):  # with a restart
            store = DiskStore(root, max_bytes=limit)
            for n in range(start, start + 60):
                chunk = make_chunk(make_identity(tokens=tokens, first=1000 * seed + n), seed=n)
                store.put(chunk)
                found = store.get(chunk.identity)
                assert found is None or same_bits(found, chunk)  # the other may have evicted it
            assert store.counters.damaged == store.counters.read_failures == 0

    children = {fork(lambda seed=seed: work(seed)) for seed in range(processes)}  # type: ignore[misc]
    peak, statuses = 0, []
    while children:
        used: dict[int, int] = {}  # by inode: a file may get its name while we walk
        for folder, _, names in os.walk(root):
            for name in names:
                try:
                    info = os.lstat(os.path.join(folder, name))
                    used[info.st_ino] = info.st_blocks * 512
                except FileNotFoundError:
                    pass
        peak = max(peak, sum(used.values()))
        time.sleep(0.005)
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.remove(child)
            statuses.append(os.waitstatus_to_exitcode(status))
    report = verify(root)
    return {"statuses": statuses, "peak": peak, "limit": limit, "size": size, "chunks": report.chunks} | {
        "sound": report.sound
    }


def read_while_evicted(root: Path) -> dict[str, Any]:
    """One process reads, one deletes, one writes: a read gives the right bytes or a miss."""
    chunks = [make_chunk(make_identity(tokens=300, first=n), seed=n) for n in range(5)]
    stop = time.monotonic() + 1.0
    DiskStore(root)

    def write() -> None:
        store, draw = DiskStore(root), random.Random(1)
        while time.monotonic() < stop:
            store.put(draw.choice(chunks))

    def delete() -> None:
        store, draw = DiskStore(root), random.Random(2)
        while time.monotonic() < stop:
            store.delete(key(draw.choice(chunks).identity))

    children = [fork(write), fork(delete)]
    store, draw, wrong = DiskStore(root), random.Random(3), 0
    while time.monotonic() < stop:
        chunk = draw.choice(chunks)
        found = store.get(chunk.identity)
        wrong += found is not None and not same_bits(found, chunk)
    statuses = [wait(child) for child in children]
    counters = store.counters
    bad = counters.damaged + counters.read_failures
    return {"statuses": statuses, "wrong": wrong, "bad": bad, "hits": counters.hits, "misses": counters.misses}


def main() -> None:
    torch.set_num_threads(1)
    disk, memory = map(Path, sys.argv[1:])
    results = {
        "kill_at_random": kill_at_random(disk / "kv", kills=40),
        "kill_at_each_call": kill_at_each_call(memory / "each"),
        "write_the_same": write_the_same(memory / "same", processes=4),
        "keep_within_limit": keep_within_limit(memory / "limit", processes=2),
        "read_while_evicted": read_while_evicted(memory / "evicted"),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""Links of a chosen speed: what the kernel counts there is what we count, and nothing stays behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import free_port

import infoflow_kv
from infoflow_kv.benchmark.links import links, missing
from infoflow_kv.errors import OptionError
from infoflow_kv.parallel.counting import ByteCounter
from infoflow_kv.parallel.group import Group

needs_links = pytest.mark.skipif(missing() is not None, reason=f"no links here: {missing()}")
ROWS = 4096


def own_namespaces() -> list[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in shown.splitlines() if line.startswith(f"ifkv{os.getpid()}")]


@needs_links
def test_the_kernel_counts_what_we_count() -> None:
    """An uneven all-gather, an all-to-all and a shift over 100 Mbit/s: bytes within 2 % and some KB, and the time."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(infoflow_kv.__file__).parents[1])}
    port = free_port()
    with links(2, "100mbit") as made:
        processes = [
            subprocess.Popen(
                made.command(rank, [sys.executable, __file__, made.interfaces[rank]]),
                env={**variables, **made.environment(rank, port)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        results = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert all(made.sent_bytes(rank) >= results[rank]["sent"] for rank in range(2))
    assert own_namespaces() == []
    for rank, result in enumerate(results):
        rows = (ROWS, ROWS // 2)[rank]
        assert result["counted"] == {"gather": rows * 256, "rest": ROWS // 2 * 256 + 4 * ROWS // 8}
        counted = sum(result["counted"].values())
        assert counted <= result["sent"] <= 1.02 * counted + 20_000
        # The bucket of 256 KB goes at once, the rest at the rate.
        assert result["seconds"] > (counted - 256 * 1024) * 8 / 100e6 * 0.9


@needs_links
def test_nothing_stays_behind() -> None:

    def fails() -> None:
        with links(2, None) as made:
            assert sorted(own_namespaces()) == sorted([*made.namespaces, f"ifkv{os.getpid()}s"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert own_namespaces() == []
    with pytest.raises(OptionError, match="failed: .*rate as tc writes it"), links(1, "fast"):
        pass
    assert own_namespaces() == []


def test_numbers_out_of_range() -> None:
    for ranks in (0, 251):
        with pytest.raises(OptionError, match="from 1 to 250"), links(ranks, None):
            pass


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "only root may make network namespaces"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert missing() == "the program 'ip' is not installed (package iproute2)"


def one_rank(interface: str) -> dict[str, Any]:
    """Runs on the rank's side of its link."""
    counter_file = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    with Group.join(60.0) as group:
        rows = torch.ones((ROWS, ROWS // 2)[group.rank], 64)
        with ByteCounter(group):  # what it imports, it imports now
            group.world.agree("warm")
            group.world.shift(torch.ones(1), (1,)).wait()
        before, start = int(counter_file.read_text()), time.perf_counter()
        with ByteCounter(group) as counter:
            with group.phase("gather"):
                group.world.all_gather(rows, [ROWS, ROWS // 2])
            with group.phase("rest"):
                half = torch.ones(ROWS, 64)
                group.world.all_to_all(half, [ROWS // 2] * 2, [ROWS // 2] * 2)
                group.world.shift(torch.ones(ROWS // 8), (ROWS // 8,)).wait()
        seconds = time.perf_counter() - start
        time.sleep(0.2)  # acknowledgements
        sent = int(counter_file.read_text()) - before
    return {"counted": counter.by_phase(), "sent": sent, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(one_rank(sys.argv[1])))

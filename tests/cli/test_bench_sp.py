"""`infoflow-kv bench sp`: the cost model's tables, and ranks that are really measured."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runs import Cli, environment, save_model, write_documents

from infoflow_kv.benchmark.sp_job import SpJob
from infoflow_kv.errors import ComputeError
from infoflow_kv.parallel.group import REQUEST_PHASES


def test_json_gives_the_records_of_all_three_tables(cli: Cli) -> None:
    result = cli("bench", "sp", "--model-only", "--json")
    assert result.code == 0, result.err
    parts = [r["part"] for r in result.records]
    assert list(dict.fromkeys(parts)) == ["table5", "bytes_and_ratios", "break_even"]
    assert all(r["benchmark"] == "sp" and r["modelled"] for r in result.records)
    longest = max((r for r in result.records if r["part"] == "table5"), key=lambda r: r["tokens"])
    assert longest["paper_one_gpu_seconds"] == 3.1905
    assert longest["one_gpu_seconds"] == pytest.approx(3.1905, rel=0.01)
    assert {r["link"] for r in result.records if r["part"] == "break_even"} >= {"NVLink", "100GbE"}


def test_tables_and_a_file_of_records(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "new" / "sp.jsonl"
    result = cli("bench", "sp", "--model-only", "--out", out)
    assert result.code == 0, result.err
    for words in ("paper, ring", "better: cached", "H or HQ, GB", "400G InfiniBand", "balanced ring"):
        assert words in result.out
    [row] = [line for line in result.out.splitlines() if line.strip().startswith("32K")]
    assert row.split()[1:7] == ["3,190.5", "2,350.1", "914.0", "3,181", "997", "768"]
    kept = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert kept == cli("bench", "sp", "--model-only", "--json").records


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arms", "rings"), "unknown arm 'rings'; did you mean 'ring'?"),
        (("--layouts", "Z"), "unknown layout 'z'"),
        (("--ranks", "0"), "--ranks 0: at least 1 is needed"),
        (("--states", "warm"), "--states 'warm': expected cached, cold or both"),
        (("--device", "tpu"), "--device 'tpu': expected cpu"),
        (("--model-only", "--ranks-of-nothing"), "no such option"),
        (("--model-only", "--out", "/dev/null/x"), "--out '/dev/null/x' cannot be written"),
    ],
)
def test_bad_options_are_one_line(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    result = cli("bench", "sp", *arguments)
    assert (result.code, result.out) == (2, "")
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    assert words in errors[0].casefold()


def test_help_has_examples(cli: Cli) -> None:
    result = cli("bench", "sp", "--help")
    assert result.code == 0
    assert "infoflow-kv bench sp --model-only" in result.out
    assert " sp " in cli("bench", "--help").out


def test_ranks_are_measured_and_what_they_send_is_counted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes; one layer in the shape of a known model, random weights."""
    monkeypatch.delenv("INFOFLOW_CACHE")  # the embedded model, whose tokenizer it takes, is there already
    result = cli(
        "bench", "sp", "--ranks", "2", "--tokens", "700", "--model", "shape:qwen3-0.6b:1", "--repeats", "1",
        "--arms", "ring,infoflow", "--layouts", "H", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    ring, ours = result.records
    assert (ring["arm"], ours["arm"]) == ("ring", "infoflow@0.15 H, cached")
    assert ring["context_tokens"] == ours["context_tokens"] and ours["layout"] == "H"
    assert 0 < ours["recomputed_tokens"] < ours["context_tokens"] / 5
    assert ours["sent_bytes"] == sum(ours["sent_bytes_by_phase"].values()) > 0
    assert "move" not in ours["sent_bytes_by_phase"], "each rank takes its own heads from the store"
    assert min(ring["ttft_seconds_median"], ours["ttft_seconds_median"]) > 0


@pytest.fixture
def request_of_few_tokens(tmp_path: Path) -> tuple[object, ...]:
    """Options: a tiny model with two K/V heads, short documents, one round."""
    documents = write_documents(tmp_path / "docs", *(f"Boat {n} carries {3 * n} nets." for n in range(9)))
    return (
        "--model", save_model(tmp_path / "model"), "--documents", documents, "--question", "What does boat 3 carry?",
        "--tokens", "120", "--chunk-tokens", "24", "--repeats", "1", "--arms", "ring,gather,infoflow",
    )  # fmt: skip


def test_arms_that_the_ranks_do_not_allow_are_left_out(cli: Cli, request_of_few_tokens: tuple[object, ...]) -> None:
    """One rank: plain full prefill, once, and one layout. Two: H exists, HQ does not. All of them, cold."""
    result = cli(
        "bench", "sp", "--ranks", "1,2", "--layouts", "Q,H,HQ", "--states", "cold", "--json", *request_of_few_tokens
    )
    assert result.code == 0, result.err
    by_ranks = {n: {r["arm"]: r for r in result.records if r["ranks"] == n} for n in (1, 2)}
    assert list(by_ranks[1]) == ["ring", "infoflow@0.15 Q"]
    assert by_ranks[1]["ring"]["layout"] is None
    assert [r["sent_bytes"] for r in by_ranks[1].values()] == [0, 0]
    assert list(by_ranks[2]) == ["ring", "gather", "infoflow@0.15 Q", "infoflow@0.15 H"]
    assert "move" in by_ranks[2]["infoflow@0.15 H"]["sent_bytes_by_phase"]
    # Full prefill has the same first token by one rank, by a ring, and by gathering; nothing but phases is counted.
    assert len({r["first_token"] for r in result.records if "infoflow" not in r["arm"]}) == 1
    for record in by_ranks[2].values():
        assert set(record["sent_bytes_by_phase"]) <= set(REQUEST_PHASES)
    assert "1 rank, gather is left out: with 1 rank it is the same as ring" in result.err
    assert "2 ranks, infoflow@0.15 HQ is left out: layout HQ does not exist for 2 ranks" in result.err


def test_no_arm_at_all_is_an_error(cli: Cli, request_of_few_tokens: tuple[object, ...]) -> None:
    result = cli("bench", "sp", "--ranks", "2", "--layouts", "HQ", *request_of_few_tokens, "--arms", "infoflow")
    assert (result.code, result.out) == (2, "")
    assert "nothing was measured: neither the model nor the ranks allow any of these arms" in result.err


def test_joined_documents_give_chunks_of_the_length_asked_for(
    cli: Cli, request_of_few_tokens: tuple[object, ...]
) -> None:
    chunks, tokens = [], []
    for more in ((), ("--join",)):
        result = cli(
            "bench", "sp", "--ranks", "1", "--json", "--no-count", *request_of_few_tokens, "--arms", "ring",
            "--chunk-tokens", "60", *more,
        )  # fmt: skip
        assert result.code == 0, result.err
        chunks.append(result.record["chunks"])
        tokens.append(result.record["context_tokens"])
    assert abs(tokens[0] - tokens[1]) <= 20
    assert chunks[0] > 3 >= chunks[1], chunks


def test_what_was_measured_before_a_failure_is_kept(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request_of_few_tokens: tuple[object, ...]
) -> None:
    def measure(job: SpJob, ranks: int, *rest: object) -> list[dict[str, object]]:
        if ranks == 4:
            raise ComputeError("rank 3 of 4 failed: out of memory")
        return [{"ranks": ranks}]

    monkeypatch.setattr("infoflow_kv.benchmark.sp.measure_sp", measure)
    out = tmp_path / "sp.jsonl"
    result = cli("bench", "sp", "--ranks", "1,2,4", "--out", out, *request_of_few_tokens)
    assert result.code == 1
    assert "rank 3 of 4 failed: out of memory" in result.err
    assert [json.loads(line)["ranks"] for line in out.read_text(encoding="utf-8").splitlines()] == [1, 2]


def test_sigterm_ends_the_ranks_too(tmp_path: Path, request_of_few_tokens: tuple[object, ...]) -> None:
    """Whoever stops a measurement finds no process and no folder of it left."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "infoflow_kv", "bench", "sp", "--ranks", "2", "--scratch", str(scratch)]
    # More rounds than can be done meanwhile.
    command += [*map(str, request_of_few_tokens), "--repeats", "1000000"]
    process = subprocess.Popen(
        command, env=environment(tmp_path / "cache"), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(scratch.glob("sp-*/job2.1.log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    assert len(children) >= 2
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(scratch.iterdir()) == []
    assert not any(Path(f"/proc/{child}").exists() for child in children)

"""`infoflow-kv bench sp`: the cost model's tables, and ranks that are really measured."""

import json
from pathlib import Path

import pytest
from cli_runs import Cli


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

"""Each benchmark gives its records, with all their fields and with numbers that hang together; times are not judged."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infoflow_kv.benchmark.arms import Arm, make_arms
from infoflow_kv.benchmark.attention import AttentionShape, draw_ranks, measure_attention
from infoflow_kv.benchmark.ceilings import Ceilings, measure_ceilings
from infoflow_kv.benchmark.children import last_words
from infoflow_kv.benchmark.context import Setting
from infoflow_kv.benchmark.decode import measure_decode
from infoflow_kv.benchmark.ingest import measure_ingest
from infoflow_kv.benchmark.memory import measure_memory, run_child
from infoflow_kv.benchmark.ttft import measure_ttft
from infoflow_kv.benchmark.work import Work, shape_of
from infoflow_kv.errors import ComputeError, OptionError
from tolerance import KERNEL

COMMON = {"benchmark", "model", "dtype", "device", "threads", "repeats", "environment", "arm"}
REQUEST = {"context_tokens", "prompt_tokens", "chunks", "token_ids_sha256"}


def numbers(record: Any) -> list[float]:
    """All numbers of a record, however deep."""
    if isinstance(record, dict):
        return [n for value in record.values() for n in numbers(value)]
    if isinstance(record, list):
        return [n for value in record for n in numbers(value)]
    return [float(record)] if isinstance(record, (int, float)) else []


def checked(records: list[dict[str, Any]], fields: set[str]) -> dict[str, dict[str, Any]]:
    """The records by arm, state and budget; each is JSON with these fields and finite numbers."""
    for record in records:
        assert fields <= set(record), fields - set(record)
        assert all(math.isfinite(number) for number in numbers(record))
        assert json.loads(json.dumps(record, allow_nan=False)) == record
    return {Arm(r["arm"], r.get("budget"), r.get("state")).name: r for r in records}


def test_ttft(setting: Setting, small: dict[str, int], scratch: Path) -> None:
    records = measure_ttft(
        setting,
        250,
        ["none", "infoflow", "influence", "cacheblend", "first-k"],
        [0.15, 0.3],
        ["warm-disk", "warm-memory", "cold"],
        scratch=scratch,
        ceiling_sizes=small,
    )
    found = checked(
        records,
        COMMON
        | REQUEST
        | {
            "ttft_seconds",
            "ttft_seconds_median",
            "spread",
            "times_sooner_than_full",
            "times_sooner_than_plain",
            "stages",
        }
        | {"ideal_times_sooner", "ideal_seconds_at_full_rate", "ideal_seconds_at_ceilings", "mean_rank", "work"}
        | {"rows_per_layer", "kv_bytes_per_token", "ceilings", "cached_chunks", "state", "budget"},
    )
    assert len(found) == len(records) == 2 + 3 * (1 + 2 + 2 + 2 + 1)
    assert len({r["token_ids_sha256"] for r in records}) == 1
    full, plain = found["full"], found["plain"]
    # Full prefill is plain Transformers' own result.
    assert full["first_token"] == plain["first_token"]
    assert full["times_sooner_than_full"] == full["ideal_times_sooner"] == 1
    total = full["context_tokens"] + full["prompt_tokens"]
    assert plain["rows_per_layer"] == total
    assert plain["work"]["pairs"] == 4 * total * (total + 1) // 2
    for name, record in found.items():
        if "warm" in name:
            assert (record["cached_chunks"], record["prefilled_tokens"]) == (record["chunks"], 0), name
            assert set(record["stages"]) == {"load", "assemble", "score", "repair", "rest"}
        if "cold" in name:
            assert (record["cached_chunks"], record["prefilled_tokens"]) == (0, record["context_tokens"]), name
            warm = found[name.replace("cold", "warm-disk")]
            assert record["work"]["row_layers"] > warm["work"]["row_layers"]
            assert record["first_token"] == warm["first_token"]
        assert len(record["ttft_seconds"]) == setting.repeats
    assert found["none (warm-disk)"]["mean_rank"] is None
    assert found["none (warm-disk)"]["work"]["row_layers"] == 3 * full["prompt_tokens"] + 1
    few, many = found["infoflow@0.15 (warm-disk)"], found["infoflow@0.3 (warm-disk)"]
    assert few["recomputed_tokens"] == round(0.15 * few["reusable_tokens"])
    assert 1 < many["ideal_times_sooner"] < few["ideal_times_sooner"]
    assert 0 < few["mean_rank"] < 1
    # Nothing is left behind.
    assert list(scratch.iterdir()) == []


def test_arms_are_the_methods_at_their_budgets_in_every_state() -> None:
    arms = make_arms(["none", "infoflow", "full"], [0.1, 0.2], ["cold", "warm-disk"])
    assert [arm.name for arm in arms] == [
        "plain",
        "full",
        "none (warm-disk)",
        "none (cold)",
        "infoflow@0.1 (warm-disk)",
        "infoflow@0.2 (warm-disk)",
        "infoflow@0.1 (cold)",
        "infoflow@0.2 (cold)",
    ]
    for methods, states in ((["infofow"], ["cold"]), (["infoflow"], ["warm"]), (["oracle"], ["cold"])):
        with pytest.raises(OptionError):
            make_arms(methods, [0.1], states)


@pytest.mark.parametrize("shape", [AttentionShape(4, 2, 16), AttentionShape(3, 3, 8)])
def test_attention(shape: AttentionShape) -> None:
    records = measure_attention(shape, 200, 50, repeats=2)
    fields = {"pairs", "pairs_per_second", "rate_ratio", "ideal_seconds", "max_error", "mean_rank", "seconds"}
    for record in records:
        assert fields <= set(record)
        assert record["max_error"] <= KERNEL[torch.float32]
    found = {record["arm"]: record for record in records}
    assert set(found) == {"causal", "even", "even-anew", "late", "late-anew"}
    assert found["causal"]["pairs"] == 200 * 201 // 2
    assert found["causal"]["rate_ratio"] == 1
    assert found["even"]["pairs"] == int((draw_ranks(50, 200, "even") + 1).sum())
    assert found["even"]["mean_rank"] < found["late"]["mean_rank"]


@pytest.mark.parametrize("skew", ["even", "late"])
@pytest.mark.parametrize("rows", [1, 30, 100])
def test_ranks_ascend_without_repetition(skew: Any, rows: int) -> None:
    ranks = draw_ranks(rows, 100, skew, seed=5)
    assert ranks.numel() == rows
    assert bool((ranks[1:] > ranks[:-1]).all())
    assert int(ranks[0]) >= 0
    assert int(ranks[-1]) < 100
    assert torch.equal(ranks, draw_ranks(rows, 100, skew, seed=5))


def test_odd_shapes_are_refused() -> None:
    with pytest.raises(OptionError, match="multiple"):
        AttentionShape(4, 3, 16)
    with pytest.raises(OptionError, match="1 to as many rows as keys"):
        draw_ranks(11, 10, "even")


def test_ingest(setting: Setting, scratch: Path) -> None:
    fields = {"tokens", "tokens_per_second", "ideal_tokens_per_second", "share_of_plain_rate", "stored_bytes", "work"}
    found = checked(measure_ingest(setting, 150, scratch=scratch), COMMON | REQUEST | fields)
    assert set(found) == {"plain", "plain-chunks", "memory", "disk", "disk-movement"}
    assert found["memory"]["work"] == found["disk"]["work"] == found["plain-chunks"]["work"]
    assert found["disk-movement"]["work"]["row_layers"] > 2 * found["disk"]["work"]["row_layers"]
    assert found["disk"]["stored_bytes"] == found["disk"]["tokens"] * found["disk"]["kv_bytes_per_token"]
    assert found["plain"]["share_of_plain_rate"] == 1
    assert list(scratch.iterdir()) == []


def test_decode(setting: Setting, small: dict[str, int]) -> None:
    fields = {"new_tokens", "tokens_per_second", "ideal_tokens_per_second", "same_ids", "read_bytes_per_token"}
    found = checked(measure_decode(setting, 150, 5, ceiling_sizes=small), COMMON | REQUEST | fields)
    assert set(found) == {"plain", "engine"}
    assert found["engine"]["same_ids"]
    with pytest.raises(OptionError, match="at least 2"):
        measure_decode(setting, 150, 1)


def test_end_tokens_do_not_end_decoding(setting: Setting, small: dict[str, int]) -> None:
    stopping = replace(setting, repeats=1)
    before = stopping.model.stop_ids
    stopping.model.stop_ids = frozenset(range(400))
    try:
        records = measure_decode(stopping, 100, 4, ceiling_sizes=small)
    finally:
        stopping.model.stop_ids = before
    assert [r["same_ids"] for r in records] == [True, True]


def test_memory(setting: Setting, tiny_folder: Path, scratch: Path) -> None:
    one = replace(setting, model_name=str(tiny_folder), repeats=1)
    fields = {"above_weights_bytes_median", "peak_bytes", "weights_bytes", "kv_bytes", "times_kv", "peak_is_reset"}
    found = checked(measure_memory(one, 150, ["infoflow"], [0.15], scratch=scratch), COMMON | REQUEST | fields)
    assert set(found) == {"plain", "full", "infoflow@0.15 (warm-disk)"}
    for record in found.values():
        assert record["peak_bytes"] >= record["above_weights_bytes_median"] >= 0
        assert record["weights_bytes"] > 0


@pytest.fixture
def tiny_folder(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    setting.model.plain().save_pretrained(folder)
    setting.model.tokenizer.save_pretrained(folder)
    return folder


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(ComputeError, match="exit code 3: .*no such weather"):
        run_child([sys.executable, "-c", "import sys; print('no such weather', file=sys.stderr); sys.exit(3)"], "a", 60)
    with pytest.raises(ComputeError, match="did not end in 0.2 seconds"):
        run_child([sys.executable, "-c", "import time; time.sleep(60)"], "a", 0.2)


def test_last_words_of_a_traceback_name_the_error() -> None:
    told = "warming up\nTraceback (most recent call last):\n  File x\nValueError: no\n"
    assert last_words(told) == "ValueError: no"
    assert last_words("one\n two\n") == "one two"
    assert last_words("") == "it said nothing"


def test_ceilings_are_rates_and_bound_seconds(setting: Setting, small: dict[str, int]) -> None:
    shape = shape_of(setting.model)
    found = measure_ceilings(setting.model, shape, **small)
    assert all(rate > 0 for rate in found.record().values())
    hand = Ceilings(1e6, 2e6, 4e6, 1e9)
    assert hand.higher(Ceilings(2e6, 1e6, 5e6, 1e8)) == Ceilings(2e6, 2e6, 5e6, 1e9)
    # One second of products, one of attention, half a second of reading and writing a million bytes.
    assert hand.seconds(shape, Work(linear_flops=10**6, attention_flops=2 * 10**6), 10**6) == pytest.approx(2.5)

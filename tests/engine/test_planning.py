"""Plans: what reuse and full prefill would take, which is picked, and that the answer is right either way."""

import json
from dataclasses import replace

import pytest
import torch

import tiny
from infoflow_kv import DiskStore, Engine, MemoryStore, speeds
from infoflow_kv.models import greedy, wrap
from infoflow_kv.planning import Load, Plan, plan_request, predict
from infoflow_kv.speeds import Speeds, find_speeds, keep_speeds, measure_speeds

TEXTS = [" ".join(f"Boat {n} of row {r} carries {n * r + 3} nets." for r in range(9)) for n in range(5)]
QUESTION = "How many nets does boat 2 of row 4 carry?"
# Rows alone cost: reuse pays. Forwards alone cost: full prefill runs one, reuse two.
ROWS_COST = Speeds(forward=0.0, row=1.0, pair=0.0, load=1e12, assemble=1e12)
FORWARDS_COST = Speeds(forward=1.0, row=1e-9, pair=0.0, load=1e12, assemble=1e12)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("INFOFLOW_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model():
    return wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")


def engine_of(model, store=None, **options):
    engine = Engine(model, store, chunk_tokens=64, **options)
    if store is not None:
        engine.add(TEXTS)
    return engine


def plan_of(engine, given=ROWS_COST):
    prompt = engine.prompt(QUESTION, TEXTS)
    return plan_request(engine.model, given, engine._supply, prompt, engine.recipe, prompt.num_tokens)


def test_a_prediction_adds_up():
    given = Speeds(forward=0.5, row=0.01, pair=1e-6, load=1e6, assemble=1e7)
    load = Load(
        context=1000, prompt=20, missing=(100,), read_bytes=2_000_000, kv_bytes=4_000_000, chosen=150, scored=0.5
    )
    plan = predict(given, load)
    prompt_pairs = 20 * 1010
    assert plan.full_seconds == pytest.approx(0.5 + 1020 * 0.01 + 1020 * 1021 / 2 * 1e-6)
    expected = 2.0 + 0.4 + (0.5 + 1.0 + 5000e-6) + 0.5 * (0.5 + 0.2 + prompt_pairs * 1e-6)
    expected += 0.5 + 1.7 + (150 * 0.75 * 1000 + prompt_pairs) * 1e-6
    assert plan.reuse_seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reuse", "full", "picks"), [(1.0, 0.85, True), (1.0, 0.91, False), (10.0, 9.6, False), (1.0, 2.0, False)]
)
def test_full_prefill_is_picked_only_where_it_is_clearly_quicker(reuse, full, picks):
    plan = Plan(reuse, full)
    assert plan.picks_full is picks
    assert plan.seconds == (full if picks else reuse)


def test_reuse_pays_where_rows_cost_and_not_where_forwards_do(model):
    engine = engine_of(model, MemoryStore())
    assert not plan_of(engine, ROWS_COST).picks_full
    assert plan_of(engine, FORWARDS_COST).picks_full


def test_a_slow_disk_counts_and_memory_does_not(model, tmp_path):
    slow = replace(ROWS_COST, load=1e3)
    assert plan_of(engine_of(model, DiskStore(tmp_path / "kv")), slow).picks_full
    assert not plan_of(engine_of(model, MemoryStore()), slow).picks_full


def test_chunks_that_are_stored_for_nobody_do_not_pay(model):
    assert plan_of(engine_of(model)).picks_full


def test_chunks_that_will_be_stored_are_no_plan(model):
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    assert plan_of(engine) is None
    engine.add(TEXTS[:-1])
    assert plan_of(engine) is None
    # The record of method influence counts as well.
    engine.add(TEXTS)
    assert plan_of(engine) is not None
    other = Engine(model, engine.store, chunk_tokens=64, method="influence")
    assert plan_of(other) is None


def test_budget_and_method_decide_the_rows(model):
    store = MemoryStore()
    small, large = (plan_of(engine_of(model, store, budget=b)).reuse_seconds for b in (0.05, 0.5))
    none, blend = (plan_of(engine_of(model, store, method=m)).reuse_seconds for m in ("none", "cacheblend"))
    assert none < small < large
    assert blend > plan_of(engine_of(model, store, method="epic")).reuse_seconds


def test_the_engine_follows_the_plan_and_says_so(model):
    keep_speeds(model, FORWARDS_COST)
    engine = engine_of(model, MemoryStore(), plans=True)
    answer = engine.answer(QUESTION, TEXTS, 3)
    assert answer.method == "full"
    assert "full prefill instead of reuse: predicted" in answer.notices[0]
    assert answer.timings.predicted_seconds == answer.timings.predicted_full_seconds > 0
    prompt = engine.prompt(QUESTION, TEXTS)
    expected = greedy(model.plain(), prompt.token_ids, 3, model.stop_ids)
    assert answer.token_ids[: len(expected.token_ids)] == expected.token_ids
    keep_speeds(model, ROWS_COST)
    answer = engine.answer(QUESTION, TEXTS, 1)
    assert (answer.method, answer.notices) == ("infoflow", ())
    assert 0 < answer.timings.predicted_seconds < answer.timings.predicted_full_seconds


def test_nothing_is_planned_unless_asked_for_and_known(model):
    keep_speeds(model, FORWARDS_COST)
    assert engine_of(model, MemoryStore()).answer(QUESTION, TEXTS, 1).method == "infoflow"
    speeds.speeds_file(model).unlink()
    answer = engine_of(model, MemoryStore(), plans=True).answer(QUESTION, TEXTS, 1)
    assert (answer.method, answer.timings.predicted_seconds) == ("infoflow", 0.0)


def test_speeds_are_measured_and_kept(model, tmp_path):
    found = measure_speeds(model, tmp_path)
    assert list(tmp_path.iterdir()) == [] or not list(tmp_path.glob("speeds-*"))
    assert found.row > 0 and found.load > 0 and found.assemble > 0 and found.forward >= 0 and found.pair >= 0
    assert found.seconds(200, 20_000) >= found.seconds(100, 5_000) > 0
    assert find_speeds(model) is None
    keep_speeds(model, found)
    assert find_speeds(model) == found
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert find_speeds(model) is None  # another number of threads is another machine
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "speeds": {"row": 1}}', '{"format": 1, "speeds": 3}']
)
def test_a_file_that_is_none_is_not_used(model, text, caplog):
    file = keep_speeds(model, ROWS_COST)
    file.write_text(text)
    assert find_speeds(model) is None
    assert "are not used" in caplog.text


def test_speeds_that_cannot_be_are_not_used(model):
    file = keep_speeds(model, ROWS_COST)
    record = json.loads(file.read_text())
    record["speeds"]["row"] = -1
    file.write_text(json.dumps(record))
    assert find_speeds(model) is None

"""Which CPU form is taken: by the rule, by the costs of a trial, and the same one for the whole process."""

import threading
from dataclasses import replace

import pytest
import torch

from infoflow_kv.ops import AttentionSpec, Staircase, quickest
from infoflow_kv.ops.products import BLOCK_ROWS
from infoflow_kv.ops.quickest import Kind
from reference.attention import attend
from tolerance import KERNEL, assert_close

KIND = Kind(contiguous=False, dtype=torch.float32, head_dim=16, group=3, kv_heads=2, threads=1)
LARGE = quickest.SMALLEST_TRIED


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(quickest, "_costs", {})


def pinned(monkeypatch, costs: dict[str, float]) -> list[Kind]:
    """The trials asked for, each of which finds `costs`."""
    asked = []
    monkeypatch.setattr(quickest, "measured", lambda kind: asked.append(kind) or costs)
    return asked


def test_few_rows_take_the_rule_without_a_trial(monkeypatch):
    asked = pinned(monkeypatch, {"pieces-64": 1.0, "products": 0.1})
    assert quickest.quickest(KIND, lambda form: 1, LARGE - 1) == "pieces-64"
    assert asked == []


@pytest.mark.parametrize(("bf16", "amx", "form"), [(0, 0, "pieces-64"), (1, 0, "products"), (1, 1, "pieces-64")])
def test_the_rule_is_products_for_bfloat16_without_amx(bf16, amx, form, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(bf16), raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(amx), raising=False)
    monkeypatch.setattr(quickest, "products_pay", quickest.products_pay.__wrapped__)
    assert quickest.by_rule(replace(KIND, dtype=torch.bfloat16)) == form
    assert quickest.by_rule(KIND) == "pieces-64"
    assert quickest.candidates(replace(KIND, dtype=torch.bfloat16))[0] == form


def test_a_cost_counts_by_the_cells_of_the_staircase_at_hand(monkeypatch):
    """Larger edges are cheaper per cell, and pay where there are rows enough."""
    pinned(monkeypatch, {"pieces-64": 1.0, "pieces-128": 0.85, "products": 2.0})
    for rows, form in ((256, "pieces-64"), (4096, "pieces-128")):
        steps = list(range(6, 7 * rows, 7))
        assert quickest.quickest(KIND, lambda form, steps=steps: quickest.cells_of(form, steps, False), LARGE) == form


def test_a_form_must_be_clearly_quicker_than_the_one_before_it(monkeypatch):
    pinned(monkeypatch, {"pieces-64": 1.0, "pieces-128": 0.96, "products": 0.94})
    assert quickest.quickest(KIND, lambda form: 1, LARGE) == "products"
    pinned(monkeypatch, {"pieces-64": 1.0, "pieces-128": 0.96})
    assert quickest.quickest(replace(KIND, threads=2), lambda form: 1, LARGE) == "pieces-64"


@pytest.mark.parametrize("form", [*quickest.EDGES, "products"])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200, 513])
def test_cells_are_rows_times_slots_of_each_block(form, rows):
    steps = list(range(3, 3 + 5 * rows, 5))
    for contiguous, largest in ((False, quickest.EDGES.get(form)), (True, quickest.CAUSAL_ROWS)):
        block = BLOCK_ROWS if form == "products" else largest
        blocks = [steps[start : start + block] for start in range(0, rows, block)]
        assert quickest.cells_of(form, steps, contiguous) == sum(len(part) * (part[-1] + 1) for part in blocks)


def test_once_chosen_it_stays_and_threads_ask_once(monkeypatch):
    asked = pinned(monkeypatch, {"pieces-64": 1.0, "products": 0.5})
    found = []
    callers = [
        threading.Thread(target=lambda: found.append(quickest.quickest(KIND, lambda form: 1, LARGE))) for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert asked == [KIND] and found == ["products"] * 8
    pinned(monkeypatch, {"pieces-64": 0.1, "products": 0.5})
    assert quickest.quickest(KIND, lambda form: 1, LARGE) == "products"
    assert list(quickest.known_costs()) == [KIND]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_trial_measures_every_candidate_and_leaves_the_random_numbers_alone(contiguous, dtype):
    kind = replace(KIND, contiguous=contiguous, dtype=dtype)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    costs = quickest.measured(kind)
    assert torch.equal(torch.rand(1), expected)
    assert tuple(costs) == quickest.candidates(kind)
    assert ("products" in costs) == (dtype != torch.float16)
    assert all(0 < cost < 1 for cost in costs.values())


@pytest.mark.parametrize("ranks", [torch.arange(700), torch.arange(0, 1400, 2)], ids=["contiguous", "selected"])
@pytest.mark.parametrize("form", ["pieces-128", "products"])
def test_a_large_staircase_is_attended_in_the_form_that_was_found(ranks, form, monkeypatch):
    monkeypatch.setattr(quickest, "SMALLEST_TRIED", 1)
    asked = pinned(monkeypatch, {"pieces-64": 1.0, form: 0.5})
    torch.manual_seed(0)
    query, keys, values = torch.randn(6, 700, 16), torch.randn(2, 1400, 16), torch.randn(2, 1400, 16)
    out = Staircase(ranks, cpu_form="auto").attend(query, keys, values, AttentionSpec(0.25))
    assert asked == [replace(KIND, contiguous=int(ranks[-1]) == 699, threads=torch.get_num_threads())]
    assert_close(out, attend(query, keys, values, ranks, AttentionSpec(0.25)), KERNEL[torch.float32])

"""Every method and setting on several ranks: the same tokens chosen as in one process, the same answer."""

from functools import cache
from typing import Any

import pytest
import torch
from many_requests import DOCUMENTS, assert_same, many
from ranks import run_ranks, thorough

from infoflow_kv.methods import METHODS

SOURCE = "tiny:qwen3"
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}
LAYOUTS: list[Any] = [thorough(2, "H"), thorough(4, "Q"), (4, [2, 2])]
BY_ALL = [{"method": name, "budget": 0.2} for name, method in METHODS.items() if not method.in_laboratory_only]
SETTINGS: list[dict[str, Any]] = [
    *BY_ALL,
    # Once more without a store: the movement is measured for this request.
    {"method": "influence", "budget": 0.3, "alone": True},
    {"method": "first-k:5"},
    {"method": "seam:3"},
    {"budget": "auto"},
    {"budget": "auto:0.5", "method": "influence"},
    {"budget": "auto:0.6", "method": "cacheblend", "budget_max": 0.5},
    *[{"budget": 0.2, "geometry": name} for name in ("HL-HP", "HL-TP", "TL-TP")],
    {"budget": 0.2, "reorder": True},
    {"budget": 0.2, "reorder": True, "geometry": "TL-TP", "method": "influence"},
    {"budget": 0.3, "chunk_floor": 0.5, "chunk_cap": 0.4},
    {"budget": 0.3, "chunk_cap": 0.3, "method": "cacheblend"},
    {"budget": 0.3, "repair_layers": "0-1"},
    {"budget": 0.3, "repair_layers": "1-2"},
    {"budget": 0.3, "repair_layers": "2-3"},
    {"budget": 0.2, "head_policy": "none"},
    {"budget": 0.3, "head_policy": "none", "method": "cacheblend-gradual"},
    {"budget": 0.3, "layers": "0,3"},
    {"budget": 0.7, "method": "cacheblend-gradual"},
    {"budget": 0.3, "documents": [*DOCUMENTS[:3], DOCUMENTS[1], DOCUMENTS[1]]},  # a document three times
]


def on_layout(layout: Any) -> list[dict[str, Any]]:
    return [{**settings, "layout": layout} for settings in SETTINGS]


@cache
def alone() -> dict[str, torch.Tensor]:
    return many(None, SOURCE, SETTINGS, SIZES)


def test_the_settings_choose_different_tokens_so_that_a_mistaken_one_would_show():
    found = alone()
    chosen = {tuple(found[f"{number}.selected"].tolist()) for number in range(len(SETTINGS))}
    assert len(chosen) > 0.6 * len(SETTINGS)
    assert any(found[f"{n}.order"].tolist() != sorted(found[f"{n}.order"].tolist()) for n in range(len(SETTINGS)))


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_every_method_chooses_and_answers_as_in_one_process(size, layout):
    requests = on_layout(layout)
    assert_same(run_ranks(many, size, SOURCE, requests, SIZES, timeout=240.0), alone(), requests)

"""Images on several ranks: budget 1 is full prefill with pixels, and less chooses and answers as in one process."""

from functools import cache
from typing import Any

import pytest
import torch
from many_requests import assert_same, engine_of, many, prompt_of
from ranks import run_ranks, thorough

import tiny_vlm
from infoflow_kv.store import DiskStore, verify
from tolerance import TINY_LOGITS, assert_close

SOURCE = "vlm:qwen3_vl"  # M-RoPE, and rows for early layers
# All but the first find their chunks in memory where tiles are the same.
REQUESTS: list[dict[str, Any]] = [
    {"budget": 1.0, "layers": "all"},
    {"budget": 0.15, "layers": "all"},
    {"budget": 0.15, "layers": "all", "tiles": 2},
    {"budget": 1.0, "layers": "all", "tiles": 2},
    {"budget": 0.3, "method": "influence", "tiles": 2},
    {"budget": 0.3, "method": "cacheblend"},
    {"budget": 0.5, "method": "cacheblend-gradual", "tiles": 2},
    {"budget": 0.4, "repair_tokens": "visual"},
    {"budget": 0.4, "repair_tokens": "text"},
    {"budget": 0.4, "reorder": True, "geometry": "TL-TP"},
    {"method": "epic", "budget": 0.3, "tiles": 2},
    {"method": "full", "baseline": "ring"},
    {"method": "full", "baseline": "gather"},
]
WHOLE = [
    number for number, one in enumerate(REQUESTS) if one["budget" if "budget" in one else "method"] in (1.0, "full")
]


@cache
def alone() -> dict[str, torch.Tensor]:
    return many(None, SOURCE, REQUESTS)


def with_pixels() -> torch.Tensor:
    """The logits behind the prompt of plain Transformers."""
    engine = engine_of(tiny_vlm.model("qwen3_vl"), {})
    prompt = prompt_of(engine, SOURCE, {})
    pictures = [one.picture for chunk in prompt.chunks if chunk.images for one in chunk.images.prepared]
    with torch.no_grad():
        given = tiny_vlm.reference_inputs("qwen3_vl", prompt.token_ids, pictures)
        logits: torch.Tensor = tiny_vlm.hf_model("qwen3_vl")(**given, use_cache=False).logits[0, -1:].float()
    return logits


@pytest.mark.parametrize(("size", "layout"), [thorough(2, "Q"), thorough(2, "H"), (4, [2, 2])])
def test_images_on_several_ranks(size, layout):
    requests = [{**one, "layout": layout} for one in REQUESTS]
    found = run_ranks(many, size, SOURCE, requests, timeout=240.0)
    assert_same(found, alone(), requests)
    expected = with_pixels()
    for number in WHOLE:
        assert_close(found[0][f"{number}.steps"][:1], expected, TINY_LOGITS)


@pytest.mark.parametrize(("size", "layout"), [(2, "H"), thorough(4, "Q")])
def test_images_are_stored_once_and_read_from_the_store(tmp_path, size, layout):
    requests = [{"budget": 0.15, "layout": layout, "store": str(tmp_path / "all")} for _ in range(2)]
    one = [{"budget": 0.15, "store": str(tmp_path / "one")} for _ in range(2)]
    expected = many(None, SOURCE, one)
    found = run_ranks(many, size, SOURCE, requests, timeout=120.0)
    assert_same(found, expected, requests, usage=True)
    assert found[0]["1.usage"].tolist()[1] == 0
    assert set(DiskStore(tmp_path / "all").keys()) == set(DiskStore(tmp_path / "one").keys())
    assert verify(tmp_path / "all").is_clean

"""RoPE similarity by hand: two frequencies, a few places."""

import math

import pytest
import torch

import tiny
from infoflow_kv.evaluate.rotation import rope_similarity
from infoflow_kv.models import wrap


def by_hand(distance: int, head_dim: int = 16, theta: float = 10000.0) -> float:
    frequencies = [theta ** (-2 * k / head_dim) for k in range(head_dim // 2)]
    return sum(math.cos(distance * f) for f in frequencies) / len(frequencies)


@pytest.fixture(scope="module", params=["llama", "llama-yarn"])
def model(request):
    return wrap(tiny.hf_model(request.param), tiny.tokenizer(), request.param)


def test_by_hand():
    model = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")
    found = rope_similarity(torch.tensor([3, 40]), torch.tensor([50, 60]), model.rotary())
    best = [max(by_hand(50 - p), by_hand(60 - p)) for p in (3, 40)]
    assert found.mean_of_max == pytest.approx(sum(best) / 2, abs=1e-5)
    assert found.max == pytest.approx(max(best), abs=1e-5)


def test_the_same_place_is_1_and_nothing_is_above(model):
    found = rope_similarity(torch.arange(0, 100), torch.tensor([99]), model.rotary())
    assert found.max == pytest.approx(1.0, abs=1e-5)
    assert -1 <= found.mean_of_max < 1


def test_chunk_starts_far_from_the_prompt_have_a_low_max(model):
    near = rope_similarity(torch.tensor([0, 50, 99]), torch.arange(100, 110), model.rotary())
    starts = rope_similarity(torch.tensor([0, 25, 50]), torch.arange(100, 110), model.rotary())
    assert starts.max < near.max == pytest.approx(by_distance_1(model), abs=1e-6)


def by_distance_1(model) -> float:
    return rope_similarity(torch.tensor([0]), torch.tensor([1]), model.rotary()).max


def test_nothing_selected(model):
    assert rope_similarity(torch.empty(0, dtype=torch.int64), torch.arange(3), model.rotary()) is None

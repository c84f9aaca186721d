"""The last layer's short cut changes nothing: every method, rule and family, with and without it."""

import pytest
import torch

import tiny
from infoflow_kv import Engine, MemoryStore
from infoflow_kv.models import LanguageModel, wrap
from infoflow_kv.recipes import make_recipe

TEXTS = [" ".join(f"Boat {n} of row {r} carries {n * r + 3} nets." for r in range(6)) for n in range(4)]
ARMS = [
    ("infoflow", {}),
    ("infoflow", {"repair_layers": "0-1"}),
    ("infoflow", {"repair_layers": "2-3"}),
    ("cacheblend", {}),
    ("cacheblend-gradual", {}),
    ("influence", {}),
    ("full", {}),
    ("none", {}),
]


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral-window", "smollm3"])
def model(request):
    return wrap(tiny.hf_model(request.param), tiny.tokenizer(), request.param)


@pytest.mark.parametrize("forced", [(), (5, 9, 30)], ids=["", "forced"])
@pytest.mark.parametrize(("method", "options"), ARMS, ids=lambda value: str(value))
def test_logits_and_kv_are_the_same(model, method, options, forced, monkeypatch):
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    prompt = engine.prompt("How many nets does boat 2 carry?", TEXTS)
    recipe = make_recipe(model, method, 0.2, **options)
    short = engine.run(prompt, recipe=recipe, forced_ids=forced)
    whole = LanguageModel.forward
    taken = []

    def forward(self, *given, write=None, **rest):
        taken.append(write is not None)
        return whole(self, *given, **rest)

    monkeypatch.setattr(LanguageModel, "forward", forward)
    long = engine.run(prompt, recipe=recipe, forced_ids=forced)
    assert any(taken)
    assert torch.allclose(short.logits, long.logits, atol=3e-6, rtol=1e-5)
    count = prompt.num_tokens + len(forced)
    for a, b in ((short.context.keys, long.context.keys), (short.context.values, long.context.values)):
        assert torch.allclose(a[:, :, :count], b[:, :, :count], atol=1e-6)

"""The one forward: rows without logits leave their keys and values in the last layer and go no further."""

import pytest
import torch

import tiny
from infoflow_kv.errors import ComputeError
from infoflow_kv.models import LocalMemory, forward_rows, wrap


@pytest.fixture(params=["llama", "qwen3", "gemma3", "phi3-longrope", "glm4"])
def model(request):
    return wrap(tiny.hf_model(request.param), tiny.tokenizer(), request.param)


def forward(model, num_logits, **options):
    """Rows 0..9 as a prefill; keys, values and logits."""
    torch.manual_seed(0)
    ids, ranks = torch.arange(5, 15), torch.arange(10)
    keys, values = model.empty_slots(10)
    seen = []
    layers = model._hf.get_decoder().layers
    handles = [
        layer.mlp.register_forward_hook(
            lambda module, args, out, number=number: seen.append((number, args[0].shape[-2]))
        )
        for number, layer in enumerate(layers)
    ]
    try:
        logits = forward_rows(
            model, ids, ranks, model.rotary().tables(ranks), LocalMemory(keys, values), num_logits=num_logits, **options
        )
    finally:
        for handle in handles:
            handle.remove()
    return keys, values, logits, seen


@pytest.mark.parametrize("num_logits", [0, 1, 3, 10])
def test_only_rows_with_logits_go_through_the_last_layer(model, num_logits):
    keys, values, logits, seen = forward(model, num_logits)
    last = model.num_layers - 1
    expected = [(layer, 10) for layer in range(last)] + ([(last, num_logits)] if num_logits else [])
    assert seen == expected
    all_keys, all_values, all_logits, _ = forward(model, 10, attends_last=True)
    assert torch.equal(keys, all_keys) and torch.equal(values, all_values)
    if num_logits:
        assert torch.allclose(logits, all_logits[-num_logits:], atol=2e-6, rtol=1e-5)


def test_whoever_wants_queries_of_the_last_layer_gets_all_rows(model):
    rows = []
    forward(model, 0, attends_last=True, on_layer=lambda given, *_: rows.append((given.layer, given.query.shape[1])))
    assert rows == [(layer, 10) for layer in range(model.num_layers)]


@pytest.mark.parametrize("num_logits", [-1, 11])
def test_more_logits_than_rows_are_an_error(model, num_logits):
    with pytest.raises(ComputeError, match="logit rows were asked of 10 rows"):
        forward(model, num_logits)


def test_an_output_that_nobody_takes_is_an_error(model):
    with pytest.raises(ComputeError, match="give attends_last=True"):
        forward(model, 1, on_layer=lambda given, *_: torch.zeros_like(given.query))


def test_keys_are_handed_over_once_a_layer(model):
    rows = []
    forward(model, 2, on_layer=lambda given, *_: rows.append((given.layer, given.raw_key.shape[1])))
    assert rows == [(layer, 10) for layer in range(model.num_layers)]


@pytest.mark.parametrize("num_logits", [0, 2])
def test_a_layer_that_was_skipped_is_an_error_here_too(model, num_logits):
    layers = model._hf.get_decoder().layers
    del layers[2]
    model._hf.config.num_hidden_layers = 3
    with pytest.raises(ComputeError, match="attention ran in layers"):
        forward(model, num_logits)

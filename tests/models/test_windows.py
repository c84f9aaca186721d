"""Sliding windows: measured, not believed; and how far what stands before a chunk reaches into it."""

import copy

import pytest
import transformers as tf

import families
import tiny
from infoflow_kv import assemble, prefill
from infoflow_kv.errors import UnsupportedModelError
from infoflow_kv.models import probe, wrap
from infoflow_kv.models.traits import find_traits, window_advice
from infoflow_kv.models.windows import NARROW_TOKENS, Reach, reach
from infoflow_kv.positions import request_tables
from infoflow_kv.prefilling import identify
from tolerance import TINY_LOGITS, assert_close


def made(config):
    return families.hf_model(families.Family("", "", lambda: config))


@pytest.mark.parametrize("window", [20, 4096])
def test_a_window_that_the_models_class_never_looks_at_is_none(window):
    """Wider than the probe's tokens it would show in long requests only."""
    hf = made(tf.LlamaConfig(**tiny.SIZES, sliding_window=window))
    model = wrap(hf, tiny.tokenizer(), "x")
    assert model._support.windows == (None,) * 4
    assert hf.config.sliding_window == window


@pytest.mark.parametrize("window", [20, 1024])
def test_windows_longer_than_the_probe_are_measured_too(window, monkeypatch):
    make = lambda: made(tf.MistralConfig(**tiny.SIZES, sliding_window=window))  # noqa: E731
    hf = make()
    assert wrap(hf, tiny.tokenizer(), "x")._support.windows == (window,) * 4
    assert hf.config.sliding_window == window
    monkeypatch.setattr(probe, "narrowed", lambda windows: (NARROW_TOKENS + 1,) * len(windows))
    with pytest.raises(UnsupportedModelError, match="differ from its own"):
        wrap(make(), tiny.tokenizer(), "x")


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None, None), Reach(2, 0, None, None)),
        ((9,), Reach(1, 1, 9, 0)),
        ((9, 9, 9), Reach(3, 3, 9, 16)),
        ((5, 9, 3), Reach(3, 3, 9, 12)),
        ((9, 9, None), Reach(3, 2, 9, 16)),  # the last layer's output is in no key and no value
        ((9, None, 9), Reach(3, 2, 9, None)),
    ],
)
def test_reach_counts_one_window_a_layer_up_to_the_last(windows, expected):
    assert reach(windows) == expected


def test_past_its_reach_a_chunks_kv_is_what_full_prefill_gives():
    window = 8
    hf = made(tf.MistralConfig(**tiny.SIZES, sliding_window=window))
    plain = copy.deepcopy(hf)
    model = wrap(hf, tiny.tokenizer(), "x")
    far = find_traits(model).reach.reach_tokens
    assert far == 3 * (window - 1)
    before, chunk = tuple(range(10, 40)), tuple(range(100, 140))
    parts = [prefill(model, identify(model, ids)) for ids in (before, chunk)]
    total = len(before) + len(chunk)
    context = assemble(model, parts, request_tables(model.rotary(), total, 0), total, 0)
    _, keys, values = families.plain_prefill(plain, before + chunk)
    own = slice(len(before) + far, total)
    assert_close(context.keys[:, :, own], keys[:, :, own], TINY_LOGITS)
    assert_close(context.values[:, :, own], values[:, :, own], TINY_LOGITS)
    moved = (context.values - values).abs().amax(dim=(1, 3))
    for layer in range(model.num_layers):  # news comes one window further with each layer, and no further
        reached = len(before) + layer * (window - 1)
        assert float(moved[layer, reached:].max()) <= TINY_LOGITS
        if layer:
            assert float(moved[layer, reached - 1]) > 2 * float(moved[layer, reached:].max())


def test_the_advice_says_what_windows_mean_for_repair():
    assert window_advice(reach((None, None))) == ""
    mixed = window_advice(reach((24, None, 24, None)))
    assert mixed == ("2 of 4 layers see at most 24 tokens: repair there mends only tokens within 24 of a chunk's start")
    assert window_advice(reach((24,) * 4)).endswith("from token 69 of a chunk on its keys and values need no repair")

"""The support probe: accepts by numbers, refuses with the reason, leaves a refused model as it was."""

import pytest
import torch

import families
import tiny
from infoflow_kv.errors import ComputeError, UnsupportedModelError
from infoflow_kv.models import hooks, wrap


def test_layers_without_rope_are_found_by_poison():
    assert wrap(tiny.hf_model("smollm3"), tiny.tokenizer(), "x")._support.rotated_layers == (True, True, True, False)


def test_windows_are_read_per_layer():
    assert wrap(tiny.hf_model("gemma3"), tiny.tokenizer(), "x")._support.windows == (24, None, 24, None)
    assert wrap(tiny.hf_model("mistral-window"), tiny.tokenizer(), "x")._support.windows == (96,) * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "gemma2"])
def test_what_rounding_tips_over_is_no_reason_to_refuse(name, dtype):
    """With some tokens a router of this gpt-oss picks another expert in 16 bits, which is a large and honest error."""
    model = wrap(families.hf_model(families.FAMILIES[name]).to(dtype), tiny.tokenizer(), name)
    assert model._support.max_error < 0.05


def test_wrong_positions_are_caught_by_numbers_not_by_names(monkeypatch):
    """A model whose rotation differs from its `apply_rotary_pos_emb` must be refused, and is left without our hook."""
    from transformers.models.llama import modeling_llama

    hf = tiny.hf_model("llama")
    real = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: real(q, k, cos, -sin * 0.5))
    monkeypatch.setattr("infoflow_kv.models.probe.apply_function", lambda module: real)
    with pytest.raises(UnsupportedModelError, match="differ from its own"):
        wrap(hf, tiny.tokenizer(), "llama")
    assert not hf.get_decoder().rotary_emb._forward_hooks


def test_nan_is_never_a_small_error(monkeypatch):
    from infoflow_kv.models import probe

    monkeypatch.setattr(probe, "run", lambda hf, ids, *_: torch.full((len(ids), 400), float("nan")))
    monkeypatch.setattr(
        probe, "rotated_layers", lambda hf, windows: probe.Seen((True,) * 4, [((4, 16), (2, 16), (2, 16))] * 4, False)
    )
    with pytest.raises(UnsupportedModelError, match="by inf"):
        wrap(tiny.hf_model("llama"), tiny.tokenizer(), "llama")


def test_a_model_is_wrapped_once():
    hf = tiny.hf_model("llama")
    wrap(hf, tiny.tokenizer(), "llama")
    with pytest.raises(UnsupportedModelError, match="held by another LanguageModel"):
        wrap(hf, tiny.tokenizer(), "llama")


def test_a_wrapped_model_cannot_be_called_directly():
    hf = tiny.hf_model("llama")
    wrap(hf, tiny.tokenizer(), "llama")
    with pytest.raises(ComputeError, match="cannot be called directly"):
        hf(torch.tensor([[1, 2, 3]]))


def test_plain_shares_the_weights_and_carries_no_hook():
    hf = tiny.hf_model("llama")
    ids = torch.tensor([[5, 9, 11, 30]])
    with torch.no_grad():
        before = hf(ids).logits
        model = wrap(hf, tiny.tokenizer(), "llama")
        plain = model.plain()
        assert torch.equal(plain(ids).logits, before)
    assert next(plain.parameters()).data_ptr() == next(hf.parameters()).data_ptr()


def test_a_skipped_layer_is_an_error_not_a_wrong_answer():
    model = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "llama")
    ids = torch.arange(5, 10)
    tables = model.rotary().tables(torch.arange(5))

    def attend(given):
        return given.query

    layers = model._hf.get_decoder().layers
    del layers[2]
    model._hf.config.num_hidden_layers = 3
    with pytest.raises(ComputeError, match="attention ran in layers"):
        model.forward(ids, torch.arange(5), tables, attend)


def test_nan_in_the_logits_is_an_error():
    model = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "llama")
    tables = model.rotary().tables(torch.arange(5))
    with pytest.raises(ComputeError, match="not finite"):
        model.forward(
            torch.arange(5, 10), torch.arange(5), tables, lambda g: torch.full_like(g.query, float("nan")), num_logits=1
        )


def test_importing_registers_one_name_and_patches_nothing():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[hooks.IMPLEMENTATION] is hooks.attention
    fresh = tiny.hf_model("llama")
    assert fresh.config._attn_implementation == "sdpa"
    assert not fresh.get_decoder().rotary_emb._forward_hooks


def test_identity_follows_the_weights_in_place():
    hf = tiny.hf_model("llama")
    model = wrap(hf, tiny.tokenizer(), "llama")
    before = model.identity
    assert model.identity == before
    with torch.no_grad():
        hf.get_decoder().layers[1].self_attn.k_proj.weight[0, 0] += 1e-3
    assert model.identity.weights != before.weights


def test_rope_regime_changes_only_where_frequencies_do():
    steady = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "x")
    assert steady.rope_regime(10) == steady.rope_regime(1000)
    dynamic = wrap(tiny.hf_model("llama-dynamic-short"), tiny.tokenizer(), "x")
    assert dynamic.rope_regime(10) == dynamic.rope_regime(128)
    assert dynamic.rope_regime(10) != dynamic.rope_regime(300)
    # Kept state of one request must not leak into the next.
    assert dynamic.rope_regime(10) == dynamic.rotary().fingerprint(10) + dynamic._support.windows_tag

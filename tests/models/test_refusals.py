"""What is refused, each with its reason in one line, and left as it was."""

import json

import pytest
import transformers as tf

import families
import tiny
from infoflow_kv import load
from infoflow_kv.errors import ModelError, UnsupportedModelError
from infoflow_kv.models import wrap


@pytest.fixture(params=families.REFUSED)
def refused(request):
    family = families.REFUSED[request.param]
    if family.missing:
        pytest.skip(family.missing)
    return family


def test_refused_with_the_reason_in_one_line(refused):
    hf = families.hf_model(refused)
    before = hf.config._attn_implementation
    hooks = count_hooks(hf)
    with pytest.raises(UnsupportedModelError, match=refused.reason) as caught:
        wrap(hf, tiny.tokenizer(), "x")
    assert "\n" not in str(caught.value)
    assert type(hf).__name__ in str(caught.value)
    assert hf.config._attn_implementation == before
    assert count_hooks(hf) == hooks


def count_hooks(hf) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in hf.modules())


@pytest.mark.parametrize("name", ["bloom", "qwen3-next", "t5"])
def test_load_gives_the_same_reason(name, tmp_path):
    family = families.REFUSED[name]
    if family.missing:
        pytest.skip(family.missing)
    families.hf_model(family).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=family.reason) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_keys_that_the_model_turns_by_a_table_of_its_own_are_refused():
    """Its logits are right wherever it stands; only what is stored would not be free of positions."""
    from transformers.models.llama import modeling_llama

    class TurningAttention(modeling_llama.LlamaAttention):
        """Rotates by positions that it is handed, not by `rotary_emb`'s tables."""

        def forward(self, hidden_states, position_embeddings, position_ids=None, **kwargs):
            angles = (position_ids[..., None].float() / 7).expand(-1, -1, self.head_dim)
            return super().forward(hidden_states, (angles.cos(), angles.sin()), position_ids=position_ids, **kwargs)

    hf = families.hf_model(families.FAMILIES["llama"])
    for layer in (hf.model.layers[1], hf.model.layers[3]):
        layer.self_attn.__class__ = TurningAttention
    with pytest.raises(UnsupportedModelError, match=r"layers \[1, 3\] depend on the position") as caught:
        wrap(hf, tiny.tokenizer(), "turning")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["chatglm", "phi3"])
def test_remote_code_is_refused_before_transformers_asks_for_it(kind, tmp_path):
    family = families.FAMILIES["phi3"]
    families.hf_model(family).save_pretrained(tmp_path)
    config = tf.AutoConfig.from_pretrained(tmp_path).to_dict() | {
        "model_type": kind,
        "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="code of its own") as caught:
        load(tmp_path)
    assert "trust_remote_code" not in str(caught.value)
    assert ("remove auto_map" in str(caught.value)) == (kind == "phi3")

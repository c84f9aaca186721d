"""Finding and refusing models: each message is one line that says what to do."""

import json

import pytest

import tiny
from infoflow_kv import load
from infoflow_kv.errors import ModelError, OptionError, UnsupportedModelError


@pytest.fixture
def folder(tmp_path):
    tiny.hf_model("qwen3").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads_with_its_stop_ids_and_window(folder):
    model = load(folder)
    assert model.family == "qwen3"
    assert model.stop_ids == {2}
    assert model.window_tokens == 2048
    assert load(folder).identity == model.identity


def test_dtype_is_part_of_the_identity(folder):
    assert load(folder).identity != load(folder, dtype="bfloat16").identity


def refuses(kind: type[Exception], match: str, *args: object, **options: object) -> None:
    with pytest.raises(kind, match=match) as caught:
        load(*args, **options)
    assert "\n" not in str(caught.value)


def test_names_that_lead_nowhere(tmp_path):
    refuses(ModelError, "did you mean 'smollm2-135m'", "smollm2-135")
    refuses(ModelError, "unknown model", "/nowhere/at/all")
    refuses(ModelError, "does not exist", "gguf:/nowhere.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refuses(ModelError, "write gguf:", str(tmp_path / "m.gguf"))
    refuses(ModelError, r"no config\.json", tmp_path)


def test_options_outside_their_range(folder):
    refuses(OptionError, "did you mean 'bfloat16'", folder, dtype="bfloat")
    refuses(OptionError, "unknown device", folder, device="gpu7")
    refuses(OptionError, "sees no CUDA device|is not supported", folder, device="cuda:93")


def test_pickled_weights_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(ModelError, "pickled weights", folder)


def test_a_model_that_brings_code_is_refused_and_its_code_never_runs(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'canary')!r}, 'w')")
    refuses(ModelError, "code of its own|could not be loaded", folder)
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("damage", ["{", "[]", '{"model_type": "no-such-model"}', "{}"])
def test_a_damaged_config_is_one_line(folder, damage):
    (folder / "config.json").write_text(damage)
    refuses(ModelError, "config.json|could not be loaded", folder)


def test_truncated_weights_are_one_line(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuses(ModelError, "could not be loaded", folder)


def test_missing_weights_are_not_filled_with_random_numbers(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refuses(ModelError, "k_proj", folder)


def test_an_unsupported_architecture_keeps_its_reason(tmp_path):
    import transformers as tf

    config = tf.GPT2Config(vocab_size=400, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=2)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    refuses(UnsupportedModelError, "no rotary position", tmp_path)

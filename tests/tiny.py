"""Tiny random models of the supported families and a small byte-level tokenizer, made in the process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SIZES = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def mixed(window: int) -> dict[str, Any]:
    return {"head_dim": 16, "sliding_window": window, "layer_types": ["sliding_attention", "full_attention"] * 2}


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "llama-llama3": lambda: tf.LlamaConfig(
        **SIZES,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": lambda: tf.LlamaConfig(**SIZES, **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-dynamic": lambda: tf.LlamaConfig(**SIZES, **rope("dynamic", factor=4.0)),
    # Its window is 128 × 4 tokens and its frequencies change past 128: requests outgrow the regime of their chunks.
    "llama-dynamic-short": lambda: tf.LlamaConfig(
        **{**SIZES, "max_position_embeddings": 128}, **rope("dynamic", factor=4.0)
    ),
    # Short frequencies up to 128 tokens, long ones beyond.
    "phi3-longrope": lambda: tf.Phi3Config(
        **SIZES,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [1.0 + 0.8 * i for i in range(8)],
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, head_dim=16),
    "glm4": lambda: tf.Glm4Config(**SIZES, head_dim=16),
    "mistral-window": lambda: tf.MistralConfig(**SIZES, sliding_window=96),
    "gemma3": lambda: tf.Gemma3TextConfig(**SIZES, **mixed(24)),
    "smollm3": lambda: tf.SmolLM3Config(**SIZES),
}


@cache
def tokenizer() -> Any:
    """A byte-level BPE tokenizer of 400 tokens with ChatML control tokens and template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = ["The lighthouse keeper of Saltmere counts the boats every evening and writes them down."] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[0], eos_token=SPECIAL[2], additional_special_tokens=SPECIAL
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def hf_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int) -> Any:
    """A fresh random Transformers model of a family; weights scaled so that attention is far from uniform. `sizes`:
    other values of its config."""
    config = CONFIGS[family]()
    for key, value in sizes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    hf = tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(2.5)
    return hf.to(dtype)

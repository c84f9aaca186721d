"""Models with random weights in the shape of a known one: for measuring, where its weights are not at hand.

What a forward costs does not depend on the weights. Some of its layers suffice, as all of them are alike.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.models.loading import DTYPES, find, torch_device, wrap
from infoflow_kv.models.model import LanguageModel

PREFIX = "shape:"

# name → config class, and layers, width, MLP width, heads, K/V heads, head_dim as published with each model
SHAPES: dict[str, tuple[type, tuple[int, int, int, int, int, int]]] = {
    "qwen2.5-1.5b": (Qwen2Config, (28, 1536, 8960, 12, 2, 128)),
    "qwen3-0.6b": (Qwen3Config, (28, 1024, 3072, 16, 8, 128)),
    "qwen3-1.7b": (Qwen3Config, (28, 2048, 6144, 16, 8, 128)),
    "qwen3-14b": (Qwen3Config, (40, 5120, 17408, 40, 8, 128)),
    "llama-3.2-1b": (LlamaConfig, (16, 2048, 8192, 32, 8, 64)),
    "llama-3.1-8b": (LlamaConfig, (32, 4096, 14336, 32, 8, 128)),
}
WINDOW_TOKENS = 131_072


def shaped(name: str, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
    """The model that `shape:NAME` or `shape:NAME:LAYERS` stands for, the same in every process: random weights, and the
    tokenizer of the embedded model. OptionError for an unknown shape or more layers than it has."""
    known, _, layers = name.removeprefix(PREFIX).partition(":")
    if known not in SHAPES:
        raise unknown_name("shape", known, SHAPES)
    make, (most, width, mlp_width, heads, kv_heads, head_dim) = SHAPES[known]
    if layers and not (layers.isdigit() and 1 <= int(layers) <= most):
        raise OptionError(f"'{name}' asks for {layers} layers; {known} has {most}: give 1 to {most}")
    where = torch_device(device)
    tokenizer = AutoTokenizer.from_pretrained(find("smollm2-135m", lambda _: None), trust_remote_code=False)
    config = make(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=int(layers or most),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=WINDOW_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        with where:  # on the device at once: ranks that share a host need not hold all their weights there
            hf = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    finally:
        torch.random.set_rng_state(state)
    return wrap(hf.to(where), tokenizer, name)

"""The one table of model families: tiny random configs of all that the probe accepts and of what it refuses.

Used by the tests and by tools/write_models.py, which makes docs/models.md of it. What each family's traits are is
written here by hand and compared with what is found on the model.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

import tiny
from tiny import SIZES, mixed, rope


@dataclass(frozen=True)
class Family:
    """`needs`: the config class, which an older Transformers may lack. `words`: the traits that must be found."""

    title: str
    needs: str
    make: Callable[[], Any]
    words: tuple[str, ...] = ()
    rope: str = "default"

    @property
    def missing(self) -> str:
        """Why it cannot be made with this Transformers; empty if it can."""
        return "" if hasattr(tf, self.needs) else f"transformers {tf.__version__} has no {self.needs}"


@dataclass(frozen=True)
class Refused(Family):
    """`reason`: a pattern that the refusal must match."""

    reason: str = ""
    auto: str = "AutoModelForCausalLM"


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in SIZES.items() if name not in names}


HEADS_OF_16: dict[str, Any] = {**SIZES, "head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED: dict[str, Any] = {**SIZES, **mixed(24)}
# Frequencies that change at 64 tokens, or that would: every request of the tests is longer.
YARN: dict[str, Any] = rope("yarn", factor=32.0, original_max_position_embeddings=64)
SCALED_QUERY: dict[str, Any] = rope(
    "yarn", factor=32.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0
)
WINDOW_2 = "window in 2 of 4 layers"

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", "LlamaConfig", tiny.CONFIGS["llama"]),
    "llama-llama3": Family("Llama 3.x", "LlamaConfig", tiny.CONFIGS["llama-llama3"], rope="llama3"),
    "llama-linear": Family(
        "Llama, linear", "LlamaConfig", lambda: tf.LlamaConfig(**SIZES, **rope("linear", factor=4.0)), rope="linear"
    ),
    "llama-dynamic": Family("Llama, dynamic", "LlamaConfig", tiny.CONFIGS["llama-dynamic"], rope="dynamic"),
    "llama-dynamic-short": Family(
        "Llama, dynamic, past its length", "LlamaConfig", tiny.CONFIGS["llama-dynamic-short"], rope="dynamic"
    ),
    "llama-yarn": Family("Llama, yarn", "LlamaConfig", tiny.CONFIGS["llama-yarn"], rope="yarn"),
    "qwen2": Family("Qwen2", "Qwen2Config", lambda: tf.Qwen2Config(**SIZES), ("QKV bias",)),
    "qwen2.5": Family(
        "Qwen2.5",
        "Qwen2Config",
        lambda: tf.Qwen2Config(**SIZES, tie_word_embeddings=True),
        ("QKV bias", "tied embeddings"),
    ),
    "qwen2-window": Family(
        "Qwen2, sliding",
        "Qwen2Config",
        lambda: tf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=2),
        ("QKV bias", WINDOW_2),
    ),
    "qwen3": Family("Qwen3", "Qwen3Config", tiny.CONFIGS["qwen3"], ("qk-norm",)),
    "qwen3-moe": Family(
        "Qwen3-MoE",
        "Qwen3MoeConfig",
        lambda: tf.Qwen3MoeConfig(**HEADS_OF_16, **EXPERTS, num_experts=4),
        ("qk-norm", "experts"),
    ),
    "glm": Family(
        "GLM",
        "GlmConfig",
        lambda: tf.GlmConfig(**HEADS_OF_16, attention_bias=True),
        ("QKV bias", "partial rotary", "interleaved rotary"),
    ),
    "glm4": Family("GLM-4", "Glm4Config", tiny.CONFIGS["glm4"], ("QKV bias", "partial rotary", "interleaved rotary")),
    "glm4-moe": Family(
        "GLM-4.5",
        "Glm4MoeConfig",
        lambda: tf.Glm4MoeConfig(
            **HEADS_OF_16, **EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1,
            use_qk_norm=True, attention_bias=True,
        ),
        ("QKV bias", "qk-norm", "partial rotary", "experts"),
    ),
    "mistral": Family("Mistral", "MistralConfig", lambda: tf.MistralConfig(**SIZES, sliding_window=None)),
    "mistral-window": Family(
        "Mistral, sliding", "MistralConfig", lambda: tf.MistralConfig(**SIZES, sliding_window=24), ("window",)
    ),
    "mixtral": Family(
        "Mixtral", "MixtralConfig", lambda: tf.MixtralConfig(**SIZES, num_local_experts=4), ("experts",)
    ),
    "ministral": Family("Ministral", "MinistralConfig", lambda: tf.MinistralConfig(**MIXED), (WINDOW_2,)),
    # Its queries grow with their position: 64, 128, … tokens are steps.
    "ministral3": Family(
        "Ministral 3", "Ministral3Config", lambda: tf.Ministral3Config(**HEADS_OF_16, **SCALED_QUERY), rope="yarn"
    ),
    "gemma": Family("Gemma", "GemmaConfig", lambda: tf.GemmaConfig(**HEADS_OF_16), ("tied embeddings",)),
    "gemma2": Family(
        "Gemma 2",
        "Gemma2Config",
        lambda: tf.Gemma2Config(**MIXED, attn_logit_softcapping=5.0),
        (WINDOW_2, "softcap", "tied embeddings"),
    ),
    "gemma3": Family(
        "Gemma 3",
        "Gemma3TextConfig",
        tiny.CONFIGS["gemma3"],
        ("qk-norm", "RoPE by kind of layer", WINDOW_2, "tied embeddings"),
    ),
    "phi": Family("Phi", "PhiConfig", lambda: tf.PhiConfig(**SIZES), ("QKV bias", "partial rotary")),
    "phi3": Family("Phi-3", "Phi3Config", lambda: tf.Phi3Config(**SIZES)),
    "phi3-longrope": Family("Phi-3, long", "Phi3Config", tiny.CONFIGS["phi3-longrope"], rope="longrope"),
    "phi4-mini": Family(
        "Phi-4-mini",
        "Phi3Config",
        lambda: tf.Phi3Config(**SIZES, partial_rotary_factor=0.75, tie_word_embeddings=True),
        ("partial rotary", "tied embeddings"),
    ),
    "smollm3": Family(
        "SmolLM3", "SmolLM3Config", tiny.CONFIGS["smollm3"], ("NoPE in 1 of 4 layers", "tied embeddings")
    ),
    "olmo2": Family("OLMo 2", "Olmo2Config", lambda: tf.Olmo2Config(**SIZES), ("qk-norm",)),
    "olmo3": Family(
        "OLMo 3", "Olmo3Config", lambda: tf.Olmo3Config(**MIXED), ("qk-norm", "RoPE by kind of layer", WINDOW_2)
    ),
    "cohere": Family(
        "Cohere", "CohereConfig", lambda: tf.CohereConfig(**SIZES), ("interleaved rotary", "tied embeddings")
    ),
    "cohere-norm": Family(
        "Cohere, qk-norm",
        "CohereConfig",
        lambda: tf.CohereConfig(**SIZES, use_qk_norm=True),
        ("qk-norm", "interleaved rotary", "tied embeddings"),
    ),
    "cohere2": Family(
        "Cohere 2",
        "Cohere2Config",
        lambda: tf.Cohere2Config(**MIXED),
        ("interleaved rotary", "NoPE in 2 of 4 layers", WINDOW_2, "tied embeddings"),
    ),
    "granite": Family("Granite", "GraniteConfig", lambda: tf.GraniteConfig(**SIZES, attention_multiplier=0.2)),
    "ernie4.5": Family(
        "ERNIE 4.5",
        "Ernie4_5Config",
        lambda: tf.Ernie4_5Config(**HEADS_OF_16),
        ("interleaved rotary", "tied embeddings"),
    ),
    "exaone4": Family(
        "EXAONE 4", "Exaone4Config", lambda: tf.Exaone4Config(**MIXED), ("qk-norm", "NoPE in 2 of 4 layers", WINDOW_2)
    ),
    "seed-oss": Family("Seed-OSS", "SeedOssConfig", lambda: tf.SeedOssConfig(**HEADS_OF_16), ("QKV bias",)),
    "starcoder2": Family(
        "StarCoder2",
        "Starcoder2Config",
        lambda: tf.Starcoder2Config(**SIZES, sliding_window=24),
        ("QKV bias", "window", "tied embeddings"),
    ),
    "gpt-neox": Family(
        "GPT-NeoX",
        "GPTNeoXConfig",
        lambda: tf.GPTNeoXConfig(**without("num_key_value_heads")),
        ("QKV bias", "partial rotary"),
    ),
    "gpt-oss": Family(
        "gpt-oss",
        "GptOssConfig",
        lambda: tf.GptOssConfig(**MIXED, **YARN, num_local_experts=4, num_experts_per_tok=2),
        ("QKV bias", WINDOW_2, "sinks", "experts"),
        rope="yarn",
    ),
}  # fmt: skip

TWO_LAYERS: dict[str, Any] = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NAMED: dict[str, Any] = {"vocab_size": 400, "n_embd": 64, "n_layer": 2, "n_head": 4}
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 2}
LATENT: dict[str, Any] = {
    **TWO_LAYERS,
    **{"intermediate_size": 64, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32},
    **EXPERTS,
}
LINEAR: dict[str, Any] = {
    **{"num_experts": 4, "shared_expert_intermediate_size": 32},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
STATE = "whose state cannot be moved"

REFUSED: dict[str, Refused] = {
    "gpt2": Refused("GPT-2", "GPT2Config", lambda: tf.GPT2Config(**NAMED, **ENDS), reason="no rotary position"),
    "opt": Refused(
        "OPT",
        "OPTConfig",
        lambda: tf.OPTConfig(**TWO_LAYERS, ffn_dim=64, word_embed_proj_dim=64),
        reason="no rotary position",
    ),
    "gpt-j": Refused(
        "GPT-J",
        "GPTJConfig",
        lambda: tf.GPTJConfig(**NAMED, **ENDS, rotary_dim=8),
        reason="not a plain list|AttentionInterface",  # the second with Transformers 5.16
    ),
    "falcon": Refused("Falcon", "FalconConfig", lambda: tf.FalconConfig(**TWO_LAYERS), reason="AttentionInterface"),
    "bloom": Refused(
        "BLOOM",
        "BloomConfig",
        lambda: tf.BloomConfig(vocab_size=400, hidden_size=64, n_layer=2, n_head=4),
        reason="AttentionInterface",
    ),
    "stablelm": Refused(
        "StableLM", "StableLmConfig", lambda: tf.StableLmConfig(**SIZES), reason="AttentionInterface"
    ),
    "nemotron": Refused(
        "Nemotron", "NemotronConfig", lambda: tf.NemotronConfig(**SIZES), reason="hand on the keywords"
    ),
    "diffllama": Refused(
        "DiffLlama", "DiffLlamaConfig", lambda: tf.DiffLlamaConfig(**SIZES), reason=r"in layers \[0, 0, 1, 1"
    ),
    "granite-swa": Refused(
        "Granite SWA",
        "GraniteSWAConfig",
        lambda: tf.GraniteSWAConfig(**SIZES),
        reason="does not come from its rotary_emb",
    ),
    "llama4": Refused(
        "Llama 4",
        "Llama4TextConfig",
        lambda: tf.Llama4TextConfig(**HEADS_OF_16, intermediate_size_mlp=64, num_local_experts=2),
        reason=STATE,
    ),
    "mimo": Refused(
        "MiMo-V2",
        "MiMoV2FlashConfig",
        lambda: tf.MiMoV2FlashConfig(**HEADS_OF_16, **EXPERTS, n_routed_experts=4, v_head_dim=32),
        # under pytest the annotated shapes see it first
        reason="keys and values differ in shape|Type-check error",
    ),
    "mamba": Refused(
        "Mamba",
        "MambaConfig",
        lambda: tf.MambaConfig(vocab_size=400, hidden_size=64, num_hidden_layers=2),
        reason=STATE,
    ),
    "qwen3-next": Refused(
        "Qwen3-Next",
        "Qwen3NextConfig",
        lambda: tf.Qwen3NextConfig(**HEADS_OF_16, **EXPERTS, **LINEAR),
        reason=STATE,
    ),
    "jamba": Refused(
        "Jamba",
        "JambaConfig",
        lambda: tf.JambaConfig(**SIZES, num_experts=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1),
        reason=STATE,
    ),
    "bamba": Refused(
        "Bamba",
        "BambaConfig",
        lambda: tf.BambaConfig(**SIZES, mamba_n_heads=8, mamba_d_state=8, mamba_d_head=16, attn_layer_indices=[1, 3]),
        reason=STATE,
    ),
    "deepseek-v2": Refused(
        "DeepSeek-V2", "DeepseekV2Config", lambda: tf.DeepseekV2Config(**LATENT), reason=r"latent \(MLA\)"
    ),
    "deepseek-v3": Refused(
        "DeepSeek-V3", "DeepseekV3Config", lambda: tf.DeepseekV3Config(**LATENT), reason=r"latent \(MLA\)"
    ),
    "t5": Refused(
        "T5",
        "T5Config",
        lambda: tf.T5Config(vocab_size=400, d_model=64, num_layers=2, num_heads=4, d_ff=64, d_kv=16),
        reason="encoder-decoder",
        auto="AutoModelForSeq2SeqLM",
    ),
}  # fmt: skip


def hf_model(family: Family, seed: int = 0) -> Any:
    """A fresh random model of a family in float32.

    Matrices are scaled so that attention is far from uniform, and vectors (norms, biases, sinks), which start as
    constants, are made random: otherwise a forgotten one would not be noticed.
    """
    torch.manual_seed(seed)
    auto = getattr(tf, family.auto if isinstance(family, Refused) else "AutoModelForCausalLM")
    hf = auto.from_config(family.make(), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(2.5)
    return hf


def plain_prefill(hf: Any, token_ids: Sequence[int], start: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of all tokens, and rotated keys and values `[layers, kv_heads, tokens, head_dim]`, of plain Transformers
    for these tokens at positions `start..`; of a copy, as dynamic RoPE remembers the longest request."""
    hf = copy.deepcopy(hf)
    word = "cache" if "cache" in inspect.signature(type(hf).forward).parameters else "past_key_values"
    kept = tf.DynamicCache()  # made without a config, none of its layers forgets what left its window
    positions = torch.arange(start, start + len(token_ids))[None]
    with torch.inference_mode():
        out = hf(input_ids=torch.tensor([list(token_ids)]), position_ids=positions, use_cache=True, **{word: kept})
    keys, values = (torch.stack([getattr(layer, part)[0] for layer in kept.layers]) for part in ("keys", "values"))
    return out.logits[0].float(), keys, values

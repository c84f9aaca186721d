"""What is special about a loaded model, as far as KV reuse is concerned: found on the model, never by its name."""

from dataclasses import dataclass, replace

import torch

from infoflow_kv.models.hooks import AttentionInput
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.rotary import rope_types
from infoflow_kv.models.windows import Reach, reach
from infoflow_kv.ops import AttentionSpec, staircase_attention
from infoflow_kv.shapes import Tensor

SAMPLE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of one model; `words` says those that are unlike a plain Llama's.

    `rotary_width`: how many of the `head_dim` numbers of a key are rotated. `max_error`: what the support probe
    measured, relative to the largest logit.
    """

    model_class: str
    rope_types: tuple[str, ...]
    head_dim: int
    rotary_width: int
    is_interleaved: bool
    is_by_kind: bool  # one rotary table for each kind of layer
    unrotated_layers: int
    has_qk_norm: bool
    has_qkv_bias: bool
    has_softcap: bool
    has_sinks: bool
    has_experts: bool
    is_tied: bool
    reach: Reach
    max_error: float

    @property
    def words(self) -> tuple[str, ...]:
        """The traits in words, in a fixed order."""
        r = self.reach
        window = f"window in {r.windowed_layers} of {r.num_layers} layers"
        found = {
            "QKV bias": self.has_qkv_bias,
            "qk-norm": self.has_qk_norm,
            "partial rotary": self.rotary_width < self.head_dim,
            "interleaved rotary": self.is_interleaved,
            "RoPE by kind of layer": self.is_by_kind,
            f"NoPE in {self.unrotated_layers} of {r.num_layers} layers": bool(self.unrotated_layers),
            "window" if r.windowed_layers == r.num_layers else window: bool(r.windowed_layers),
            "softcap": self.has_softcap,
            "sinks": self.has_sinks,
            "experts": self.has_experts,
            "tied embeddings": self.is_tied,
        }
        return tuple(word for word, is_there in found.items() if is_there)


def window_advice(reach: Reach) -> str:
    """One sentence on what windows mean for repair; empty for a model without windows."""
    if not reach.windowed_layers:
        return ""
    text = (
        f"{reach.windowed_layers} of {reach.num_layers} layers see at most {reach.window_tokens} tokens: repair there "
        f"mends only tokens within {reach.window_tokens} of a chunk's start"
    )
    if reach.reach_tokens is not None:
        text += f"; from token {reach.reach_tokens} of a chunk on its keys and values need no repair"
    return text


def find_traits(model: LanguageModel) -> Traits:
    """The traits of a loaded model; runs a few tokens through it."""
    hf, support = model._hf, model._support
    specs: list[AttentionSpec] = []

    def attend(given: AttentionInput) -> Tensor:
        specs.append(given.spec)
        ranks = torch.arange(given.query.shape[1], device=given.query.device)
        return staircase_attention(given.query, given.key, given.value, ranks, replace(given.spec, window=None))

    positions = torch.arange(SAMPLE_TOKENS, device=model.device)
    model.forward(positions, positions, model.rotary().tables(positions), attend)
    attentions = [
        module
        for module in hf.get_decoder().modules()
        if "Attention" in type(module).__name__ and hasattr(module, "layer_idx")
    ]
    parts = [(name, part) for attention in attentions for name, part in attention.named_children()]
    width, is_interleaved = rotation(model)
    head = hf.get_output_embeddings()
    return Traits(
        model_class=type(hf).__name__,
        rope_types=tuple(sorted(set(rope_types(support.rotary_module)))),
        head_dim=model.head_dim,
        rotary_width=width,
        is_interleaved=is_interleaved,
        is_by_kind=None not in support.layer_types,
        unrotated_layers=support.rotated_layers.count(False),
        has_qk_norm=any("norm" in name for name, _ in parts),
        # k_proj, qkv_proj, query_key_value: whatever makes the keys
        has_qkv_bias=any("k" in name and getattr(part, "bias", None) is not None for name, part in parts),
        has_softcap=any(spec.softcap is not None for spec in specs),
        has_sinks=any(spec.sinks is not None for spec in specs),
        has_experts=any("expert" in name for name, _ in hf.get_decoder().named_modules()),
        is_tied=head is not None and head.weight is hf.get_input_embeddings().weight,
        reach=reach(support.windows),
        max_error=support.max_error,
    )


def rotation(model: LanguageModel) -> tuple[int, bool]:
    """How many numbers of a key are rotated, and whether neighbours are turned together instead of halves; both seen
    on keys of one 1 among zeros."""
    rotated = model._support.rotated_layers
    if True not in rotated:
        return 0, False
    tables = model.rotary().tables(torch.arange(2, device=model.device)).at(slice(1, 2))
    # One key per place of the 1, as so many heads: every one is rotated to position 1.
    units = torch.eye(model.head_dim, dtype=model.dtype, device=model.device)[:, None]
    out = tables.rotate_keys(rotated.index(True), units)[:, 0].float()
    mixed = (out - torch.diag(out.diagonal())).abs()
    return int((mixed.amax(dim=1) > 0).sum()), int(mixed[0].argmax()) == 1

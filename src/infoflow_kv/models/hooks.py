"""The two hooks on an unpatched Transformers model: rotary identity and our attention function.

The rotary hook makes `rotary_emb` give cos = 1, sin = 0 to the layers, so that the registered attention function
receives queries and keys *before* RoPE; it then rotates them itself with the model's own `apply_rotary_pos_emb` at the
positions of the request. Both are stateless: all that belongs to one request travels as the keyword `infoflow`.
(docs/method.md, section 3)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from infoflow_kv.errors import ComputeError
from infoflow_kv.models.rotary import Rotates
from infoflow_kv.ops import AttentionSpec
from infoflow_kv.shapes import Float, Tensor

IMPLEMENTATION = "infoflow_kv"


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What one layer hands over: one sequence, no batch axis. `raw_key` is the key before RoPE."""

    layer: int
    query: Float[Tensor, "heads rows head_dim"]
    key: Float[Tensor, "kv_heads rows head_dim"]
    raw_key: Float[Tensor, "kv_heads rows head_dim"]
    value: Float[Tensor, "kv_heads rows head_dim"]
    spec: AttentionSpec


Attend = Callable[[AttentionInput], Float[Tensor, "heads rows head_dim"]]


class StopForward(Exception):
    """Raised by an `Attend` to end the forward after its layer; `LanguageModel.forward` takes it."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The keyword `infoflow` of one forward: the request's rotary tables and what to do in each layer."""

    rotary: Rotates
    attend: Attend
    windows: tuple[int | None, ...]
    layers_seen: list[int] = field(default_factory=list)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with Transformers; runs in every layer of every forward of a loaded model."""
    call: AttentionCall | None = kwargs.get("infoflow")
    if call is None:
        raise ComputeError(
            "this model is held by InfoFlow KV and cannot be called directly; use LanguageModel.plain() for that"
        )
    if attention_mask is not None or query.shape[0] != 1 or dropout:
        raise ComputeError(
            f"the attention function got a mask, dropout or a batch of {query.shape[0]}; expected one unpadded sequence"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    call.layers_seen.append(layer)
    if "sliding_window" in kwargs and kwargs.get("sliding_window") != call.windows[layer]:
        raise ComputeError(
            f"layer {layer} asked for a window of {kwargs.get('sliding_window')}, the config says {call.windows[layer]}"
        )
    rotated_query, rotated_key = call.rotary.rotate(layer, query, key)
    spec = AttentionSpec(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=call.windows[layer],
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    out = call.attend(AttentionInput(layer, rotated_query[0], rotated_key[0], key[0], value[0], spec))
    return out.transpose(0, 1)[None].contiguous(), None


# Registering adds one name to Transformers' table and changes no model; it is NOT a mask function, so that
# `create_causal_mask` returns None and nothing N × N is ever built.
AttentionInterface.register(IMPLEMENTATION, attention)


def identity_rotary(
    module: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The rotary hook: the identity rotation in the shape and dtype of the real one."""
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)

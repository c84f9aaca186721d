"""The three hooks on an unpatched Transformers model: rotary identity, our attention function, and row narrowing.

The rotary hook makes `rotary_emb` give cos = 1, sin = 0 to the layers, so that the registered attention function
receives queries and keys *before* RoPE; it then rotates them itself with the model's own `apply_rotary_pos_emb` at the
positions of the request. A hook before each decoder layer drops the rows that need no more layers. All are stateless:
what belongs to one request travels as the keyword `infoflow`. (docs/method.md, section 3)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from infoflow_kv.errors import ComputeError
from infoflow_kv.models.rotary import Rotates
from infoflow_kv.ops import AttentionSpec
from infoflow_kv.shapes import Float, Int, Tensor

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


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Attention output of one layer after which only the rows `kept` (ascending indices) go on to the next one."""

    output: Float[Tensor, "heads rows head_dim"]
    kept: Int[Tensor, " kept"]


Attend = Callable[[AttentionInput], Float[Tensor, "heads rows head_dim"] | Narrowed]
Write = Callable[[AttentionInput], None]


class StopForward(Exception):
    """Raised by an `Attend` to end the forward after its layer; `LanguageModel.forward` takes it."""


class _Written(Exception):
    """Ends a layer that was run for its keys and values alone."""


@dataclass(slots=True)
class AttentionCall:
    """The keyword `infoflow` of one forward: the request's rotary tables and what to do in each layer.

    `kept` is set between a layer that narrowed and the next one; `rows` are the rows still there, by their first index.
    `write`: given where the last layer's output is wanted of the last `num_whole` rows only. That layer is then run
    twice: once for the keys and values of all rows, up to `write`, and once for these rows as usual.
    """

    rotary: Rotates
    attend: Attend
    windows: tuple[int | None, ...]
    layers_seen: list[int] = field(default_factory=list)
    kept: Tensor | None = None
    rows: Tensor | None = None
    write: Write | None = None
    num_whole: int = 0
    is_writing: bool = False
    visual: Tensor | None = None  # indices of the rows that get `layer_rows`
    layer_rows: Tensor | None = None  # [early, visual, hidden], added to the output of the first layers


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
    if call.kept is not None:
        raise ComputeError("rows were dropped after a layer, but the next layer still got all of them")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if not call.is_writing:
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
    given = AttentionInput(layer, rotated_query[0], rotated_key[0], key[0], value[0], spec)
    if call.is_writing and call.write is not None:
        call.write(given)
        raise _Written
    out = call.attend(given)
    if isinstance(out, Narrowed):
        call.kept = out.kept if layer + 1 < len(call.windows) else None
        out = out.output
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


def narrow_rows(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The hook before each decoder layer: keeps only the rows that the layers before asked to keep, and before the last
    layer those whose output is wanted, after all have left their keys and values there."""
    call: AttentionCall | None = kwargs.get("infoflow")
    if call is None:
        return None
    was_narrowed = call.kept is not None or call.rows is not None
    # Made once for all layers, so these still hold every row of the forward.
    whole = {name: kwargs[name] for name in ("position_embeddings", "position_ids") if kwargs.get(name) is not None}
    if was_narrowed:
        args, kwargs = _narrowed(call, args, kwargs, whole)
    if call.write is None or len(call.layers_seen) + 1 < len(call.windows):
        return (args, kwargs) if was_narrowed else None
    hidden = args[0] if args else kwargs["hidden_states"]
    num_rows = int(hidden.shape[1])
    if num_rows == call.num_whole:
        call.write = None  # nothing to save: the layer runs once, as the others
        return (args, kwargs) if was_narrowed else None
    call.is_writing = True
    try:
        module.forward(*args, **kwargs)
    except _Written:
        pass
    else:
        raise ComputeError("the last layer ended without having been asked for keys and values")
    finally:
        call.is_writing = False
    if call.num_whole == 0:
        if call.layers_seen != list(range(len(call.windows) - 1)):
            raise ComputeError(f"attention ran in layers {call.layers_seen} before the last one; expected each once")
        raise StopForward
    call.kept = torch.arange(num_rows - call.num_whole, num_rows, device=hidden.device)
    return _narrowed(call, args, kwargs, whole)


def add_layer_rows(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The hook behind each decoder layer: adds the rows that a vision tower gives to the first layers (deepstack)."""
    call: AttentionCall | None = kwargs.get("infoflow")
    found = None if call is None else _rows_of(call, call.layers_seen[-1])
    if found is None:
        return None
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = hidden.index_add(1, found[0], found[1][None].to(hidden.dtype))
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _rows_of(call: AttentionCall, layer: int) -> tuple[Tensor, Tensor] | None:
    """Which rows of the forward get something behind this layer, and what; None for nothing."""
    if call.layer_rows is None or call.visual is None or layer >= call.layer_rows.shape[0]:
        return None
    rows, added = call.visual, call.layer_rows[layer]
    if call.rows is not None:  # some rows have left: the others stand closer together
        place = torch.searchsorted(call.rows, rows).clamp_max(call.rows.numel() - 1)
        stays = call.rows[place] == rows
        rows, added = place[stays], added[stays]
    return rows, added


def _narrowed(
    call: AttentionCall, args: tuple[Any, ...], kwargs: dict[str, Any], whole: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments for the rows that are left; `whole`: those that were made for all rows of the forward."""
    kwargs = dict(kwargs)
    if call.kept is not None:
        kept, call.kept = call.kept, None
        call.rows = kept if call.rows is None else call.rows[kept]
        call.rotary = call.rotary.at(kept)
        if args:
            args = (args[0][:, kept], *args[1:])
        else:
            kwargs["hidden_states"] = kwargs["hidden_states"][:, kept]
    if "position_embeddings" in whole:
        kwargs["position_embeddings"] = tuple(table[:, call.rows] for table in whole["position_embeddings"])
    if "position_ids" in whole:
        kwargs["position_ids"] = whole["position_ids"][..., call.rows]
    return args, kwargs

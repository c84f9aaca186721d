"""The model's own rotary embedding, called at the positions of a request.

RoPE types whose frequencies depend on the length seen (dynamic NTK, longrope) keep state on their module; every request
works on its own copy, so that no request sees the frequencies of another (bug kind P03).
"""

import copy
import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.shapes import Float, Int, Tensor

ApplyRotary = Callable[..., tuple[Tensor, Tensor]]


def apply_function(attention_module: torch.nn.Module) -> ApplyRotary | None:
    """The `apply_rotary_pos_emb` of the model file that an attention module comes from, if it has one."""
    return getattr(sys.modules[type(attention_module).__module__], "apply_rotary_pos_emb", None)


def apply_partly(apply: ApplyRotary) -> ApplyRotary:
    """`apply` on the leading part of the head only, for models that slice outside of it."""

    def sliced(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1]
        q_part, k_part = apply(q[..., :width], k[..., :width], cos, sin)
        return torch.cat([q_part, q[..., width:]], dim=-1), torch.cat([k_part, k[..., width:]], dim=-1)

    return sliced


@runtime_checkable
class Rotates(Protocol):
    """What rotates a layer's query and key: the tables of a request, or the probe's poison."""

    def rotate(self, layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]: ...

    def at(self, index: Tensor) -> "Rotates": ...


class RotaryTables:
    """cos and sin of one request's positions for every layer; `rotate` applies them as the model does."""

    def __init__(
        self,
        tables: dict[str | None, tuple[Tensor, Tensor]],
        layer_types: tuple[str | None, ...],
        rotated_layers: tuple[bool, ...],
        apply: ApplyRotary,
    ) -> None:
        self._tables = tables
        self._layer_types = layer_types
        self._rotated_layers = rotated_layers
        self._apply = apply

    def at(self, index: Int[Tensor, " rows"] | slice) -> "RotaryTables":
        """The tables of some of the positions."""
        part = {t: (cos[:, index], sin[:, index]) for t, (cos, sin) in self._tables.items()}
        return RotaryTables(part, self._layer_types, self._rotated_layers, self._apply)

    def rotate(
        self,
        layer: int,
        query: Float[Tensor, "1 heads rows head_dim"],
        key: Float[Tensor, "1 kv_heads rows head_dim"],
    ) -> tuple[Float[Tensor, "1 heads rows head_dim"], Float[Tensor, "1 kv_heads rows head_dim"]]:
        """Query and key of a layer, rotated; unchanged in layers without RoPE."""
        if not self._rotated_layers[layer]:
            return query, key
        cos, sin = self._tables[self._layer_types[layer]]
        return self._apply(query, key, cos, sin)

    def similarity(self) -> Float[Tensor, " tokens"]:
        """How much of a rotation is left at each of these positions, taken as distances: the mean of cos(d·θ) over the
        frequencies θ, 1 at distance 0 (of the first layer type, where there are several)."""
        cos, _ = next(iter(self._tables.values()))
        # A scaling of attention (YaRN) multiplies cos and sin alike; it is no rotation.
        return cos[0].float().mean(-1) / cos[0].float().abs().amax().clamp_min(1e-12)

    def rotate_keys(
        self, layer: int, keys: Float[Tensor, "kv_heads tokens head_dim"]
    ) -> Float[Tensor, "kv_heads tokens head_dim"]:
        """Stored keys of a layer, rotated to the tables' positions."""
        # Zero query heads: the model's function rotates both, and only the keys are wanted.
        return self.rotate(layer, keys[None, :0], keys[None])[1][0]


class Rotary:
    """The rotary embedding of one model for one request. Make a new one for each request (`LanguageModel.rotary`)."""

    def __init__(
        self,
        module: torch.nn.Module,
        layer_types: tuple[str | None, ...],
        rotated_layers: tuple[bool, ...],
        apply: ApplyRotary,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stateful = is_stateful(module)
        self._module = copy.deepcopy(module) if self._stateful else module
        self._layer_types = layer_types
        self._rotated_layers = rotated_layers
        self._apply = apply
        self._like = torch.empty(1, 1, 1, dtype=dtype, device=device)

    def tables(self, positions: Int[Tensor, "*stack tokens"]) -> RotaryTables:
        """cos and sin at these positions, in the regime of the largest position seen by this object. Models whose
        positions have several axes take `[axes, tokens]`, or `[tokens]` for the same on all of them."""
        # `forward` itself, not the module call: the call would run the identity hook.
        forward = type(self._module).forward
        positions = positions.to(self._like.device)
        if positions.ndim == 2 and positions.shape[0] == 1:
            positions = positions[0]
        with torch.no_grad():
            tables: dict[str | None, tuple[Tensor, Tensor]] = {}
            for layer_type in dict.fromkeys(self._layer_types):
                extra = {} if layer_type is None else {"layer_type": layer_type}
                tables[layer_type] = forward(self._module, self._like, positions.unsqueeze(-2), **extra)
        return RotaryTables(tables, self._layer_types, self._rotated_layers, self._apply)

    def fingerprint(self, num_tokens: int) -> str:
        """SHA-256 (hex) of the frequencies that a sequence of this length gets: the RoPE regime."""
        self.tables(torch.tensor([max(num_tokens, 1) - 1], device=self._like.device))
        digest = hashlib.sha256()
        for name, buffer in sorted(self._module.named_buffers()):
            if name.endswith("inv_freq") and "original" not in name:
                digest.update(name.encode())
                digest.update(buffer.detach().to("cpu", torch.float64).numpy().tobytes())
        scaling = {k: _plain(v) for k, v in vars(self._module).items() if k.endswith("attention_scaling")}
        digest.update(json.dumps(scaling, sort_keys=True).encode())
        digest.update(json.dumps([self._layer_types, self._rotated_layers]).encode())
        return digest.hexdigest()


def is_stateful(module: torch.nn.Module) -> bool:
    """Whether the module's frequencies depend on the length of the sequence."""
    return is_longrope(module) or any("dynamic" in name for name in rope_types(module))


def is_longrope(module: torch.nn.Module) -> bool:
    """Whether the module changes from short to long frequencies at one length."""
    return "longrope" in rope_types(module)


def rope_types(module: torch.nn.Module) -> list[str]:
    """The module's RoPE types, one for each layer type that has its own."""
    kinds = getattr(module, "rope_type", "default")
    return [str(name) for name in (kinds.values() if isinstance(kinds, dict) else [kinds])]


def takes_layer_type(module: torch.nn.Module) -> bool:
    """Whether the rotary embedding has one table per layer type (two thetas in Gemma 3)."""
    parameters = inspect.signature(type(module).forward).parameters
    return "layer_type" in parameters and isinstance(getattr(module, "rope_type", None), dict)


def find_rotary(decoder: torch.nn.Module) -> torch.nn.Module:
    """The one rotary module of a decoder; ComputeError if there is none."""
    module = getattr(decoder, "rotary_emb", None)
    if not isinstance(module, torch.nn.Module):
        raise ComputeError(f"{type(decoder).__name__} has no rotary_emb module")
    return module


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, (int, float, Tensor)) else str(value)

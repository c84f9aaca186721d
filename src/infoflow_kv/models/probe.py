"""The support probe: decides by numbers, at load, whether a model's KV can be moved; never by a list of names.

Four steps, each with its own reason for refusal: what the model declares; which layers rotate (a forward with NaN
instead of cos and sin shows where RoPE arrives); whether keys and values before RoPE are the same at another place; and
24 random tokens through our path against the model's own attention at two places, also cut in two chunks, with all rows
but the last ones left behind before the last layer, and with windows so narrow that they matter to 24 tokens.
"""

import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from infoflow_kv.errors import ComputeError, UnsupportedModelError
from infoflow_kv.models import hooks
from infoflow_kv.models.plain import plain_copy
from infoflow_kv.models.rotary import (
    ApplyRotary,
    Rotary,
    RotaryTables,
    apply_function,
    apply_partly,
    find_rotary,
    is_longrope,
    is_stateful,
    takes_layer_type,
)
from infoflow_kv.models.windows import NARROW_TOKENS, Windows, narrowed, obeys, through
from infoflow_kv.models.windows import layer_windows as layer_windows  # the evaluation asks the probe for it
from infoflow_kv.ops import staircase_attention
from infoflow_kv.shapes import Float, Tensor

PROBE_TOKENS = 24
# Correct models stay far below, wrong ones (absolute positions, wrong rotation) give 0.5 and more.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 0.15}
# In 16 bits a router between experts may tip over in a token or two, by rounding alone; a wrong model is wrong with any
# tokens.
DRAWS = {torch.float32: 1, torch.float16: 4, torch.bfloat16: 4}
LAYER_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Support:
    """What the probe found out about a model that it accepts."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_module: torch.nn.Module  # as it was at load: the model's own one changes where length matters
    apply_rotary: ApplyRotary
    layer_types: tuple[str | None, ...]
    rotated_layers: tuple[bool, ...]
    windows: Windows
    length_matters: bool
    rotates_anew: bool
    needs_eager: bool
    max_error: float

    @property
    def windows_tag(self) -> str:
        """The windows as part of the regime's fingerprint; empty without windows."""
        return "" if not any(self.windows) else "/w" + ",".join(str(w or 0) for w in self.windows)


def probe(hf: Any) -> Support:
    """The facts that the engine needs; UnsupportedModelError with the reason if the model's KV cannot be moved.

    Leaves our attention function and the rotary hook on `hf`; a refused model is left as it was.
    """
    name = type(hf).__name__
    before = hf.config._attn_implementation
    handles: list[Any] = []
    try:
        declared(hf)
        rotary_module = find_rotary(hf.get_decoder())
        pristine = copy.deepcopy(rotary_module)
        attentions = attention_modules(hf)
        hf.set_attn_implementation(hooks.IMPLEMENTATION)
        handles.append(rotary_module.register_forward_hook(hooks.identity_rotary))
        for layer in decoder_layers(hf, attentions):
            handles.append(layer.register_forward_pre_hook(hooks.narrow_rows, with_kwargs=True))
        return measure(hf, pristine, attentions)
    except UnsupportedModelError:
        restore(hf, before, handles)
        raise
    except Exception as error:
        restore(hf, before, handles)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedModelError(f"{name} is not supported: the support probe failed ({reason})") from error


def restore(hf: Any, implementation: str, handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    if hf.config._attn_implementation != implementation:
        hf.set_attn_implementation(implementation)


def refuse(hf: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(hf).__name__} is not supported: {reason}")


def declared(hf: Any) -> None:
    """Refusals that need no arithmetic."""
    config = hf.config
    if config._attn_implementation == hooks.IMPLEMENTATION:
        raise refuse(hf, "it is held by another LanguageModel already; load it again")
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(hf, "it is an encoder-decoder model; a decoder-only model is needed")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= LAYER_KINDS:
        raise refuse(hf, f"it has layers of kind {', '.join(sorted(kinds - LAYER_KINDS))}, whose state cannot be moved")
    if not getattr(hf, "_supports_attention_backend", False):
        raise refuse(hf, "its attention cannot be replaced through Transformers' AttentionInterface")
    decoder = hf.get_decoder()
    if not isinstance(getattr(decoder, "rotary_emb", None), torch.nn.Module):
        raise refuse(
            hf, "it has no rotary position embedding (absolute, ALiBi or no positions), so its KV cannot be moved"
        )
    if getattr(config, "kv_lora_rank", None):
        raise refuse(hf, "it compresses keys and values into a latent (MLA), whose positions cannot be separated here")


def attention_modules(hf: Any) -> dict[int, torch.nn.Module]:
    """The attention module of each layer: the modules that carry a `layer_idx` and projections of their own."""
    found: dict[int, torch.nn.Module] = {}
    for module in hf.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "Attention" in type(module).__name__:
            found[index] = module
    if sorted(found) != list(range(hf.config.num_hidden_layers)):
        raise refuse(hf, f"it has attention in layers {sorted(found)} of {hf.config.num_hidden_layers}")
    return found


def decoder_layers(hf: Any, attentions: dict[int, torch.nn.Module]) -> list[torch.nn.Module]:
    """The decoder layers in order: the modules of the decoder's own list that hold the attention modules."""
    layers = list(getattr(hf.get_decoder(), "layers", ()))
    if len(layers) != len(attentions) or any(
        attention not in layer.modules() for layer, attention in zip(layers, attentions.values(), strict=True)
    ):
        raise refuse(hf, "its decoder layers are not a plain list, one attention each")
    return layers


def measure(hf: Any, rotary_module: torch.nn.Module, attentions: dict[int, torch.nn.Module]) -> Support:
    config = hf.config
    num_layers = len(attentions)
    kinds = list(getattr(config, "layer_types", None) or [None] * num_layers)
    layer_types = tuple(kinds) if takes_layer_type(rotary_module) else (None,) * num_layers
    windows = layer_windows(config, kinds, num_layers)
    if any(windows) and not obeys(plain_copy(hf, rotary_module, "eager"), random_ids(hf)):
        windows = (None,) * num_layers
    seen = rotated_layers(hf, windows)
    rotated, shapes = seen.rotated, seen.shapes
    if len(set(shapes)) != 1 or shapes[0][1] != shapes[0][2]:
        raise refuse(hf, f"keys and values differ in shape between or inside layers ({sorted(set(shapes))})")
    (num_heads, *_), (num_kv_heads, head_dim), _ = shapes[0]
    refuse_bound_keys(hf, windows, starts(hf))
    apply = apply_function(attentions[0])
    if apply is None and any(rotated):
        raise refuse(hf, "its model file has no apply_rotary_pos_emb")
    best = float("inf")
    candidates = (apply, apply_partly(apply)) if apply is not None else ()
    for candidate, draw in itertools.product(candidates, range(DRAWS[hf.dtype])):
        error = try_rotation(hf, random_ids(hf, draw), rotary_module, candidate, layer_types, rotated, windows)
        best = min(best, error)
        if error <= TOLERANCE[hf.dtype]:
            return Support(
                num_layers, num_heads, num_kv_heads, head_dim, rotary_module, candidate,
                layer_types, rotated, windows, is_stateful(rotary_module), is_longrope(rotary_module),
                seen.needs_eager, error,
            )  # fmt: skip
    raise refuse(
        hf,
        f"with our rotation its logits differ from its own by {best:.2g} (relative; {TOLERANCE[hf.dtype]:.0e} allowed)",
    )


def random_ids(hf: Any, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, hf.config.get_text_config().vocab_size, (PROBE_TOKENS,), generator=generator).to(hf.device)


def starts(hf: Any) -> tuple[int, int]:
    """The two places where the model is measured: first position, and one far away from it."""
    return 0, min(333, hf.config.max_position_embeddings - PROBE_TOKENS)


class Still:
    """Rotates nothing."""

    def rotate(self, layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key

    def at(self, index: Tensor) -> "Still":
        return self


@dataclass(frozen=True, slots=True)
class Seen:
    """Per layer: whether it rotates, and (heads, width) of q, k and v; whether any layer has softcap or sinks."""

    rotated: tuple[bool, ...]
    shapes: list[tuple[Any, ...]]
    needs_eager: bool


def rotated_layers(hf: Any, windows: Windows) -> Seen:
    """Which layers rotate, found by poison.

    cos and sin are NaN here: keys that come out NaN were rotated. Attention returns zeros: later layers stay clean.
    """
    num_layers = len(windows)
    rotated = [False] * num_layers
    shapes: list[tuple[Any, ...]] = [()] * num_layers
    special: set[int] = set()

    class Poison(Still):
        def rotate(self, layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            rotated[layer] = bool(key.isnan().any())
            return query, key

    def attend(given: hooks.AttentionInput) -> Tensor:
        q, k, v = given.query, given.raw_key, given.value
        shapes[given.layer] = ((q.shape[0], q.shape[2]), (k.shape[0], k.shape[2]), (v.shape[0], v.shape[2]))
        if given.spec.softcap is not None or given.spec.sinks is not None:
            special.add(given.layer)
        return no_output(given)

    def poison(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return torch.full_like(output[0], float("nan")), torch.full_like(output[1], float("nan"))

    handle = find_rotary(hf.get_decoder()).register_forward_hook(poison)
    call = hooks.AttentionCall(Poison(), attend, windows)
    try:
        run(hf, random_ids(hf), torch.arange(PROBE_TOKENS), call)
    except ComputeError as error:
        if call.layers_seen:
            raise
        raise refuse(
            hf, "its layers bring masks of their own to attention, or do not hand on the keywords it needs"
        ) from error
    finally:
        handle.remove()
    if call.layers_seen != list(range(num_layers)):
        raise refuse(hf, f"attention runs in layers {call.layers_seen} of {num_layers}; expected each once, in order")
    return Seen(tuple(rotated), shapes, bool(special))


def no_output(given: hooks.AttentionInput) -> Tensor:
    """Zeros for what a layer's attention gives: no later layer then depends on positions or on other tokens."""
    return given.query.new_zeros(*given.query.shape[:2], given.value.shape[2])


def refuse_bound_keys(hf: Any, windows: Windows, starts: tuple[int, int]) -> None:
    """UnsupportedModelError where keys before RoPE, or values, are not the same at two places.

    Such models rotate by tables that `rotary_emb` did not give, or add positions elsewhere. Their logits are right all
    the same, as every row is computed where it stands; only what is stored and moved would be wrong.
    """
    found: list[list[Tensor]] = []
    for start in starts:
        here: list[Tensor] = []
        found.append(here)

        def attend(given: hooks.AttentionInput, here: list[Tensor] = here) -> Tensor:
            here.append(torch.cat([given.raw_key, given.value]).float())
            return no_output(given)

        run(
            hf, random_ids(hf), torch.arange(start, start + PROBE_TOKENS), hooks.AttentionCall(Still(), attend, windows)
        )
    errors = [float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in zip(*found, strict=True)]
    bound = [layer for layer, error in enumerate(errors) if not error <= TOLERANCE[hf.dtype]]
    if bound:
        raise refuse(
            hf,
            f"keys or values of layers {bound} depend on the position in a way that does not come from its rotary_emb",
        )


def run(hf: Any, ids: Tensor, positions: Tensor, call: hooks.AttentionCall) -> Float[Tensor, "rows vocab"]:
    with torch.inference_mode():
        out = hf(input_ids=ids[None], position_ids=positions[None].to(hf.device), use_cache=False, infoflow=call)
    logits: Tensor = out.logits[0].float()
    return logits


def try_rotation(
    hf: Any,
    ids: Tensor,
    rotary_module: torch.nn.Module,
    apply: ApplyRotary,
    layer_types: tuple[str | None, ...],
    rotated: tuple[bool, ...],
    windows: Windows,
) -> float:
    """Largest relative logit error of our path against the model's own attention, at positions 0.. and 333.., and with
    narrow windows where it has some."""
    plain = plain_copy(hf, rotary_module, "eager")
    two = two_chunks(PROBE_TOKENS // 2)
    is_windowed = any(window and window > NARROW_TOKENS for window in windows)
    worst = 0.0
    for start, is_narrow in [(start, False) for start in starts(hf)] + [(0, True)] * is_windowed:
        positions = torch.arange(start, start + PROBE_TOKENS, device=hf.device)
        if is_narrow:  # last: it stays narrow
            plain.config.get_text_config().sliding_window = NARROW_TOKENS
        rotary = Rotary(rotary_module, layer_types, rotated, apply, hf.dtype, hf.device)
        try:
            attend = through(narrowed(windows), two) if is_narrow else two
            call = hooks.AttentionCall(rotary.tables(positions), attend, windows)
            ours = run(hf, ids, positions, call)
        except RuntimeError:
            return float("inf")
        with torch.inference_mode():
            theirs = plain(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
            counts = () if is_narrow else (1, 3)
            shorter = [rows_short_of(hf, ids, positions, rotary.tables(positions), windows, count) for count in counts]
        for found in (ours, *shorter):
            if found is None:
                return float("inf")
            wanted = theirs[-found.shape[0] :]
            error = float((found - wanted).abs().max() / theirs.abs().max())
            if not math.isfinite(error):  # NaN compares as smaller than anything
                return float("inf")
            worst = max(worst, error)
    return worst


def rows_short_of(
    hf: Any, ids: Tensor, positions: Tensor, tables: RotaryTables, windows: Windows, count: int
) -> Float[Tensor, "rows vocab"] | None:
    """Logits of the last `count` rows where the others leave nothing but K/V in the last layer, as in every request;
    None where a layer does not come by exactly once, or will not run for some of the rows."""
    slots: dict[int, tuple[Tensor, Tensor]] = {}

    def write(given: hooks.AttentionInput) -> None:
        slots[given.layer] = given.key, given.value

    def attend(given: hooks.AttentionInput) -> Tensor:
        if given.query.shape[1] == ids.shape[0]:
            slots[given.layer] = given.key, given.value
        keys, values = slots[given.layer]
        last = ids.shape[0]
        ranks = torch.arange(last - given.query.shape[1], last, device=ids.device)
        return staircase_attention(given.query, keys, values, ranks, given.spec)

    call = hooks.AttentionCall(tables, attend, windows, write=write, num_whole=count)
    try:
        with torch.inference_mode():
            out = hf(
                input_ids=ids[None],
                position_ids=positions[None].to(hf.device),
                use_cache=False,
                infoflow=call,
                logits_to_keep=count,
            )
    except (RuntimeError, IndexError, ComputeError):
        return None
    logits: Tensor = out.logits[0].float()
    return logits if call.layers_seen == list(range(len(windows))) else None


def two_chunks(cut: int) -> hooks.Attend:
    """Plain causal attention, computed as two row blocks so that slots and ranks are exercised."""

    def attend(given: hooks.AttentionInput) -> Tensor:
        ranks = torch.arange(given.query.shape[1], device=given.query.device)
        parts = [
            staircase_attention(given.query[:, part], given.key, given.value, ranks[part], given.spec)
            for part in (slice(0, cut), slice(cut, None))
        ]
        return torch.cat(parts, dim=1)

    return attend

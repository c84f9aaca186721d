"""The same weights as an ordinary Transformers model: the reference for probe, invariants, laboratory, benchmarks."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infoflow_kv.shapes import Float, Tensor


def plain_copy(hf: Any, rotary_module: torch.nn.Module, attention: str) -> Any:
    """A second module tree over the same parameters, without our hooks; costs no memory for weights.

    `rotary_module`: the model's rotary embedding as it was at load (dynamic RoPE keeps state from call to call).
    """
    memo: dict[int, Any] = {id(p): p for p in hf.parameters()}
    memo[id(hf.get_decoder().rotary_emb)] = copy.deepcopy(rotary_module)
    twin = copy.deepcopy(hf, memo)
    twin.set_attn_implementation(attention)
    return twin


@dataclass(frozen=True, slots=True)
class PlainRun:
    """A greedy answer of plain Transformers: its ids, the float32 logits behind each of them, and its KV cache.

    keys (rotated) and values: `[layers, kv_heads, tokens, head_dim]` of the prompt and of all new ids but the last.
    None where the cache does not keep every token (sliding windows).
    """

    token_ids: tuple[int, ...]
    logits: Float[Tensor, "new vocab"]
    keys: Float[Tensor, "layers kv_heads tokens head_dim"] | None
    values: Float[Tensor, "layers kv_heads tokens head_dim"] | None
    ttft_seconds: float
    seconds: float


def greedy(plain: Any, token_ids: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int]) -> PlainRun:
    """The greedy continuation of `token_ids` by Transformers' own `generate`; ends after the first of `stop_ids`."""
    ids = torch.tensor([list(token_ids)], device=plain.device)
    watch = _Watch()
    with torch.inference_mode():
        out = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(stop_ids) or None,
            pad_token_id=min(stop_ids, default=0),
            return_dict_in_generate=True,
            output_logits=True,
            streamer=watch,
        )
    new = tuple(int(t) for t in out.sequences[0, len(token_ids) :])
    logits = torch.cat(list(out.logits)).float()
    # The last new token was never read.
    keys, values = whole_kv(out, len(token_ids) + len(new) - 1)
    return PlainRun(new, logits, keys, values, watch.first - watch.start, time.perf_counter() - watch.start)


def cache_of(out: Any) -> dict[str, Any]:
    """An output's cache as a keyword, under the name that this version of Transformers gives it: the older one warns
    where there is a newer."""
    name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
    return {name: getattr(out, name)}


def whole_kv(out: Any, num_tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """The KV of all `num_tokens` that were read; None where a sliding window has dropped some."""
    [cache] = cache_of(out).values()
    layers = list(getattr(cache, "layers", ()))
    if not layers or any(layer.keys.shape[2] != num_tokens for layer in layers):
        return None, None
    return torch.stack([layer.keys[0] for layer in layers]), torch.stack([layer.values[0] for layer in layers])


class _Watch:
    """A streamer that notes when the first new token is known; `generate` hands the prompt over first."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first = 0.0
        self._puts = 0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Nothing to do at the end."""

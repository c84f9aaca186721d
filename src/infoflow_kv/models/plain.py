"""The same weights as an ordinary Transformers model: the reference for probe, invariants and benchmarks."""

import copy
from typing import Any

import torch


def plain_copy(hf: Any, rotary_module: torch.nn.Module, attention: str) -> Any:
    """A second module tree over the same parameters, without our hooks; costs no memory for weights.

    `rotary_module`: the model's rotary embedding as it was at load (dynamic RoPE keeps state from call to call).
    """
    memo: dict[int, Any] = {id(p): p for p in hf.parameters()}
    memo[id(hf.get_decoder().rotary_emb)] = copy.deepcopy(rotary_module)
    twin = copy.deepcopy(hf, memo)
    twin.set_attn_implementation(attention)
    return twin

"""Slow, obvious truth: dense masked attention in float64."""

import torch

from infoflow_kv.ops import AttentionSpec


def weights(query: torch.Tensor, keys: torch.Tensor, ranks: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Attention weights `[heads, rows, slots]` by a loop over rows."""
    heads, rows, _ = query.shape
    group = heads // keys.shape[0]
    out = torch.zeros(heads, rows, keys.shape[1], dtype=torch.float64)
    for head in range(heads):
        for row in range(rows):
            rank = int(ranks[row])
            first = 0 if spec.window is None else max(0, rank - spec.window + 1)
            seen = keys[head // group, first : rank + 1].double()
            logits = seen @ query[head, row].double() * spec.scale
            if spec.softcap is not None:
                logits = torch.tanh(logits / spec.softcap) * spec.softcap
            if spec.sinks is not None:
                logits = torch.cat([logits, spec.sinks[head : head + 1].double()])
            out[head, row, first : rank + 1] = torch.softmax(logits, dim=0)[: rank + 1 - first]
    return out


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention output `[heads, rows, head_dim]`."""
    group = query.shape[0] // keys.shape[0]
    return weights(query, keys, ranks, spec) @ values.double().repeat_interleave(group, dim=0)

"""Stitched context and its attention from plain Transformers: every chunk sees only itself, by a dense mask.

With head policy `none` a chunk's KV depends on relative positions inside the chunk only, so one ordinary forward at
positions 0..N-1 under a block-diagonal mask gives what reuse without recomputing must give.
"""

from dataclasses import dataclass

import torch


@dataclass
class Stitched:
    """attention: `[layers, heads, prompt, context]` of the prompt rows; keys, values: `[layers, kv_heads, N+M, d]`."""

    attention: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    logits: torch.Tensor


def block_mask(lengths: list[int], num_prompt: int) -> torch.Tensor:
    """True where row i may look at slot j: its own chunk up to itself; prompt rows look at everything before them."""
    total = sum(lengths) + num_prompt
    mask = torch.zeros(total, total, dtype=torch.bool)
    start = 0
    for length in lengths:
        mask[start : start + length, start : start + length] = True
        start += length
    mask[start:] = True
    return mask & torch.ones(total, total, dtype=torch.bool).tril()


def run_plain(
    model, token_ids, num_prompt: int, mask: torch.Tensor | None = None, positions: list[int] | None = None
) -> Stitched:
    """The plain model over all ids, eager so that it hands its attention out; `mask` None is ordinary prefill."""
    plain = model.plain("eager")
    ids = torch.tensor([list(token_ids)])
    total = ids.shape[1]
    if mask is None:
        mask = torch.ones(total, total, dtype=torch.bool).tril()
    additive = torch.zeros(1, 1, total, total).masked_fill(~mask[None, None], torch.finfo(torch.float32).min)
    with torch.inference_mode():
        out = plain(
            input_ids=ids,
            attention_mask=additive,
            position_ids=(torch.arange(total) if positions is None else torch.tensor(positions))[None],
            use_cache=True,
            output_attentions=True,
        )
    context = total - num_prompt
    cache = getattr(out, "cache", None)
    cache = out.past_key_values if cache is None else cache
    return Stitched(
        attention=torch.stack([a[0, :, context:, :context] for a in out.attentions]),
        keys=torch.stack([layer.keys[0] for layer in cache.layers]),
        values=torch.stack([layer.values[0] for layer in cache.layers]),
        logits=out.logits[0].float(),
    )

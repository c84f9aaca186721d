"""Selectors that look at nothing but a token's place in its chunk: LegoLink (EPIC) and seams (KVBoost)."""

import torch

from infoflow_kv.records import Context
from infoflow_kv.select.base import Scene
from infoflow_kv.shapes import Float, Int, Tensor


class ChunkStarts:
    """The earlier in its chunk, the higher: all first tokens, then all second tokens, … (LegoLink, EPIC)."""

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        scores = torch.zeros(scene.context.num_tokens)
        for slots in parts(scene.context):
            scores[slots] = -torch.arange(slots.numel(), dtype=torch.float32)
        return scores.to(scene.context.keys.device)


class Seams:
    """The nearer to the next chunk, the higher. The last chunk ends at the prompt, which is no seam: it comes last."""

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        spans = scene.context.spans
        scores = torch.full((scene.context.num_tokens,), -float(scene.context.num_tokens))
        for span in spans[:-1]:
            scores[span.start : span.stop] = -torch.arange(span.num_tokens - 1, -1, -1, dtype=torch.float32)
        return scores.to(scene.context.keys.device)


def tokens_at_starts(context: Context, k: int) -> int:
    """How many tokens are the first `k` of every chunk outside the exact prefix."""
    return sum(min(k, slots.numel()) for slots in parts(context) if int(slots[0]) >= context.exact_tokens)


def parts(context: Context) -> tuple[Int[Tensor, " part"], ...]:
    """The slots of everything that was prefilled apart: tiles of images where there are some, else the chunks."""
    return context.cells or tuple(torch.arange(span.start, span.stop) for span in context.spans)


def tokens_at_seams(context: Context, k: int) -> int:
    """How many tokens are the last `k` before a seam, outside the exact prefix."""
    return sum(min(k, s.num_tokens) for s in context.spans[:-1] if s.start >= context.exact_tokens)

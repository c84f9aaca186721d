"""Position reconstruction: stored position-free chunks become one context at its RoPE positions.

GLOBAL, as inference uses it: context 0..N-1 over all chunks, prompt N..N+M-1 (docs/method.md, section 2). The other
geometries are choices of origins for scoring only (section 8): repair and decoding always use GLOBAL.
"""

from collections.abc import Iterable, Sequence

import torch

from infoflow_kv.errors import ComputeError, unknown_name
from infoflow_kv.models import LanguageModel, Rotary, RotaryTables
from infoflow_kv.records import ChunkIdentity, ChunkKV, Context, Prompt, Span
from infoflow_kv.shapes import Int, Tensor

# name → where the context stands, where the prompt stands
GEOMETRIES: dict[str, tuple[str, str]] = {
    "GLOBAL": ("global", "tail"),
    "HL-HP": ("head-local", "head"),
    "HL-TP": ("head-local", "tail"),
    "TL-TP": ("tail-local", "tail"),
}


def lay_out(lengths: Sequence[int]) -> tuple[Span, ...]:
    """Consecutive spans of these lengths from slot 0."""
    spans, start = [], 0
    for length in lengths:
        spans.append(Span(start, start + length))
        start += length
    return tuple(spans)


def check_geometry(name: str) -> str:
    """The geometry's name as it is written; OptionError with the nearest known one if there is none."""
    found = {known.casefold(): known for known in GEOMETRIES}.get(str(name).casefold())
    if found is None:
        raise unknown_name("geometry", str(name), GEOMETRIES)
    return found


def scoring_positions(
    geometry: str, head_tokens: int, lengths: Sequence[int], origin: int, num_prompt: int
) -> Int[Tensor, " positions"]:
    """RoPE positions of head, chunks and prompt while tokens are scored (docs/method.md, section 8).

    `origin`: where a chunk stood in its own prefill (the head's length, or 0 if it was prefilled without one). The head
    itself always stands at 0.

    >>> scoring_positions("HL-TP", 0, [3, 2], 0, 2).tolist()
    [0, 1, 2, 0, 1, 5, 6]
    """
    where, prompt_at = GEOMETRIES[check_geometry(geometry)]
    total = head_tokens + sum(lengths)
    parts = [torch.arange(head_tokens)]
    start = head_tokens
    for length in lengths:
        first = {"global": start, "head-local": origin, "tail-local": total - length}[where]
        parts.append(torch.arange(first, first + length))
        start += length
    first = total if prompt_at == "tail" else origin + max(lengths, default=0)
    parts.append(torch.arange(first, first + num_prompt))
    return torch.cat(parts)


def request_tables(rotary: Rotary, num_context: int, num_prompt: int) -> RotaryTables:
    """The GLOBAL tables of a whole request; slot index == position."""
    return rotary.tables(torch.arange(num_context + num_prompt))


def assemble(
    model: LanguageModel,
    parts: Sequence[ChunkKV],
    rotary: RotaryTables,
    num_slots: int,
    exact_tokens: int,
) -> Context:
    """The context of these parts in this order (the head first, where there is one), rotated by the model itself.

    `rotary` covers at least the context's slots. `exact_tokens`: how many leading tokens are what full prefill would
    give (docs/method.md, section 5). The parts are copied: stored KV is never written into.
    """
    return assemble_one_by_one(model, [part.identity for part in parts], parts, rotary, num_slots, exact_tokens)


def assemble_one_by_one(
    model: LanguageModel,
    identities: Sequence[ChunkIdentity],
    parts: Iterable[ChunkKV],
    rotary: RotaryTables,
    num_slots: int,
    exact_tokens: int,
) -> Context:
    """As `assemble`, of parts that are handed over one after the other, so that nobody need hold them all;
    `identities` are their own. ComputeError where another part comes than was announced."""
    spans = lay_out([len(identity.token_ids) for identity in identities])
    num_context = spans[-1].stop if spans else 0
    if num_slots < num_context or exact_tokens > num_context:
        raise ComputeError(f"{num_context} context tokens do not fit {num_slots} slots with {exact_tokens} exact ones")
    keys, values = model.empty_slots(num_slots)
    for part, identity, span in zip(parts, identities, spans, strict=True):
        if part.identity != identity:
            raise ComputeError("a part is not the one that was announced; its tokens would get another's KV")
        if part.keys.dtype != model.dtype or part.keys.shape != keys[:, :, span.start : span.stop].shape:
            raise ComputeError(
                f"stored KV is {part.keys.dtype} {tuple(part.keys.shape)}, expected {model.dtype} "
                f"{tuple(keys[:, :, span.start : span.stop].shape)} (layers, kv_heads, tokens, head_dim)"
            )
        own = slice(span.start, span.stop)
        values[:, :, own] = part.values
        tables, part_keys = rotary.at(own), part.keys.to(keys.device)
        # Layer by layer and part by part: what rotation makes on the way then stays in the processor's cache.
        for layer in range(model.num_layers):
            keys[layer, :, own] = tables.rotate_keys(layer, part_keys[layer])
    ids = torch.tensor([t for i in identities for t in i.token_ids], dtype=torch.int64, device=model.device)
    return Context(keys=keys, values=values, token_ids=ids, spans=spans, exact_tokens=exact_tokens)


def reserve(model: LanguageModel, prompt: Prompt, num_slots: int) -> Context:
    """An unfilled context for an ordinary prefill of the same tokens; nothing of it is exact yet."""
    keys, values = model.empty_slots(num_slots)
    ids = torch.tensor(prompt.token_ids[: prompt.context_tokens], dtype=torch.int64, device=model.device)
    lengths = ([len(prompt.head_ids)] if prompt.head_ids else []) + [c.num_tokens for c in prompt.chunks]
    return Context(keys=keys, values=values, token_ids=ids, spans=lay_out(lengths), exact_tokens=0)

"""Position reconstruction: stored position-free chunks become one context at its RoPE positions.

GLOBAL, as inference uses it: context 0..N-1 over all chunks, prompt N..N+M-1 (docs/method.md, section 2). The other
geometries are choices of origins for scoring only (section 8): repair and decoding always use GLOBAL.
"""

from collections.abc import Iterable, Sequence

import torch

from infoflow_kv.errors import ComputeError, unknown_name
from infoflow_kv.models import LanguageModel, Rotary, RotaryTables
from infoflow_kv.records import Chunk, ChunkIdentity, ChunkInputs, ChunkKV, Context, Prompt, Span, VisualRows
from infoflow_kv.shapes import Float, Int, Tensor

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


Place = int | Tensor
"""A chunk's positions relative to its first: the number of its tokens, or `[axes, tokens]` of a chunk with images."""


def places_of(chunks: Sequence[Chunk]) -> tuple[Place, ...]:
    """How the positions of each chunk lie."""
    return tuple(chunk.num_tokens if chunk.images is None else chunk.images.positions for chunk in chunks)


def span_of(place: Place) -> int:
    """How far the chunk behind stands from this one."""
    return place if isinstance(place, int) else int(place.max()) + 1


def shift_of(chunks: Sequence[Chunk]) -> int:
    """What is added to a slot behind these chunks to get its RoPE position: an image takes fewer positions than slots
    (docs/method.md, section 12)."""
    return sum(span_of(place) - chunk.num_tokens for place, chunk in zip(places_of(chunks), chunks, strict=True))


def visual_slots(prompt: Prompt) -> Int[Tensor, " visual"]:
    """The context slots that stand for parts of an image, ascending."""
    found, start = [torch.empty(0, dtype=torch.int64)], len(prompt.head_ids)
    for chunk in prompt.chunks:
        if chunk.images is not None:
            found.append(start + chunk.images.visual.long())
        start += chunk.num_tokens
    return torch.cat(found)


def cells_of(prompt: Prompt) -> tuple[Int[Tensor, " cell"], ...]:
    """The slots of each part of the context that was prefilled apart, in order; empty where these are the chunks."""
    if all(chunk.images is None or not chunk.images.cells for chunk in prompt.chunks):
        return ()
    head, start = len(prompt.head_ids), len(prompt.head_ids)
    found = [torch.arange(head)] if head else []
    for chunk in prompt.chunks:
        cells = chunk.images.cells if chunk.images is not None else ()
        found += [start + cell for cell in cells or (torch.arange(chunk.num_tokens),)]
        start += chunk.num_tokens
    return tuple(found)


def request_positions(prompt: Prompt, num_rows: int) -> Int[Tensor, "*stack positions"]:
    """GLOBAL RoPE positions of the context and of `num_rows` rows behind it, slot by slot: one axis for text, as many
    as the model has where there are images."""
    lengths = places_of(prompt.chunks)
    return scoring_positions("GLOBAL", len(prompt.head_ids), lengths, 0, num_rows)


def scoring_positions(
    geometry: str, head_tokens: int, lengths: Sequence[Place], origin: int, num_prompt: int
) -> Int[Tensor, "*stack positions"]:
    """RoPE positions of head, chunks and prompt while tokens are scored (docs/method.md, section 8).

    `origin`: where a chunk stood in its own prefill (the head's length, or 0 if it was prefilled without one). The head
    itself always stands at 0. A chunk with images moves as a whole, by the same on all axes.

    >>> scoring_positions("HL-TP", 0, [3, 2], 0, 2).tolist()
    [0, 1, 2, 0, 1, 5, 6]
    """
    where, prompt_at = GEOMETRIES[check_geometry(geometry)]
    spans = [span_of(place) for place in lengths]
    total = head_tokens + sum(spans)
    parts = [torch.arange(head_tokens)]
    start = head_tokens
    for place, span in zip(lengths, spans, strict=True):
        first = {"global": start, "head-local": origin, "tail-local": total - span}[where]
        parts.append(torch.arange(first, first + span) if isinstance(place, int) else first + place.long())
        start += span
    first = total if prompt_at == "tail" else origin + max(spans, default=0)
    parts.append(torch.arange(first, first + num_prompt))
    axes = max((part.shape[0] for part in parts if part.ndim == 2), default=0)
    return torch.cat([part.expand(axes, -1) if axes else part for part in parts], dim=-1)


def request_tables(rotary: Rotary, num_context: int, num_prompt: int) -> RotaryTables:
    """The GLOBAL tables of a whole request of text; slot index == position."""
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
    seen: list[tuple[int, ChunkInputs]] = []
    for part, identity, span in zip(parts, identities, spans, strict=True):
        if part.identity != identity:
            raise ComputeError("a part is not the one that was announced; its tokens would get another's KV")
        own = slice(span.start, span.stop)
        if part.inputs is not None:
            seen.append((span.start, part.inputs))
        write_part(part, rotary.at(own), keys[:, :, own], values[:, :, own])
    ids = torch.tensor([t for i in identities for t in i.token_ids], dtype=torch.int64, device=model.device)
    shift = sum(inputs.span - int(inputs.positions.shape[1]) for _, inputs in seen)
    return Context(keys, values, ids, spans, exact_tokens, visual_rows(model, seen), shift)


def write_part(
    part: ChunkKV,
    rotary: RotaryTables,
    keys: Float[Tensor, "layers kv_heads tokens head_dim"],
    values: Float[Tensor, "layers kv_heads tokens head_dim"],
) -> None:
    """The part's KV is copied into its slots, keys rotated by the slots' tables; ComputeError where it does not fit."""
    if part.keys.dtype != keys.dtype or part.keys.shape != keys.shape:
        raise ComputeError(
            f"stored KV is {part.keys.dtype} {tuple(part.keys.shape)}, expected {keys.dtype} {tuple(keys.shape)} "
            "(layers, kv_heads, tokens, head_dim)"
        )
    values.copy_(part.values)
    part_keys = part.keys.to(keys.device)
    # Layer by layer and part by part: what rotation makes on the way then stays in the processor's cache.
    for layer in range(keys.shape[0]):
        keys[layer] = rotary.rotate_keys(layer, part_keys[layer])


def visual_rows(model: LanguageModel, seen: Sequence[tuple[int, ChunkInputs]]) -> VisualRows | None:
    """What the layers read where images are, of chunks by the slot of their first token; None without images."""
    if not seen:
        return None
    device = model.device
    return VisualRows(
        slots=torch.cat([start + inputs.visual.long() for start, inputs in seen]).to(device),
        embeddings=torch.cat([inputs.embeddings.to(device) for _, inputs in seen]),
        layer_rows=torch.cat([inputs.layer_rows.to(device) for _, inputs in seen], dim=1),
    )


def reserve(model: LanguageModel, prompt: Prompt, num_slots: int, inputs: Sequence[ChunkInputs | None] = ()) -> Context:
    """An unfilled context for an ordinary prefill of the same tokens; nothing of it is exact yet. `inputs`: those of
    each chunk, where any has images."""
    keys, values = model.empty_slots(num_slots)
    ids = torch.tensor(prompt.token_ids[: prompt.context_tokens], dtype=torch.int64, device=model.device)
    lengths = ([len(prompt.head_ids)] if prompt.head_ids else []) + [c.num_tokens for c in prompt.chunks]
    spans = lay_out(lengths)
    starts = [span.start for span in (spans[1:] if prompt.head_ids else spans)]
    seen = [(start, given) for start, given in zip(starts, inputs, strict=False) if given is not None]
    return Context(keys, values, ids, spans, 0, visual_rows(model, seen), shift_of(prompt.chunks))

"""Chunk prefill: one chunk alone behind its head, its KV kept position-free; and how far that KV moves in company."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import AttentionInput, LanguageModel, LocalMemory, forward_rows
from infoflow_kv.records import ChunkIdentity, ChunkImages, ChunkInputs, ChunkKV, ModelIdentity, VisualRows
from infoflow_kv.shapes import Float, Int, Tensor

# What stands before a chunk while its movement is measured. The same text for every chunk, so that the record depends
# on nothing but model, head and chunk: no order of ingestion, no other tenant's document.
NEIGHBOUR = (
    "The harbour office keeps a book of every ship that came in since 1871. Captain Ines Duarte signed it twice in "
    "March: once for the barque Elinor, which carried 340 barrels of pitch from Norrholm, and once for a smaller boat "
    "whose name the clerk could not read. Her brother, an engineer in Tallis, drew the new crane on the east quay. "
    "It was built in 1926 by the firm of Roth & Daughters, cost 18,500 crowns, and lifts nine tonnes. The council paid "
    "half of it; the other half came from the fishermen's union, whose chairman at the time was Olaf Brandt.\n\n"
)


def identify(
    model: LanguageModel,
    token_ids: tuple[int, ...],
    head_ids: tuple[int, ...] = (),
    namespace: str = "public",
    known: ModelIdentity | None = None,
    images: ChunkImages | None = None,
) -> ChunkIdentity:
    """The identity that a chunk's KV would have, without computing it.

    `known`: the model's own identity, which looks at every parameter: for many chunks, ask it once. `images`: those of
    the chunk, where it has any.
    """
    return ChunkIdentity(
        model=known or model.identity,
        rope=model.rope_regime(len(head_ids) + len(token_ids)),
        head_ids=head_ids,
        token_ids=token_ids,
        namespace=namespace,
        inputs=images.key if images is not None else "",
        inputs_layout=images.layout if images is not None else (),
    )


def prefill(
    model: LanguageModel,
    identity: ChunkIdentity,
    head: ChunkKV | None = None,
    inputs: ChunkInputs | None = None,
    cells: Sequence[Int[Tensor, " _"]] = (),
) -> ChunkKV:
    """The KV of one chunk under its own causal mask, positions after its head's (docs/method.md, section 2).

    `head` is the KV of exactly `identity.head_ids` (a chunk that was prefilled without a head); None for no ids.
    The head's KV is stripped again: only the chunk's own tokens are kept. `inputs`: of a chunk with images, what its
    layers read there. `cells`: indices of tokens that are prefilled apart, each cell from the head on as if it stood
    alone (an image in tiles); together they must hold every token once.
    """
    if (head.identity.token_ids if head is not None else ()) != identity.head_ids:
        raise ComputeError("the head's KV does not belong to the head ids of the chunk's identity")
    num_tokens = len(identity.token_ids)
    if not num_tokens:
        raise ComputeError("a chunk needs at least one token")
    if (inputs.layout if inputs is not None else ()) != identity.inputs_layout:
        raise ComputeError("what the chunk's images give does not fit the layout of the chunk's identity")
    if cells and not torch.equal(torch.cat(list(cells)).sort().values, torch.arange(num_tokens)):
        raise ComputeError("the cells of a chunk do not hold each of its tokens once")
    raw_keys, own_values = model.empty_slots(num_tokens)
    for cell in cells or (torch.arange(num_tokens),):
        part_keys, part_values = _prefill_cell(model, identity, head, inputs, cell)
        place = cell.to(model.device)
        raw_keys.index_copy_(2, place, part_keys)
        own_values.index_copy_(2, place, part_values)
    if not bool(torch.isfinite(raw_keys).all()) or not bool(torch.isfinite(own_values).all()):
        raise ComputeError("the model gave keys or values that are not finite; the chunk is not stored")
    return ChunkKV(identity, raw_keys, own_values, inputs)


def _prefill_cell(
    model: LanguageModel,
    identity: ChunkIdentity,
    head: ChunkKV | None,
    inputs: ChunkInputs | None,
    cell: Int[Tensor, " cell"],
) -> tuple[Float[Tensor, "layers kv_heads cell head_dim"], Float[Tensor, "layers kv_heads cell head_dim"]]:
    """Keys before RoPE and values of some of the chunk's tokens behind its head alone."""
    head_tokens = len(identity.head_ids)
    total = head_tokens + int(cell.numel())
    ranks = torch.arange(total, device=model.device)
    positions, visual = ranks, None
    if inputs is not None:
        own_positions = inputs.positions.long()[:, cell]
        # Moved to its own origin on every axis: where the cell stands in its image must not matter.
        own_positions = own_positions - own_positions.amin(dim=1, keepdim=True) + head_tokens
        before = torch.arange(head_tokens).expand(own_positions.shape[0], -1)
        positions = torch.cat([before, own_positions], dim=1).to(model.device)
        visual = _visual_of_cell(inputs, cell, head_tokens, model.device)
    tables = model.rotary().tables(positions)
    keys, values = model.empty_slots(total)
    if head is not None:
        head_tables = tables.at(slice(0, head_tokens))
        values[:, :, :head_tokens] = head.values
        keys[:, :, :head_tokens] = head.keys  # a copy first: stored KV may be on another device
        for layer in range(model.num_layers):
            keys[layer, :, :head_tokens] = head_tables.rotate_keys(layer, keys[layer, :, :head_tokens])
    raw_keys, _ = model.empty_slots(total - head_tokens)

    def keep(given: AttentionInput, *_: object) -> None:
        raw_keys[given.layer] = given.raw_key

    own = slice(head_tokens, total)
    ids = torch.tensor(identity.token_ids, device=model.device)[cell.to(model.device)]
    memory = LocalMemory(keys, values)
    forward_rows(model, ids, ranks[own], tables.at(own), memory, on_layer=keep, visual=visual)
    return raw_keys, values[:, :, own]


def _visual_of_cell(
    inputs: ChunkInputs, cell: Int[Tensor, " cell"], head_tokens: int, device: torch.device
) -> VisualRows | None:
    """What the layers read in the cell's slots behind the head; None where none of them is of an image."""
    is_visual = torch.zeros(inputs.positions.shape[1], dtype=torch.int64)
    is_visual[inputs.visual.long()] = torch.arange(1, inputs.visual.numel() + 1)
    found = is_visual[cell]
    rows = torch.nonzero(found)[:, 0]
    if not rows.numel():
        return None
    taken = (found[rows] - 1).to(inputs.embeddings.device)
    embeddings, layer_rows = inputs.embeddings[taken].to(device), inputs.layer_rows[:, taken].to(device)
    return VisualRows((rows + head_tokens).to(device), embeddings, layer_rows)


def identify_movement(model: LanguageModel, identity: ChunkIdentity, neighbour_ids: tuple[int, ...]) -> ChunkIdentity:
    """The identity of the record of how far a chunk's values move behind `neighbour_ids`.

    It is kept like a chunk of half the layers and one head, whose `keys` hold the lower half of the record and whose
    `values` the upper one: `head_ids` is what stood before it in the second prefill, head_dim is 1.
    """
    before = identity.head_ids + neighbour_ids
    half = -(-identity.model.num_layers // 2)
    return replace(
        identity,
        model=replace(identity.model, num_layers=half, num_kv_heads=1, head_dim=1, dtype="float16"),
        # The record holds nothing of the images, but depends on them.
        rope=model.rope_regime(len(before) + len(identity.token_ids))
        + (f"/i{identity.inputs}" if identity.inputs else ""),
        head_ids=before,
        quantisation="movement-2",
        inputs="",
        inputs_layout=(),
    )


def measure_movement(model: LanguageModel, chunk: ChunkKV, before: ChunkKV) -> ChunkKV:
    """‖ΔV‖ of each token and layer, over all heads, between the chunk behind its head and behind `before`; see
    `movement_of`.

    `before`: the KV of head and neighbour prefilled as one sequence; it is the same for all chunks of a head. Costs one
    more chunk prefill. Two bytes a token and layer are stored: finer forms select no better (docs/results.md).
    """
    head_ids = chunk.identity.head_ids
    if before.identity.token_ids[: len(head_ids)] != head_ids:
        raise ComputeError("the neighbour does not stand behind the head of the chunk")
    identity = identify_movement(model, chunk.identity, before.identity.token_ids[len(head_ids) :])
    behind = replace(chunk.identity, head_ids=identity.head_ids, rope=identity.rope)
    moved = prefill(model, behind, before, chunk.inputs)
    # A chunk from a disk store is on the CPU, whatever the model's device.
    difference = moved.values - chunk.values.to(moved.values.device)
    norms = difference.float().transpose(1, 2).flatten(2).norm(dim=-1)[:, None, :, None]
    norms = norms.clamp_max(torch.finfo(torch.float16).max).to(torch.float16)
    half = identity.model.num_layers
    lower, upper = norms[:half], norms[half:]
    if upper.shape[0] < half:  # an odd number of layers
        upper = torch.cat([upper, torch.zeros_like(norms[:1])])
    return ChunkKV(identity, lower.contiguous(), upper.contiguous())


def movement_of(record: ChunkKV, num_layers: int) -> Float[Tensor, "layers tokens"]:
    """The ‖ΔV‖ that `measure_movement` put into a record, float16."""
    if record.identity.quantisation != "movement-2" or record.keys.shape[0] != -(-num_layers // 2):
        raise ComputeError("this is no record of how far a chunk's values move in this model")
    return torch.cat([record.keys, record.values])[:num_layers, 0, :, 0]

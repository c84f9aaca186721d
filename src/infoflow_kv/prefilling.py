"""Chunk prefill: one chunk alone behind its head, its KV kept position-free; and how far that KV moves in company."""

from dataclasses import replace

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import AttentionInput, LanguageModel, forward_rows
from infoflow_kv.records import ChunkIdentity, ChunkKV, ModelIdentity
from infoflow_kv.shapes import Float, Tensor

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
) -> ChunkIdentity:
    """The identity that a chunk's KV would have, without computing it.

    `known`: the model's own identity, which looks at every parameter: for many chunks, ask it once.
    """
    return ChunkIdentity(
        model=known or model.identity,
        rope=model.rope_regime(len(head_ids) + len(token_ids)),
        head_ids=head_ids,
        token_ids=token_ids,
        namespace=namespace,
    )


def prefill(model: LanguageModel, identity: ChunkIdentity, head: ChunkKV | None = None) -> ChunkKV:
    """The KV of one chunk under its own causal mask, positions after its head's (docs/method.md, section 2).

    `head` is the KV of exactly `identity.head_ids` (a chunk that was prefilled without a head); None for no ids.
    The head's KV is stripped again: only the chunk's own tokens are kept.
    """
    head_tokens = len(identity.head_ids)
    if (head.identity.token_ids if head is not None else ()) != identity.head_ids:
        raise ComputeError("the head's KV does not belong to the head ids of the chunk's identity")
    if not identity.token_ids:
        raise ComputeError("a chunk needs at least one token")
    total = head_tokens + len(identity.token_ids)
    positions = torch.arange(total, device=model.device)
    tables = model.rotary().tables(positions)
    keys, values = model.empty_slots(total)
    if head is not None:
        head_tables = tables.at(slice(0, head_tokens))
        values[:, :, :head_tokens] = head.values
        keys[:, :, :head_tokens] = head.keys  # a copy first: stored KV may be on another device
        for layer in range(model.num_layers):
            keys[layer, :, :head_tokens] = head_tables.rotate_keys(layer, keys[layer, :, :head_tokens])
    raw_keys, _ = model.empty_slots(len(identity.token_ids))

    def keep(given: AttentionInput, *_: Tensor) -> None:
        raw_keys[given.layer] = given.raw_key

    own = slice(head_tokens, total)
    ids = torch.tensor(identity.token_ids, device=model.device)
    forward_rows(model, ids, positions[own], positions[own], tables.at(own), keys, values, on_layer=keep)
    own_values = values[:, :, own].contiguous() if head_tokens else values
    if not bool(torch.isfinite(raw_keys).all()) or not bool(torch.isfinite(own_values).all()):
        raise ComputeError("the model gave keys or values that are not finite; the chunk is not stored")
    return ChunkKV(identity=identity, keys=raw_keys, values=own_values)


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
        rope=model.rope_regime(len(before) + len(identity.token_ids)),
        head_ids=before,
        quantisation="movement-2",
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
    moved = prefill(model, replace(chunk.identity, head_ids=identity.head_ids, rope=identity.rope), before)
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

"""Chunk prefill: one chunk alone behind its head, its KV kept position-free."""

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import AttentionInput, LanguageModel, forward_rows
from infoflow_kv.records import ChunkIdentity, ChunkKV
from infoflow_kv.shapes import Tensor


def identify(
    model: LanguageModel, token_ids: tuple[int, ...], head_ids: tuple[int, ...] = (), namespace: str = "public"
) -> ChunkIdentity:
    """The identity that a chunk's KV would have, without computing it."""
    return ChunkIdentity(
        model=model.identity,
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

    def keep(given: AttentionInput, _: Tensor) -> None:
        raw_keys[given.layer] = given.raw_key

    own = slice(head_tokens, total)
    ids = torch.tensor(identity.token_ids, device=model.device)
    forward_rows(model, ids, positions[own], positions[own], tables.at(own), keys, values, on_layer=keep)
    own_values = values[:, :, own].contiguous() if head_tokens else values
    if not bool(torch.isfinite(raw_keys).all()) or not bool(torch.isfinite(own_values).all()):
        raise ComputeError("the model gave keys or values that are not finite; the chunk is not stored")
    return ChunkKV(identity=identity, keys=raw_keys, values=own_values)

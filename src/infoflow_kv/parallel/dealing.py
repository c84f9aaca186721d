"""Which sequence shard and which rank runs each row. Pure functions of what all ranks know: nothing is exchanged."""

from collections.abc import Sequence

import torch

from infoflow_kv.shapes import Bool, Int, Tensor


def deal_chunks(lengths: Sequence[int], shards: int, holders: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """The shard of each chunk: the one with the fewest tokens so far, among those that hold the chunk, where any does.

    Chunks of equal length go round in turn, so that early and late ones are spread: a late row sees more slots, and
    each shard serves all rows with its own slots.
    """
    loads = [0] * shards
    dealt: list[int] = []
    for index, length in enumerate(lengths):
        among = (holders[index] if index < len(holders) else ()) or range(shards)
        # From the one after the last on, so that ties go round.
        start = (dealt[-1] + 1) if dealt else 0
        chosen = min(among, key=lambda shard: (loads[shard], (shard - start) % shards))
        loads[chosen] += length
        dealt.append(chosen)
    return tuple(dealt)


def deal_sources(lengths: Sequence[int], held: Sequence[Sequence[bool]], chunks: Sequence[int]) -> tuple[int, ...]:
    """The member of a heads team that gives each of these chunks to the others: one that holds it, else the one with
    the least to prefill so far. `held[chunk][member]`: what the members hold."""
    holders = [[member for member, there in enumerate(held[chunk]) if there] for chunk in chunks]
    work = [0 if among else lengths[chunk] for chunk, among in zip(chunks, holders, strict=True)]
    return deal_chunks(work, len(held[0]) if len(held) else 1, holders)


def balanced(homes: Int[Tensor, " rows"], movable: Bool[Tensor, " rows"], shards: int) -> Int[Tensor, " rows"]:
    """The shard that runs each row: its home, but for rows that a full shard hands to one with too few.

    No shard gets more than its even share, as far as rows may move. Those that go are spread over the shard's rows.
    """
    runners = homes.clone()
    most = -(-homes.numel() // shards)
    counts = torch.bincount(homes, minlength=shards).tolist()
    surplus: list[Tensor] = []
    for shard in range(shards):
        rows = torch.nonzero((homes == shard) & movable)[:, 0]
        extra = min(counts[shard] - most, rows.numel())
        if extra > 0:
            surplus.append(rows[torch.arange(extra) * rows.numel() // extra])
    if not surplus:
        return runners
    waiting = torch.sort(torch.cat(surplus)).values
    taken = 0
    for shard in range(shards):
        room = max(0, most - counts[shard])
        runners[waiting[taken : taken + room]] = shard
        taken += min(room, waiting.numel() - taken)
    return runners


def members(shard_of_row: Int[Tensor, " rows"], shards: int, head_shards: int) -> Int[Tensor, " rows"]:
    """The rank of each row: those of a sequence shard go round in its heads team, from the last row on."""
    ranks = torch.empty_like(shard_of_row)
    for shard in range(shards):
        rows = torch.nonzero(shard_of_row == shard)[:, 0]
        turn = torch.arange(rows.numel() - 1, -1, -1) % head_shards
        ranks[rows] = shard * head_shards + turn
    return ranks


def zigzag(num_slots: int, shards: int) -> Int[Tensor, " slots"]:
    """The shard of each slot in head-tail order: shard i holds parts i and 2·shards − 1 − i of 2·shards, so that all
    do the same causal attention."""
    bounds = [num_slots * part // (2 * shards) for part in range(2 * shards + 1)]
    homes = torch.empty(num_slots, dtype=torch.int64)
    for part in range(2 * shards):
        homes[bounds[part] : bounds[part + 1]] = min(part, 2 * shards - 1 - part)
    return homes

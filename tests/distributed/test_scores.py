"""Scores over ranks are those of one softmax: a softmax over each rank's own keys, the trap, chooses other tokens."""

import torch
from ranks import run_ranks

from infoflow_kv.models import AttentionInput
from infoflow_kv.ops import AttentionSpec, attention_mass
from infoflow_kv.parallel.cost import Layout
from infoflow_kv.parallel.group import Group
from infoflow_kv.parallel.scoring import spread_mass
from infoflow_kv.parallel.shard import Shard

HEADS, KV_HEADS, WIDTH, CONTEXT, PROMPT, CHOSEN = 4, 2, 8, 24, 3, 6
SPEC = AttentionSpec(scale=1.0)
RANKS = torch.arange(CONTEXT, CONTEXT + PROMPT)


def made() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values: what the prompt asks for stands in even slots, of rank 0; odd ones hold nothing of it.

    Each rank's own softmax gives its slots a mass of one all the same.
    """
    generator = torch.Generator().manual_seed(3)
    slots = CONTEXT + PROMPT
    query = torch.ones(HEADS, PROMPT, WIDTH)
    keys = 0.05 * torch.randn(KV_HEADS, slots, WIDTH, generator=generator)
    keys[:, 0:CONTEXT:2] += 0.6
    keys[:, 1:CONTEXT:2] -= 0.6
    keys[:, 1] += 0.4  # the least bad of the odd ones
    return query, keys, torch.randn(KV_HEADS, slots, WIDTH, generator=generator)


def best(scores: torch.Tensor) -> list[int]:
    return sorted(torch.sort(scores, descending=True, stable=True).indices[:CHOSEN].tolist())


def scored(group: Group) -> dict[str, torch.Tensor]:
    """The scores of all context slots: ours, and by a softmax over each rank's keys."""
    query, keys, values = made()
    shard = Shard(group, Layout(1, group.size), HEADS, KV_HEADS)
    own = torch.arange(group.rank, CONTEXT + PROMPT, group.size)
    num_own = int((own < CONTEXT).sum())
    here, there = keys[:, own].contiguous(), values[:, own].contiguous()
    given = AttentionInput(0, query, keys[:, -PROMPT:], keys[:, -PROMPT:], values[:, -PROMPT:], SPEC)
    exact, out = spread_mass(given, shard, here, there, RANKS, own, num_own, "sum", None)
    logits = (query @ here.repeat_interleave(HEADS // KV_HEADS, dim=0).transpose(1, 2)).masked_fill(
        own > RANKS[:, None], float("-inf")
    )
    trap = torch.softmax(logits, dim=-1).sum(dim=(0, 1))[:num_own]
    found = {"out": out}
    for name, score in (("exact", exact), ("trap", trap)):
        whole = torch.empty(CONTEXT)
        whole.index_copy_(
            0,
            torch.cat([torch.arange(r, CONTEXT, group.size) for r in range(group.size)]),
            group.world.all_gather(score, [len(range(r, CONTEXT, group.size)) for r in range(group.size)]),
        )
        found[name] = whole
    return found


def test_a_softmax_on_each_rank_would_choose_other_tokens_and_ours_does_not():
    query, keys, values = made()
    expected, out = attention_mass(query, keys, values, RANKS, CONTEXT, SPEC)
    for found in run_ranks(scored, 2):
        assert torch.allclose(found["exact"], expected, atol=1e-6)
        assert torch.allclose(found["out"], out, atol=1e-6)
        assert best(found["exact"]) == best(expected)
        assert all(slot % 2 == 0 for slot in best(expected))
        assert 1 in best(found["trap"])

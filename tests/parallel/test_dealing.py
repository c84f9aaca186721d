"""Who holds which chunk and who runs which row: everything dealt once, and evenly."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_kv.parallel.dealing import balanced, deal_chunks, members, zigzag

SHARDS = st.integers(1, 5)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Homes of rows, which of them may move, and the number of shards."""
    shards = draw(SHARDS)
    homes = draw(st.lists(st.integers(0, shards - 1), max_size=60))
    movable = draw(st.lists(st.booleans(), min_size=len(homes), max_size=len(homes)))
    return torch.tensor(homes, dtype=torch.int64), torch.tensor(movable, dtype=torch.bool), shards


@given(rows())
@settings(deadline=None)
def test_no_shard_runs_more_than_its_even_share_unless_rows_may_not_move(given_rows):
    homes, movable, shards = given_rows
    before = homes.clone()
    runners = balanced(homes, movable, shards)
    assert torch.equal(homes, before)
    assert runners.shape == homes.shape
    assert bool(((runners >= 0) & (runners < shards)).all())
    assert torch.equal(runners[~movable], homes[~movable])
    even = -(-homes.numel() // shards)
    fixed = torch.bincount(homes[~movable], minlength=shards)
    counts = torch.bincount(runners, minlength=shards)
    assert bool((counts <= fixed.clamp_min(even)).all())
    # Nothing moves to where there was enough, and nothing leaves where there was room.
    full = torch.bincount(homes, minlength=shards) >= even
    assert bool(full[homes[runners != homes]].all())
    assert not bool(full[runners[runners != homes]].any())


def test_the_rows_that_go_are_spread_over_those_of_the_full_shard():
    runners = balanced(torch.zeros(12, dtype=torch.int64), torch.ones(12, dtype=torch.bool), 3)
    assert torch.bincount(runners).tolist() == [4, 4, 4]
    gone = torch.nonzero(runners != 0)[:, 0]
    assert int(gone.min()) <= 1
    assert int(gone.max()) >= 9


@given(rows(), st.integers(1, 4))
@settings(deadline=None)
def test_every_row_has_one_runner_in_its_shard_and_teams_are_even(given_rows, head_shards):
    homes, _, shards = given_rows
    ranks = members(homes, shards, head_shards)
    assert torch.equal(ranks // head_shards, homes)
    counts = torch.bincount(ranks, minlength=shards * head_shards).view(shards, head_shards)
    assert bool((counts.amax(dim=1) - counts.amin(dim=1) <= 1).all())
    if homes.numel() and int(homes[-1]) == 0:
        assert int(ranks[-1]) == 0  # the prompt's last row: rank 0 makes the logits


@given(st.lists(st.integers(1, 500), max_size=40), SHARDS)
def test_chunks_are_dealt_evenly(lengths, shards):
    dealt = deal_chunks(lengths, shards)
    loads = [sum(n for n, s in zip(lengths, dealt, strict=True) if s == shard) for shard in range(shards)]
    assert len(dealt) == len(lengths)
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), SHARDS, st.data())
def test_chunks_go_to_shards_that_hold_them(lengths, shards, data):
    held = st.lists(st.integers(0, shards - 1), unique=True)
    holders = data.draw(st.lists(held, min_size=len(lengths), max_size=len(lengths)))
    for shard, among in zip(deal_chunks(lengths, shards, holders), holders, strict=True):
        assert 0 <= shard < shards
        assert not among or shard in among


def test_chunks_of_one_length_go_round():
    assert deal_chunks([7] * 7, 3) == (0, 1, 2, 0, 1, 2, 0)


def pairs_of(homes: torch.Tensor, shards: int) -> list[int]:
    """Pairs of a row and a slot that each shard's rows see."""
    seen = torch.arange(1, homes.numel() + 1)
    return [int(seen[homes == shard].sum()) for shard in range(shards)]


@given(st.integers(0, 4000), SHARDS)
def test_zigzag_gives_all_shards_the_same_tokens_and_the_same_causal_attention(num_slots, shards):
    homes = zigzag(num_slots, shards)
    assert homes.numel() == num_slots
    counts = torch.bincount(homes, minlength=shards)
    assert int(counts.max() - counts.min()) <= 2
    pairs = pairs_of(homes, shards)
    # Up to the two slots that one may have more.
    assert max(pairs) - min(pairs) <= 3 * num_slots
    assert num_slots == 0 or int(homes[-1]) == 0


def test_zigzag_is_exactly_even_where_the_slots_divide():
    pairs = pairs_of(zigzag(64, 4), 4)
    assert len(set(pairs)) == 1

"""The payload bytes that one rank sends in each phase of one request of text: closed formulas, exact to the byte.

They repeat nothing of the code that sends: from prompt, selection, store and layout they deal chunks and rows as
`dealing` does, then add up. `ByteCounter` must find the same (tests/distributed/test_bytes.py).

Signs: P = u × s ranks, u head shards and s sequence shards; rank ρ is member ρ mod u of the heads team ρ div u, which
holds sequence shard ρ div u. One row has, over all heads of one layer, Q = heads × head_dim × itemsize bytes of queries
(and as many of attention output), KV = 2 × kv_heads × head_dim × itemsize of keys and values, and, for a partial output
with its float32 log-sum-exp, O = Q + 4 × heads. A rank has 1/u of the heads, so of every row that it serves 1/u of
these.

begin: each rank gives the SHA-256 of the request to all others. 32 (P − 1)

load: each rank tells all others which of the chunks its store holds, one byte each, and at the end five counters of
8 bytes. (P − 1)(chunks + 40). A method that needs chunks' movement has the source of each chunk give its record to the
rest of the heads team: two bytes a token and layer, an odd number of layers rounded up. (u − 1) × tokens × 4 ⌈layers/2⌉

move: inside a heads team each chunk has a source: the first member whose store holds it, or else members in turn. If
not all members hold it, the source sends every other member that one's heads of all layers.
(u − 1) × tokens × layers × KV / u for the chunks of which the rank is the source; nothing where u = 1

score: all ranks run the M prompt rows through the first layers, up to the last that scores. In each, the partial
outputs of a rank's heads go to its sequence team, (s − 1) × M × O / u, and the merged ones to its heads team,
(u − 1) × M × Q / u. A layer that scores by `entropy` sends the sequence team the entropy over its slots, 4 bytes for
each row and own head; one that scores by `l2` needs the mean over all heads row by row, for which the slots of the
shard are dealt out in the heads team and each member gets the sums for its part: 4 M × (slots of the shard − own part).
At the end the scores of a shard's slots, 4 bytes each, are summed over its heads team and given to the sequence team:
4 (u − 1 + s − 1) × slots of the shard. Nothing of that where all tokens or none are recomputed, and for rules without
attention. Then the digest of what was selected, 32 (P − 1), of any method that reuses chunks.

repair: the selected and the prompt rows are dealt to sequence shards, then to members. With n rows on this rank, t on
its heads team and R on all, a layer sends
  keys and values to the owners of their heads     (u − 1) × n × KV / u
  queries to the owners of their heads             (u − 1) × n × Q / u
  queries of the team's rows to the other shards   (s − 1) × t × Q / u
  partial outputs of the others' rows back         (R − t) × O / u
  outputs of the team's other rows to who runs them       (t − n) × Q / u
In the last layer keys and values are still wanted (decoding reads them), but only the output of the prompt's last row,
which rank 0 runs: there the last four count that row alone, n = t = R = 1 on rank 0.

decode: every rank runs each new token's row. Per layer (s − 1) × O / u + (u − 1) × Q / u, and none for the last token,
which is not run. Rank 0 gives each chosen token as 8 bytes to all others; the first one comes straight from repair.

Full prefill (`ring`, `gather`) has begin and decode as in layout Q (u = 1) and nothing else but repair, in which all
tokens are rows and lie in head-tail order. In each layer but the last a ring passes on every block but the one of the
next rank, which is where that block began: (R − n of the next rank) × KV. An all-gather gives the own block to all
others: (P − 1) × n × KV. The last layer attends for one row, by its queries, as above.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infoflow_kv.ops.mass import Reduction
from infoflow_kv.parallel.cost import LSE_BYTES, Layout, query_layout
from infoflow_kv.parallel.dealing import balanced, deal_chunks, deal_sources, members, zigzag
from infoflow_kv.parallel.full import Baseline

DIGEST_BYTES = 32
COUNTER_BYTES = 5 * 8
TOKEN_BYTES = 8
SCORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Widths:
    """The sizes of a model that decide its traffic; `itemsize` is that of its values, in bytes."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def query(self) -> int:
        """Bytes of one row's queries in one layer."""
        return self.heads * self.head_dim * self.itemsize

    @property
    def kv(self) -> int:
        """Bytes of one row's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def partial(self) -> int:
        """Bytes of one row's partial output and log-sum-exp in one layer."""
        return self.query + self.heads * LSE_BYTES


@dataclass(frozen=True, slots=True)
class Scoring:
    """`prompt_rows` go through `layers` layers, and `scoring_layers` of these score, by `reduction`."""

    prompt_rows: int
    layers: int
    scoring_layers: int
    reduction: Reduction = "sum"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the bytes of one request depend on.

    rows: run by each rank in repair. slots: of the context, by sequence shard. moved, recorded: tokens of the chunks
    whose K and V, and whose records of movement, each rank gives to its heads team. chunks: told of in "load"; None
    where no chunk is asked for. scoring: None where no row scores. baseline: of a full prefill, None with reuse.
    """

    layout: Layout
    widths: Widths
    rows: tuple[int, ...]
    new_tokens: int
    slots: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    recorded: tuple[int, ...] = ()
    chunks: int | None = None
    scoring: Scoring | None = None
    baseline: Baseline | None = None

    def sent(self, rank: int) -> dict[str, int]:
        """Phase → bytes that this rank sends in it, for all REQUEST_PHASES."""
        return {
            "begin": (self.layout.ranks - 1) * DIGEST_BYTES,
            "load": self._load(rank),
            "move": self._move(rank),
            "score": self._score(rank),
            "repair": self._repair(rank),
            "decode": self._decode(rank),
        }

    def _load(self, rank: int) -> int:
        if self.chunks is None:
            return 0
        told = (self.layout.ranks - 1) * (self.chunks + COUNTER_BYTES)
        if not self.recorded:
            return told
        return told + (self.layout.head_shards - 1) * self.recorded[rank] * 4 * -(-self.widths.layers // 2)

    def _move(self, rank: int) -> int:
        if not self.moved:
            return 0
        shards, widths = self.layout.head_shards, self.widths
        return (shards - 1) * self.moved[rank] * widths.layers * widths.kv // shards

    def _score(self, rank: int) -> int:
        scoring = self.scoring
        agreed = 0 if self.chunks is None else DIGEST_BYTES * (self.layout.ranks - 1)
        if scoring is None:
            return agreed
        heads, sequence = self.layout.head_shards, self.layout.sequence_shards
        slots = self.slots[rank // heads]
        through = scoring.layers * scoring.prompt_rows * self._row_that_all_run()
        each = 0
        if scoring.reduction == "entropy":
            each = (sequence - 1) * scoring.prompt_rows * self.widths.heads // heads * SCORE_BYTES
        elif scoring.reduction == "l2":
            member = rank % heads
            own = slots * (member + 1) // heads - slots * member // heads
            each = scoring.prompt_rows * (slots - own) * SCORE_BYTES
        gathered = (heads - 1 + sequence - 1) * slots * SCORE_BYTES
        return agreed + through + scoring.scoring_layers * each + gathered

    def _repair(self, rank: int) -> int:
        widths, shards = self.widths, self.layout.head_shards
        only_last = tuple(int(other == 0) for other in range(self.layout.ranks))
        if self.baseline == "ring":
            each = (sum(self.rows) - self.rows[(rank + 1) % self.layout.ranks]) * widths.kv
            return (widths.layers - 1) * each + self._attended(only_last, rank)
        if self.baseline == "gather":
            each = (self.layout.ranks - 1) * self.rows[rank] * widths.kv
            return (widths.layers - 1) * each + self._attended(only_last, rank)
        written = (shards - 1) * self.rows[rank] * widths.kv // shards
        attended = (widths.layers - 1) * self._attended(self.rows, rank) + self._attended(only_last, rank)
        return widths.layers * written + attended

    def _decode(self, rank: int) -> int:
        told = (self.layout.ranks - 1) * TOKEN_BYTES * self.new_tokens if rank == 0 else 0
        return told + (self.new_tokens - 1) * self.widths.layers * self._row_that_all_run()

    def _row_that_all_run(self) -> int:
        """Bytes for one row of one layer that every rank runs."""
        heads, sequence = self.layout.head_shards, self.layout.sequence_shards
        return ((sequence - 1) * self.widths.partial + (heads - 1) * self.widths.query) // heads

    def _attended(self, rows: Sequence[int], rank: int) -> int:
        """Bytes for the attention of one layer of rows that were dealt to ranks."""
        heads, sequence, widths = self.layout.head_shards, self.layout.sequence_shards, self.widths
        first = rank // heads * heads
        own, team, total = rows[rank], sum(rows[first : first + heads]), sum(rows)
        queries = (heads - 1) * own + (sequence - 1) * team + (team - own)
        return (queries * widths.query + (total - team) * widths.partial) // heads


def reuse_traffic(
    layout: Layout,
    widths: Widths,
    *,
    head_tokens: int,
    chunk_tokens: Sequence[int],
    prompt_rows: int,
    selected: Sequence[int],
    holds: Sequence[Sequence[bool]] = (),
    copy_of: Sequence[int] = (),
    scoring: Scoring | None = None,
    has_records: bool = False,
    new_tokens: int = 1,
) -> Traffic:
    """The traffic of a request that reuses chunks. `selected`: the slots that are recomputed. `holds[rank][chunk]`:
    whether the rank's store held the chunk before; none did if it is empty. `copy_of[chunk]`: the first chunk that is
    the same, by default itself; its copies go where it is. `has_records`: the method needs movement.
    """
    heads, shards = layout.head_shards, layout.sequence_shards
    held = [[any_of[chunk] for any_of in holds] or [False] * layout.ranks for chunk in range(len(chunk_tokens))]
    holders = [[g for g in range(shards) if any(ranks[g * heads : (g + 1) * heads])] for ranks in held]
    firsts = copy_of or range(len(chunk_tokens))
    dealt = deal_chunks(chunk_tokens, shards, holders)
    homes = [dealt[first] for first in firsts]
    moved, recorded = [0] * layout.ranks, [0] * layout.ranks
    for shard in range(shards):
        team = [ranks[shard * heads : (shard + 1) * heads] for ranks in held]
        mine = [chunk for chunk, home in enumerate(homes) if home == shard and firsts[chunk] == chunk]
        for chunk, source in zip(mine, deal_sources(chunk_tokens, team, mine), strict=True):
            recorded[shard * heads + source] += chunk_tokens[chunk]
            if not all(team[chunk]):
                moved[shard * heads + source] += chunk_tokens[chunk]
    context = [0] * head_tokens
    for tokens, home in zip(chunk_tokens, homes, strict=True):
        context += [home] * tokens
    # The last prompt row on shard 0, those before it on the shards before that in turn.
    prompt = [(row - (prompt_rows - 1)) % shards for row in range(prompt_rows)]
    row_homes = torch.tensor([context[slot] for slot in sorted(selected)] + prompt)
    may_move = torch.arange(row_homes.numel()) < len(selected)
    runners = members(balanced(row_homes, may_move, shards), shards, heads)
    return Traffic(
        layout,
        widths,
        rows=_counted(runners, layout.ranks),
        new_tokens=new_tokens,
        slots=tuple(context.count(shard) for shard in range(shards)),
        moved=tuple(moved),
        recorded=tuple(recorded) if has_records else (),
        chunks=len(chunk_tokens),
        scoring=scoring,
    )


def full_traffic(ranks: int, widths: Widths, baseline: Baseline, *, tokens: int, new_tokens: int = 1) -> Traffic:
    """The traffic of a full prefill of so many prompt tokens."""
    rows = _counted(zigzag(tokens, ranks), ranks)
    return Traffic(query_layout(ranks), widths, rows, new_tokens, baseline=baseline)


def _counted(places: torch.Tensor, count: int) -> tuple[int, ...]:
    return tuple(torch.bincount(places, minlength=count).tolist())

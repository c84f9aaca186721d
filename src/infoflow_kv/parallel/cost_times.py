"""How long one prefill over several devices takes, as arithmetic: ring attention beside InfoFlow, and where they meet.

A model, not a measurement: it leaves out kernel launches, padding, a skewed selection, and the last row's logits. Times
are seconds of the critical path. Imports no torch.
"""

from dataclasses import dataclass

from infoflow_kv.errors import OptionError
from infoflow_kv.parallel.cost import (
    PROMPT_TOKENS,
    SHARE,
    DecoderShape,
    Layout,
    Link,
    head_layout,
    move_bytes,
    query_layout,
    repair_bytes,
    ring_bytes,
    small_bytes,
)

CHUNK_TOKENS = 2048
FEWEST_RANK_TOKENS = 256  # with fewer on a rank nobody would take so many ranks
MOST_TOKENS = 2**24
_STEP = 15 / 16  # of the search downwards: a stretch where the ring wins is not stepped over


@dataclass(frozen=True, slots=True)
class Machine:
    """One device: FLOP/s in matrix products and in attention, seconds until a small collective is answered."""

    name: str
    linear_flops: float
    attention_flops: float
    latency: float = 15e-6


@dataclass(frozen=True, slots=True)
class Request:
    """A prefill over `ranks` devices. `share` of its rows is repaired; `chunk_tokens`: by default all that a rank has;
    `cached`: chunks come from a store that keeps them as the layout wants them, nothing is prefilled or moved.
    """

    tokens: int
    ranks: int
    share: float = SHARE
    chunk_tokens: int | None = None
    prompt_tokens: int = PROMPT_TOKENS
    cached: bool = False

    @property
    def rank_tokens(self) -> float:
        return self.tokens / self.ranks

    @property
    def chunk(self) -> float:
        """Tokens of a chunk, no more than a rank has: with longer chunks some ranks would have none."""
        return min(self.chunk_tokens or self.rank_tokens, self.rank_tokens)


@dataclass(frozen=True, slots=True)
class Work:
    """Rows that go through all layers, and pairs of a row and a key that it sees in each layer."""

    rows: float
    pairs: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.rows + other.rows, self.pairs + other.pairs)

    def over(self, ranks: int) -> "Work":
        """An even part of it."""
        return Work(self.rows / ranks, self.pairs / ranks)

    def seconds(self, shape: DecoderShape, machine: Machine) -> float:
        """How long one device computes; a multiply-add is two FLOPs."""
        linear = 2 * shape.weights * self.rows / machine.linear_flops
        return linear + 4 * shape.heads * shape.head_dim * shape.layers * self.pairs / machine.attention_flops


def ring_seconds(
    shape: DecoderShape,
    machine: Machine,
    link: Link,
    request: Request,
    *,
    balanced: bool = True,
    overlapped: bool = True,
) -> float:
    """Seconds of ring attention; not `overlapped` is the all-gather, whose bytes come before any attention.

    Balanced (zigzag) each rank has an even part of the pairs; of a contiguous split the last has (2P - 1) / P² of them.
    """
    ranks, pairs = request.ranks, request.tokens**2 / 2
    part = 1 / ranks if balanced else (2 * ranks - 1) / ranks**2
    linear = Work(request.rank_tokens, 0).seconds(shape, machine)
    attention = Work(0, pairs * part).seconds(shape, machine)
    sent = ring_bytes(shape, request.tokens, ranks) / link.bytes_per_second
    return linear + (max(attention, sent) if overlapped else attention + sent)


def infoflow_seconds(shape: DecoderShape, machine: Machine, link: Link, layout: Layout, request: Request) -> float:
    """Seconds of InfoFlow in a layout: prefill of the chunks, scoring, repair, the prompt again.

    The move of K and V hides behind the prefill, a layer behind the next. The exchanges of repair are counted as if
    nothing hid them, which is to the ring's advantage. Of collectives only the small ones are charged their latency.
    """
    if layout.ranks != request.ranks:
        raise OptionError(f"the layout {layout.head_shards} x {layout.sequence_shards} is not of {request.ranks} ranks")
    prefill, repair = (work.over(request.ranks).seconds(shape, machine) for work in _chunks_and_rows(request))
    if not request.cached:
        prefill = max(prefill, move_bytes(shape, request.tokens, layout) / link.bytes_per_second)
    # Each rank runs all prompt rows against its own keys.
    prompt = _passes(shape, Work(request.prompt_tokens, request.prompt_tokens * request.rank_tokens))
    sent = repair_bytes(shape, request.share * request.tokens, layout)
    sent += small_bytes(shape, request.tokens, request.ranks, request.prompt_tokens)
    waits = 2 * shape.layers * machine.latency if request.ranks > 1 else 0.0
    return prefill + prompt.seconds(shape, machine) + repair + sent / link.bytes_per_second + waits


def ideal_seconds(shape: DecoderShape, machine: Machine, request: Request) -> float:
    """Seconds of 1/P of the arithmetic that InfoFlow really does: no bytes, no waiting, nothing done twice."""
    prefill, repair = _chunks_and_rows(request)
    prompt = _passes(shape, Work(request.prompt_tokens, request.prompt_tokens * request.tokens))
    return (prefill + repair + prompt).over(request.ranks).seconds(shape, machine)


def best_seconds(shape: DecoderShape, machine: Machine, link: Link, request: Request) -> tuple[float, Layout]:
    """The seconds and the layout of the quicker one of Q and H (HQ beyond the K/V heads)."""
    layouts = (head_layout(shape, request.ranks), query_layout(request.ranks))
    return min(((infoflow_seconds(shape, machine, link, x, request), x) for x in layouts), key=lambda found: found[0])


def break_even_tokens(
    shape: DecoderShape, machine: Machine, link: Link, ranks: int, share: float = SHARE, *, cached: bool = False
) -> int | None:
    """The context length in tokens from which on InfoFlow, in chunks of 2K, is quicker than a balanced ring.

    The least length worth the ranks (FEWEST_RANK_TOKENS on each) where it is quicker already there; None where it is
    not even at MOST_TOKENS. The kink where traffic begins to hide can bring a second crossing; the highest counts.
    """

    def wins(tokens: int) -> bool:
        request = Request(tokens, ranks, share, CHUNK_TOKENS, cached=cached)
        return best_seconds(shape, machine, link, request)[0] < ring_seconds(shape, machine, link, request)

    least, quick = FEWEST_RANK_TOKENS * ranks, MOST_TOKENS
    if not wins(quick):
        return None
    slow = quick
    while wins(slow):
        if slow == least:
            return least
        slow, quick = max(least, int(slow * _STEP)), slow
    while quick - slow > 1:
        middle = (slow + quick) // 2
        slow, quick = (slow, middle) if wins(middle) else (middle, quick)
    return quick


def _chunks_and_rows(request: Request) -> tuple[Work, Work]:
    """The work of all ranks for the chunks, each alone, and for the repaired rows, drawn evenly over the context."""
    chunks = Work(0, 0) if request.cached else Work(request.tokens, request.tokens * request.chunk / 2)
    return chunks, Work(request.share * request.tokens, request.share * request.tokens**2 / 2)


def _passes(shape: DecoderShape, prompt: Work) -> Work:
    """The prompt's work: once through all layers, and once through those of the scoring pass."""
    times = 1 + shape.scored_layers / shape.layers
    return Work(prompt.rows * times, prompt.pairs * times)

"""What one rank sends in a whole prefill over several devices, in bytes, and which layout a request should take.

Arithmetic of bfloat16 values, with rows spread evenly over the ranks; `cost_times` makes seconds of it. No torch here.
"""

import math
from dataclasses import dataclass

from infoflow_kv.errors import OptionError

VALUE_BYTES = 2  # bfloat16
LSE_BYTES = 4  # one float32 for each query and head
LAYOUTS = ("auto", "Q", "H", "HQ")  # names by which one is asked for
SHARE = 0.15  # of the rows, recomputed; the paper's (arXiv 2603.05353, Table 5)
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder that decide its work and its traffic.

    `scored_layers`: how many layers the scoring pass runs through. It stops behind the last layer that scores; the
    paper's set is 22-25 (arXiv 2603.05353).
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int
    scored_layers: int

    @property
    def weights(self) -> int:
        """Weights that a row meets in all layers together, without the vocabulary's."""
        attention = self.width * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp_width)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * VALUE_BYTES

    @property
    def query_bytes(self) -> int:
        """Bytes of one row's queries in one layer; its attention output has as many."""
        return self.heads * self.head_dim * VALUE_BYTES

    @property
    def partial_bytes(self) -> int:
        """Bytes of one row's partial attention in one layer: output and log-sum-exp."""
        return self.query_bytes + self.heads * LSE_BYTES


LLAMA_8B = DecoderShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 26)
QWEN_14B = DecoderShape("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, 26)
QWEN_VL_8B = DecoderShape("Qwen3-VL-8B (text)", 36, 4096, 32, 8, 128, 12288, 151936, 26)


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of each rank: what it carries one way, in bytes per second (what transfers reach, not the label)."""

    name: str
    bytes_per_second: float


NVLINK = Link("NVLink", 350e9)
INFINIBAND = Link("400G InfiniBand", 45e9)
ETHERNET_100G = Link("100GbE", 11e9)
ETHERNET_10G = Link("10GbE", 1.1e9)
LINKS = (NVLINK, INFINIBAND, ETHERNET_100G, ETHERNET_10G)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where K and V are while rows are repaired: `head_shards` ranks share the heads of one of `sequence_shards`
    parts of the context. Q is (1, P), H is (P, 1), HQ is both above 1."""

    head_shards: int
    sequence_shards: int

    @property
    def ranks(self) -> int:
        return self.head_shards * self.sequence_shards

    @property
    def name(self) -> str:
        """`Q`, `H` or `HQ`; one rank is `H`, all heads being there."""
        if self.sequence_shards == 1:
            return "H"
        return "Q" if self.head_shards == 1 else "HQ"


def query_layout(ranks: int) -> Layout:
    """Layout Q: K and V stay where they are, queries visit them."""
    return Layout(1, ranks)


def head_layout(shape: DecoderShape, ranks: int) -> Layout:
    """Layout H, or HQ beyond the K/V heads: the most head shards that give each rank a whole number of K/V heads."""
    shards = math.gcd(ranks, shape.kv_heads)
    return Layout(shards, ranks // shards)


def ring_bytes(shape: DecoderShape, tokens: int, ranks: int) -> float:
    """Bytes that one rank sends for ring attention: all K and V but one part pass through it, in P - 1 steps."""
    return shape.layers * (ranks - 1) / ranks * tokens * shape.kv_bytes


def all_gather_bytes(shape: DecoderShape, tokens: int, ranks: int) -> float:
    """Bytes that one rank sends where each layer's K and V are gathered by all: the ring's, in one call."""
    return ring_bytes(shape, tokens, ranks)


def move_bytes(shape: DecoderShape, tokens: int, layout: Layout) -> float:
    """Bytes that one rank sends, once, to give each rank of a group its heads of the K and V that the group holds."""
    away = (layout.head_shards - 1) / layout.head_shards
    return shape.layers * away * tokens / layout.ranks * shape.kv_bytes


def repair_bytes(shape: DecoderShape, rows: float, layout: Layout) -> float:
    """Bytes that one rank sends to repair so many rows of the context.

    Inside a group, each rank's rows go to the owners of their heads as Q, K and V and come back as O. Between groups,
    Q is gathered and partial outputs return by all-to-all. Each row is repaired by the group that holds its place, so
    its new K and V stay there.
    """
    heads, groups = layout.head_shards, layout.sequence_shards
    inside = (heads - 1) / heads * rows / layout.ranks * (2 * shape.query_bytes + shape.kv_bytes)
    between = (groups - 1) / groups * rows / heads * (shape.query_bytes + shape.partial_bytes)
    return shape.layers * (inside + between)


def small_bytes(shape: DecoderShape, tokens: int, ranks: int, prompt_tokens: int = PROMPT_TOKENS) -> float:
    """Bytes that one rank sends beside: the prompt's partial outputs in scoring and in the prompt pass, and scores.

    Partial outputs go by all-gather or, summed in float32, by all-reduce, whichever sends less.
    """
    gathered = (ranks - 1) * shape.partial_bytes
    reduced = 2 * (ranks - 1) / ranks * shape.heads * (shape.head_dim + 1) * 4
    passes = (shape.layers + shape.scored_layers) * prompt_tokens * min(gathered, reduced)
    return passes + (ranks - 1) * tokens / ranks * 4


def infoflow_bytes(
    shape: DecoderShape, tokens: int, layout: Layout, share: float = SHARE, *, move: bool = True
) -> float:
    """Bytes that one rank sends in a layout, small exchanges left out; without `move` the chunks are kept by head."""
    once = move_bytes(shape, tokens, layout) if move else 0.0
    return once + repair_bytes(shape, share * tokens, layout)


def pick_layout(shape: DecoderShape, ranks: int, share: float = SHARE, *, stored: bool = False) -> tuple[Layout, str]:
    """The layout in which a rank sends least where `share` of the rows are recomputed, and why.

    `stored`: the chunks are in a store that every rank reads, so that heads come from there and need not be moved.
    """
    if ranks < 1:
        raise OptionError(f"{ranks} ranks: at least 1 is needed")
    heads = head_layout(shape, ranks)
    if ranks == 1:
        return heads, "one rank: nothing is sent"
    if heads.head_shards == 1:
        return heads, f"Q: {shape.kv_heads} K/V heads and {ranks} ranks have no common divisor to share heads by"
    queries = query_layout(ranks)
    if infoflow_bytes(shape, 1, queries, share) <= infoflow_bytes(shape, 1, heads, share, move=not stored):
        return queries, f"Q: rows of {share:.2g} of the tokens send less than a move of all K and V by head"
    if heads.sequence_shards == 1:
        return heads, f"H: {ranks} ranks share {shape.kv_heads} K/V heads evenly"
    return heads, f"HQ: {ranks} ranks do not share {shape.kv_heads} K/V heads, groups of {heads.head_shards} do"

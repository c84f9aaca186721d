"""CPU: a staircase cut into rectangles without a mask and small masked edges, whose partial results merge exactly.

The merge by log-sum-exp (LSE) is the one of FlashAttention and Ring Attention. Rows are *packed*: the query heads of a
K/V head stand side by side as rows of it, so that K and V are read once per group.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from infoflow_kv.ops.spec import visible
from infoflow_kv.shapes import Bool, Float, Int, Tensor

# Rows of a masked edge. A smaller edge masks fewer slots, a larger one keeps the kernel busier: which pays is for the
# machine to say (`quickest.py`), and this is what small requests and windows take.
EDGE_ROWS = 64
# Pieces begin and end at multiples of this many slots. The kernel slows down on what is left over: in bfloat16 with AMX
# 512 rows over 416 slots run at 347 GFLOP/s, over 417 at 241; in float32 the difference is some percent.
SLOTS_STEP = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `rows` over slots `slots`. `mask`: which of them each row sees, None where that is all. `opens`: no piece
    before it has these rows.

    Every row sees at least one slot of each of its pieces: torch's kernel gives a row that sees nothing the LSE 0 (not
    -inf), which would be merged as if it were real.
    """

    rows: slice
    slots: slice
    mask: Bool[Tensor, "_ _"] | None = None
    opens: bool = False


def cut(ranks: Int[Tensor, " rows"], window: int | None = None, edge_rows: int | None = None) -> tuple[Piece, ...]:
    """The pieces of a staircase: together they hold every pair of a row and a slot that it sees once, and no other.

    `ranks` do not descend. Without a window rows are halved again and again: the second half of them rests on one
    large rectangle, and only edges of `edge_rows` rows (EDGE_ROWS) are masked. With one, each edge has a band of its
    own, of EDGE_ROWS rows.
    """
    steps = ranks.tolist()
    edge_rows = EDGE_ROWS if edge_rows is None else edge_rows
    if window is None or window > steps[-1]:
        found = _halved(ranks, steps, 0, len(steps), 0, edge_rows)
    else:
        starts = range(0, len(steps), EDGE_ROWS)
        found = itertools.chain.from_iterable(_banded(ranks, steps, start, window) for start in starts)
    pieces, seen = [], set[int]()
    for piece in found:
        # Rows come in wholes: a piece's rows were all there before, or none of them.
        pieces.append(replace(piece, opens=piece.rows.start not in seen))
        seen.update(range(piece.rows.start, piece.rows.stop))
    return tuple(pieces)


def _halved(ranks: Tensor, steps: Sequence[int], start: int, stop: int, floor: int, edge_rows: int) -> Iterator[Piece]:
    """Rows start..stop-1 over the slots from `floor` on, which none of them ends before."""
    if stop - start <= edge_rows:
        yield from _edge(ranks, steps, start, stop, floor)
        return
    # In the middle, so that no rectangle is long and low: the kernel packs its keys and values again in each.
    edges = -(-(stop - start) // edge_rows)
    middle = start + (edges + 1) // 2 * edge_rows
    seen_by_all = _down(steps[middle])
    if seen_by_all > floor:
        yield Piece(slice(middle, stop), slice(floor, seen_by_all))
    yield from _halved(ranks, steps, start, middle, floor, edge_rows)
    yield from _halved(ranks, steps, middle, stop, seen_by_all, edge_rows)


def _edge(ranks: Tensor, steps: Sequence[int], start: int, stop: int, floor: int) -> Iterator[Piece]:
    # Masked anyway, so that some slots more on either side cost less than odd ends; but none that no row ever sees.
    rows, low = slice(start, stop), _down(steps[start])
    high = min(_down(steps[stop - 1]) + SLOTS_STEP, steps[-1] + 1)
    if low > floor:
        yield Piece(rows, slice(floor, low))
    yield Piece(rows, slice(low, high), visible(ranks[rows], low, high, None))


def _down(slot: int) -> int:
    return slot - slot % SLOTS_STEP


def _banded(ranks: Tensor, steps: Sequence[int], start: int, window: int) -> Iterator[Piece]:
    """One edge's rows: slots that fall out of the window on the way, slots that all see, slots that come in."""
    stop = min(start + EDGE_ROWS, len(steps))
    rows, low, high = slice(start, stop), steps[start], steps[stop - 1] + 1
    first, seen_by_all = max(0, low - window + 1), max(0, high - window)
    if seen_by_all >= low:  # a window narrower than the edge: no slot is seen by all of it
        yield Piece(rows, slice(first, high), visible(ranks[rows], first, high, window))
        return
    if seen_by_all > first:
        # One slot further than needed, so that the last row sees one too.
        yield Piece(rows, slice(first, seen_by_all + 1), visible(ranks[rows], first, seen_by_all + 1, window))
        first = seen_by_all + 1
    if low > first:
        yield Piece(rows, slice(first, low))
    yield Piece(rows, slice(max(first, low), high), visible(ranks[rows], max(first, low), high, window))


def bias_of(piece: Piece, group: int, dtype: torch.dtype) -> Float[Tensor, "1 1 _ _"] | None:
    """The piece's mask as the kernel takes it: 0 or -inf for each packed row and slot."""
    if piece.mask is None:
        return None
    bias = torch.where(piece.mask, 0.0, float("-inf")).to(dtype)
    return bias.repeat_interleave(group, dim=0)[None, None]


def in_pieces(
    packed: Float[Tensor, "kv_heads packed head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    pieces: Sequence[Piece],
    biases: Sequence[Float[Tensor, "1 1 _ _"] | None],
    scale: float,
) -> tuple[Float[Tensor, "kv_heads packed head_dim"], Float[Tensor, "kv_heads packed"]]:
    """Output and LSE, float32, of packed rows over their pieces; `biases` are the pieces' own, see `bias_of`."""
    group = packed.shape[1] // max(piece.rows.stop for piece in pieces)
    # The kernel's own layout, rows before heads: what is merged then lies in one run of memory.
    kv_heads, num_packed, head_dim = packed.shape
    out = torch.empty(num_packed, kv_heads, head_dim, dtype=torch.float32).transpose(0, 1)
    lse = torch.empty(num_packed, kv_heads, dtype=torch.float32).transpose(0, 1)
    for piece, bias in zip(pieces, biases, strict=True):
        rows = slice(piece.rows.start * group, piece.rows.stop * group)
        part, part_lse = flash(packed[:, rows], keys[:, piece.slots], values[:, piece.slots], scale, bias=bias)
        if piece.opens:
            out[:, rows], lse[:, rows] = part, part_lse
        else:
            merge_into(out[:, rows], lse[:, rows], part, part_lse)
    return out, lse


def merge_into(
    out: Float[Tensor, "some rows head_dim"],
    lse: Float[Tensor, "some rows"],
    part: Float[Tensor, "some rows head_dim"],
    part_lse: Float[Tensor, "some rows"],
) -> None:
    """Makes `out` and `lse` those over the union of two disjoint sets of slots, from theirs and the part's."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def flash(
    query: Float[Tensor, "some rows head_dim"],
    keys: Float[Tensor, "some part head_dim"],
    values: Float[Tensor, "some part head_dim"],
    scale: float,
    *,
    is_causal: bool = False,
    bias: Float[Tensor, "1 1 rows part"] | None = None,
) -> tuple[Float[Tensor, "some rows head_dim"], Float[Tensor, "some rows"]]:
    """Output and LSE of torch's CPU flash kernel; both are needed for the exact merge, and SDPA returns only one."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out[0], lse[0]

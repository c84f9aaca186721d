"""Staircase attention: rows sorted by rank, each row sees the prefix of slots that ends at its own rank.

It is causal attention with the row number replaced by the rank: the mask of repaired rows, which looks irregular, is
dense up to a step and empty after it. No rows × slots mask is ever built.
"""

import logging
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from infoflow_kv.ops.forms import (
    CpuForm,
    Form,
    choice_of_environment,
    cpu_choice_of_environment,
    known_choice,
    known_cpu_choice,
    pick,
)
from infoflow_kv.ops.pieces import SLOTS_STEP, Piece, bias_of, cut, flash, in_pieces, merge_into
from infoflow_kv.ops.products import Block, blocks_of, by_products, rows_of_block
from infoflow_kv.ops.quickest import EDGES, Kind, by_rule, cells_of, quickest
from infoflow_kv.ops.spec import AttentionSpec, masked_logits, visible, with_sinks
from infoflow_kv.shapes import Float, Int, Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

logger = logging.getLogger(__name__)

# Rows per block of the masked form, which any device and any layer can take.
ROWS_PER_BLOCK = 128


class Staircase:
    """The rows of one forward: made once, used in every layer, so that cuts and masks are made once too.

    `ranks` must ascend strictly; slot index == rank of the key in that slot. `form`: one of `forms.Choice`, by default
    what INFOFLOW_ATTENTION says; `cpu_form`: one of `forms.CpuChoice`, by default what INFOFLOW_CPU_FORM says.
    OptionError for another name, or in `attend` for a form that cannot be had there.

    >>> stairs = Staircase(torch.tensor([3, 7]))
    >>> stairs.attend(query, keys, values, AttentionSpec(scale=0.125))  # doctest: +SKIP
    """

    def __init__(self, ranks: Int[Tensor, " rows"], form: str | None = None, cpu_form: str | None = None) -> None:
        self.ranks = ranks
        self._choice = choice_of_environment() if form is None else known_choice(form)
        self._cpu_choice = cpu_choice_of_environment() if cpu_form is None else known_cpu_choice(cpu_form)
        self.steps: list[int] = ranks.tolist()
        self._cuts: dict[tuple[int | None, int | None], tuple[Piece, ...]] = {}
        self._biases: dict[tuple[int | None, int | None, int, torch.dtype], list[Tensor | None]] = {}
        self._counted: dict[tuple[bool, CpuForm], int] = {}
        self._masks: dict[int | None, BlockMask] = {}
        self._blocks: tuple[int, tuple[Block, ...]] | None = None

    def attend(
        self,
        query: Float[Tensor, "heads rows head_dim"],
        keys: Float[Tensor, "kv_heads slots head_dim"],
        values: Float[Tensor, "kv_heads slots head_dim"],
        spec: AttentionSpec,
    ) -> Float[Tensor, "heads rows head_dim"]:
        """Attention output of each row over slots 0..rank (inside the window, where there is one)."""
        steps = self.steps
        if steps[-1] >= keys.shape[1]:
            raise ValueError(f"rank {steps[-1]} has no slot: there are {keys.shape[1]}")
        window = spec.window if spec.window is not None and spec.window <= steps[-1] else None
        contiguous = window is None and steps[-1] - steps[0] == len(steps) - 1
        is_cpu, is_plain = query.device.type == "cpu", spec.softcap is None and spec.sinks is None
        if is_plain and contiguous and len(steps) == 1:
            return _one_row(query, keys[:, : steps[0] + 1], values[:, : steps[0] + 1], spec.scale)
        if is_plain and contiguous and steps[0] == 0 and not is_cpu and self._choice == "auto":
            return _causal_square(query, keys[:, : len(steps)], values[:, : len(steps)], spec.scale)
        # One row alone has no stairs: what it sees is one block, which other forms would only cut up.
        form = pick(self._choice, query, is_right) if len(steps) > 1 else None
        if form == "triton" or form == "flex":
            return self._by_kernel(form, query, keys, values, spec, window)
        if form == "blocks" or not is_plain or not is_cpu:
            return in_blocks(query, keys, values, self.ranks, spec, window)
        cpu_form = self._cpu_form(query, keys.shape[0], contiguous) if window is None else None
        if cpu_form == "products":
            block_rows = rows_of_block(query.shape[0] // keys.shape[0], steps[-1] + 1, query.dtype)
            if self._blocks is None or self._blocks[0] != block_rows:
                self._blocks = block_rows, blocks_of(self.ranks, steps, block_rows, query.dtype)
            packed = by_products(pack(query, keys.shape[0]), keys, values, self._blocks[1], spec.scale)
        elif contiguous:
            return _contiguous(query, keys[:, : steps[-1] + 1], values[:, : steps[-1] + 1], steps[0], spec.scale)
        else:
            edge_rows = None if cpu_form is None else EDGES[cpu_form]
            packed = self._in_pieces(pack(query, keys.shape[0]), keys, values, spec.scale, window, edge_rows)
        return unpack(packed, query.shape)

    def _cpu_form(self, query: Tensor, kv_heads: int, contiguous: bool) -> CpuForm:
        """Which of the CPU's own forms rows without a window are due."""
        steps, choice = self.steps, self._cpu_choice
        heads, rows, head_dim = query.shape
        group = heads // kv_heads
        if choice == "auto" or choice == "rule":
            kind = Kind(contiguous, query.dtype, head_dim, group, kv_heads, torch.get_num_threads())
            size = rows * (steps[-1] + 1)
            choice = by_rule(kind) if choice == "rule" else quickest(kind, partial(self._cells, contiguous), size)
        lacks = choice == "products" and not rows_of_block(group, steps[-1] + 1, query.dtype)
        return "pieces-64" if lacks else choice

    def _cells(self, contiguous: bool, form: CpuForm) -> int:
        key = contiguous, form
        if key not in self._counted:
            self._counted[key] = cells_of(form, self.steps, contiguous)
        return self._counted[key]

    def _by_kernel(
        self, form: Form, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, window: int | None
    ) -> Tensor:
        # Both load compilers, which take seconds and are not everywhere: imported where they are used.
        spec = replace(spec, window=window)
        if form == "triton":
            from infoflow_kv.ops.triton_staircase import attend_by_triton

            return attend_by_triton(query, keys, values, self.ranks, spec)[0]
        from infoflow_kv.ops.flex import attend_by_flex, make_block_mask

        mask = self._masks.get(window)
        if mask is None:
            mask = self._masks[window] = make_block_mask(self.ranks, self.steps, window)
        filled = self.steps[-1] + 1
        return attend_by_flex(query, keys[:, :filled], values[:, :filled], mask, spec)[0]

    def _in_pieces(
        self, packed: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, edge_rows: int | None
    ) -> Tensor:
        pieces = self._cuts.get((window, edge_rows))
        if pieces is None:
            pieces = self._cuts[window, edge_rows] = cut(self.ranks, window, edge_rows)
        group = packed.shape[1] // len(self.steps)
        key = window, edge_rows, group, packed.dtype
        biases = self._biases.get(key)
        if biases is None:
            biases = self._biases[key] = [bias_of(piece, group, packed.dtype) for piece in pieces]
        return in_pieces(packed, keys, values, pieces, biases, scale)[0].to(packed.dtype)


def is_right(form: Form, query: Float[Tensor, "heads rows head_dim"]) -> bool:
    """Whether a compiled form agrees with masked blocks for queries of this kind, tried once per device."""
    return _agrees(form, query.device, query.dtype, query.shape[-1])


@cache
def _agrees(form: Form, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """A kernel that compiles is not yet a kernel that is right: a small staircase by both forms."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.randperm(300, generator=generator)[:70].sort().values.to(device)
    query, keys, values = (
        torch.randn(heads, rows, head_dim, generator=generator).to(device, dtype)
        for heads, rows in ((4, 70), (2, 300), (2, 300))
    )
    spec = AttentionSpec(head_dim**-0.5)
    expected = in_blocks(query, keys, values, ranks, spec, None).float()
    try:
        found = Staircase(ranks, form).attend(query, keys, values, spec).float()
        error = float((found - expected).abs().max())
    except Exception as failure:  # noqa: BLE001 - errors of a compiler are of any kind
        logger.warning("attention by %s is not used on %s: %s", form, device, " ".join(str(failure).split())[:200])
        return False
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2  # TensorFloat-32 and 16-bit rounding; wrong masks give 0.5
    if not error <= tolerance:  # NaN too
        logger.warning("attention by %s is not used on %s: it is off by %.2g on a small example", form, device, error)
        return False
    return True


def staircase_attention(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    spec: AttentionSpec,
) -> Float[Tensor, "heads rows head_dim"]:
    """Attention output of each row over slots 0..rank, for rows that are used once; see `Staircase`."""
    return Staircase(ranks).attend(query, keys, values, spec)


def pack(query: Float[Tensor, "heads rows head_dim"], kv_heads: int) -> Float[Tensor, "kv_heads packed head_dim"]:
    """The query heads of a group next to each other for each row, as more rows of their K/V head."""
    heads, rows, head_dim = query.shape
    return query.view(kv_heads, heads // kv_heads, rows, head_dim).transpose(1, 2).reshape(kv_heads, -1, head_dim)


def unpack(
    packed: Float[Tensor, "kv_heads packed head_dim"], shape: torch.Size
) -> Float[Tensor, "heads rows head_dim"]:
    """A view of packed rows as heads and rows again."""
    heads, rows, head_dim = shape
    kv_heads = packed.shape[0]
    return packed.view(kv_heads, rows, heads // kv_heads, head_dim).transpose(1, 2).reshape(shape)


def in_blocks(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    spec: AttentionSpec,
    window: int | None,
) -> Float[Tensor, "heads rows head_dim"]:
    """Any device, window, softcap and sinks: per block one masked attention over the slots that it can see."""
    kv_heads = keys.shape[0]
    group = query.shape[0] // kv_heads
    packed = pack(query, kv_heads)
    out = torch.empty_like(packed)
    for start in range(0, query.shape[1], ROWS_PER_BLOCK):
        part_ranks = ranks[start : start + ROWS_PER_BLOCK]
        rows = slice(start * group, (start + len(part_ranks)) * group)
        low, high = 0 if window is None else max(0, int(part_ranks[0]) - window + 1), int(part_ranks[-1]) + 1
        mask = visible(part_ranks, low, high, window).repeat_interleave(group, dim=0)
        part, k, v = packed[:, rows], keys[:, low:high], values[:, low:high]
        if spec.softcap is None and spec.sinks is None:
            out[:, rows] = F.scaled_dot_product_attention(part[None], k[None], v[None], mask, scale=spec.scale)[0]
        else:
            # with_sinks asks for one head after the other.
            split = part.view(kv_heads, len(part_ranks), group, -1).transpose(1, 2).reshape(part.shape)
            logits = masked_logits(split, k, visible(part_ranks, low, high, window).repeat(group, 1), spec)
            weights = torch.softmax(with_sinks(logits, spec, group), dim=-1, dtype=torch.float32)
            block = weights[..., : k.shape[1]].to(v.dtype) @ v
            out[:, rows] = block.view(kv_heads, group, len(part_ranks), -1).transpose(1, 2).reshape(part.shape)
    return unpack(out, query.shape)


def _one_row(
    query: Float[Tensor, "heads one head_dim"],
    keys: Float[Tensor, "kv_heads filled head_dim"],
    values: Float[Tensor, "kv_heads filled head_dim"],
    scale: float,
) -> Float[Tensor, "heads one head_dim"]:
    packed = pack(query, keys.shape[0])
    return unpack(F.scaled_dot_product_attention(packed[None], keys[None], values[None], scale=scale)[0], query.shape)


def _causal_square(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads rows head_dim"],
    values: Float[Tensor, "kv_heads rows head_dim"],
    scale: float,
) -> Float[Tensor, "heads rows head_dim"]:
    return F.scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True
    )[0]


def _contiguous(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads filled head_dim"],
    values: Float[Tensor, "kv_heads filled head_dim"],
    first: int,
    scale: float,
) -> Float[Tensor, "heads rows head_dim"]:
    """CPU: rows first..first+rows-1, a dense part before `first` and a causal square."""
    # The dense part ends where the kernel likes it, and the square begins there: with rows of no meaning before ours.
    added = first % SLOTS_STEP
    first -= added
    wider = F.pad(query, (0, 0, added, 0)) if added else query
    if first == 0:
        return _causal_square(wider, keys, values, scale)[:, added:]
    kv_heads = keys.shape[0]
    heads, rows, _ = query.shape
    group = heads // kv_heads
    packed = query.reshape(kv_heads, group * rows, -1)
    dense, dense_lse = flash(packed, keys[:, :first], values[:, :first], scale)
    square_keys, square_values = (x[:, first:].repeat_interleave(group, dim=0) for x in (keys, values))
    square, square_lse = flash(wider, square_keys, square_values, scale, is_causal=True)
    out = dense.reshape(query.shape).float()
    merge_into(out, dense_lse.reshape(heads, rows), square[:, added:], square_lse[:, added:])
    return out.to(query.dtype)

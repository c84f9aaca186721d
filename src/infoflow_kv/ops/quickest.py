"""Which of a CPU's own forms is quickest on this machine: found by a short trial, once per process, then kept.

Processors differ: where bfloat16 has only AVX-512, two matrix products beat torch's flash kernel; where it has AMX,
that kernel is twice as quick as they are. The trial finds what one cell (a row × a slot, seen or masked) costs in each
form, so that each staircase takes the form in which its own cells cost least. The forms differ in rounding only, but
one request must give the same numbers again and again: a cost, once measured, stays for the process, and staircases
below SMALLEST_TRIED never look at any.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch

from infoflow_kv.ops.forms import CpuForm
from infoflow_kv.ops.pieces import bias_of, cut, flash, in_pieces
from infoflow_kv.ops.products import BLOCK_ROWS, blocks_of, by_products

logger = logging.getLogger(__name__)

# Rows of a masked edge. Contiguous rows have no stairs to cut: torch's causal kernel takes them whole, whatever N is,
# CAUSAL_ROWS by CAUSAL_ROWS.
EDGES: dict[CpuForm, int] = {"pieces-64": 64, "pieces-128": 128, "pieces-256": 256}
CAUSAL_ROWS = 256
# Rows × slots from which a form that is ten percent quicker is worth a trial.
SMALLEST_TRIED = 2**21
# The trial: rows that each see STRIDE slots more than the one before, and a square of contiguous rows. Wide enough in
# heads to occupy all threads, and no wider: a large model has more heads than the choice depends on.
ROWS, STRIDE, SQUARE = 512, 4, 768
WIDTH_PER_THREAD = 288  # heads × head_dim
ROUNDS, FEWEST_ROUNDS, SECONDS = 5, 2, 0.06
# A form must be this much quicker than the one before it in line: clocks are noisy, and processes should agree.
MARGIN = 0.95


@dataclass(frozen=True, slots=True)
class Kind:
    """What a cost depends on: `contiguous` rows or selected ones, the tensors' kind, torch's threads."""

    contiguous: bool
    dtype: torch.dtype
    head_dim: int
    group: int
    kv_heads: int
    threads: int


_costs: dict[Kind, Mapping[CpuForm, float]] = {}
_one_trial = Lock()


def quickest(kind: Kind, cells: Callable[[CpuForm], int], size: int) -> CpuForm:
    """The form in which these rows cost least; `cells`: how many cells they have in a form, `size`: rows × slots."""
    if size < SMALLEST_TRIED:
        return by_rule(kind)
    costs = costs_of(kind)
    best, *others = costs
    for form in others:
        if costs[form] * cells(form) < MARGIN * costs[best] * cells(best):
            best = form
    return best


def by_rule(kind: Kind) -> CpuForm:
    """The form for rows too few for a trial, from what the processor can do."""
    return "products" if kind.dtype == torch.bfloat16 and products_pay() else "pieces-64"


@cache
def products_pay() -> bool:
    """Whether this processor multiplies bfloat16 by itself, but not by AMX, from which flash gains more."""
    return _has("_is_avx512_bf16_supported") and not _has("_is_amx_tile_supported")


def _has(name: str) -> bool:
    supported = getattr(torch.cpu, name, None)
    return bool(supported is not None and supported())


def candidates(kind: Kind) -> tuple[CpuForm, ...]:
    """The forms a trial compares, the one of the rule first."""
    forms: tuple[CpuForm, ...] = ("pieces-64",) if kind.contiguous else ("pieces-64", "pieces-128", "pieces-256")
    if kind.dtype != torch.float16:  # its logits would be rounded to what overflows at 65,504
        forms += ("products",)
    first = by_rule(kind)
    return (first, *(form for form in forms if form != first))


def cells_of(form: CpuForm, steps: Sequence[int], contiguous: bool) -> int:
    """Rows × slots that a form computes, masked ones too: each block of rows goes as far as its last row."""
    block = BLOCK_ROWS if form == "products" else CAUSAL_ROWS if contiguous else EDGES[form]
    stops = range(block, len(steps) + block, block)
    return sum((min(stop, len(steps)) - stop + block) * (steps[min(stop, len(steps)) - 1] + 1) for stop in stops)


def costs_of(kind: Kind) -> Mapping[CpuForm, float]:
    """Seconds per cell in each form, in the order of the candidates; measured where no one has asked before."""
    found = _costs.get(kind)
    if found is None:
        with _one_trial:
            found = _costs.get(kind)
            if found is None:
                found = _costs[kind] = measured(kind)
    return found


def known_costs() -> Mapping[Kind, Mapping[CpuForm, float]]:
    """What this process has measured so far, for records of a run."""
    return dict(_costs)


@torch.inference_mode()
def measured(kind: Kind) -> Mapping[CpuForm, float]:
    """Seconds per cell in each form, by a trial on tensors of random numbers."""
    started = time.perf_counter()
    steps = list(range(SQUARE)) if kind.contiguous else [STRIDE * (row + 1) - 1 for row in range(ROWS)]
    trials = {form: _trial(form, kind, steps) for form in candidates(kind)}
    best = dict.fromkeys(trials, float("inf"))
    for done in range(ROUNDS):
        if done >= FEWEST_ROUNDS and time.perf_counter() - started > SECONDS:
            break
        # One after the other in each round: what else the machine does then slows all of them.
        for form, attend in trials.items():
            began = time.perf_counter()
            attend()
            best[form] = min(best[form], time.perf_counter() - began)
    costs = {form: seconds / cells_of(form, steps, kind.contiguous) for form, seconds in best.items()}
    shown = ", ".join(f"{form} {1e12 * cost:.0f} ps" for form, cost in costs.items())
    logger.info("a cell of attention costs, for %s: %s (%.0f ms)", kind, shown, 1e3 * (time.perf_counter() - started))
    return costs


def _trial(form: CpuForm, kind: Kind, steps: Sequence[int]) -> Callable[[], object]:
    """One attention of these rows in a form, all it needs made already, as in every layer but the first."""
    generator = torch.Generator().manual_seed(0)
    width = kind.group * kind.head_dim
    kv_heads = max(1, min(kind.kv_heads, WIDTH_PER_THREAD * kind.threads // width))
    packed, keys, values = (
        torch.randn(kv_heads, rows, kind.head_dim, generator=generator).to(kind.dtype)
        for rows in (len(steps) * kind.group, steps[-1] + 1, steps[-1] + 1)
    )
    ranks, scale = torch.tensor(steps), kind.head_dim**-0.5
    if form == "products":
        blocks = blocks_of(ranks, steps, BLOCK_ROWS, kind.dtype)
        return lambda: by_products(packed, keys, values, blocks, scale)
    if kind.contiguous:
        heads = packed.view(kv_heads * kind.group, len(steps), kind.head_dim)
        wide_keys, wide_values = (x.repeat_interleave(kind.group, dim=0) for x in (keys, values))
        return lambda: flash(heads, wide_keys, wide_values, scale, is_causal=True)
    pieces = cut(ranks, edge_rows=EDGES[form])
    biases = [bias_of(piece, kind.group, kind.dtype) for piece in pieces]
    return lambda: in_pieces(packed, keys, values, pieces, biases, scale)

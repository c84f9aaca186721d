"""The cost model's tables as plain records: the paper's Table 5 beside ours, bytes and ratios, break-even contexts.

Rates come from the paper's single-GPU column (arXiv 2603.05353, Table 5: 4 x H100, 15 % recomputed, nothing cached).
That the model was Qwen3-14B is inferred: it is the default of the released script. Imports no torch.
"""

from dataclasses import dataclass
from typing import Any

from infoflow_kv.parallel.cost import (
    LINKS,
    LLAMA_8B,
    NVLINK,
    QWEN_14B,
    QWEN_VL_8B,
    SHARE,
    DecoderShape,
    head_layout,
    infoflow_bytes,
    pick_layout,
    query_layout,
    ring_bytes,
)
from infoflow_kv.parallel.cost_times import (
    CHUNK_TOKENS,
    FEWEST_RANK_TOKENS,
    Machine,
    Request,
    best_seconds,
    break_even_tokens,
    ideal_seconds,
    infoflow_seconds,
    ring_seconds,
)

Record = dict[str, Any]

K = 1024
PAPER_RANKS = 4
RANKS = (4, 8, 64)
LENGTHS = (8 * K, 16 * K, 32 * K, 128 * K, 1024 * K)


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One line of the paper's Table 5, in seconds to the first token."""

    tokens: int
    one_gpu: float
    ring: float
    infoflow: float


PAPER = (
    PaperRow(8 * K, 0.5667, 0.2475, 0.2320),
    PaperRow(16 * K, 1.2858, 0.7078, 0.4276),
    PaperRow(32 * K, 3.1905, 2.3501, 0.9140),
)
# What FlashAttention 3 and well-shaped products reach on the same device.
BETTER_KERNELS = Machine("better kernels", 700e12, 650e12)


@dataclass(frozen=True, slots=True)
class Fit:
    """T = linear × tokens + quadratic × tokens², in seconds, through the paper's first two single-GPU times."""

    linear: float
    quadratic: float

    def seconds(self, tokens: int) -> float:
        """One GPU's time at a length; 32K is the test, as the fit has not seen it."""
        return self.linear * tokens + self.quadratic * tokens**2

    def machine(self, shape: DecoderShape) -> Machine:
        """The rates that this fit means for a model, with logits of all rows, as the released code computes them."""
        weights = shape.weights + shape.width * shape.vocabulary
        pair_flops = 4 * shape.heads * shape.head_dim * shape.layers
        return Machine("the paper's kernels", 2 * weights / self.linear, pair_flops / 2 / self.quadratic)


def paper_fit() -> Fit:
    """The fit of the paper's single-GPU column: two unknowns from its 8K and 16K."""
    first, second = PAPER[:2]
    slope_first, slope_second = first.one_gpu / first.tokens, second.one_gpu / second.tokens
    quadratic = (slope_second - slope_first) / (second.tokens - first.tokens)
    return Fit(slope_first - quadratic * first.tokens, quadratic)


def paper_machine() -> Machine:
    """One H100 with the paper's own kernels, as its single-GPU column tells of them."""
    return paper_fit().machine(QWEN_14B)


def table5() -> list[Record]:
    """The paper's Table 5 and this model's times of the same requests, in seconds, one record a context length."""
    fit, shape, layout = paper_fit(), QWEN_14B, head_layout(QWEN_14B, PAPER_RANKS)
    records = []
    for row in PAPER:
        long = Request(row.tokens, PAPER_RANKS)
        short = Request(row.tokens, PAPER_RANKS, chunk_tokens=CHUNK_TOKENS)
        stored = Request(row.tokens, PAPER_RANKS, chunk_tokens=CHUNK_TOKENS, cached=True)
        record: Record = {
            **_head("table5", shape, PAPER_RANKS, row.tokens),
            "layout": layout.name,
            "paper_one_gpu_seconds": row.one_gpu,
            "paper_ring_seconds": row.ring,
            "paper_infoflow_seconds": row.infoflow,
            "one_gpu_seconds": fit.seconds(row.tokens),
        }
        for machine, prefix in ((fit.machine(shape), ""), (BETTER_KERNELS, "better_kernels_")):
            given = (shape, machine, NVLINK)
            record |= {
                f"{prefix}ring_contiguous_seconds": ring_seconds(*given, long, balanced=False),
                f"{prefix}ring_balanced_seconds": ring_seconds(*given, long),
                f"{prefix}infoflow_rank_chunks_seconds": infoflow_seconds(*given, layout, long),
                f"{prefix}infoflow_seconds": infoflow_seconds(*given, layout, short),
                f"{prefix}infoflow_cached_seconds": infoflow_seconds(*given, layout, stored),
                f"{prefix}ideal_seconds": ideal_seconds(shape, machine, short),
                f"{prefix}ideal_cached_seconds": ideal_seconds(shape, machine, stored),
            }
        records.append(record)
    return records


def bytes_and_ratios() -> list[Record]:
    """Bytes that one rank sends and seconds to the first token, one record for each model, ranks, length and link."""
    machine, records = paper_machine(), []
    for shape in (LLAMA_8B, QWEN_14B):
        for ranks in RANKS:
            for tokens in (n for n in LENGTHS if n / ranks >= FEWEST_RANK_TOKENS):
                request = Request(tokens, ranks, chunk_tokens=CHUNK_TOKENS)
                stored = Request(tokens, ranks, chunk_tokens=CHUNK_TOKENS, cached=True)
                heads, queries = head_layout(shape, ranks), query_layout(ranks)
                sent = {
                    "ring_bytes": ring_bytes(shape, tokens, ranks),
                    "q_bytes": infoflow_bytes(shape, tokens, queries),
                    "heads_layout": heads.name,
                    "heads_bytes": infoflow_bytes(shape, tokens, heads),
                    "heads_bytes_cached": infoflow_bytes(shape, tokens, heads, move=False),
                    "picked": pick_layout(shape, ranks)[0].name,
                }
                for link in LINKS:
                    ring = ring_seconds(shape, machine, link, request)
                    ours, layout = best_seconds(shape, machine, link, request)
                    cached = best_seconds(shape, machine, link, stored)[0]
                    records.append(
                        {
                            **_head("bytes_and_ratios", shape, ranks, tokens),
                            **sent,
                            "link": link.name,
                            "link_bytes_per_second": link.bytes_per_second,
                            "quickest": layout.name,
                            "ring_seconds": ring,
                            "infoflow_seconds": ours,
                            "infoflow_cached_seconds": cached,
                            "times_sooner": ring / ours,
                            "times_sooner_cached": ring / cached,
                        }
                    )
    return records


def break_even() -> list[Record]:
    """Tokens from which on InfoFlow is quicker than a balanced ring, one record for each model, ranks and link."""
    machine = paper_machine()
    return [
        {
            **_head("break_even", shape, ranks),
            "link": link.name,
            "link_bytes_per_second": link.bytes_per_second,
            "break_even_tokens": break_even_tokens(shape, machine, link, ranks),
            "break_even_tokens_cached": break_even_tokens(shape, machine, link, ranks, cached=True),
        }
        for shape in (LLAMA_8B, QWEN_14B, QWEN_VL_8B)
        for ranks in RANKS
        for link in LINKS
    ]


def _head(part: str, shape: DecoderShape, ranks: int, tokens: int | None = None) -> Record:
    """What all records begin with; `modelled` tells them from measured ones."""
    length = {} if tokens is None else {"tokens": tokens}
    return {
        "benchmark": "sp",
        "modelled": True,
        "part": part,
        "model": shape.name,
        "ranks": ranks,
        **length,
        "share": SHARE,
    }

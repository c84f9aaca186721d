"""How exact and how quick are the forms of staircase attention on this GPU, against causal SDPA over the full square?

`python benchmarks/gpu_attention.py --out gpu.jsonl` writes one JSON line per measurement: first the machine, then the
largest error of each form against float64 on cases of every kind, then times. Exit code 0; 1 where a form failed or was
not exact (its line says how); 2 where there is no GPU. `--sweep` times other block sizes of the Triton kernel.
`--device cpu` runs the same lines without a GPU, to try the script: its times say nothing about one.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from environment import environment

from infoflow_kv.ops import AttentionSpec, Staircase
from infoflow_kv.ops.forms import Form

FORMS: tuple[Form, ...] = ("triton", "flex", "blocks")
# Query heads, K/V heads, width of a head.
HEADS = {
    "llama-2-7b": (32, 32, 128),
    "llama-3-8b and mistral-7b": (32, 8, 128),
    "qwen-2.5-7b": (28, 4, 128),
    "smollm2-135m": (9, 3, 64),
}
PROMPT = 64  # rows at the end that are always there: the question
CHECKED_ROWS = 64
# Largest error as a share of the largest value: a few thousand products in another order, and bfloat16's eight bits.
EXACT = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
# Kinds of attention whose exactness is looked at: heads, K/V heads, width, window, softcap, sinks.
CASES: dict[str, tuple[int, int, int, int | None, float | None, bool]] = {
    "plain": (8, 8, 64, None, None, False),
    "groups of 3": (9, 3, 64, None, None, False),
    "groups of 7": (28, 4, 128, None, None, False),
    "width 80": (8, 2, 80, None, None, False),
    "width 256, softcap": (8, 4, 256, None, 50.0, False),
    "window": (8, 2, 128, 300, None, False),
    "narrow window": (8, 2, 64, 7, None, False),
    "window, softcap, sinks": (8, 2, 64, 128, 30.0, True),
}


def main() -> int:
    given = arguments()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: torch sees no CUDA device, and these measurements need one", file=sys.stderr)
        return 2
    failed = False
    with torch.inference_mode(), open(given.out or "/dev/stdout", "a", encoding="utf-8") as lines:
        for record in itertools.chain([machine(given.device)], exactness(given), times(given)):
            failed |= "error" in record or not record.get("is_exact", True)
            lines.write(json.dumps({"device": name_of(given.device), **record}) + "\n")
            lines.flush()
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    numbers = lambda kind: lambda text: [kind(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--tokens", type=numbers(int), default=[4096, 8192, 16384, 32768])
    parser.add_argument("--budgets", type=numbers(float), default=[0.05, 0.15, 0.3])
    parser.add_argument("--heads", type=numbers(str), default=list(HEADS), help="some of: " + ", ".join(HEADS))
    parser.add_argument("--dtype", choices=EXACT, default="bfloat16", help="of the times; exactness is shown for two")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="other block sizes of the Triton kernel too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", help="file that lines are added to (default: standard output)")
    return parser.parse_args()


def machine(device: str) -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    found = {"kind": "machine", "triton": triton, **environment(device)}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


# ---------------------------------------------------------------------------------------------------------- exactness


def exactness(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each form, case and dtype."""
    tokens = min(2000, *given.tokens)
    rows = {"scattered": draw(tokens, 0.15), "tail": torch.arange(tokens - tokens // 3, tokens)}
    for dtype, case, which, form in itertools.product(("float32", "bfloat16"), CASES, rows, FORMS):
        heads, kv_heads, width, window, softcap, has_sinks = CASES[case]
        ranks = rows[which].to(given.device)
        # Slots after the last rank hold NaN: a form that reads them shows it.
        query, keys, values = noise(given.device, dtype, heads, kv_heads, width, ranks, tokens + 40)
        keys[:, tokens:], values[:, tokens:] = float("nan"), float("nan")
        sinks = torch.linspace(-3, 3, heads, device=given.device) if has_sinks else None
        spec = AttentionSpec(width**-0.5, window, softcap, sinks)
        record = {"kind": "exactness", "arm": form, "case": case, "rows": which, "dtype": dtype, "tokens": tokens}
        try:
            out = Staircase(ranks, form=form).attend(query, keys, values, spec)
            worst = largest_error(out, query, keys[:, :tokens], values[:, :tokens], ranks, spec)
            yield record | {"max_error": worst, "limit": EXACT[dtype], "is_exact": worst <= EXACT[dtype]}
        except Exception as error:  # noqa: BLE001 - whatever stops one form, the others are still to be seen
            yield record | {"error": first_line(error)}


def largest_error(out, query, keys, values, ranks, spec: AttentionSpec) -> float:
    """Largest difference to dense float64 attention over rows spread evenly, as a share of the largest value there.

    NaN anywhere is an infinite error. K/V head by K/V head, so that little is held at once.
    """
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    picked = torch.linspace(0, len(ranks) - 1, min(CHECKED_ROWS, len(ranks))).round().long().to(ranks.device)
    slots, own = torch.arange(keys.shape[1], device=ranks.device)[None], ranks[picked][:, None]
    hidden = (slots > own) | (slots <= own - (spec.window or keys.shape[1]))
    group, worst, largest = query.shape[0] // keys.shape[0], 0.0, 0.0
    for head in range(query.shape[0]):
        logits = query[head, picked].double() @ keys[head // group].double().T * spec.scale
        if spec.softcap is not None:
            logits = torch.tanh(logits / spec.softcap) * spec.softcap
        logits.masked_fill_(hidden, float("-inf"))
        total = torch.logsumexp(logits, dim=1, keepdim=True)
        if spec.sinks is not None:
            total = torch.logaddexp(total, spec.sinks[head].double())
        expected = torch.exp(logits - total) @ values[head // group].double()
        worst = max(worst, float((out[head, picked].double() - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return worst / largest


# --------------------------------------------------------------------------------------------------------------- times


def times(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each shape, length, budget and arm; the arm `causal` is SDPA over all rows."""
    for shape, tokens in itertools.product(given.heads, given.tokens):
        heads, kv_heads, width = HEADS[shape]
        every = torch.arange(tokens, device=given.device)
        query, keys, values = noise(given.device, given.dtype, heads, kv_heads, width, every, tokens)
        spec = AttentionSpec(width**-0.5)
        common = {"kind": "time", "heads_of": shape, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
        common |= {"dtype": given.dtype, "tokens": tokens, "repeats": given.repeats}

        def causal(given=(query, keys, values), scale=spec.scale) -> None:
            q, k, v = (x[None] for x in given)
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

        square = timed(causal, given)
        pairs = tokens * (tokens + 1) // 2
        flops = 4 * heads * width
        rate = pairs / square["seconds_median"] if "error" not in square else None
        yield common | {"arm": "causal", "rows": tokens, "pairs": pairs, **square, **rates(square, pairs, flops, rate)}
        for budget in given.budgets:
            ranks = draw(tokens, budget).to(given.device)
            part = query[:, ranks].contiguous()
            pairs = int((ranks + 1).sum())
            for arm, run in arms(part, keys, values, ranks, spec, given.sweep):
                found = timed(run, given)
                record = common | {"arm": arm, "budget": budget, "rows": len(ranks), "pairs": pairs, **found}
                yield record | rates(found, pairs, flops, rate)


def arms(query, keys, values, ranks, spec: AttentionSpec, sweep: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each form as a model's layers use it: the staircase, with what it keeps, is there already."""
    for form in FORMS:
        stairs = Staircase(ranks, form=form)
        yield form, lambda stairs=stairs: stairs.attend(query, keys, values, spec)
    if sweep:
        from infoflow_kv.ops.triton_staircase import Tiles, attend_by_triton

        for rows, slots, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
            tiles = Tiles(rows, slots, warps, stages)
            name = f"triton {rows}x{slots}, {warps} warps, {stages} stages"
            yield name, lambda tiles=tiles: attend_by_triton(query, keys, values, ranks, spec, tiles)


def timed(run: Callable[[], object], given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first call, which may compile, and of `repeats` calls after three more; or why there are none."""
    try:
        start = time.perf_counter()
        run()
        wait(given.device)
        first = time.perf_counter() - start
        for _ in range(3):
            run()
        seconds = [seconds_of(run, given.device) for _ in range(given.repeats)]
    except Exception as error:  # noqa: BLE001 - as above
        return {"error": first_line(error)}
    return {
        "first_seconds": tidy(first),
        "seconds_median": tidy(statistics.median(seconds)),
        "seconds_min": tidy(min(seconds)),
        "seconds_max": tidy(max(seconds)),
    }


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Of one call; on a GPU by its own clock, from the first of the call's kernels to the last."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    wait(device)
    before.record()
    run()
    after.record()
    wait(device)
    return before.elapsed_time(after) / 1000


def rates(found: dict[str, Any], pairs: int, flops: int, square: float | None) -> dict[str, Any]:
    """TFLOP/s over the pairs that count, and the rate of pairs as a share of causal SDPA's on the full square."""
    if "error" in found:
        return {}
    rate = pairs / found["seconds_median"]
    return {"tflops": tidy(rate * flops / 1e12), "rate_ratio": None if square is None else tidy(rate / square)}


# ---------------------------------------------------------------------------------------------------------------- parts


def draw(tokens: int, budget: float) -> torch.Tensor:
    """Ascending ranks: a share of the tokens, drawn evenly, and the prompt's rows at the end."""
    context = tokens - PROMPT
    chosen = torch.randperm(context, generator=torch.Generator().manual_seed(tokens))[: round(budget * context)]
    return torch.cat([chosen.sort().values, torch.arange(context, tokens)])


def noise(device: str, dtype: str, heads: int, kv_heads: int, width: int, ranks: torch.Tensor, slots: int):
    """Query, K and V; K and V are views of one layer in a request's buffers, as in a model."""
    generator = torch.Generator(device).manual_seed(0)
    kind = {"device": device, "generator": generator}
    query = torch.randn(heads, len(ranks), width, **kind).to(getattr(torch, dtype))
    buffers = torch.randn(2, kv_heads, slots, width, **kind).to(getattr(torch, dtype))
    return query, buffers[0], buffers[1]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def tidy(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    sys.exit(main())

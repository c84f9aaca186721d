"""`infoflow-kv bench attention`: the staircase kernel against causal SDPA."""

from typing import Annotated

import typer

from infoflow_kv.cli import opening, options
from infoflow_kv.cli.bench import setting as given
from infoflow_kv.cli.bench.tables import Record, rate, spread, times, took
from infoflow_kv.cli.evaluation.lists import numbers
from infoflow_kv.cli.output import emit_table
from infoflow_kv.errors import OptionError

_SHAPE = "Shape"
Rows = Annotated[
    str,
    typer.Option(metavar="LIST", help="Rows as shares (0 to 1) of the keys.", rich_help_panel="Request"),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Take heads from this model.", show_default="none", rich_help_panel=_SHAPE),
]
Heads = Annotated[int, typer.Option(metavar="N", help="Query heads.", rich_help_panel=_SHAPE)]
KvHeads = Annotated[int, typer.Option(metavar="N", help="Key/value heads.", rich_help_panel=_SHAPE)]
HeadDim = Annotated[int, typer.Option(metavar="N", help="Width of one head.", rich_help_panel=_SHAPE)]


def attention(
    tokens: given.Tokens = given.TOKENS,
    rows: Rows = given.BUDGETS,
    heads: Heads = 9,
    kv_heads: KvHeads = 3,
    head_dim: HeadDim = 64,
    model: Model = None,
    repeats: given.Repeats = given.REPEATS,
    warmup: given.Warmup = 1,
    threads: given.Threads = None,
    seed: given.Seed = 0,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    out: given.Out = None,
    as_json: options.Json = False,
) -> int:
    """The attention kernel of repair against causal SDPA on the full square, in pairs of a row and a key per second.

    `even`: rows drawn evenly; `late`: rows that stand late, as selectors often choose them; `-anew`: the cuts are made
    for this one layer. The rate ratio is 1 where the kernel is as quick per pair as torch's own on the full square.

    Examples:

    \b
        infoflow-kv bench attention
        infoflow-kv bench attention --tokens 2000,8000 --rows .05,.15,.30 --dtype bfloat16
        infoflow-kv bench attention --heads 32 --kv-heads 8 --head-dim 128 --out bench/attention.jsonl
    """
    given.check_rounds(repeats, warmup, threads)
    wanted, share_list, file = given.lengths(tokens), numbers(rows, "--rows", float), given.out_file(out)
    if not all(0 < part <= 1 for part in share_list):
        raise OptionError(f"--rows '{rows}' holds a share outside 0..1 (0 excluded); give a list like .05,.15")

    import torch

    from infoflow_kv.benchmark.attention import AttentionShape, measure_attention
    from infoflow_kv.evaluate.environment import environment
    from infoflow_kv.models.loading import DTYPES, torch_device

    if dtype not in DTYPES:
        raise OptionError(f"unknown dtype '{dtype}' (known: {', '.join(sorted(DTYPES))})")
    torch_device(device)
    shape = AttentionShape(heads, kv_heads, head_dim)
    if model is not None:
        loaded = opening.load_model(model, dtype, device)
        shape = AttentionShape(loaded.num_heads, loaded.num_kv_heads, loaded.head_dim)
    common = {
        "benchmark": "attention",
        "dtype": dtype,
        "device": torch.device(device).type,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    machine = {"environment": environment(device)}
    for length in wanted:
        for part in share_list:
            with given.steps(f"attention of {part:g} × {length} rows") as step:
                found = measure_attention(
                    shape,
                    length,
                    max(1, round(part * length)),
                    dtype=DTYPES[dtype],
                    device=device,
                    repeats=repeats,
                    warmup=warmup,
                    seed=seed,
                    on_step=step,
                )
            records = [common | record | machine for record in found]
            given.keep(records, file, as_json)
            if not as_json:
                table(records)
    return 0


def table(records: list[Record]) -> None:
    """Nothing; the arms of one size are on stdout."""
    columns = (
        "keys",
        "rows",
        "arm",
        "mean rank",
        "time",
        "spread",
        "ideal",
        "Mpairs/s",
        "GFLOP/s",
        "rate",
        "max error",
    )
    rows = [
        (
            r["keys"],
            r["rows"],
            r["arm"],
            f"{r['mean_rank']:.2f}",
            took(r["seconds_median"]),
            spread(r),
            took(r["ideal_seconds"]),
            rate(r["pairs_per_second"] / 1e6),
            rate(r["gflops_per_second"]),
            times(r["rate_ratio"]),
            f"{r['max_error']:.1e}",
        )
        for r in records
    ]
    emit_table(columns, rows, right=(0, 1, 3, 4, 5, 6, 7, 8, 9, 10))

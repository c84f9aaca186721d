"""`infoflow-kv bench sp`: one long request over several devices."""

from pathlib import Path
from typing import Annotated, Any

import typer

from infoflow_kv.cli import options
from infoflow_kv.cli.bench import setting as given
from infoflow_kv.cli.bench.tables import took
from infoflow_kv.cli.evaluation.lists import numbers
from infoflow_kv.cli.output import emit, emit_table, note, status
from infoflow_kv.errors import OptionError

MOST_RANKS = 64

ModelOnly = Annotated[
    bool,
    typer.Option("--model-only", help="Compute the cost model's tables; nothing is measured.", show_default=False),
]
Ranks = Annotated[
    str,
    typer.Option(metavar="LIST", help="Numbers of processes that share the request.", rich_help_panel="Ranks"),
]
Arms = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="ring and gather are full prefill (Ring Attention, all-gather), infoflow repairs.",
        rich_help_panel="Request",
    ),
]
LayoutList = Annotated[
    str, typer.Option("--layouts", metavar="LIST", help="Of infoflow: auto, Q, H, HQ.", rich_help_panel="Request")
]
States = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="cached: every rank finds the chunks in a store; cold: they are prefilled on the way.",
        rich_help_panel="Request",
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Put each rank behind a link that is as slow for this machine as nvlink, 400g-infiniband, 100gbe or 10gbe "
        "is for a GPU (needs root and iproute2).",
        show_default="none: the loopback",
        rich_help_panel="Ranks",
    ),
]
Counts = Annotated[
    bool,
    typer.Option(
        "--count/--no-count",
        help="Count the payload that each rank sends, in a pass of its own. On the wire: what its network interface "
        "sent, with headers, where --link gives it one.",
        rich_help_panel="Measuring",
    ),
]
Join = Annotated[
    bool,
    typer.Option(
        "--join",
        help="Join the documents to one, so that chunks are as long as --chunk-tokens says, however short they are.",
        show_default=False,
        rich_help_panel="Request",
    ),
]
RankThreads = Annotated[
    int, typer.Option("--threads", metavar="N", help="Threads of torch in each rank.", rich_help_panel="Ranks")
]
RankDevice = Annotated[
    str,
    typer.Option("--device", metavar="NAME", help="cpu, or cuda: a GPU for each rank.", rich_help_panel="Model"),
]
Shape = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="A model, or shape:NAME:LAYERS for random weights in the shape of qwen2.5-1.5b, qwen3-0.6b, qwen3-1.7b, "
        "qwen3-14b, llama-3.2-1b or llama-3.1-8b.",
        rich_help_panel="Model",
    ),
]


def sp(
    model_only: ModelOnly = False,
    ranks: Ranks = "1,2,4",
    arms: Arms = "ring,infoflow",
    layouts: LayoutList = "auto",
    budgets: given.Budgets = given.BUDGETS,
    states: States = "cached",
    tokens: given.Tokens = "2000",
    link: Link = None,
    documents: given.Documents = None,
    question: given.Question = None,
    join: Join = False,
    repeats: given.Repeats = 3,
    count: Counts = True,
    threads: RankThreads = 1,
    scratch: given.Scratch = None,
    model: Shape = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: RankDevice = options.DEVICE,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    out: given.Out = None,
    as_json: options.Json = False,
) -> int:
    """Sequence-parallel prefill: bytes that each rank sends and time to first token, ring attention beside InfoFlow.

    Starts the ranks as processes of this machine. TTFT runs from the request on all ranks to the first token on rank 0.
    With --model-only: the paper's Table 5 beside the cost model, bytes and ratios for models, ranks, lengths and links,
    and the context length from which on InfoFlow is quicker than a balanced ring. Arithmetic; no device is needed.

    Examples:

    \b
        infoflow-kv bench sp --ranks 1,2,4 --arms ring,gather,infoflow --layouts Q,H --states cached,cold \\
          --model shape:qwen3-0.6b:4
        infoflow-kv bench sp --ranks 4 --tokens 8000 --model shape:qwen3-0.6b:4 --link 100gbe --no-count
        infoflow-kv bench sp --model-only
    """
    file = given.out_file(out)
    if model_only:
        return tell_model(file, as_json)
    sizes = rank_numbers(ranks)
    if device not in ("cpu", "cuda"):
        raise OptionError(f"--device '{device}': expected cpu, or cuda for a GPU to each rank")
    if max(sizes) > MOST_RANKS:
        raise OptionError(f"--ranks {max(sizes)}: more than {MOST_RANKS} processes on one machine make no sense")
    given.check_rounds(repeats, 0, threads)
    read, folder = given.given_documents(documents, question), given.scratch_folder(scratch)
    cached = [{"cached": True, "cold": False}.get(state) for state in given.names(states, "--states")]
    if None in cached:
        raise OptionError(f"--states '{states}': expected cached, cold or both")

    from infoflow_kv.benchmark.sp import measure_all
    from infoflow_kv.benchmark.sp_job import SpJob, make_arms
    from infoflow_kv.evaluate.environment import environment

    chosen = make_arms(
        given.names(arms, "--arms"),
        given.names(layouts, "--layouts"),
        given.shares(budgets),
        [c is True for c in cached],
    )
    records: list[dict[str, Any]] = []
    where = environment()
    with status("starting ranks") as say:
        for length in given.lengths(tokens):
            job = SpJob(
                model=model,
                dtype=dtype,
                device=device,
                documents=tuple((d.title, d.text) for d in read[0]),
                question=read[1],
                tokens=length,
                chunk_tokens=chunk_tokens,
                joined=join,
                arms=chosen,
                repeats=repeats,
                threads=threads,
                folder=str(folder or ""),
                counts=count,
            )
            for found in measure_all(job, sizes, link, say, note):
                given.keep([record | {"environment": where} for record in found], file, as_json)
                records += found
    if not records:
        raise OptionError("nothing was measured: neither the model nor the ranks allow any of these arms")
    if not as_json:
        tell_measured(records)
    return 0


def rank_numbers(text: str) -> list[int]:
    """The numbers in `--ranks`; OptionError for what is none."""
    return [given.at_least(number, 1, "--ranks") for number in numbers(text, "--ranks", int)]


def tell_measured(records: list[dict[str, Any]]) -> None:
    """Nothing; the records as a table on stdout."""
    columns = ("ranks", "tokens", "arm", "link", "TTFT", "spread", "MB sent", "MB on the wire")
    rows = [
        (
            r["ranks"],
            r["context_tokens"],
            r["arm"],
            r["link"] or "-",
            took(r["ttft_seconds_median"]),
            f"{r['spread']:.0%}",
            "-" if r["sent_bytes"] is None else f"{r['sent_bytes'] / 1e6:,.2f}",
            f"{r['interface_bytes'] / 1e6:,.2f}" if r["interface_bytes"] else "-",
        )
        for r in records
    ]
    emit_table(columns, rows, right=(0, 1, 4, 5, 6, 7))


def tell_model(out: Path | None, as_json: bool) -> int:
    """0; the cost model's records are kept, and on stdout as tables or as JSON."""
    from infoflow_kv.parallel import cost_cells as cells
    from infoflow_kv.parallel import cost_tables as tables

    shown = (
        (tables.table5(), cells.table5_cells),
        (tables.bytes_and_ratios(), cells.bytes_cells),
        (tables.break_even(), cells.break_even_cells),
    )
    for index, (records, drawn) in enumerate(shown):
        given.keep(records, out, as_json)
        if not as_json:
            table = drawn(records)
            emit(("\n" if index else "") + table.title)
            emit_table(table.columns, table.rows, right=range(table.words, len(table.columns)))
    return 0

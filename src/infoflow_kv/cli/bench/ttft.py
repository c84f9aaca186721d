"""`infoflow-kv bench ttft`: time to first token."""

from typing import TYPE_CHECKING, Annotated

import typer

from infoflow_kv.cli import options
from infoflow_kv.cli.bench import setting as given
from infoflow_kv.cli.bench.tables import Record, arm_name, spread, stage_shares, times, took
from infoflow_kv.cli.output import emit_table

if TYPE_CHECKING:
    from infoflow_kv.benchmark.timing import OnStep

States = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Where chunks are when the request comes: warm-disk (store opened anew), warm-memory, cold (prefilled and "
        "stored on the way).",
        rich_help_panel="Request",
    ),
]

Plans = Annotated[
    bool,
    typer.Option(
        "--plan",
        help="Let requests take full prefill where that is predicted to be quicker, as `ask` does. The machine's "
        "speeds are measured first where they are not known.",
        rich_help_panel="Request",
    ),
]


def ttft(
    tokens: given.Tokens = given.TOKENS,
    methods: given.Methods = given.METHODS,
    budgets: given.Budgets = given.BUDGETS,
    states: States = given.STATES,
    plan: Plans = False,
    documents: given.Documents = None,
    question: given.Question = None,
    repeats: given.Repeats = given.REPEATS,
    warmup: given.Warmup = 1,
    threads: given.Threads = None,
    seed: given.Seed = 0,
    scratch: given.Scratch = None,
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    out: given.Out = None,
    as_json: options.Json = False,
) -> int:
    """Time to first token: plain Transformers, our full prefill, and methods at their budgets, warm and cold.

    All arms read the same token ids and take turns. Arms of the engine begin with texts, plain Transformers begins with
    ids. The ideal is full prefill's time × the FLOPs of the rows that were computed, at the pairs that they really see.

    Examples:

    \b
        infoflow-kv bench ttft
        infoflow-kv bench ttft --tokens 1000,8000 --budgets .05,.15,.30 --out ttft.jsonl
        infoflow-kv bench ttft --methods none,infoflow --states warm-disk --threads 2
        infoflow-kv bench ttft --tokens 256,512 --budgets .15,.9 --states warm-memory --plan
    """
    given.check_rounds(repeats, warmup, threads)
    wanted, budget_list = given.lengths(tokens), given.shares(budgets)
    method_list, state_list = given.names(methods, "--methods"), given.names(states, "--states")
    read, folder, file = given.given_documents(documents, question), given.scratch_folder(scratch), given.out_file(out)

    from infoflow_kv.benchmark.arms import make_arms
    from infoflow_kv.benchmark.ttft import measure_ttft

    make_arms(method_list, budget_list, state_list)  # refuses unknown names before the model is loaded
    setting = given.open_setting(
        model, dtype, device, read, repeats=repeats, warmup=warmup, chunk_tokens=chunk_tokens, seed=seed, plans=plan
    )
    for length in wanted:
        setting.request(length)  # a length over the window is refused before anything is measured

    def measure(length: int, step: "OnStep") -> list[Record]:
        return measure_ttft(setting, length, method_list, budget_list, state_list, scratch=folder, on_step=step)

    return given.each(wanted, "ttft of {} tokens", measure, table, file, as_json)


def table(records: list[Record]) -> None:
    """Nothing; the arms of one length are on stdout."""
    columns = (
        "tokens",
        "arm",
        "state",
        "TTFT",
        "spread",
        "vs full",
        "ideal",
        "vs plain",
        "rows",
        "mean rank",
        "stages",
    )
    rows = [
        (
            r["context_tokens"],
            arm_name(r),
            r["state"] or "-",
            took(r["ttft_seconds_median"]),
            spread(r),
            times(r["times_sooner_than_full"]),
            times(r["ideal_times_sooner"]),
            times(r["times_sooner_than_plain"]),
            f"{r['rows_per_layer']:,.0f}",
            "-" if r["mean_rank"] is None else f"{r['mean_rank']:.2f}",
            stage_shares(r),
        )
        for r in records
    ]
    emit_table(columns, rows, right=(0, 3, 4, 5, 6, 7, 8, 9))

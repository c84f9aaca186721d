"""`infoflow-kv bench memory`: peak memory of one request."""

from typing import TYPE_CHECKING

from infoflow_kv.cli import options
from infoflow_kv.cli.bench import setting as given
from infoflow_kv.cli.bench.tables import Record, arm_name, spread, times
from infoflow_kv.cli.output import emit_table, size

if TYPE_CHECKING:
    from infoflow_kv.benchmark.timing import OnStep


def memory(
    tokens: given.Tokens = given.TOKENS,
    methods: given.Methods = "none,infoflow",
    budgets: given.Budgets = given.BUDGETS,
    documents: given.Documents = None,
    question: given.Question = None,
    repeats: given.Repeats = 3,
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
    """Peak memory of one request above the weights, each in a process of its own, beside the bytes of the context's KV.

    Examples:

    \b
        infoflow-kv bench memory
        infoflow-kv bench memory --tokens 2000,8000 --methods none,infoflow --out bench/memory.jsonl
    """
    given.check_rounds(repeats, 0, threads)
    wanted, budget_list, method_list = given.lengths(tokens), given.shares(budgets), given.names(methods, "--methods")
    folder, file = given.scratch_folder(scratch), given.out_file(out)
    read = given.given_documents(documents, question)

    from infoflow_kv.benchmark.arms import make_arms
    from infoflow_kv.benchmark.memory import measure_memory

    make_arms(method_list, budget_list, ("warm-disk",))
    setting = given.open_setting(
        model, dtype, device, read, repeats=repeats, warmup=0, chunk_tokens=chunk_tokens, seed=seed
    )
    for length in wanted:
        setting.request(length)

    def measure(length: int, step: "OnStep") -> list[Record]:
        return measure_memory(setting, length, method_list, budget_list, scratch=folder, on_step=step)

    return given.each(wanted, "memory of {} tokens", measure, table, file, as_json)


def table(records: list[Record]) -> None:
    """Nothing; the arms of one length are on stdout."""
    columns = ("tokens", "arm", "above weights", "spread", "KV", "times KV", "weights", "peak")
    rows = [
        (
            r["context_tokens"],
            arm_name(r),
            size(r["above_weights_bytes_median"]),
            spread(r),
            size(r["kv_bytes"]),
            times(r["times_kv"]),
            size(r["weights_bytes"]),
            size(r["peak_bytes"]),
        )
        for r in records
    ]
    emit_table(columns, rows, right=(0, 2, 3, 4, 5, 6, 7))

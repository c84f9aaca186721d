"""`infoflow-kv bench ingest`: how quickly documents become stored chunks."""

from typing import TYPE_CHECKING

from infoflow_kv.cli import options
from infoflow_kv.cli.bench import setting as given
from infoflow_kv.cli.bench.tables import Record, rate, spread, times, took
from infoflow_kv.cli.output import emit_table, size

if TYPE_CHECKING:
    from infoflow_kv.benchmark.timing import OnStep


def ingest(
    tokens: given.Tokens = given.TOKENS,
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
    """Prefilling and storing chunks, in tokens per second, with and without the movement that method influence wants.

    Beside it: plain Transformers on all the text as one sequence, and on each chunk by itself with nothing stored.

    Examples:

    \b
        infoflow-kv bench ingest
        infoflow-kv bench ingest --tokens 2000,8000 --scratch /data --out bench/ingest.jsonl
    """
    given.check_rounds(repeats, warmup, threads)
    wanted, folder, file = given.lengths(tokens), given.scratch_folder(scratch), given.out_file(out)
    read = given.given_documents(documents, question)

    from infoflow_kv.benchmark.ingest import measure_ingest

    setting = given.open_setting(
        model, dtype, device, read, repeats=repeats, warmup=warmup, chunk_tokens=chunk_tokens, seed=seed
    )

    def measure(length: int, step: "OnStep") -> list[Record]:
        return measure_ingest(setting, length, scratch=folder, on_step=step)

    return given.each(wanted, "ingestion of {} tokens", measure, table, file, as_json)


def table(records: list[Record]) -> None:
    """Nothing; the arms of one length are on stdout."""
    columns = ("tokens", "arm", "time", "spread", "tokens/s", "ideal", "vs plain", "stored")
    rows = [
        (
            r["tokens"],
            r["arm"],
            took(r["seconds_median"]),
            spread(r),
            rate(r["tokens_per_second"]),
            rate(r["ideal_tokens_per_second"]),
            times(r["share_of_plain_rate"]),
            size(r["stored_bytes"]) if r["stored_bytes"] else "-",
        )
        for r in records
    ]
    emit_table(columns, rows, right=(0, 2, 3, 4, 5, 6, 7))

"""`infoflow-kv bench decode`: tokens after the first."""

from typing import TYPE_CHECKING, Annotated

import typer

from infoflow_kv.cli import options
from infoflow_kv.cli.bench import setting as given
from infoflow_kv.cli.bench.tables import Record, rate, spread, times
from infoflow_kv.cli.output import emit_table

if TYPE_CHECKING:
    from infoflow_kv.benchmark.timing import OnStep

NewTokens = Annotated[int, typer.Option(metavar="N", help="Tokens to write.", rich_help_panel="Request")]


def decode(
    tokens: given.Tokens = given.TOKENS,
    new_tokens: NewTokens = 32,
    documents: given.Documents = None,
    question: given.Question = None,
    repeats: given.Repeats = given.REPEATS,
    warmup: given.Warmup = 1,
    threads: given.Threads = None,
    seed: given.Seed = 0,
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    out: given.Out = None,
    as_json: options.Json = False,
) -> int:
    """Decoding after the first token, in tokens per second, against Transformers' generate with its own cache.

    Both read the same ids, choose greedily and ignore end tokens. The ideal reads all weights and all KV once a token.

    Examples:

    \b
        infoflow-kv bench decode
        infoflow-kv bench decode --tokens 1000,8000 --new-tokens 64 --out bench/decode.jsonl
    """
    given.check_rounds(repeats, warmup, threads)
    wanted, file = given.lengths(tokens), given.out_file(out)
    given.at_least(new_tokens, 2, "--new-tokens")
    read = given.given_documents(documents, question)

    from infoflow_kv.benchmark.decode import measure_decode

    setting = given.open_setting(
        model, dtype, device, read, repeats=repeats, warmup=warmup, chunk_tokens=chunk_tokens, seed=seed
    )
    for length in wanted:
        setting.request(length, new_tokens)

    def measure(length: int, step: "OnStep") -> list[Record]:
        return measure_decode(setting, length, new_tokens, on_step=step)

    return given.each(wanted, "decoding behind {} tokens", measure, table, file, as_json)


def table(records: list[Record]) -> None:
    """Nothing; both arms are on stdout."""
    columns = ("context", "new", "arm", "tokens/s", "spread", "ideal", "vs plain", "same ids")
    rows = [
        (
            r["context_tokens"],
            r["new_tokens"],
            r["arm"],
            rate(r["tokens_per_second"]),
            spread(r),
            rate(r["ideal_tokens_per_second"]),
            times(r["share_of_plain_rate"]),
            "yes" if r["same_ids"] else "no",
        )
        for r in records
    ]
    emit_table(columns, rows, right=(0, 1, 3, 4, 5, 6))

"""`infoflow-kv bench ttft | attention | ingest | decode | memory | compare | sp`. One file per verb."""

import typer

from infoflow_kv.cli.bench.attention import attention
from infoflow_kv.cli.bench.compare import compare
from infoflow_kv.cli.bench.decode import decode
from infoflow_kv.cli.bench.ingest import ingest
from infoflow_kv.cli.bench.memory import memory
from infoflow_kv.cli.bench.sp import sp
from infoflow_kv.cli.bench.ttft import ttft
from infoflow_kv.cli.options import flowing

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine: first token, kernel, ingestion, decoding, memory, other engines; "
    "and what one request over several devices costs.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

for verb in (ttft, attention, ingest, decode, memory, compare, sp):
    bench.command(help=flowing(verb.__doc__))(verb)

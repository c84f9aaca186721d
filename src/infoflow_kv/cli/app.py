"""The verbs, put together."""

from typing import Annotated

import typer

from infoflow_kv import __version__
from infoflow_kv.cli.ask import ask
from infoflow_kv.cli.bench import bench
from infoflow_kv.cli.calibrate import calibrate
from infoflow_kv.cli.check import check
from infoflow_kv.cli.demo import demo
from infoflow_kv.cli.evaluation import evaluation
from infoflow_kv.cli.explain import explain
from infoflow_kv.cli.ingest import ingest
from infoflow_kv.cli.methods import methods
from infoflow_kv.cli.models import models
from infoflow_kv.cli.options import flowing
from infoflow_kv.cli.output import emit
from infoflow_kv.cli.store import store

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

ROOT = """
Answers over your own documents from chunk KV that was computed once.

Results go to standard output, everything else to standard error; every verb takes --json.

Start here:

\b
    infoflow-kv demo
    infoflow-kv ask "Who keeps the lighthouse?" notes/

Exit codes: 0 done, 1 something that was asked did not work, 2 bad usage or bad input, 3 damage found by `store verify`,
130 interrupted.
"""


def show_version(wanted: bool) -> None:
    if wanted:
        emit(f"infoflow-kv {__version__}")
        raise typer.Exit


@app.callback(help=flowing(ROOT))
def root(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", metavar="", help="Show tracebacks and log messages (also: INFOFLOW_DEBUG=1).")
    ] = False,
) -> None:
    """Nothing; `main` looks for --debug itself, as errors reach it after the options are gone."""


for verb in (demo, ask, ingest, explain, check, calibrate, methods, models):
    app.command(help=flowing(verb.__doc__))(verb)
app.add_typer(evaluation, name="eval")
app.add_typer(bench, name="bench")
app.add_typer(store, name="store")

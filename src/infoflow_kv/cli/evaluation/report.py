"""`infoflow-kv eval report`: rows → Markdown, HTML and figures."""

from pathlib import Path
from typing import Annotated, Any

import typer

from infoflow_kv.cli import options
from infoflow_kv.cli.evaluation.score import Reference, Runs
from infoflow_kv.cli.output import emit, emit_json
from infoflow_kv.errors import DocumentError, InfoFlowError, OptionError

Out = Annotated[str, typer.Option(metavar="FOLDER", help="Where the report is written.", show_default=False)]
Explained = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A JSON file of `explain`: adds its selection map.", show_default="none"),
]


def report(
    runs: Runs,
    out: Out,
    reference: Reference = None,
    explained: Explained = None,
    as_json: options.Json = False,
) -> int:
    """Write a report: report.md, one self-contained report.html, and figures as PNG and SVG.

    Everything in it comes from the rows and the records beside them; equal rows give equal files. A report that stands
    in FOLDER is replaced; a folder that holds anything else is refused. Needs matplotlib:
    pip install 'infoflow-kv\\[eval]'.

    Examples:

    \b
        infoflow-kv eval report runs/musique --out report/
        infoflow-kv eval report runs/* --reference cacheblend --out report/
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--out '{out}' is a file; expected a folder for the report")
    request = None if explained is None else read_explained(Path(explained))

    from infoflow_kv.evaluate.report import write_report
    from infoflow_kv.evaluate.results import read_rows, read_runs

    rows, records = read_rows(runs), read_runs(runs)
    try:
        files = write_report(rows, records, folder, explained=request, reference=reference)
    except OSError as error:
        raise InfoFlowError(f"the report cannot be written to '{out}': {error.strerror or error}") from error
    if as_json:
        emit_json({"out": out, "rows": len(rows), "files": [str(file) for file in files]})
    else:
        emit(
            f"{len(rows):,} rows told in {folder / 'report.md'} and {folder / 'report.html'}, {len(files) - 2} figures"
        )
    return 0


def read_explained(path: Path) -> dict[str, Any]:
    """The request to draw; DocumentError for a file that is not one."""
    from infoflow_kv.evaluate.json_text import parsed
    from infoflow_kv.explaining import selections

    try:
        given = parsed(path.read_bytes())
    except OSError as error:
        raise DocumentError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DocumentError(f"'{path}' is not JSON ({error}); give a file that `explain --json` printed") from None
    try:
        return selections(given)
    except OptionError as error:
        raise DocumentError(
            f"'{path}' explains no request: {error}; give a file that `explain --json` printed"
        ) from None

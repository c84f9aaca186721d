"""`infoflow-kv explain`: one question by several methods, as a page that shows what each recomputed and why."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoflow_kv.cli import opening, options
from infoflow_kv.cli.output import (
    OutputError,
    emit,
    emit_json,
    emit_table,
    finish,
    note,
    one_line,
    seconds,
    share,
    status,
)
from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from infoflow_kv.chunking import ReadResult
    from infoflow_kv.store import ChunkStore

OUT = "report.html"
METHODS = "infoflow,influence,cacheblend,epic,none,full"
# How every page of ours begins, whatever its version.
OURS, OURS_WITHIN_BYTES = b'<meta name="generator" content="infoflow-kv ', 2000

Out = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Where the page is written; with --json only if given.",
        show_default=OUT,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", metavar="", help="Replace FILE even if it is not a page of this program.")
]
Methods = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="What to compare, by commas; see `infoflow-kv methods`.", rich_help_panel="Method"
    ),
]


def explain(
    question: options.Question,
    paths: options.Paths,
    out: Out = None,
    force: Force = False,
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    store: options.Store = None,
    no_store: options.NoStore = False,
    namespace: options.Namespace = options.NAMESPACE,
    methods: Methods = METHODS,
    budget: options.BudgetText = options.BUDGET_TEXT,
    budget_max: options.BudgetMax = None,
    layers: options.Layers = options.LAYERS,
    geometry: options.Geometry = options.GEOMETRY,
    reorder: options.Reorder = False,
    max_new_tokens: options.MaxNewTokens = options.MAX_NEW_TOKENS,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    head_policy: options.HeadPolicy = options.HEAD_POLICY,
    max_file_bytes: options.MaxFileBytes = options.MAX_FILE_BYTES,
    pdf_pages: options.PdfPages = False,
    tiles: options.Tiles = options.TILES,
    instruction: options.Instruction = options.INSTRUCTION,
    system: options.System = None,
    as_json: options.Json = False,
) -> int:
    """Show which tokens each method recomputes for a question, and why.

    Every method answers the question over the same documents. The page, one HTML file that needs no network, shows
    their answers, times and distances to full prefill beside each other, and every token with its score. Chunks are
    stored before anything is timed.

    Examples:

    \b
        infoflow-kv explain "Who keeps the lighthouse?" notes/ --out report.html
        infoflow-kv explain "Who keeps the lighthouse?" notes/ --methods infoflow,full --budget auto --reorder
        infoflow-kv explain "Who keeps the lighthouse?" notes/ --json > report.json
    """
    if no_store and store is not None:
        raise OptionError("--store and --no-store exclude each other; give one of them")
    if not question.strip():
        raise OptionError('the question is empty; ask something, as in: infoflow-kv explain "Who …?" notes/')
    wanted = options.read_budget(budget)
    options.check_tiles(tiles)
    path = None if as_json and out is None else writable(OUT if out is None else out, force)
    names = chosen(methods)
    read = without(opening.read_documents(paths, max_file_bytes, pdf_pages), path)
    opening.check_choice(names[0], wanted, budget_max, geometry)

    from infoflow_kv.explain import explain as make_report
    from infoflow_kv.explaining import render_page

    engine = opening.make_engine(
        opening.load_model(model, dtype, device, pdf_pages),
        open_store(store, no_store),
        budget=wanted,
        budget_max=budget_max,
        layers=layers,
        geometry=geometry,
        reorder=reorder,
        chunk_tokens=chunk_tokens,
        head_policy=head_policy,
        namespace=namespace,
        instruction=instruction,
        system=system,
        tiles=tiles,
    )
    given = opening.chunkable(engine, read)
    opening.tell_skipped(given.skipped)
    for notice in given.notices:
        note(notice)
    with status("explaining") as say:
        report = make_report(
            engine,
            question,
            given.documents,
            names,
            max_new_tokens,
            on_progress=lambda done, total, step: say(f"step {done + 1} of {total}: {step}"),
        )
    if path is not None:
        write(path, render_page(report))
    if as_json:
        emit_json(report)
    else:
        emit_table(
            ("method", "first token", "recomputed", "KL", "JS", "answer"), [row(m) for m in report["methods"]], (1, 2)
        )
    if path is not None:
        finish()
        (note if as_json else emit)(f"{path}: open it in a browser")
    return 0


def chosen(methods: str) -> list[str]:
    """The names in `--methods`; OptionError for one that is unknown or cannot be explained."""
    from infoflow_kv.explain import check_methods

    return [m.name for m in check_methods([name for name in map(str.strip, methods.split(",")) if name])]


def without(read: "ReadResult", page: Path | None) -> "ReadResult":
    """What was read but the page itself: one from an earlier call may lie among the documents."""
    if page is None or not page.exists():
        return read
    ours = [d.source for d in read.documents if d.source and os.path.realpath(d.source) == str(page)]
    kept = tuple(d for d in read.documents if d.source not in ours)
    return replace(read, documents=kept, skipped=read.skipped | dict.fromkeys(ours, "the page that --out replaces"))


def open_store(folder: str | None, no_store: bool) -> "ChunkStore":
    """The store on disk, or one that ends with this process: methods can be compared only if all find chunks stored."""
    if not no_store:
        return opening.open_store(opening.store_folder(folder))
    from infoflow_kv.store import MemoryStore

    return MemoryStore()


def row(method: dict[str, Any]) -> Sequence[str]:
    """The cells of one method."""
    usage = method["usage"]
    reused = usage["reusable_tokens"]
    distances = ("–" if method[key] is None else f"{method[key]:.3g}" for key in ("kl_first", "js_first"))
    return (
        method["name"],
        seconds(method["timings"]["ttft_seconds"]),
        share(usage["recomputed_tokens"], reused) if reused else "–",
        *distances,
        one_line(method["answer"]),
    )


# ---- the file ----


def writable(out: str, force: bool) -> Path:
    """The file that the page may go to; OptionError, before anything slow is done, if it may not or cannot."""
    path = Path(out).expanduser()
    try:
        if path.is_dir():
            raise OptionError(f"--out '{out}' is a folder; give a file, for example {path / OUT}")
        if path.exists() and not path.is_file():
            raise OptionError(f"--out '{out}' is not an ordinary file; give another one")
        if path.is_file() and not force and not is_ours(path):
            raise OptionError(
                f"--out '{out}' is there and is not a page of infoflow-kv explain; give another name, or --force to "
                "replace it"
            )
        path = path.resolve()  # a link stays a link
        with contextlib.ExitStack() as tidy:
            tidy.callback(lambda: beside(path).unlink(missing_ok=True))
            beside(path).open("xb").close()
    except (OSError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"--out '{out}' cannot be written: {reason}; check folder and permissions") from error
    return path


def is_ours(path: Path) -> bool:
    """Whether the file is a page that an earlier call wrote, or empty."""
    with path.open("rb") as file:
        start = file.read(OURS_WITHIN_BYTES)
    return not start or OURS in start


def beside(path: Path) -> Path:
    """Where the page is written first: readers of `path` see the old page or the new one, never a part."""
    return path.with_name(f".{path.name[:100]}.{os.getpid()}.part")


def write(path: Path, page: str) -> None:
    """Nothing; the page is in the file."""
    part = beside(path)
    try:
        with part.open("x", encoding="utf-8", newline="\n") as file:
            file.write(page)
        part.replace(path)
    except OSError as error:
        raise OutputError(f"the page cannot be written to '{path}': {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)

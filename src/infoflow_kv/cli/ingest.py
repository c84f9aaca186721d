"""`infoflow-kv ingest`: documents → stored chunks."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infoflow_kv.cli import opening, options
from infoflow_kv.cli.output import Interrupted, emit, emit_json, note, progress_bar, seconds, status

if TYPE_CHECKING:
    from infoflow_kv.engine import Engine
    from infoflow_kv.records import AddReport

Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        metavar="",
        help="Prefill each chunk once more, behind a neighbour, and store how far its KV moved: method influence then "
        "need not measure it in a request.",
        rich_help_panel="Store",
    ),
]


def ingest(
    paths: options.Paths,
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    store: options.Store = None,
    namespace: options.Namespace = options.NAMESPACE,
    measure: Measure = False,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    head_policy: options.HeadPolicy = options.HEAD_POLICY,
    max_file_bytes: options.MaxFileBytes = options.MAX_FILE_BYTES,
    pdf_pages: options.PdfPages = False,
    tiles: options.Tiles = options.TILES,
    instruction: options.Instruction = options.INSTRUCTION,
    system: options.System = None,
    as_json: options.Json = False,
) -> int:
    """Chunk, prefill and store documents ahead of the first question.

    Chunks that are stored already cost nothing, so it may be stopped (Ctrl-C) and run again at any time. The first run
    with a model also measures this machine, for the plans of `ask`. Files that
    cannot be read are listed on standard error, the others are stored, and the exit code is 1.

    Examples:

    \b
        infoflow-kv ingest notes/ handbook.pdf
        infoflow-kv ingest pages.jsonl --store /data/kv --model ./my-model
        infoflow-kv ingest notes/ --measure
        infoflow-kv ingest scans/ --pdf-pages --tiles 2 --model ./my-vision-model
    """
    options.check_tiles(tiles)
    read = opening.read_documents(paths, max_file_bytes, pdf_pages)
    folder = opening.store_folder(store)
    chunks = opening.open_store(folder)
    engine = opening.make_engine(
        opening.load_model(model, dtype, device, pdf_pages),
        chunks,
        method="influence" if measure else options.METHOD,  # the engine measures what its method needs
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
    report = add(engine, given, str(folder))
    measure_machine(engine, folder)
    if as_json:
        record = {**asdict(report), "skipped": given.skipped, "store": str(folder), "model": engine.model.name}
        emit_json(record | {"measured": measure})
    else:
        emit(summary(report, str(folder)) + (", movement measured" if measure else ""))
    if given.skipped:
        note(f"{len(given.skipped)} of {len(given.skipped) + len(given.documents)} documents were skipped, see above")
    return 1 if given.skipped else 0


def add(engine: "Engine", given: opening.Chunkable, where: str, what: str = "storing chunks") -> "AddReport":
    """What was added; Interrupted, with what is stored by then, on Ctrl-C."""
    stored = 0

    def advance(done: int, total: int) -> None:
        nonlocal stored
        stored = done
        move(done, total)

    try:
        with progress_bar(what) as move:
            return engine.add(given.documents, on_progress=advance)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{stored} of {given.num_chunks} chunks are stored in {where}; run the same command again to continue"
        ) from None


def measure_machine(engine: "Engine", folder: Path) -> None:
    """The machine's speeds with this model are kept, so that `ask` can tell whether reuse pays; once."""
    from infoflow_kv.speeds import find_speeds, keep_speeds, measure_speeds

    if find_speeds(engine.model) is not None:
        return
    with status("measuring this machine with this model, once"):
        speeds = measure_speeds(engine.model, folder)
    try:
        keep_speeds(engine.model, speeds)
    except OSError as error:
        note(f"this machine's speeds could not be kept ({error.strerror or error}); `ask` will not plan")


def summary(report: "AddReport", where: str) -> str:
    """One line on what was added."""
    return (
        f"{report.chunks:,} chunks ({report.tokens:,} tokens) of {report.documents:,} documents are in {where}: "
        f"{report.cached_chunks:,} were there, {report.chunks - report.cached_chunks:,} prefilled in "
        f"{seconds(report.seconds)}"
    )

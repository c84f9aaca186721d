"""`infoflow-kv store ls | stat | verify`: looking after a store. No model is loaded."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from infoflow_kv.cli import options
from infoflow_kv.cli.opening import store_folder
from infoflow_kv.cli.output import emit, emit_json, emit_table, size
from infoflow_kv.errors import OptionError, StoreError

DAMAGED = 3

Sample = Annotated[float, typer.Option(metavar="SHARE", help="Share (above 0, to 1) of the files to check.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Chooses which files a share below 1 means.")]
Quarantine = Annotated[
    bool, typer.Option("--quarantine", metavar="", help="Move damaged files to the store's quarantine folder.")
]

store = typer.Typer(
    no_args_is_help=True,
    help="List, measure and verify stored chunks.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def list_chunks(folder: options.Store = None, as_json: options.Json = False) -> int:
    """List the stored chunks, from their headers alone.

    Examples:

    \b
        infoflow-kv store ls
        infoflow-kv store ls --store /data/kv --json | head -1
    """
    from infoflow_kv.store import ls

    records = ls(existing_store(folder))
    if as_json:
        for record in records:
            emit_json(asdict(record))
        return 0
    rows = (
        (
            r.key[:16],
            r.tokens,
            r.visual_tokens or "",
            size(r.num_bytes),
            r.dtype,
            r.weights,
            r.namespace,
            when(r.mtime),
            r.problem,
        )
        for r in records
    )
    columns = ("chunk", "tokens", "visual", "size", "dtype", "weights", "namespace", "last used", "problem")
    emit_table(columns, rows, right=(1, 2, 3))
    return 0


def show_stat(folder: options.Store = None, as_json: options.Json = False) -> int:
    """Show how much a store holds, in all and by model.

    Examples:

    \b
        infoflow-kv store stat
        infoflow-kv store stat --store /data/kv --json
    """
    from infoflow_kv.store import stat

    path = existing_store(folder)
    found = stat(path)
    if as_json:
        emit_json({"store": path, **asdict(found)})
        return 0
    emit(f"{path}: {found.chunks:,} chunks, {found.tokens:,} tokens, {size(found.total_bytes)} on disk")
    for count, what in (
        (found.unreadable, "with a header that cannot be read (see: store verify)"),
        (found.quarantined, "in quarantine"),
        (found.temporary, "being written, or left by a crash"),
    ):
        if count:
            emit(f"{count:,} {what}")
    rows = [(m.weights[:12], m.dtype, m.chunks, m.tokens, size(m.num_bytes)) for m in found.models]
    if rows:
        emit_table(("weights", "dtype", "chunks", "tokens", "size"), rows, right=(2, 3, 4))
    return 0


def verify_chunks(
    folder: options.Store = None,
    sample: Sample = 1.0,
    seed: Seed = 0,
    quarantine: Quarantine = False,
    as_json: options.Json = False,
) -> int:
    """Check stored chunks to the last bit.

    Exit codes: 0 all sound, 3 damage found, 1 some files could not be read, 2 not a store. Damage never harms an
    answer: a chunk that fails a check when it is used is set aside and computed again.

    Examples:

    \b
        infoflow-kv store verify --sample 0.1
        infoflow-kv store verify --store /data/kv --quarantine
    """
    from infoflow_kv.store import verify

    path = existing_store(folder)
    report = verify(path, sample=sample, seed=seed, quarantine=quarantine)
    code = DAMAGED if report.damaged else 1 if report.unreadable else 0
    if as_json:
        lists = {
            name: [{"chunk": key, "reason": reason} for key, reason in found]
            for name, found in (("damaged", report.damaged), ("unreadable", report.unreadable))
        }
        emit_json({"store": path, "clean": report.is_clean, **asdict(report), **lists})
        return code
    for name, found in (("damaged", report.damaged), ("unreadable", report.unreadable)):
        for key, reason in found:
            emit(f"{name} {key}: {reason}")
    parts = [f"{report.sound:,} sound", f"{len(report.damaged):,} damaged"]
    parts += [f"{len(report.unreadable):,} unreadable"] if report.unreadable else []
    parts += [f"{report.newer:,} of a newer format"] if report.newer else []
    parts += [f"{report.quarantined:,} moved to quarantine"] if quarantine else []
    emit(f"{path}: {report.checked:,} of {report.chunks:,} chunks checked: {', '.join(parts)}")
    return code


def existing_store(given: str | None) -> str:
    """The folder of a store that is there; OptionError if it is none."""
    from infoflow_kv.store import ls

    path = store_folder(given)
    try:
        ls(path)  # reads nothing but the store's marker until it is iterated
    except StoreError as error:
        raise OptionError(str(error)) from error
    return str(path)


def when(mtime: float) -> str:
    """The local date and time of a time stamp."""
    return datetime.fromtimestamp(mtime, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M")


for name, verb in (("ls", list_chunks), ("stat", show_stat), ("verify", verify_chunks)):
    store.command(name, help=options.flowing(verb.__doc__))(verb)

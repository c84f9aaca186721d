"""`infoflow-kv calibrate`: which layers score best on a model → its profile."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoflow_kv.cli import opening, options
from infoflow_kv.cli.output import emit, emit_json, emit_table, note, progress_bar
from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from infoflow_kv.evaluate.items import Item

FEWEST_ITEMS = 8  # with fewer, which set comes first is mostly chance
Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="FILE",
        help="Questions with passages, as for `eval predict`; may be given several times.",
        show_default=False,
    ),
]
Limit = Annotated[int, typer.Option(metavar="N", help="Items taken from each file.")]
Skip = Annotated[int, typer.Option(metavar="N", help="Items passed over in each file first.")]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Also write profile.json and the layer figure there.", show_default="only the profile"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", metavar="", help="Measure, but leave the model's profile as it is.")]


def calibrate(
    data: Data,
    limit: Limit = 4,
    skip: Skip = 0,
    budget: Annotated[float, typer.Option(metavar="SHARE", help="Budget at which sets are compared.")] = 0.15,
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: options.Json = False,
) -> int:
    """Find the layers whose attention finds the tokens that matter on this model, and remember them.

    Measures how close every single layer, and sets of layers, come to full prefill on a few questions, and keeps the
    best set per method in a profile in the cache, by the model's weights: `--layers auto` uses it from then on. Takes
    about two minutes per item for a model of 135M parameters on two cores. Do not report results on the same items.

    Examples:

    \b
        infoflow-kv calibrate --data musique.chunks.jsonl --limit 8
        infoflow-kv calibrate --data a.chunks.jsonl --data b.chunks.jsonl --skip 150 --out figures/
    """
    if limit < 1 or skip < 0:
        raise OptionError(f"--limit {limit} and --skip {skip}: expected at least 1 and at least 0")
    if not 0 < budget < 1:
        raise OptionError(f"budget {budget!r} leaves nothing to choose; give a share between 0 and 1, like 0.15")
    from infoflow_kv.evaluate.items import check_items
    from infoflow_kv.evaluate.readers import read_items

    given: list[Item] = []
    for name in data:
        loaded = read_items(Path(name))
        opening.tell_skipped(loaded.skipped)
        given += loaded.items[skip : skip + limit]
    items, _ = check_items(given)
    if len(items) < 2:
        raise OptionError(f"{len(items)} items are left of {', '.join(data)}; calibration needs at least 2")
    from infoflow_kv.models.profiles import profile_file, profiles_folder, write_profile

    folder = None if out is None else Path(out)
    if folder is not None:
        writable(folder, "--out")
    if not dry_run:
        writable(profiles_folder(), "the folder of profiles")

    from infoflow_kv.calibrate import calibrate as measure
    from infoflow_kv.evaluate.options import Options

    loaded_model = opening.load_model(model, dtype, device)
    with progress_bar("calibrating") as move:
        profile = measure(
            loaded_model,
            items,
            budget,
            Options(chunk_tokens=chunk_tokens),
            on_progress=lambda done, total, what: move(done, total),
        )
    files: list[str] = []
    if not dry_run:
        file = profile_file(loaded_model.identity)
        write_profile(profile, file)
        files.append(str(file))
    if folder is not None:
        write_profile(profile, folder / "profile.json")
        files += [str(folder / "profile.json"), *draw(profile.measurements, folder)]
    if profile.measurements["items"] < FEWEST_ITEMS:
        note(
            f"{profile.measurements['items']} items do not tell the leading sets apart; give at least {FEWEST_ITEMS}, "
            "for example with --limit"
        )
    if dry_run:
        note("--dry-run: the model's profile in the cache is as it was, and `--layers auto` does not use this one")
    if as_json:
        emit_json({"layers": dict(profile.layers), "files": files, **profile.measurements})
        return 0
    rows = [
        (s["method"], s["set"], s["layers"], f"{s['kl_cont']:.4f}", f"{s['js_cont']:.4f}")
        for s in sorted(profile.measurements["sets"], key=lambda s: (s["method"], s["js_cont"]))
    ]
    emit_table(("method", "set", "layers", "KL, nats", "JS, bits"), rows, right=(3, 4))
    emit("chosen: " + ", ".join(f"{method}: {layers}" for method, layers in profile.layers.items()))
    emit(f"by the smallest mean JS over {profile.measurements['items']} items at budget {budget:g}")
    for path in files:
        note(f"written: {path}")
    return 0


def writable(folder: Path, what: str) -> None:
    """Nothing; OptionError before minutes of measuring if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"{what} '{folder}' cannot be written: {error.strerror or error}") from error


def draw(measurements: Mapping[str, Any], folder: Path) -> list[str]:
    """The layer figure's files; a note and none where matplotlib is not there."""
    from infoflow_kv.evaluate.figures import draw_calibration

    try:
        return [str(path) for path in draw_calibration(measurements, folder)]
    except OptionError as error:
        note(f"no figure: {error}")
        return []

"""`infoflow-kv check`: the method's claims, measured on the user's own model."""

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infoflow_kv.cli import opening, options
from infoflow_kv.cli.output import emit, emit_json, emit_table, finite, seconds, status
from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from infoflow_kv.invariants import InvariantResult, Subject
    from infoflow_kv.models import LanguageModel

Quick = Annotated[bool, typer.Option("--quick", metavar="", help="Shorter documents: half the tokens.")]

NUM_DOCUMENTS = 4
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 1200, 600
CHUNK_TOKENS, QUICK_CHUNK_TOKENS = 192, 64
ROOM_TOKENS = 64  # for the continuation that the invariants decode and force
PICTURE_PIXELS = 224, 160
CUTS = (4000, 2000, 1200, 800, 400, 200, 100, 50)


def check(
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    quick: Quick = False,
    tiles: options.Tiles = options.TILES,
    as_json: options.Json = False,
) -> int:
    """Measure every claim of the method on your model.

    Each invariant is compared with the same weights in plain Transformers, on documents that come with the package; for
    a vision-language model there is a picture among them. The exit code is 1 if any fails.

    Examples:

    \b
        infoflow-kv check --quick
        infoflow-kv check --model ./my-model --dtype bfloat16 --json
        infoflow-kv check --model ./my-vision-model --tiles 2
    """
    options.check_tiles(tiles)
    loaded = opening.load_model(model, dtype, device)

    from infoflow_kv.invariants import CHECKS

    results: list[InvariantResult] = []
    with tempfile.TemporaryDirectory(prefix="infoflow-check-") as folder, status("checking") as say:
        subject = make_subject(loaded, Path(folder), quick, tiles)
        for number, name in enumerate(CHECKS, start=1):
            if not as_json:
                say(f"checking {number} of {len(CHECKS)}: {name}")
            results.append(measured(subject, name))
    passed = all(r.passed for r in results)
    if as_json:
        rows = [{**asdict(r), "error": finite(r.error), "tolerance": finite(r.tolerance)} for r in results]
        emit_json({"model": loaded.name, "dtype": dtype, "passed": passed, "invariants": rows})
    else:
        columns = ("", "claim", "max error", "tolerance", "time", "what was measured")
        emit_table(columns, [row(result) for result in results], right=(2, 3, 4))
        failed = sum(not r.passed for r in results)
        verdict = f"{failed} of {len(results)} invariants FAILED" if failed else f"all {len(results)} invariants hold"
        emit(f"{verdict} on {loaded.name} in {dtype}")
    return 0 if passed else 1


def make_subject(model: "LanguageModel", folder: Path, quick: bool, tiles: int = 1) -> "Subject":
    """What the invariants run on: the beginnings of a few sample documents, as much as is wanted and fits, with a
    picture after the first of them for a model that reads images."""
    from infoflow_kv import samples
    from infoflow_kv.invariants import Subject
    from infoflow_kv.records import Document, Image

    questions = [q.text for q in samples.QUESTIONS]
    wanted, chunk_tokens = (QUICK_PROMPT_TOKENS, QUICK_CHUNK_TOKENS) if quick else (PROMPT_TOKENS, CHUNK_TOKENS)
    engine = opening.make_engine(model, None, chunk_tokens=chunk_tokens, tiles=tiles)
    pictures = [] if model.vision is None else [Document(parts=("The picture:", Image(picture())), id="picture")]
    wanted += sum(chunk.num_tokens for document in pictures for chunk in engine.split(document))
    limit = min(wanted, model.window_tokens - ROOM_TOKENS)
    for characters in CUTS:
        texts = [replace(d, text=d.text[:characters]) for d in samples.documents()[:NUM_DOCUMENTS]]
        documents = [*texts[:1], *pictures, *texts[1:]]
        if max(engine.prompt(question, documents).num_tokens for question in questions) <= limit:
            return Subject(model, documents, questions, folder, chunk_tokens, tiles=tiles)
    raise OptionError(
        f"the sample documents do not fit into {limit} tokens (the model's window is {model.window_tokens}); "
        "choose another model"
    )


def picture() -> bytes:
    """A small picture file: bars of grey, no two alike and none as wide as high."""
    width, height = PICTURE_PIXELS
    levels = bytes((7 * x + 29 * (y // 16)) % 256 for y in range(height) for x in range(width))
    return b"P5 %d %d 255\n" % PICTURE_PIXELS + levels


def row(result: "InvariantResult") -> tuple[str, ...]:
    """The cells of one invariant."""
    verdict = "pass" if result.passed else "FAIL"
    numbers = (f"{result.error:.2g}", f"{result.tolerance:.2g}", seconds(result.seconds))
    return (verdict, result.claim, *numbers, result.detail)


def measured(subject: "Subject", name: str) -> "InvariantResult":
    """The result of one invariant; one that could not be computed has failed, and `detail` says why."""
    from infoflow_kv import invariants
    from infoflow_kv.errors import ComputeError

    try:
        return invariants.check(subject, name)
    except (ComputeError, AssertionError) as error:
        claim = (invariants.CHECKS[name].__doc__ or "").strip()
        return invariants.InvariantResult(name, claim, float("inf"), 0.0, False, 0.0, f"not computed: {error}")

"""`infoflow-kv ask`: one question over documents."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoflow_kv.cli import opening, options, ranks
from infoflow_kv.cli.output import emit, emit_json, finish, note, seconds, share
from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from infoflow_kv.records import Answer, Piece

LARGEST_SEED = 2**63 - 1

Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="End the answer before this text; may be given several times.",
        show_default=False,
        rich_help_panel="Answer",
    ),
]
Temperature = Annotated[float, typer.Option(metavar="T", help="0 is greedy.", rich_help_panel="Answer")]
TopP = Annotated[
    float, typer.Option(metavar="P", help="Sample from the likeliest tokens of this mass.", rich_help_panel="Answer")
]
Seed = Annotated[int, typer.Option(metavar="N", help="For every random choice.", rich_help_panel="Answer")]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", metavar="", help="Print the answer as it is made; with --json, a line per piece, then the whole."
    ),
]


def ask(
    question: options.Question,
    paths: options.Paths,
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    store: options.Store = None,
    no_store: options.NoStore = False,
    namespace: options.Namespace = options.NAMESPACE,
    method: options.Method = options.METHOD,
    budget: options.BudgetText = options.BUDGET_TEXT,
    budget_max: options.BudgetMax = None,
    layers: options.Layers = options.LAYERS,
    geometry: options.Geometry = options.GEOMETRY,
    reorder: options.Reorder = False,
    chunk_floor: options.ChunkFloor = 0.0,
    chunk_cap: options.ChunkCap = 1.0,
    plan: options.Plan = True,
    max_new_tokens: options.MaxNewTokens = options.MAX_NEW_TOKENS,
    stop: Stop = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    head_policy: options.HeadPolicy = options.HEAD_POLICY,
    max_file_bytes: options.MaxFileBytes = options.MAX_FILE_BYTES,
    pdf_pages: options.PdfPages = False,
    tiles: options.Tiles = options.TILES,
    instruction: options.Instruction = options.INSTRUCTION,
    system: options.System = None,
    layout: options.Layout = options.LAYOUT,
    timeout: options.Timeout = options.TIMEOUT_SECONDS,
    stream: Stream = False,
    as_json: options.Json = False,
) -> int:
    """Answer a question over your documents.

    Chunks that are stored are reused wherever they stand now; new ones are prefilled and stored on the way. The answer
    goes to standard output; how it was made, and files that were skipped, to standard error.

    Under torchrun several ranks share the request, each with a part of the chunks; rank 0 prints.

    Examples:

    \b
        infoflow-kv ask "Who keeps the lighthouse?" notes/ report.pdf
        infoflow-kv ask "What changed?" - --budget 0.3 < changes.txt
        infoflow-kv ask "Who keeps the lighthouse?" notes/ --budget auto --reorder
        infoflow-kv ask "What does the chart say?" chart.png report.pdf --pdf-pages --model ./my-vision-model
        infoflow-kv ask "Who keeps the lighthouse?" notes/ --method full --json
        torchrun --nproc-per-node 2 -m infoflow_kv ask "Who keeps the lighthouse?" notes/
    """
    if no_store and store is not None:
        raise OptionError("--store and --no-store exclude each other; give one of them")
    if not 0 <= seed <= LARGEST_SEED:
        raise OptionError(f"seed {seed} is outside 0..{LARGEST_SEED}")
    if not question.strip():
        raise OptionError('the question is empty; ask something, as in: infoflow-kv ask "Who …?" notes/')
    wanted = options.read_budget(budget)
    options.check_tiles(tiles)
    with ranks.shared(device, layout, timeout, paths) as shared:
        read = opening.read_documents(paths, max_file_bytes, pdf_pages)
        opening.check_choice(method, wanted, budget_max, geometry)

        from infoflow_kv.decoding import Sampling

        sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
        chunks = None if no_store else opening.open_store(opening.store_folder(store))
        loaded = opening.load_model(model, dtype, shared.device, pdf_pages)
        shared.ready()  # HQ connects its teams as the engine is made, under the short limit
        engine = opening.make_engine(
            loaded,
            chunks,
            method=method,
            budget=wanted,
            budget_max=budget_max,
            layers=layers,
            geometry=geometry,
            reorder=reorder,
            chunk_floor=chunk_floor,
            chunk_cap=chunk_cap,
            chunk_tokens=chunk_tokens,
            head_policy=head_policy,
            namespace=namespace,
            instruction=instruction,
            system=system,
            plans=plan and shared.group is None,  # what was measured is the speed of one process
            tiles=tiles,
            **shared.settings,
        )
        given = opening.chunkable(engine, read)
        shared.ready()
        pieces = engine.stream(question, given.documents, max_new_tokens, stop=stop or (), sampling=sampling)
        answer = show(pieces, as_json) if stream else whole(pieces)
        skipped = tuple(f"skipped '{label}': {reason}" for label, reason in given.skipped.items())
        parallel = ranks.described(engine, answer.method)
        if as_json:
            full = replace(answer, notices=answer.notices + given.notices + skipped)
            emit_json(record(full, given.images) | ({"parallel": parallel} if parallel else {}))
        elif not stream:
            emit(answer.text)
        finish()
        for notice in skipped:
            note(notice)
        note(summary(answer) + ranks.told(parallel))
        for notice in (*answer.notices, *given.notices):
            note(notice)
    return 0


def record(answer: "Answer", images: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What `--json` prints; a chunk with images has two more fields, from `images` (see `Chunkable`)."""
    whole = answer.as_json()
    for chunk, (count, visual) in zip(whole["chunks"], images, strict=True):
        if count:
            chunk |= {"images": count, "visual_tokens": visual}
    return whole


def whole(pieces: Iterable["Piece"]) -> "Answer":
    """The answer at the end of the pieces."""
    return [piece.answer for piece in pieces if piece.answer is not None][-1]


def show(pieces: Iterable["Piece"], as_json: bool) -> "Answer":
    """The answer at the end of the pieces, each of which is put out as it comes."""
    answers: list[Answer] = []

    def texts() -> Iterator[str]:
        for piece in pieces:
            yield piece.text
            if piece.answer is not None:
                answers.append(piece.answer)

    try:
        for text in trimmed(texts()):
            if as_json:
                emit_json({"piece": text})
            else:
                emit(text, end="")
            finish()
    finally:
        if not as_json:
            emit("")
    return answers[-1]


def trimmed(texts: Iterable[str]) -> Iterator[str]:
    """The texts without the white space before the first and after the last word of all: together the answer's text."""
    held, begun = "", False
    for text in texts:
        text = held + text if begun else text.lstrip()
        begun = begun or bool(text)
        body = text.rstrip()
        held = text[len(body) :]
        if body:
            yield body


def summary(answer: "Answer") -> str:
    """One line on how the answer was made.

    >>> summary(answer)  # doctest: +SKIP
    'infoflow: first token after 0.41 s, 12 of 12 chunks from the store, 15.0% of 3,210 reusable tokens recomputed'
    """
    usage = answer.usage
    parts = [f"{answer.method}: first token after {seconds(answer.timings.ttft_seconds)}"]
    parts.append(f"{usage.cached_chunks} of {usage.chunks} chunks from the store")
    if usage.reusable_tokens:
        recomputed = share(usage.recomputed_tokens, usage.reusable_tokens)
        parts.append(f"{recomputed} of {usage.reusable_tokens:,} reusable tokens recomputed")
    if usage.prefilled_tokens:
        parts.append(f"{usage.prefilled_tokens:,} tokens prefilled")
    return ", ".join(parts)

"""`infoflow-kv eval generate niah | vt`: made questions → a chunks file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from infoflow_kv.cli import opening, options
from infoflow_kv.cli.evaluation.lists import numbers, split_list
from infoflow_kv.cli.output import emit, emit_json
from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from infoflow_kv.evaluate.items import Item

Out = Annotated[str, typer.Option(metavar="FILE", help="The file to write: NAME.chunks.jsonl.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Write over a file that is there.")]
Seed = Annotated[int, typer.Option(metavar="N", help="For every random choice: another seed, other questions.")]
ChunkTokens = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Most tokens of a passage. Predict with chunks of at least as many, counted by the same --model: "
        "a passage is one chunk then.",
    ),
]
Essays = Annotated[
    str, typer.Option(metavar="FOLDER", help="Folder of .txt files to make haystacks of.", show_default=False)
]
Lengths = Annotated[str, typer.Option(metavar="LIST", help="Tokens of the haystacks, needle included.")]
Depths = Annotated[str, typer.Option(metavar="LIST", help="Where the needle stands, 0 (start) to 1 (end).")]
Seeds = Annotated[int, typer.Option(metavar="N", help="Haystacks for each combination.")]
Kinds = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="one: a sentence; split: cut by a passage boundary; two-chunk: two facts in two passages.",
    ),
]
Places = Annotated[
    str, typer.Option(metavar="LIST", help="Where in its passage the needle stands: any, start, middle, end.")
]
Hops = Annotated[str, typer.Option(metavar="LIST", help="Assignments between the value and the last variable.")]
Orders = Annotated[str, typer.Option(metavar="LIST", help="Order of the assignments in the text: forward, shuffled.")]
Gap = Annotated[int, typer.Option(metavar="N", help="Passages of noise between two assignments.")]
Count = Annotated[int, typer.Option(metavar="N", help="Items for each number of hops and order.")]
Form = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="all: name every variable with the value (RULER's); value: the last one's value."
    ),
]
TokenModel = Annotated[
    str, typer.Option("--model", metavar="NAME", help="Its tokenizer counts the tokens (as for `ask`).")
]
WordModel = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Its tokenizer counts the tokens.", show_default="words are counted"),
]


Dataset = Annotated[
    str,
    typer.Option(metavar="NAME", help="Name of the data set: sets of different names have tables of their own."),
]


def needles(
    essays: Essays,
    out: Out,
    lengths: Lengths = "1000,2000,4000",
    depths: Depths = "0,0.25,0.5,0.75,1",
    seeds: Seeds = 6,
    kinds: Kinds = "one",
    places: Places = "any",
    chunk_tokens: ChunkTokens = options.CHUNK_TOKENS,
    model: TokenModel = options.MODEL,
    dataset: Dataset = "niah",
    seed: Seed = 0,
    force: Force = False,
    as_json: options.Json = False,
) -> int:
    """Make needle-in-a-haystack questions: a random fact in real prose, at a depth and at a place in its passage.

    One question for each length, seed, kind, place and depth. All questions of a seed read the same hay, so that they
    count as one document in the statistics: of fewer than 6 seeds no interval is given. A split needle stands at the
    boundary between passages that is nearest to its depth.

    Examples:

    \b
        infoflow-kv eval generate niah --essays essays/ --out niah.chunks.jsonl
        infoflow-kv eval generate niah --essays essays/ --kinds one,split --out niah.chunks.jsonl
    """
    from infoflow_kv.evaluate.items import check_dataset
    from infoflow_kv.evaluate.niah import needle_items, read_essays

    check_free(out, force)
    check_dataset(dataset, "--dataset")
    texts = read_essays(essays)
    how_long, how_deep = numbers(lengths, "--lengths", int), numbers(depths, "--depths", float)
    items = needle_items(
        texts,
        how_long,
        how_deep,
        seeds,
        cast(Any, split_list(kinds)),
        chunk_tokens=chunk_tokens,
        count_tokens=token_counter(model),
        places=cast(Any, [None if place == "any" else place for place in split_list(places)]),
        seed=seed,
        dataset=dataset,
    )
    return written(items, out, force, as_json)


def tracking(
    out: Out,
    hops: Hops = "1,2,3,4",
    orders: Orders = "forward,shuffled",
    gap: Gap = 1,
    count: Count = 10,
    form: Form = "all",
    chunk_tokens: ChunkTokens = 128,
    model: WordModel = None,
    dataset: Dataset = "variable_tracking",
    seed: Seed = 0,
    force: Force = False,
    as_json: options.Json = False,
) -> int:
    """Make variable-tracking questions (RULER's vt): a value goes from variable to variable, each in its own passage.

    Every hop then needs attention across chunks, which is what reuse without recomputation loses.

    Examples:

    \b
        infoflow-kv eval generate vt --out vt.chunks.jsonl
        infoflow-kv eval generate vt --hops 1,2 --form value --count 25 --out vt.chunks.jsonl
    """
    from infoflow_kv.evaluate.items import check_dataset
    from infoflow_kv.evaluate.variable_tracking import count_words, tracking_items

    check_free(out, force)
    check_dataset(dataset, "--dataset")
    items = tracking_items(
        numbers(hops, "--hops", int),
        cast(Any, split_list(orders)),
        gap=gap,
        count=count,
        chunk_tokens=chunk_tokens,
        seed=seed,
        form=cast(Any, form),
        count_tokens=count_words if model is None else token_counter(model),
        dataset=dataset,
    )
    return written(items, out, force, as_json)


def check_free(out: str, force: bool) -> None:
    """Nothing; OptionError for a file that is there already, before anything slow is done."""
    if Path(out).exists() and not force:
        raise OptionError(f"'{out}' is there already; give another name, or --force to write it anew")


def token_counter(model: str) -> Any:
    """A function that counts the tokens of a text as this model's tokenizer makes them."""
    from infoflow_kv.chunking import TextEncoder

    encoder = TextEncoder(opening.load_model(model, options.DTYPE, options.DEVICE).tokenizer)
    return lambda text: len(encoder.content(text)[0])


def written(items: "list[Item]", out: str, force: bool, as_json: bool) -> int:
    """0, the items being in the file and that having been said."""
    from infoflow_kv.evaluate.writing import write_items

    count = write_items(items, out, overwrite=force)
    if as_json:
        emit_json({"out": out, "items": count})
    else:
        emit(f"{count:,} items written to {out}; next: infoflow-kv eval predict --data {out} --out DIR")
    return 0

"""`infoflow-kv eval predict`: questions × arms → rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infoflow_kv.cli import opening, options
from infoflow_kv.cli.evaluation.pictures import Rules, Tiles, predict_pictures
from infoflow_kv.cli.evaluation.running import budgets, run, tell, writing_arms
from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from infoflow_kv.evaluate.items import Item
    from infoflow_kv.evaluate.options import Options
    from infoflow_kv.evaluate.readers import Loaded
    from infoflow_kv.models import LanguageModel

METHODS = "full,none,random,epic,cacheblend,infoflow,influence"
BUDGETS = ".05,.15"
INSTRUCTION = "Answer the question using the documents. Give the answer only, in a few words."

_DATA, _ARMS, _MEASURING = "Data", "Arms", "Measuring"

Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="FILE",
        help="Questions with passages and answers: *.chunks.jsonl, LongBench, CacheBlend's lists, key-value retrieval; "
        "or, with --rules or --tiles, with pictures. May be given several times.",
        show_default=False,
        rich_help_panel=_DATA,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(metavar="N", help="Items taken from each file.", show_default="all", rich_help_panel=_DATA),
]
Skip = Annotated[int, typer.Option(metavar="N", help="Items passed over in each file first.", rich_help_panel=_DATA)]
Lengthen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Mix passages of the file's other items in, up to so many tokens. Not for texts in which order matters.",
        show_default="as they are",
        rich_help_panel=_DATA,
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Methods, each with its differences in brackets and a budget of its own where wanted: "
        r"full,infoflow\[layers=all],epic@0.3.",
        rich_help_panel=_ARMS,
    ),
]
Budgets = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Budgets of all methods that take one and name none: shares (0 to 1) or auto:P.",
        rich_help_panel=_ARMS,
    ),
]
Geometry = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Positions while scoring (GLOBAL, HL-HP, HL-TP, TL-TP), for arms that score by attention and name none.",
        show_default="GLOBAL",
        rich_help_panel=_ARMS,
    ),
]
Reorder = Annotated[
    bool,
    typer.Option(
        "--reorder",
        metavar="",
        help="Put the chunks that matter most next to the question, in all arms that score tokens.",
        rich_help_panel=_ARMS,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Longest answer, in tokens.",
        show_default="32; of pictures what their set asks for",
        rich_help_panel=_MEASURING,
    ),
]
Continuation = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Tokens of full prefill's answer over which distances are taken.",
        rich_help_panel=_MEASURING,
    ),
]
Generate = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Budgets, or arms, that also write an answer: all, none, or a list. Arms without a budget always do.",
        rich_help_panel=_MEASURING,
    ),
]
KvError = Annotated[
    bool,
    typer.Option(
        "--kv-error",
        metavar="",
        help="Also keep how far keys and values lie from full prefill's, per layer.",
        rich_help_panel=_MEASURING,
    ),
]
Instruction = Annotated[
    str, typer.Option(metavar="TEXT", help="What stands before the documents.", rich_help_panel=_MEASURING)
]
Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Prompts instead of the instruction: JSON of data sets and templates with {context} and {input}, such as "
        "LongBench's dataset2prompt.json.",
        show_default="none",
        rich_help_panel=_MEASURING,
    ),
]
HeadPolicy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What chunks are prefilled behind: head (the chat header) or none.",
        rich_help_panel=_MEASURING,
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", help="For every random choice.", rich_help_panel=_MEASURING)]
Out = Annotated[
    str,
    typer.Option(
        metavar="DIR", help="Folder for rows.jsonl and run.json; made if it is not there.", show_default=False
    ),
]


def predict(
    data: Data,
    out: Out,
    limit: Limit = None,
    skip: Skip = 0,
    lengthen: Lengthen = None,
    rules: Rules = None,
    tiles: Tiles = None,
    methods: Methods = METHODS,
    budget: Budgets = BUDGETS,
    geometry: Geometry = None,
    reorder: Reorder = False,
    max_new_tokens: MaxNewTokens = None,
    continuation: Continuation = 16,
    generate: Generate = "all",
    kv_error: KvError = False,
    seed: Seed = 0,
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    head_policy: HeadPolicy = "head",
    instruction: Instruction = INSTRUCTION,
    prompts: Prompts = None,
    as_json: options.Json = False,
) -> int:
    """Answer questions under every method and budget, and measure how close each comes to full prefill.

    All arms of a question read the same token ids; full prefill is plain Transformers. Each row is written as soon as
    it is measured, and rows that are there are not measured again: stop it (Ctrl-C) and give the same command to go on,
    or add methods later. A question over the model's window loses whole distractor passages, or is left out; either is
    said.

    With --rules or --tiles the files hold questions about pictures (docs/vlm.md), and --model reads images.

    Examples:

    \b
        infoflow-kv eval predict --data musique.chunks.jsonl --limit 50 --out run
        infoflow-kv eval predict --data a.jsonl --methods "full,epic,infoflow\\[layers=all]" --out run
        infoflow-kv eval predict --data a.jsonl --budget .05,.15,auto:0.8 --generate .15 --out run
        infoflow-kv eval predict --data test_human.json --rules chartqa --model DIR --out run
    """
    if limit is not None and limit < 1:
        raise OptionError(f"--limit {limit}: at least 1 item is needed")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise OptionError(f"max_new_tokens is {max_new_tokens}; expected a whole number of at least 1")
    if skip < 0:
        raise OptionError(f"--skip {skip}: give the number of items to pass over, 0 or more")
    if prompts is not None and instruction != INSTRUCTION:
        raise OptionError("--prompts and --instruction exclude each other; give one of them")
    if rules is not None or tiles is not None:
        if lengthen is not None or prompts is not None:
            raise OptionError("--lengthen and --prompts are for texts; leave them out with --rules and --tiles")
        return predict_pictures(
            data,
            out,
            limit=limit,
            skip=skip,
            rules=rules,
            tiles=tiles,
            methods=methods,
            budget=budget,
            geometry=geometry,
            reorder=reorder,
            generate=generate,
            measuring={
                "max_new_tokens": max_new_tokens,
                "continuation": continuation,
                "kv_error": kv_error,
                "chunk_tokens": chunk_tokens,
                "head_policy": head_policy,
                "instruction": "" if instruction == INSTRUCTION else instruction,
                "seed": seed,
            },
            model=model,
            dtype=dtype,
            device=device,
            as_json=as_json,
        )
    loaded = read_data(data)
    taken = [read.items[skip:][:limit] for read in loaded]
    check_ids(data, taken, skip)
    templates = wanted_prompts(prompts, taken)

    from infoflow_kv.evaluate.arms import parse_arms
    from infoflow_kv.evaluate.options import MAX_NEW_TOKENS, Options
    from infoflow_kv.evaluate.run_records import check_folder

    arms = parse_arms(methods, budgets(budget), geometry=geometry, reorder=reorder)
    measuring = Options(
        max_new_tokens=max_new_tokens or MAX_NEW_TOKENS,
        continuation=continuation,
        generate=writing_arms(generate, arms, geometry, reorder),
        kv_error=kv_error,
        chunk_tokens=chunk_tokens,
        head_policy=head_policy,
        instruction=instruction,
        seed=seed,
        lengthen=lengthen,
        prompts=templates,
    )
    records = [{"file": Path(name).name, "sha256": read.sha256} for name, read in zip(data, loaded, strict=True)]
    check_folder(Path(out), measuring, records)
    language_model = opening.load_model(model, dtype, device)
    items = list(prepared(language_model, loaded, taken, measuring))

    from infoflow_kv.evaluate.predict import predict as measure

    done = run(
        lambda environment, say: measure(language_model, items, arms, Path(out), measuring, records, environment, say),
        len(items) * len(arms),
        Path(out),
        device,
    )
    skipped = {identity: reason for read in loaded for identity, reason in read.skipped.items()}
    return tell(done, language_model, len(items), arms, out, skipped, as_json)


def wanted_prompts(file: str | None, taken: "list[tuple[Item, ...]]") -> dict[str, str] | None:
    """The templates of `--prompts` for the data sets of these items; OptionError where one has none."""
    from infoflow_kv.evaluate.prompts import check_prompt, read_prompts

    if file is None:
        return None
    found = read_prompts(file)
    return {dataset: check_prompt(dataset, found) for dataset in sorted({i.dataset for items in taken for i in items})}


def read_data(files: list[str]) -> "list[Loaded]":
    """What the files hold; one line on stderr for each record that nothing can score."""
    from infoflow_kv.evaluate.readers import read_items

    loaded = []
    for name in files:
        read = read_items(name)
        opening.tell_skipped(read.skipped)
        loaded.append(read)
    return loaded


def check_ids(files: list[str], taken: "list[tuple[Item, ...]]", skip: int) -> None:
    """Nothing; OptionError where a file has no item to take or two items have one id."""
    from infoflow_kv.evaluate.items import check_items

    for name, items in zip(files, taken, strict=True):
        if not items:
            raise OptionError(f"--skip {skip} passes over every item of '{name}'; give a smaller number")
    places = [
        f"'{name}', item {number}"
        for name, items in zip(files, taken, strict=True)
        for number in range(skip + 1, skip + 1 + len(items))
    ]
    check_items([item for items in taken for item in items], places)


def prepared(
    model: "LanguageModel", loaded: "list[Loaded]", taken: "list[tuple[Item, ...]]", measuring: "Options"
) -> "list[Item]":
    """The items of all files, lengthened where that is asked for."""
    if measuring.lengthen is None:
        return [item for items in taken for item in items]
    from infoflow_kv.evaluate.predict import lengthened

    tokens = measuring.lengthen
    return [
        item
        for read, items in zip(loaded, taken, strict=True)
        for item in lengthened(model, items, read.items, tokens, measuring)
    ]

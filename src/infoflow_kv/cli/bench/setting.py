"""The options that all benchmarks share, and what is opened from them. Imports no torch."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoflow_kv.cli import opening
from infoflow_kv.cli.evaluation.lists import numbers, split_list
from infoflow_kv.cli.output import emit_json, status
from infoflow_kv.errors import DocumentError, OptionError

if TYPE_CHECKING:
    from infoflow_kv.benchmark.context import Setting
    from infoflow_kv.benchmark.timing import OnStep
    from infoflow_kv.records import Document

TOKENS = "4000"
BUDGETS = ".15"
METHODS = "infoflow"
REPEATS = 5
STATES = "warm-disk,warm-memory,cold"
MAX_FILE_BYTES = 20 * 2**20

_WORK, _MEASURING = "Request", "Measuring"

Tokens = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Context lengths in tokens (about, without the chat header), one after the other.",
        rich_help_panel=_WORK,
    ),
]
Methods = Annotated[str, typer.Option(metavar="LIST", help="Methods that reuse stored chunks.", rich_help_panel=_WORK)]
Budgets = Annotated[
    str,
    typer.Option(metavar="LIST", help="Shares (0 to 1) of the reusable tokens to recompute.", rich_help_panel=_WORK),
]
Documents = Annotated[
    list[str] | None,
    typer.Option(
        "--documents",
        metavar="PATH",
        help="Files or folders to ask about; may be given several times.",
        show_default="the sample documents",
        rich_help_panel=_WORK,
    ),
]
Question = Annotated[
    str | None,
    typer.Option(
        "--question", metavar="TEXT", help="What to ask.", show_default="a sample question", rich_help_panel=_WORK
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Threads of torch.", show_default="torch's own", rich_help_panel=_MEASURING),
]
Repeats = Annotated[
    int,
    typer.Option(metavar="N", help="Rounds; each runs every arm once, another one first.", rich_help_panel=_MEASURING),
]
Warmup = Annotated[
    int, typer.Option(metavar="N", help="Rounds before, which do not count.", rich_help_panel=_MEASURING)
]
Seed = Annotated[
    int, typer.Option(metavar="N", help="For the order of the documents and random rows.", rich_help_panel=_MEASURING)
]
Scratch = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Where stores are made and removed; its file system is the disk of warm-disk and cold.",
        show_default="the system's folder for temporary files",
        rich_help_panel=_MEASURING,
    ),
]
Out = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Append the records as JSON lines.", show_default="none"),
]


def check_rounds(repeats: int, warmup: int, threads: int | None) -> None:
    """Nothing; OptionError for what cannot be measured with, before anything slow is done. Threads are set."""
    if repeats < 1:
        raise OptionError(f"--repeats {repeats}: at least 1 round is needed")
    if warmup < 0:
        raise OptionError(f"--warmup {warmup}: give a number of rounds, 0 or more")
    if threads is None:
        return
    if threads < 1:
        raise OptionError(f"--threads {threads}: at least 1 is needed")
    import torch

    torch.set_num_threads(threads)


def lengths(text: str) -> list[int]:
    """The context lengths of `--tokens`."""
    return [at_least(number, 16, "--tokens") for number in numbers(text, "--tokens", int)]


def at_least(number: int, least: int, option: str) -> int:
    if number < least:
        raise OptionError(f"{option} {number}: at least {least} is needed")
    return number


def shares(text: str) -> list[float]:
    """The budgets of `--budgets`."""
    from infoflow_kv.select import check_budget

    found = numbers(text, "--budgets", float)
    return [check_budget(share).share for share in found]


def names(text: str, option: str) -> list[str]:
    found = split_list(text)
    if not found:
        raise OptionError(f"{option} is '{text}'; give at least one name")
    return found


def scratch_folder(given: str | None) -> Path | None:
    """The folder of `--scratch`; OptionError if there is none."""
    if given is None:
        return None
    path = Path(given).expanduser()
    if not path.is_dir():
        raise OptionError(f"--scratch '{given}' is no folder; make it, or leave the option out")
    return path


def given_documents(paths: list[str] | None, question: str | None) -> "tuple[tuple[Document, ...], str]":
    """The documents and the question: the sample ones where none are given; OptionError for one without the other."""
    from infoflow_kv import samples

    if not paths:
        return samples.documents(), question or samples.QUESTIONS[0].text
    if not question:
        raise OptionError("--documents without --question: give the question to ask about them")
    read = opening.read_documents(paths, MAX_FILE_BYTES)
    pictures = {d.id or d.source: "it holds images, and texts are what is measured" for d in read.documents if d.parts}
    opening.tell_skipped(read.skipped | pictures)
    return tuple(d for d in read.documents if not d.parts), question


def open_setting(
    model: str,
    dtype: str,
    device: str,
    documents: "tuple[tuple[Document, ...], str]",
    *,
    repeats: int,
    warmup: int,
    chunk_tokens: int,
    seed: int,
    plans: bool = False,
) -> "Setting":
    """The model, loaded, and everything beside it. OptionError, DocumentError for what cannot be measured."""
    from infoflow_kv.benchmark.context import Setting
    from infoflow_kv.evaluate.environment import environment

    given, question = documents
    if not given:
        raise DocumentError("there are no documents to measure with")
    setting = Setting(
        model=opening.load_model(model, dtype, device),
        documents=tuple(given),
        question=question,
        model_name=model,
        repeats=repeats,
        warmup=warmup,
        chunk_tokens=chunk_tokens,
        seed=seed,
        plans=plans,
        environment=environment(device),
    )
    setting.engine()  # refuses a chunk length at once
    if plans:
        from infoflow_kv.speeds import find_speeds, keep_speeds, measure_speeds

        if find_speeds(setting.model) is None:
            keep_speeds(setting.model, measure_speeds(setting.model))
    return setting


def out_file(given: str | None) -> Path | None:
    """The file of `--out`, its folder made; OptionError if it cannot be appended to."""
    if given is None:
        return None
    path = Path(given).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            return path
    except OSError as error:
        raise OptionError(f"--out '{given}' cannot be written: {error.strerror or error}") from None


def keep(records: Iterable[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    """Nothing; the records stand in the file, and on stdout where JSON is asked for."""
    given = list(records)
    if out is not None:
        with out.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in given)
    if as_json:
        for record in given:
            emit_json(record)


def each(
    lengths: Iterable[int],
    what: str,
    measure: "Callable[[int, OnStep], list[dict[str, Any]]]",
    table: Callable[[list[dict[str, Any]]], None],
    out: Path | None,
    as_json: bool,
) -> int:
    """0, every length being measured, kept and shown; `what` names it with `{}` for the length."""
    for length in lengths:
        with steps(what.format(length)) as step:
            records = measure(length, step)
        keep(records, out, as_json)
        if not as_json:
            table(records)
    return 0


@contextmanager
def steps(what: str) -> "Iterator[OnStep]":
    """A function of (done, total, what goes on) that says it on stderr."""
    with status(what) as say:
        yield lambda done, total, now: say(f"{what}: {done} of {total}, {now}" if done < total else f"{what}: measured")

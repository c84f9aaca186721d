"""`eval predict`: items × arms → OUT/rows.jsonl, resumable, one writer at a time."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from infoflow_kv.errors import InfoFlowError, InputError, OptionError, PromptTooLongError
from infoflow_kv.evaluate.arms import Arm, check_distinct
from infoflow_kv.evaluate.items import Item, Passage, check_items
from infoflow_kv.evaluate.json_text import cleaned, parsed
from infoflow_kv.evaluate.measuring import Bench, documents_of
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.readers import fit, lengthen
from infoflow_kv.evaluate.results import FORMAT, ROWS_NAME, RUN_NAME
from infoflow_kv.evaluate.run_records import made_in, run_record, settle, unwritable
from infoflow_kv.evaluate.windows import check_truth
from infoflow_kv.methods import find_method
from infoflow_kv.records import Document

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]  # rows done, rows in all, what was just done


@dataclass(frozen=True, slots=True)
class Done:
    """What a run did: rows written now, rows that were there before, why items were left out, and how many distractor
    passages were dropped from others."""

    written: int
    found: int
    skipped: dict[str, str]
    dropped: dict[str, int]


def predict(
    model: "LanguageModel",
    items: Sequence[Item],
    arms: Sequence[Arm],
    out: Path,
    options: Options,
    data: Sequence[dict[str, str]] = (),
    environment: dict[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Done:
    """Measures every item under every arm and appends a row each to `out`/rows.jsonl.

    Rows that are there are not computed again: an interrupted run goes on where it was, and arms can be added later.
    `data`: file and digest of the inputs, for the record. An item over the window loses whole distractor passages; if
    that does not help, or if nothing could score it, it is left out, with the reason.

    Raises OptionError where `out` holds a run of another model, data or options, or where another process writes to it.
    """
    items, skipped = check_items(items)
    if not items:
        raise OptionError("no item is left to measure; " + (next(iter(skipped.values()), "give at least one")))
    for identity, reason in skipped.items():
        logger.warning("item '%s' is left out: %s", identity, reason)
    bench = Bench(model, options)
    bench.engine()  # refuses options that no item could be measured with, before anything is written
    for item in items:
        bench.worded(item)
        bench.check_passages(item)
    check_untiled(arms)
    check_distinct(arms, model)
    check_oracle(bench, items, arms)
    datasets = list(dict.fromkeys(item.dataset for item in items))
    record = run_record(model, arms, options, data, environment or {}, datasets)
    dropped: dict[str, int] = {}

    def fitted(item: Item) -> tuple[Item | None, str]:
        kept, reason = fitted_item(bench, item)
        if kept is not None and kept is not item:
            dropped[item.id] = len(item.passages) - len(kept.passages)
            logger.warning("item '%s' is over the window: %d distractor passages dropped", item.id, dropped[item.id])
        return kept, reason

    written, found = write_rows(out, record, items, arms, fitted, bench.rows, skipped, on_progress)
    return Done(written, found, skipped, dropped)


class Named(Protocol):
    """What has an id that is unique in a run."""

    @property
    def id(self) -> str: ...


AnyItem = TypeVar("AnyItem", bound=Named)


def write_rows(
    out: Path,
    record: dict[str, Any],
    items: Sequence[AnyItem],
    arms: Sequence[Arm],
    fitted: Callable[[AnyItem], tuple[AnyItem | None, str]],
    rows_of: Callable[[AnyItem, Sequence[Arm]], Iterator[dict[str, Any]]],
    skipped: dict[str, str],
    on_progress: Progress | None = None,
) -> tuple[int, int]:
    """How many rows were written now, and how many were there before.

    `fitted`: the item as it is measured, or None and why it is left out, which goes into `skipped`. `rows_of`: the rows
    of the arms that an item lacks.
    """
    with writer(out, record) as rows:
        have = rows.have()
        written, total = 0, len(items) * len(arms)
        done = sum((item.id, arm.name) in have for item in items for arm in arms)
        found = done
        for item in items:
            missing = [arm for arm in arms if (item.id, arm.name) not in have]
            if not missing:
                continue
            kept, reason = fitted(item)
            if kept is None:
                skipped[item.id] = reason
                total -= len(missing)
                logger.warning("item '%s' is left out: %s", item.id, reason)
                continue
            start = time.perf_counter()
            for row in rows_of(kept, missing):
                if not written:
                    rows.made_in(record["environment"])
                rows.append(row)
                written += 1
                done += 1
                if on_progress is not None:
                    on_progress(done, total, f"{item.id} {row['arm']}")
            logger.info("item '%s': %d arms in %.1f s", item.id, len(missing), time.perf_counter() - start)
        return written, found


def check_untiled(arms: Sequence[Arm]) -> None:
    """Nothing; OptionError for an arm that would cut images, where there are none."""
    for arm in arms:
        if arm.tiles > 1:
            raise OptionError(f"arm '{arm.name}' cuts images in tiles, and these items are texts; leave tiles out")


def check_oracle(bench: Bench, items: Sequence[Item], arms: Sequence[Arm]) -> None:
    """Nothing; OptionError where an arm needs a full prefill's values that plain Transformers would not keep of one of
    the items, which models with sliding windows do not (see `windows.check_truth`)."""
    if bench.window is None or not any(find_method(arm.method).in_laboratory_only for arm in arms):
        return
    for item in map(bench.worded, items):
        try:
            tokens = bench.engine(item).prompt(item.question, documents_of(item)).num_tokens
        except InfoFlowError:  # such an item is left out later, with its reason
            continue
        check_truth(arms, bench.window, item.id, tokens, bench.max_new_tokens)


def lengthened(
    model: "LanguageModel", items: Sequence[Item], pool: Sequence[Item], tokens: int, options: Options
) -> list[Item]:
    """The items with passages of the pool's other items mixed in, up to `tokens` passage tokens each (see `lengthen`).

    Tokens are those of the chunks, titles included. The options' seed chooses.
    """
    engine = Bench(model, options).engine()
    counts: dict[Passage, int] = {}

    def count(passage: Passage) -> int:
        if passage not in counts:
            chunks = engine.split(Document(text=passage.text, title=passage.title))
            counts[passage] = sum(chunk.num_tokens for chunk in chunks)
        return counts[passage]

    return [lengthen(item, pool, tokens, count, options.seed) for item in items]


def fitted_item(bench: Bench, item: Item) -> tuple[Item | None, str]:
    """The item, without some distractors if it must be; else None and the reason."""
    engine, model = bench.engine(bench.worded(item)), bench.model

    def count(candidate: Item) -> int:
        shown = bench.worded(candidate)
        return engine.prompt(shown.question, documents_of(shown)).num_tokens

    try:
        gold = len(engine.encoder.content(item.answers[0])[0])
        limit = model.window_tokens - max(bench.max_new_tokens, gold) - 1
        tokens = count(item)
    except InfoFlowError as error:
        return None, str(error)
    if tokens <= limit:
        return item, ""
    fitted = fit(item, count, limit)
    if fitted is None:
        return None, str(PromptTooLongError(tokens, model.window_tokens - limit, model.window_tokens))
    return fitted, ""


class Rows:
    """The rows file of one run, open for appending."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def have(self) -> set[tuple[str, str]]:
        """(item, arm) of all whole rows; a torn last line is cut off, so that the next row gets a line of its own."""
        if not self._file.exists():
            return set()
        try:
            data = self._file.read_bytes()
        except OSError as error:
            raise InputError(f"{self._file} cannot be read: {error.strerror or error}; give another --out") from error
        end = data.rfind(b"\n") + 1
        if end < len(data):
            logger.warning(
                "%s ends in the middle of a line (an interrupted run); that row is computed again", self._file
            )
            with self._file.open("r+b") as handle:
                handle.truncate(end)
        found: set[tuple[str, str]] = set()
        for number, line in enumerate(data[:end].split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = parsed(line)
                version = row["format"]
                found.add((row["_id"], row["arm"]))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{self._file}, line {number}: not a row of `eval predict` ({error}); remove the line or give "
                    "another --out"
                ) from None
            if version != FORMAT:
                raise InputError(
                    f"{self._file}, line {number}: format {version!r}, this version writes {FORMAT}; give another --out"
                )
        return found

    def made_in(self, environment: dict[str, Any]) -> None:
        """Keeps the environment of the rows that follow in the run's record (see `run_records.made_in`)."""
        made_in(self._file.with_name(RUN_NAME), environment)

    def append(self, row: dict[str, Any]) -> None:
        """Writes one row; on return it is in the file, whole."""
        line = json.dumps(cleaned(row), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with self._file.open("ab") as handle:
                handle.write(line.encode("utf-8"))
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            raise unwritable(self._file, error) from error


@contextmanager
def writer(out: Path, record: dict[str, Any]) -> Iterator[Rows]:
    """The rows of a run folder, made if it is not there, held by this process alone while open."""
    from filelock import FileLock, Timeout

    if out.exists() and not out.is_dir():
        raise OptionError(f"--out '{out}' is a file; expected a folder for the run")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise OptionError(f"another run writes to '{out}'; wait for it or give another --out") from None
    except OSError as error:
        raise OptionError(f"--out '{out}' cannot be written: {error.strerror or error}") from error
    try:
        try:
            settle(out / RUN_NAME, record)
        except OSError as error:
            raise unwritable(out / RUN_NAME, error) from error
        yield Rows(out / ROWS_NAME)
    finally:
        lock.release()

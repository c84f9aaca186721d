"""Where results, notes and progress go: stdout for results alone, stderr for all else. Imports no torch."""

import contextlib
import io
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from infoflow_kv.errors import InfoFlowError

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_WIDE = 10_000  # columns of a table that goes into a file or pipe: nothing is wrapped or cut

Advance = Callable[[int, int], None]


class OutputError(InfoFlowError):
    """Results could not be written."""


class ReaderGone(Exception):
    """Whoever read our output has enough (`| head -1`). No OSError, as typer would answer that one itself."""


class Interrupted(InfoFlowError):
    """Ctrl-C, with what was done until then."""


def emit(text: str, end: str = "\n") -> None:
    """Nothing; the text is a result. OutputError where stdout cannot take it, ReaderGone where no one reads on."""
    _write(printable(text) + end)


def emit_json(record: object) -> None:
    """Nothing; the record is a result, as one line of JSON."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # an ASCII terminal, or a file name that is not text
        text = json.dumps(record, allow_nan=False)
    _write(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> None:
    """Nothing; the table is a result. `right`: columns to align right. In a file or pipe no cell is cut or wrapped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    # Into memory first: Rich has its own ways with a stdout that fails.
    terminal = is_terminal(sys.stdout)
    width = shutil.get_terminal_size().columns if terminal else _WIDE
    drawn = io.StringIO()
    Console(file=drawn, force_terminal=terminal, width=width, highlight=False).print(table)
    _write("".join(line.rstrip() + "\n" for line in drawn.getvalue().splitlines()))


def note(text: str) -> None:
    """Nothing; the line is on stderr, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Advance]:
    """A function of (done, total) that moves a bar on stderr; silent where stderr is no terminal."""
    if not is_terminal(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """A function that says what goes on now, on stderr: beside a spinner on a terminal, else as lines."""
    if not is_terminal(sys.stderr):
        yield note
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)) as spinner:
        yield lambda text: spinner.update(Text(printable(text)))


@contextlib.contextmanager
def log_to_stderr(debug: bool) -> Iterator[None]:
    """While open, this package's warnings (under debug: all its messages) are lines on stderr."""
    logger = logging.getLogger("infoflow_kv")
    handler, level = _NoteHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(one_line(f"{record.levelname.lower()}: {record.getMessage()}"))


def _write(text: str) -> None:
    if sys.stdout is None:
        raise OutputError("the results cannot be written: standard output is closed")
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise _unwritable(error) from error


def finish() -> None:
    """Nothing; all results have left this process. OutputError if they could not, ReaderGone if no one reads on."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        abandon_stdout()
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> OutputError:
    """The error that says why stdout did not take the results."""
    return OutputError(f"the results cannot be written: {error.strerror or error}; check where stdout goes")


def abandon_stdout() -> None:
    """Nothing; what is still buffered for stdout goes nowhere, so that the interpreter's own last flush is quiet."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def tolerate_odd_characters() -> None:
    """Nothing; a character that the terminal's encoding lacks is escaped instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def is_terminal(stream: Any) -> bool:
    """Whether a person looks at the stream."""
    return stream is not None and stream.isatty()


def printable(text: str) -> str:
    """The text without control characters, which a document could use to rewrite the terminal; newline and tab stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(text: str) -> str:
    """The text in one line."""
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def size(num_bytes: float) -> str:
    """`1.2 MB`; decimal units.

    >>> size(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def seconds(value: float) -> str:
    """`0.41 s`, or `12 ms` under a tenth of a second."""
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def share(part: int, whole: int) -> str:
    """`15.0%`; of nothing, `0.0%`."""
    return f"{100 * part / whole if whole else 0.0:.1f}%"


def finite(value: float) -> float | None:
    """The value; None where JSON has no number for it."""
    return value if math.isfinite(value) else None

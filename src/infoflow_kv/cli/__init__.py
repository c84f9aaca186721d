"""The command line: `infoflow-kv VERB`. One file per verb, which parses, calls and prints.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 something that was asked did not work, 2 bad
usage or input, 3 damage found by `store verify`, 130 interrupted. Importing this loads no torch.
"""

import contextlib
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from infoflow_kv.cli.output import (
    Interrupted,
    OutputError,
    ReaderGone,
    abandon_stdout,
    finish,
    log_to_stderr,
    note,
    one_line,
    tolerate_odd_characters,
)
from infoflow_kv.cli.ranks import check_verb, voice
from infoflow_kv.errors import InfoFlowError, InputError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
READER_GONE = 141  # what a shell says of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `infoflow-kv ARGV…`; every error has become one line on stderr."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = os.environ.get("INFOFLOW_DEBUG", "") not in ("", "0") or "--debug" in leading_options(args)
    tolerate_odd_characters()
    with voice.rank_zero_alone(), log_to_stderr(debug), warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        try:
            check_verb(args)
            return run(args)
        except ReaderGone:
            abandon_stdout()
            return READER_GONE
        except BaseException as error:  # noqa: BLE001 - the last stop: Ctrl-C and bugs too become one line
            with contextlib.suppress(ReaderGone, OutputError):
                finish()
            if debug:
                traceback.print_exception(error)
            code, message = outcome(error)
            if message:
                note(message)
            if code not in (0, INTERRUPTED):
                voice.leave(error)
            return code


def program() -> NoReturn:
    """Never: the process `infoflow-kv` ends with `main`'s exit code."""
    code = main()
    if code == INTERRUPTED:
        # Native threads may still be at work, and an interpreter that ends under them aborts ("terminate called without
        # an active exception"). Results are flushed and files closed by now; locks go with the process.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(args: list[str]) -> int:
    """The exit code of a verb that came to its end."""
    from infoflow_kv.cli.app import app

    code = app(args=args, prog_name="infoflow-kv", standalone_mode=False)
    finish()
    if code == INTERRUPTED:  # typer's own answer to Ctrl-C
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def outcome(error: BaseException) -> tuple[int, str]:
    """The exit code for an error and what to say, in one line; nothing where it has been said."""
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":  # typer's name for it
        return INTERRUPTED, "interrupted"
    if isinstance(error, Interrupted):
        return INTERRUPTED, one_line(f"interrupted: {error}")
    if isinstance(error, InfoFlowError):
        return BAD_INPUT if isinstance(error, InputError) else FAILED, one_line(f"error: {error}")
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED, ""
    if callable(getattr(error, "format_message", None)):  # typer's usage errors; their classes are not public
        message = usage_message(error)
        return BAD_INPUT, one_line(f"error: {message}") if message else ""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return FAILED, "error: out of memory; give fewer documents, a smaller model or --dtype bfloat16"
    reason = f"{type(error).__name__}: {error}"
    return FAILED, one_line(f"internal error (this is a bug): {reason}; INFOFLOW_DEBUG=1 shows the traceback")


def usage_message(error: BaseException) -> str:
    """What was wrong with the arguments, what was given, and where to read on; empty if help was shown instead."""
    message = str(getattr(error, "message", "") or error.format_message()).strip().rstrip(".")  # type: ignore[attr-defined]
    if not message:
        return ""
    near = getattr(error, "possibilities", None)
    if near:
        message += f"; did you mean {' or '.join(sorted(near))}?"
    elif getattr(error, "param", None) is not None:
        message = str(error.format_message()).strip().rstrip(".")  # type: ignore[attr-defined]
    details: list[dict[str, Any]] = getattr(error.__context__, "errors", list)()  # of typer that checks by pydantic
    if details and "input" in details[0]:
        message += f", given '{details[0]['input']}'"
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "infoflow-kv"
    seam = " " if message.endswith("?") else "; "
    return f"{message[0].lower()}{message[1:]}{seam}see '{path} --help'"


def leading_options(args: Sequence[str]) -> list[str]:
    """The options before the verb."""
    return list(itertools.takewhile(lambda arg: arg.startswith("-"), args))

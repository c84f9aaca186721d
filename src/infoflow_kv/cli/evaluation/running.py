"""What both kinds of `eval predict` share: arms from text, a run with its bar, what is said of it in the end."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infoflow_kv.cli.evaluation.lists import split_list
from infoflow_kv.cli.output import Advance, Interrupted, emit, emit_json, is_terminal, note, progress_bar
from infoflow_kv.errors import InputError, OptionError

if TYPE_CHECKING:
    from infoflow_kv.evaluate.arms import Arm
    from infoflow_kv.evaluate.predict import Done, Progress
    from infoflow_kv.models import LanguageModel

SECONDS_BETWEEN_LINES = 60


def budgets(text: str) -> "list[float | str]":
    """The budgets of `--budget`; OptionError for what is none."""
    from infoflow_kv.evaluate.arms import parse_budget

    return [parse_budget(part) for part in split_list(text)]


def writing_arms(
    text: str, arms: "list[Arm]", geometry: str | None = None, reorder: bool = False
) -> "tuple[float | str, ...] | None":
    """The budgets and arm names of `--generate`, None for all; OptionError for one that no arm has.

    Arms are understood as in `--methods`, with the same shared options: `epic@.15` is `epic@0.15`.
    """
    from infoflow_kv.evaluate.arms import parse_arms, parse_budget, split_outside_brackets

    if text in ("all", "none"):
        return None if text == "all" else ()
    names = [arm.name for arm in arms]
    known = list(dict.fromkeys(arm.budget for arm in arms if arm.budget is not None))
    found: list[float | str] = []
    for part in (piece.strip() for piece in split_outside_brackets(text)):
        if part[0].isdigit() or part[0] in ".+-" or part.startswith("auto"):
            one = parse_budget(part)
            if one not in known:
                shown = ", ".join(map(str, known)) or "none at all"
                raise OptionError(f"--generate names budget {one}, which no arm has (their budgets: {shown})")
            found.append(one)
            continue
        # An arm without a budget of its own is meant at all of them, as in --methods.
        meant = [arm.name for arm in parse_arms(part, known, geometry=geometry, reorder=reorder)]
        if not set(meant) & set(names):
            raise OptionError(f"--generate names '{meant[0]}', which is not among --methods ({', '.join(names)})")
        found += [name for name in meant if name in names]
    return tuple(found)


def run(measure: "Callable[[dict[str, Any], Progress], Done]", num_rows: int, out: Path, device: str) -> "Done":
    """What `measure` did, given the environment and whom to tell; Interrupted, with what is written, on Ctrl-C."""
    from infoflow_kv.evaluate.environment import environment

    reached: list[Any] = [0, num_rows]

    def advance(done: int, total: int, what: str) -> None:
        reached[:] = done, total
        move(done, total)
        tell(done, total)

    tell = line_now_and_then()
    try:
        with progress_bar("measuring") as move:
            return measure(environment(device), advance)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{reached[0]} of {reached[1]} rows are in {out}; run the same command again to continue"
        ) from None


def line_now_and_then() -> Advance:
    """A function of (done, total) that says it in a line from time to time where no one watches the bar."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES and not is_terminal(sys.stderr):
            last = time.monotonic()
            note(f"{done} of {total} rows")

    return tell


def summary(done: "Done", num_items: int, num_arms: int, out: str) -> str:
    """One line on what a run did."""
    parts = [f"{done.written:,} rows written to {out}"]
    parts += [f"{done.found:,} were there"] if done.found else []
    parts += [f"{len(done.skipped):,} of {num_items:,} items left out, see above"] if done.skipped else []
    parts += [f"{len(done.dropped):,} items shortened to the window"] if done.dropped else []
    return f"{', '.join(parts)} ({num_arms} arms); next: infoflow-kv eval score {out}"


def tell(
    done: "Done",
    model: "LanguageModel",
    num_items: int,
    arms: "list[Arm]",
    out: str,
    skipped: dict[str, str],
    as_json: bool,
) -> int:
    """0, the end of a run having been said; InputError where nothing at all could be measured. `skipped`: records of
    the files that no item was made of."""
    if not done.written + done.found:
        raise InputError(f"none of the {num_items} items could be measured: {next(iter(done.skipped.values()))}")
    if as_json:
        emit_json(
            {
                "out": out,
                "model": model.name,
                "items": num_items - len(done.skipped),
                "arms": [arm.name for arm in arms],
                "written": done.written,
                "found": done.found,
                "skipped": {**skipped, **done.skipped},
                "dropped_passages": done.dropped,
            }
        )
    else:
        emit(summary(done, num_items, len(arms), out))
    return 0

"""`run.json`: what the rows of one folder share, and every place and command that wrote some of them."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infoflow_kv.errors import InfoFlowError, InputError, OptionError
from infoflow_kv.evaluate.arms import Arm
from infoflow_kv.evaluate.changes import changes
from infoflow_kv.evaluate.environment import without_folders
from infoflow_kv.evaluate.json_text import cleaned, parsed
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.results import (
    FORMAT,
    ROWS_NAME,
    RUN_NAME,
    commands_of,
    environments_of,
    worded_options,
)

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel

logger = logging.getLogger(__name__)

# What rows of one folder must share.
_SHARED = ("weights", "dtype", "options", "data", "layer_sets")
# What may change numbers, or times, between two parts of a run. The rest of an environment only says more about it.
_TOLD = {"code": "code of infoflow-kv", "torch": "torch", "threads": "thread count"}
_PASSING = ("load_average", "date", "command", "commands")


def run_record(
    model: "LanguageModel",
    arms: Sequence[Arm],
    options: Options,
    data: Sequence[dict[str, str]],
    environment: dict[str, Any],
    datasets: Sequence[str] = (),
) -> dict[str, Any]:
    """What `run.json` says: everything that rows of one folder must share, and where they were made.

    Lone surrogates, of file names that are no text, are replaced: they have no UTF-8 form.
    """
    record: dict[str, Any] = cleaned(
        {
            "format": FORMAT,
            "model": without_folders([model.name])[0],
            "weights": model.identity.weights,
            "dtype": model.identity.dtype,
            # What `layers=auto` means: a calibration in between would change arms under their names.
            "layer_sets": dict(model.layer_sets),
            "options": recorded(options),
            "data": [dict(d) for d in data],
            "datasets": list(datasets),
            "arms": [arm.name for arm in arms],
            # Where the record was made, and every place that wrote rows; the latter are added with their first row.
            "environment": environment,
            "environments": [],
        }
    )
    return record


def recorded(options: Options) -> dict[str, Any]:
    """The options as `run.json` says them: `generate` is "all", "none" or a list."""
    return worded_options(cleaned(asdict(options)))


def check_folder(out: Path, options: Options, data: Sequence[dict[str, str]]) -> None:
    """Nothing; OptionError where `out` holds a run of other data or options, InputError for rows without a record.

    What can be told before a model is loaded; `settle` checks all of it once more.
    """
    file = out / RUN_NAME
    try:
        if file.is_file():
            before = read_record(file)
            now = cleaned({"options": recorded(options), "data": list(data)})
            _check_shared(file, before, {key: value for key, value in now.items() if key in before})
        else:
            _check_no_rows(file)
    except OSError as error:
        raise unwritable(file, error) from error


def settle(file: Path, record: dict[str, Any]) -> None:
    """Writes the run's record, or checks that the one which is there belongs to the same model, data and options.

    InputError where rows are there and no record says what made them.
    """
    if file.exists():
        before = read_record(file)
        before.setdefault("layer_sets", record.get("layer_sets"))
        _check_shared(file, before, {key: record.get(key) for key in _SHARED})
        merged = {
            key: list(dict.fromkeys([*(before.get(key) or []), *(record.get(key) or [])]))
            for key in ("arms", "datasets")
        }
        record = {**before, **merged, "environments": environments_of(before)}
    else:
        _check_no_rows(file)
    write_record(file, record)


def read_record(file: Path) -> dict[str, Any]:
    """The record, its options as they are worded today; InputError for what is none."""
    try:
        record = parsed(file.read_bytes())
        version = record["format"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{file} is no record of a run; give another --out") from None
    if version != FORMAT:
        raise InputError(f"{file} has format {version!r}, this version writes {FORMAT}; give another --out")
    if isinstance(record.get("options"), dict):
        # An option that an older run did not know had its default there.
        record["options"] = worded_options({**recorded(Options()), **record["options"]})
    return dict(record)


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Writes the record whole, or not at all; OSError as the file system gives it."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(cleaned(dict(record)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, file)


def unwritable(file: Path, error: OSError) -> InfoFlowError:
    """The error for a file of a run that cannot be written."""
    return InfoFlowError(
        f"{file} cannot be written: {error.strerror or error}; what is in it stays, and the same command goes on"
    )


def made_in(file: Path, environment: dict[str, Any]) -> None:
    """Keeps the environment of the rows that follow in the record, once each with all its commands, and warns where the
    rows that are there were made by other code, by another torch or with another number of threads."""
    if not environment:
        return
    listed = environments_of(read_record(file))
    place = next((i for i, known in enumerate(listed) if _place(known) == _place(environment)), None)
    if place is None:
        _warn(file.with_name(ROWS_NAME), listed, environment)
        listed.append(environment)
    else:
        commands = [*commands_of(listed[place]), *commands_of(environment)]
        if len(set(commands)) == len(commands_of(listed[place])):
            return
        listed[place]["commands"] = list(dict.fromkeys(commands))
    try:
        write_record(file, {**read_record(file), "environments": listed})
    except OSError as error:
        raise unwritable(file, error) from error


def _warn(rows: Path, before: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> None:
    for key, words in _TOLD.items():
        known = list(dict.fromkeys(str(e.get(key, "not recorded")) for e in before))
        now = str(environment.get(key, "not recorded"))
        if known and now not in known:
            logger.warning(
                "%s holds rows made with other %s (%s, now %s); numbers may differ for that reason alone",
                rows,
                words,
                ", ".join(text[:16] for text in known),
                now[:16],
            )


def _place(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The environment without what differs between two runs on one machine."""
    return {key: value for key, value in environment.items() if key not in _PASSING}


def _check_shared(file: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key, value in now.items():
        was = before.get(key)
        if was == value:
            continue
        found = changes(_files(was), _files(value)) if key == "data" else changes(was, value)
        raise OptionError(
            f"{file.parent} holds a run with other {key} ({'; '.join(found)}); give another --out, or the same command "
            "to go on"
        )


def _files(data: Any) -> Any:
    """The inputs of a run in words: each file with the start of its digest."""
    if not isinstance(data, list) or not all(isinstance(d, Mapping) for d in data):
        return data
    return ", ".join(f"{d.get('file')} ({str(d.get('sha256'))[:12]})" for d in data)


def _check_no_rows(file: Path) -> None:
    rows = file.with_name(ROWS_NAME)
    if rows.is_file() and rows.stat().st_size:
        raise InputError(
            f"{rows} holds rows, and no {file.name} beside it says what made them; give another --out, or put the "
            f"{file.name} back that belongs to them"
        )

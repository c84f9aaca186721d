"""The commands of docs/vlm.md are understood by the command line, and its tables are those of the measurements."""

import re
import shlex
import sys
from pathlib import Path

import click
import pytest
import typer

from infoflow_kv.cli.app import app
from infoflow_kv.cli.evaluation.pictures import wanted_tiles
from infoflow_kv.evaluate.arms import parse_arms, with_tiles
from infoflow_kv.evaluate.vision_items import find_set

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "vlm.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line.strip()
]
SETS = ("chartqa", "ocrbench", "infovqa", "realworldqa", "hrbench4k")


def parsed(line: str) -> dict[str, object]:
    """The parameters of a command as its verb gets them; click's UsageError for what it does not understand."""
    program, *words = shlex.split(line)
    assert program == "infoflow-kv"
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return command.make_context(command.name, words).params


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line):
    params = parsed(line)
    if "rules" in params:
        assert find_set(params["rules"]).name in SETS
        arms = with_tiles(parse_arms(params["methods"], [float(params["budget"])]), wanted_tiles(params["tiles"]))
        assert len(arms) == 11
        assert (params["dtype"], params["device"]) == ("bfloat16", "cuda")


def test_every_set_is_predicted_scored_and_reported():
    predicted = [parsed(line) for line in COMMANDS if " predict " in line]
    assert tuple(p["rules"] for p in predicted) == SETS
    runs = [p["out"] for p in predicted]
    assert [parsed(line)["runs"] for line in COMMANDS if " predict " not in line] == [runs, runs]


def test_a_wrong_option_is_found():
    with pytest.raises(Exception, match="--tile") as caught:
        parsed("infoflow-kv eval predict --data a --out b --tile 2,4")
    assert isinstance(caught.value, click.UsageError) or "NoSuchOption" in type(caught.value).__name__


def test_the_python_lines_compile():
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        compile(block, "docs/vlm.md", "exec")


def test_the_tables_are_those_of_the_measurements(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import write_vision

    sys.modules.pop("write_vision")
    assert write_vision.filled(PAGE, write_vision.records()) == PAGE
    assert "(not measured yet)" in write_vision.filled(PAGE, [])

"""The checks of `make check` find what they look for."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_long_and_nameless_files_are_found(tmp_path: Path) -> None:
    room = tmp_path / "src" / "room"
    room.mkdir(parents=True)
    (room / "long.py").write_text("pass\n" * 401)
    (room / "utils.py").write_text("")
    (room / "fine.py").write_text("pass\n" * 400)
    faults = tool("check_sizes").faults(tmp_path)
    assert len(faults) == 2
    assert faults[0].startswith("src/room/long.py: 401 lines")
    assert faults[1].startswith("src/room/utils.py: say what it does")


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("[there](docs/there.md)", None),
        ("[part](docs/there.md#what-it-does-2)", None),
        ("[here](#top)", None),
        ("[web](https://example.org/nothing.md)", None),
        ("`[code](gone.md)`", None),
        ("```\n[code](gone.md)\n```", None),
        ("[gone](gone.md)", "gone.md does not exist"),
        ("[gone][1]\n\n[1]: gone.md", "gone.md does not exist"),
        ("![image](docs/gone.png)", "docs/gone.png does not exist"),
        ("[part](docs/there.md#elsewhere)", "docs/there.md#elsewhere has no such heading"),
    ],
)
def test_links_that_lead_nowhere_are_found(tmp_path: Path, link: str, fault: str | None) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "there.md").write_text("# There\n\n## What it *does*, `2`\n")
    (tmp_path / "README.md").write_text(f"# Top\n\n{link}\n")
    assert tool("check_docs").broken_links(tmp_path) == ([f"README.md: {fault}"] if fault else [])

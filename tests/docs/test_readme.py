"""What the README and the examples tell people to type, typed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if word in b]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    lease = "The lease of the old mill was signed by Ada Brook. The lease ends in May 2031.\n"
    (tmp_path / "docs" / "lease.txt").write_text(lease, encoding="utf-8")
    (tmp_path / "docs" / "mill.md").write_text(
        "# The mill\n\nThe old mill has two stones and a wheel.\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_lines(folder):
    done = subprocess.run(
        [sys.executable, "-c", block("python", "ifk.Engine")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
    # Without the plan: so little text without a store may be quicker by full prefill, which answers differently.
    line = ["ask", "Who signed the lease?", "docs/", "--no-store", "--no-plan"]
    asked = subprocess.run([sys.executable, "-m", "infoflow_kv", *line], capture_output=True, text=True, check=True)
    assert asked.stdout == done.stdout  # a model of this size may be wrong, but both ways are the same way


def test_the_command_lines(folder):
    lines = [line for line in block("bash", "infoflow-kv ask").splitlines() if line.strip()]
    outputs = []
    for line in lines:
        program, *rest = shlex.split(line)
        assert program == "infoflow-kv"
        done = subprocess.run([sys.executable, "-m", "infoflow_kv", *rest], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[1].strip()
    # So little text may be quicker without reuse, if the machine says so.
    assert '"cached_chunks": 2' in outputs[2] or "full prefill instead of reuse" in outputs[2]


def test_the_example_of_an_own_selector():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_selector.py")], capture_output=True, text=True, check=True
    )
    assert "1871" in done.stdout


def test_examples_stay_short():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 45, path.name

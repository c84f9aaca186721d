"""A tiny model folder, and the command line run in this process with its streams captured."""

import io
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infoflow_kv.cli import main

sys.path.insert(0, str(Path(__file__).parent))  # makes `cli_runs` importable under every pytest import mode

from cli_runs import Cli, Result, save_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only lose by more
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and their children inherit that: Ctrl-C would do nothing."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one: hundreds of chunks that wait for the disk would take minutes."""
    try:
        path = Path(tempfile.mkdtemp(prefix="infoflow-cli-", dir="/dev/shm"))
    except OSError:
        yield tmp_path
        return
    yield path
    shutil.rmtree(path)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs `infoflow-kv ARGS…` here, with its own cache folder and an empty standard input."""
    monkeypatch.setenv("INFOFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INFOFLOW_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args: object, stdin: bytes = b"") -> Result:
        streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for name in ("stdout", "stderr")}
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            code = main([str(a) for a in args])
        texts = []
        for stream in streams.values():
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())
        return Result(code, *texts)

    return run

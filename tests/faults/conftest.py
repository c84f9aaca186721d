"""Makes `store_chunks` (tests/store) importable under every pytest import mode."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one: what a killed process leaves behind does not depend on the disk."""
    with _in_memory(tmp_path) as path:
        yield path


@pytest.fixture(scope="module")
def quick_module_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same for all tests of a file together."""
    with _in_memory(tmp_path_factory.mktemp("quick")) as path:
        yield path


@contextlib.contextmanager
def _in_memory(otherwise: Path) -> Iterator[Path]:
    try:
        path = Path(tempfile.mkdtemp(prefix="infoflow-store-", dir="/dev/shm"))
    except OSError:
        yield otherwise
        return
    try:
        yield path
    finally:
        shutil.rmtree(path)

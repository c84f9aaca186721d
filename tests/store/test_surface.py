"""What the room shows and what it must not use."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import infoflow_kv
from infoflow_kv import store
from infoflow_kv.store import ChunkStore, DiskStore, MemoryStore

SOURCE = Path(infoflow_kv.__file__).parents[1]
FILES = sorted((SOURCE / "infoflow_kv" / "store").glob("*.py"))
BANNED_NAMES = {
    "pickle",
    "cPickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "diskcache",
    "md5",
    "sha1",
    "crc32",
    "xxhash",
}
BANNED_NAMES |= {"zlib", "mmap", "eval", "exec", "hash"}
BANNED_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("hashlib", "new"), ("uuid", "uuid3")}


def test_all_is_sorted_and_true() -> None:
    assert store.__all__ == sorted(store.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert all(hasattr(store, name) for name in store.__all__)


def test_a_store_has_five_verbs() -> None:
    """A sixth belongs into a function beside it, as `load_many` is."""
    verbs = {name for name, value in vars(ChunkStore).items() if callable(value) and not name.startswith("_")}
    assert verbs == {"get", "put", "contains", "delete", "keys"}
    for kind in (MemoryStore, DiskStore):
        public = {name for name, value in vars(kind).items() if not name.startswith("_")}
        assert public == verbs | {"counters"}


def test_both_stores_are_stores(tmp_path: Path) -> None:
    stores: list[ChunkStore] = [MemoryStore(), DiskStore(tmp_path / "kv")]
    assert all(isinstance(one, ChunkStore) for one in stores)


def test_the_room_is_entered_without_torch(tmp_path: Path) -> None:
    """Also `verify`, `ls` and `stat` work without it: they run where no model is."""
    script = (
        "import sys, time; start = time.process_time(); import infoflow_kv.store as s\n"
        "used = time.process_time() - start\n"
        "report = s.verify(sys.argv[1]); rows = list(s.ls(sys.argv[1])); s.stat(sys.argv[1])\n"
        "assert report.sound == len(rows) == 6, report\n"
        "heavy = {'torch', 'numpy', 'safetensors', 'transformers', 'pickle'} & sys.modules.keys()\n"
        "print(used, *heavy)"
    )
    sample = tmp_path / "kv"
    for version in (1, 2):
        shutil.copytree(Path(__file__).parent / f"format_{version}", sample, dirs_exist_ok=True)
    best = 9.0
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script, str(sample)],
            env={"PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            check=True,
        )
        used, *heavy = done.stdout.split()
        assert heavy == []
        best = min(best, float(used))
    assert best < 0.2


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_dangerous_is_used(path: Path) -> None:
    """K12: no weak hashes; no pickle anywhere; no mapped files (a cut would end the process)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Name):
            names = {node.id}
        elif isinstance(node, ast.Attribute):
            names = {node.attr}
            if isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in BANNED_ATTRIBUTES, f"line {node.lineno}"
        assert not names & BANNED_NAMES, f"line {getattr(node, 'lineno', 0)}: {names & BANNED_NAMES}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_room_stays_small_and_imports_downwards(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infoflow_kv"):
            assert (node.module or "").startswith(("infoflow_kv.errors", "infoflow_kv.records", "infoflow_kv.store"))

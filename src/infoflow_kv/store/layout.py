"""The folder of a disk store: its names, its marker file and what lies in it. Nothing here opens a chunk.

ROOT/infoflow-store.json      {"format_version": 1}; a folder without it is not ours and is never touched
ROOT/ab/ab12….safetensors     one chunk, named by its key, in the folder of the key's first two digits
ROOT/tmp/KEY.RANDOM           a chunk being written
ROOT/quarantine/KEY.RANDOM.safetensors   bytes that failed a check, kept for a person to look at
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infoflow_kv.errors import StoreError
from infoflow_kv.store.identity import dump_json, parse_json

MARKER = "infoflow-store.json"
# Of the folder. It stays 1 as long as an older release finds its way here: each file has a format version of its own.
STORE_VERSION = 1
TEMPORARY = "tmp"
QUARANTINE = "quarantine"
SUFFIX = ".safetensors"
READ_ONLY_ERRNOS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

_BLOCK_BYTES = 4096
_SHARD_PATTERN = re.compile(r"[0-9a-f]{2}")
_CHUNK_PATTERN = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})

EntryKind = Literal["chunk", "quarantine", "temporary", "other"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the store folder. `key` is empty for all but chunks."""

    path: Path
    kind: EntryKind
    key: str
    num_bytes: int
    mtime_ns: int


def chunk_path(root: Path, key: str) -> Path:
    """Where the chunk lies; `key` has been checked."""
    return root / key[:2] / (key + SUFFIX)


def look(root: Path, key: str) -> os.stat_result:
    """The entry under the chunk's name, links not followed. Raises FileNotFoundError where there is none."""
    path = chunk_path(root, key)
    if stat.S_ISLNK(os.lstat(path.parent).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is a symbolic link", str(path.parent))
    return os.lstat(path)


def find_store(path: str | os.PathLike[str]) -> Path:
    """The root of an existing store. Raises StoreError if there is none, or a newer one."""
    root = resolve(path)
    if not has_marker(root):
        raise StoreError(f"'{root}' is not an InfoFlow KV store (it has no {MARKER}); give the folder of a store")
    return root


def keys_in(root: Path) -> Iterator[str]:
    """Keys of the chunk names in the store, ascending; nothing is opened. Foreign names are left out."""
    for shard in sorted(_names(root)):
        if _SHARD_PATTERN.fullmatch(shard):
            for name in sorted(_names(root / shard)):
                found = _CHUNK_PATTERN.fullmatch(name)
                if found and name.startswith(shard):
                    yield found[1]


def entries_in(root: Path) -> Iterator[Entry]:
    """Every regular file of the store folder, also temporary, quarantined and foreign ones."""
    for folder in (root, *(root / name for name in sorted(_names(root)))):
        for name in _names(folder):
            path = folder / name
            try:
                info = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # another process was quicker
            if stat.S_ISREG(info.st_mode):
                kind, key = _kind_of(folder, root, name)
                yield Entry(path, kind, key, blocks_of(info), info.st_mtime_ns)


def blocks_of(info: os.stat_result) -> int:
    """Bytes that a file takes up. The disk fills by blocks; of a file whose size is only reserved, those to come."""
    return max(-(-info.st_size // _BLOCK_BYTES) * _BLOCK_BYTES, info.st_blocks * 512)


def resolve(path: str | os.PathLike[str]) -> Path:
    """The absolute path of an existing folder. Raises StoreError if there is none."""
    given = Path(path).absolute()
    try:
        mode = os.stat(given).st_mode
    except FileNotFoundError:
        raise StoreError(f"there is no store at '{given}'; give the folder of a store") from None
    except OSError as error:
        raise explain(error, given, "cannot open") from None
    if not stat.S_ISDIR(mode):
        raise StoreError(f"'{given}' is not a folder; give a folder for the store")
    return given.resolve()


def has_marker(root: Path) -> bool:
    """Whether the folder is a store that this release reads. Raises StoreError if it is a store that it cannot read."""
    try:
        read_marker(root)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise explain(error, root, "cannot open") from None
    return True


def read_marker(root: Path) -> None:
    """Nothing. Raises FileNotFoundError without a marker, StoreError if it names another format or cannot be read."""
    advice = f'if this is a store of format {STORE_VERSION}, write {{"format_version": {STORE_VERSION}}} into that file'
    try:
        marker = parse_json((root / MARKER).read_bytes())
    except StoreError as error:
        raise StoreError(f"'{root / MARKER}' cannot be understood ({error}); {advice}") from None
    version = marker.get("format_version") if isinstance(marker, dict) else None
    if type(version) is not int or version < 1:
        raise StoreError(f"'{root / MARKER}' names no format version; {advice}")
    if version > STORE_VERSION:
        raise StoreError(
            f"store '{root}' has format version {version}, this release reads up to {STORE_VERSION}; "
            "upgrade infoflow-kv or use another folder"
        )


def marker_bytes() -> bytes:
    """The content of a new marker file."""
    return dump_json({"format_version": STORE_VERSION}).encode() + b"\n"


def is_empty(root: Path) -> bool:
    """Whether the folder holds nothing but markers that never got their name (a crash in the first second)."""
    return all(name.startswith(MARKER + ".") for name in os.listdir(root))


def explain(error: OSError, root: Path, doing: str) -> StoreError:
    """The StoreError that says in one line what the system refused and what to do about it."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in READ_ONLY_ERRNOS:
        return StoreError(f"{doing}: store '{root}' is not writable ({reason}); check its owner, mode and mount")
    if error.errno in _FULL_ERRNOS:
        return StoreError(f"{doing}: the disk of store '{root}' is full ({reason}); free space or set max_bytes")
    return StoreError(f"{doing}: store '{root}' failed ({reason}); check that the folder and its disk are there")


def _names(folder: Path) -> list[str]:
    """The names in a folder; none if it is gone, no folder, or a link that leads elsewhere (the root is resolved)."""
    try:
        return [] if folder.is_symlink() else os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _kind_of(folder: Path, root: Path, name: str) -> tuple[EntryKind, str]:
    if folder == root:
        return "other", ""
    if folder.name == TEMPORARY:
        return "temporary", ""
    if folder.name == QUARANTINE:
        return "quarantine", ""
    found = _CHUNK_PATTERN.fullmatch(name)
    return ("chunk", found[1]) if found and found[1][:2] == folder.name else ("other", "")

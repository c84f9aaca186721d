"""Converted model folders and their manifest: the SHA-256 of every file, written last, checked at every load.

A folder with a manifest that holds is complete and unchanged; without one it is half written. Files whose names start
with a dot are not part of the model (desktops leave some) and are not looked at.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from infoflow_kv.errors import ModelError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder was made from, with what, and the digest (SHA-256, hex) of each of its files."""

    source: str
    source_sha256: str
    made_with: Mapping[str, str]
    files: Mapping[str, str]
    format_version: int = FORMAT_VERSION


def ensure_folder(folder: Path, make: Callable[[], None], progress: Progress) -> Path:
    """`folder` with digests that hold: as it is, or made by `make`, by one process at a time.

    A damaged folder is made again, once. Raises ModelError if even the new one does not hold, or as `make` does.
    """
    if folder.exists():
        try:
            verify_manifest(folder)
            return folder
        except ModelError as error:
            progress(f"{error}; making it again")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            if not _holds(folder):  # another process may have made it while this one waited
                _clear(folder)
                make()
    except OSError as error:
        raise ModelError(
            f"cannot use the cache folder {folder.parent}: {error}; set INFOFLOW_CACHE to a folder that can be written"
        ) from error
    verify_manifest(folder)
    return folder


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """A fresh hidden folder beside `folder`, gone when the context ends; the next maker deletes a killed one's."""
    work_dir = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        yield work_dir
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, *, source: str, source_sha256: str, made_with: Mapping[str, str]) -> Manifest:
    """Hash every file of `folder`, write the manifest beside them, and force all of it to the disk."""
    manifest = Manifest(source, source_sha256, dict(made_with), _digests(folder))
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in (*manifest.files, MANIFEST_NAME):
        _flush(folder / name)
    _flush(folder)
    return manifest


def verify_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, after every file was read and its digest compared.

    Raises ModelError with the first fault: no manifest, a newer format, a missing or an extra file, a wrong digest.
    """
    manifest = _read(folder)
    try:
        found = _digests(folder)
    except OSError as error:
        raise ModelError(f"cannot read the model folder {folder}: {error.strerror}") from error
    for name in sorted(found.keys() ^ manifest.files.keys()):
        state = "is missing" if name in manifest.files else "is not in its manifest"
        raise ModelError(f"the model folder {folder} is damaged: {name} {state}")
    for name, digest in manifest.files.items():
        if found[name] != digest:
            raise ModelError(
                f"the model folder {folder} is damaged: {name} has SHA-256 {found[name][:12]}…, expected {digest[:12]}…"
            )
    return manifest


def _holds(folder: Path) -> bool:
    try:
        verify_manifest(folder)
    except ModelError:
        return False
    return True


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock. The system releases it when a process dies, so a stale lock file is harmless."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(f"waiting for another process that is making {folder.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _clear(folder: Path) -> None:
    """Delete a damaged folder and what killed processes left half done. Only under the lock."""
    if folder.exists():
        with partial_folder(folder) as doomed:
            folder.rename(doomed / folder.name)  # first out of sight: nobody sees a folder that is half gone
    for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _read(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"the model folder {folder} is incomplete: it has no {MANIFEST_NAME}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"the model folder {folder} is damaged: cannot read {MANIFEST_NAME} ({error})") from error
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise ModelError(f"{path} has format version {version!r}, expected {FORMAT_VERSION}")
    files = fields.get("files")
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        raise ModelError(f"the model folder {folder} is damaged: {MANIFEST_NAME} lists no files")
    made_with = fields.get("made_with")
    return Manifest(
        source=str(fields.get("source", "")),
        source_sha256=str(fields.get("source_sha256", "")),
        made_with=made_with if isinstance(made_with, dict) else {},
        files=files,
    )


def _digests(folder: Path) -> dict[str, str]:
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.relative_to(folder).as_posix() != MANIFEST_NAME
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    with ThreadPoolExecutor(max_workers=2) as pool:  # hashing releases the GIL
        return dict(
            zip((path.relative_to(folder).as_posix() for path in paths), pool.map(sha256_of, paths), strict=True)
        )


def _flush(path: Path) -> None:
    """fsync a file or, where the system can, a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # Windows cannot open folders
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

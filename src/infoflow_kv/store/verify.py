"""Looking after a disk store without the model: check the files, count them, list them. Imports no torch."""

import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infoflow_kv.errors import OptionError
from infoflow_kv.store.files import open_chunk, read_head
from infoflow_kv.store.files import quarantine as set_aside
from infoflow_kv.store.format import DamagedChunkError, Header, NewerChunkError, parse_header
from infoflow_kv.store.inspection import inspect
from infoflow_kv.store.layout import entries_in, explain, find_store, keys_in, look


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found: `checked` of `chunks` files; each is sound, damaged, newer or unreadable, or gone meanwhile.

    damaged, unreadable: (key, reason). `quarantined` counts the damaged files that were moved away.
    """

    chunks: int
    checked: int
    sound: int
    damaged: tuple[tuple[str, str], ...]
    unreadable: tuple[tuple[str, str], ...]
    newer: int
    quarantined: int

    @property
    def is_clean(self) -> bool:
        """Whether every file that was checked was sound or of a newer format."""
        return not self.damaged and not self.unreadable


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One line of `store ls`. `problem` is empty for a readable header; otherwise the fields from it are empty.

    visual_tokens: how many of the tokens stand for parts of images; 0 for text, and for a record that is no KV.
    """

    key: str
    tokens: int
    num_bytes: int
    dtype: str
    weights: str
    namespace: str
    mtime: float
    problem: str = ""
    visual_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelStat:
    """The chunks of one model: its weights fingerprint and number format."""

    weights: str
    dtype: str
    chunks: int
    tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStat:
    """What a store holds. `total_bytes` counts every file in the folder, as `max_bytes` does."""

    chunks: int
    tokens: int
    num_bytes: int
    models: tuple[ModelStat, ...]
    unreadable: int
    quarantined: int
    temporary: int
    total_bytes: int


def verify(
    store_path: str | os.PathLike[str], sample: float = 1.0, seed: int = 0, quarantine: bool = False
) -> VerifyReport:
    """Which chunk files are sound, to the last bit. Writes nothing unless `quarantine`; memory stays small.

    `sample` is the share of files to check, in (0, 1], chosen by `seed`; at least one file is checked.
    Raises StoreError if there is no store, OptionError for a `sample` outside its range.
    """
    if isinstance(sample, bool) or not isinstance(sample, int | float) or not 0 < sample <= 1:
        raise OptionError(f"sample must lie in (0, 1], given {sample!r}")
    root = find_store(store_path)
    keys = list(keys_in(root))
    chosen = sorted(random.Random(seed).sample(keys, math.ceil(sample * len(keys))))
    sound, newer, quarantined, gone = 0, 0, 0, 0
    damaged: list[tuple[str, str]] = []
    unreadable: list[tuple[str, str]] = []
    for key in chosen:
        try:
            judged = look(root, key)
            with open_chunk(root, key) as (fd, num_bytes):
                inspect(fd, num_bytes, key)
            sound += 1
        except FileNotFoundError:
            gone += 1
        except OSError as error:
            unreadable.append((key, os.strerror(error.errno or 0)))
        except NewerChunkError:
            newer += 1
        except DamagedChunkError as error:
            damaged.append((key, str(error)))
            if quarantine:
                quarantined += _move(root, key, judged)
    return VerifyReport(len(keys), len(chosen) - gone, sound, tuple(damaged), tuple(unreadable), newer, quarantined)


def ls(path: str | os.PathLike[str]) -> Iterator[ChunkRecord]:
    """The chunks of a store, by key, from their headers alone: a record here is no proof that the chunk is sound."""
    root = find_store(path)
    return (_record(root, key, info) for key, info in _infos(root))


def stat(path: str | os.PathLike[str]) -> StoreStat:
    """What a store holds, in total and by model, from the headers alone."""
    root = find_store(path)
    chunks, tokens, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    unreadable = 0
    for key, info in _infos(root):
        try:
            identity = _read_header(root, key).identity
        except (OSError, DamagedChunkError, NewerChunkError):
            unreadable += 1
            continue
        model = (identity.model.weights, identity.model.dtype)
        chunks[model] += 1
        tokens[model] += len(identity.token_ids)
        sizes[model] += info.st_size
    entries = list(entries_in(root))
    return StoreStat(
        chunks=chunks.total(),
        tokens=tokens.total(),
        num_bytes=sizes.total(),
        models=tuple(ModelStat(*model, chunks[model], tokens[model], sizes[model]) for model in sorted(chunks)),
        unreadable=unreadable,
        quarantined=sum(entry.kind == "quarantine" for entry in entries),
        temporary=sum(entry.kind == "temporary" for entry in entries),
        total_bytes=sum(entry.num_bytes for entry in entries),
    )


def _infos(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    for key in keys_in(root):
        try:
            yield key, look(root, key)
        except FileNotFoundError:
            continue  # evicted meanwhile


def _record(root: Path, key: str, info: os.stat_result) -> ChunkRecord:
    try:
        identity = _read_header(root, key).identity
    except OSError as error:
        return ChunkRecord(key, 0, info.st_size, "", "", "", info.st_mtime, os.strerror(error.errno or 0))
    except (DamagedChunkError, NewerChunkError) as error:
        return ChunkRecord(key, 0, info.st_size, "", "", "", info.st_mtime, str(error))
    model = identity.model
    return ChunkRecord(
        key,
        tokens=len(identity.token_ids),
        num_bytes=info.st_size,
        dtype=model.dtype,
        weights=model.weights[:12],
        namespace=identity.namespace,
        mtime=info.st_mtime,
        visual_tokens=identity.inputs_layout[0] if identity.inputs_layout else 0,
    )


def _read_header(root: Path, key: str) -> Header:
    with open_chunk(root, key) as (fd, num_bytes):
        header = parse_header(read_head(fd, num_bytes), num_bytes)
    if header.key != key:
        raise DamagedChunkError("it holds another chunk than the one its name stands for")
    return header


def _move(root: Path, key: str, judged: os.stat_result) -> bool:
    """Whether the file was moved. Raises StoreError where the system refuses: the caller asked for it."""
    try:
        return set_aside(root, key, judged)
    except OSError as error:
        raise explain(error, root, f"cannot quarantine chunk {key}") from error

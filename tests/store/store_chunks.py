"""Small chunks and looks into store folders, for the tests of the store."""

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infoflow_kv.records import ChunkIdentity, ChunkKV, ModelIdentity

MODEL = ModelIdentity(weights="w" * 8, tokenizer="t" * 8, num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
IDENTITY = ChunkIdentity(model=MODEL, rope="r" * 8, head_ids=(1, 2), token_ids=(3, 4, 5))


def make_identity(dtype: str = "float32", tokens: int = 3, first: int = 3, **changes: Any) -> ChunkIdentity:
    token_ids = tuple(range(first, first + tokens))
    return replace(IDENTITY, model=replace(MODEL, dtype=dtype), token_ids=token_ids, **changes)


def make_chunk(identity: ChunkIdentity = IDENTITY, seed: int = 0) -> ChunkKV:
    """A chunk of random numbers, equal for equal arguments."""
    model = identity.model
    shape = (2, model.num_layers, model.num_kv_heads, len(identity.token_ids), model.head_dim)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, model.dtype))
    return ChunkKV(identity, numbers[0].clone(), numbers[1].clone())


def same_bits(first: ChunkKV | None, second: ChunkKV | None) -> bool:
    """Whether two chunks are equal to the last bit, identity, shape and dtype included."""
    if first is None or second is None or first.identity != second.identity:
        return False
    pairs = ((first.keys, second.keys), (first.values, second.values))
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


def files_under(root: Path) -> dict[str, tuple[int, int]]:
    """Size and mtime of every entry below the folder."""
    return {str(p.relative_to(root)): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(root.rglob("*"))}


def names_in(root: Path, folder: str) -> list[str]:
    return sorted(os.listdir(root / folder)) if (root / folder).is_dir() else []


def header_bytes(data: bytes) -> int:
    """Length of everything before the payload."""
    return 8 + int(struct.unpack_from("<Q", data)[0])


@contextlib.contextmanager
def folder_for_nobody() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="infoflow-store-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Runs as an ordinary user, whom permission bits bind; they do not bind root."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)

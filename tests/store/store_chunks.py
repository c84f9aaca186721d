"""Small chunks and looks into store folders, for the tests of the store."""

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from infoflow_kv.records import ChunkIdentity, ChunkInputs, ChunkKV, ModelIdentity
from infoflow_kv.store import identity as identities

MODEL = ModelIdentity(weights="w" * 8, tokenizer="t" * 8, num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
IDENTITY = ChunkIdentity(model=MODEL, rope="r" * 8, head_ids=(1, 2), token_ids=(3, 4, 5))
# Visual tokens, hidden, early-layer rows, axes.
IMAGE_IDENTITY = replace(IDENTITY, token_ids=(3, 4, 5, 6, 7), inputs="ab" * 32, inputs_layout=(3, 6, 2, 3))
INPUT_NAMES = ("positions", "visual", "embeddings", "layer_rows")


def make_identity(dtype: str = "float32", tokens: int = 3, first: int = 3, **changes: Any) -> ChunkIdentity:
    token_ids = tuple(range(first, first + tokens))
    return replace(IDENTITY, model=replace(MODEL, dtype=dtype), token_ids=token_ids, **changes)


def make_image_identity(
    dtype: str = "float32",
    tokens: int = 5,
    first: int = 3,
    layout: tuple[int, ...] = IMAGE_IDENTITY.inputs_layout,
    **changes: Any,
) -> ChunkIdentity:
    return make_identity(dtype, tokens, first, **{"inputs": IMAGE_IDENTITY.inputs, "inputs_layout": layout, **changes})


def make_chunk(identity: ChunkIdentity = IDENTITY, seed: int = 0) -> ChunkKV:
    """A chunk of random numbers, equal for equal arguments; with inputs where its identity promises some."""
    model = identity.model
    shape = (2, model.num_layers, model.num_kv_heads, len(identity.token_ids), model.head_dim)
    source, dtype = torch.Generator().manual_seed(seed), getattr(torch, model.dtype)
    numbers = torch.randn(shape, generator=source).to(dtype)
    inputs = None
    if identity.inputs_layout:
        visual, hidden, early, axes = identity.inputs_layout
        tokens = len(identity.token_ids)
        inputs = ChunkInputs(
            positions=torch.randint(0, 2 * tokens, (axes, tokens), generator=source, dtype=torch.int32),
            visual=torch.randperm(tokens, generator=source)[:visual].sort().values.to(torch.int32),
            embeddings=torch.randn((visual, hidden), generator=source).to(dtype),
            layer_rows=torch.randn((early, visual, hidden), generator=source).to(dtype),
        )
    return ChunkKV(identity, numbers[0].clone(), numbers[1].clone(), inputs)


def counted_chunk(identity: ChunkIdentity) -> ChunkKV:
    """A chunk of a sample store: numbers that no random source decides."""
    shape = (2, 2, 1, len(identity.token_ids), 4)
    dtype = getattr(torch, identity.model.dtype)

    def count(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)

    numbers = count(*shape)
    if not identity.inputs_layout:
        return ChunkKV(identity, numbers[0].clone(), numbers[1].clone())
    visual, hidden, early, axes = identity.inputs_layout
    inputs = ChunkInputs(
        positions=count(axes, shape[3], dtype=torch.int32),
        visual=count(visual, dtype=torch.int32) + 1,
        embeddings=count(visual, hidden) / 2,
        layer_rows=count(early, visual, hidden) / 4,
    )
    return ChunkKV(identity, numbers[0].clone(), numbers[1].clone(), inputs)


def sample_identities() -> list[ChunkIdentity]:
    """What the sample store of format 2 holds; make it by `python tests/store/store_chunks.py tests/store/format_2`."""
    return [
        make_image_identity("float32", layout=(3, 6, 2, 3), namespace="sample"),
        make_image_identity("bfloat16", layout=(3, 6, 3, 3), namespace="sample"),
        make_image_identity("float16", layout=(2, 5, 0, 1), namespace="sample"),
    ]


def tensors_of(chunk: ChunkKV) -> dict[str, torch.Tensor]:
    """The tensors of the chunk's file by name, from the format's description and not by the store."""
    found = {"keys": chunk.keys, "values": chunk.values}
    if chunk.inputs is not None:
        found |= {name: getattr(chunk.inputs, name) for name in INPUT_NAMES}
    return {name: tensor for name, tensor in found.items() if tensor.numel()}


def sealed(data: bytes) -> bytes:
    """The bytes with the digest that fits them, computed here from the format's description and not by the store."""
    place = data.index(b'\\"digest\\":\\"') + len(b'\\"digest\\":\\"')
    blank = data[:place] + b"0" * 64 + data[place + 64 :]
    return data[:place] + hashlib.sha256(blank).hexdigest().encode() + data[place + 64 :]


def forged(tensors: dict[str, torch.Tensor], of: ChunkIdentity = IDENTITY, /, **fields: Any) -> bytes:
    """A file with a right digest and whatever else."""
    entry = {
        "digest": "0" * 64,
        "format_version": 2 if of.inputs else 1,
        "identity": identities.to_fields(of),
        "key": identities.key(of),
        **fields,
    }
    return sealed(save(tensors, metadata={"infoflow": json.dumps(entry, sort_keys=True, separators=(",", ":"))}))


def same_bits(first: ChunkKV | None, second: ChunkKV | None) -> bool:
    """Whether two chunks are equal to the last bit, identity, shape and dtype included."""
    if first is None or second is None or first.identity != second.identity:
        return False
    if (first.inputs is None) != (second.inputs is None):
        return False
    pairs = [(first.keys, second.keys), (first.values, second.values)]
    if first.inputs is not None:
        pairs += [(getattr(first.inputs, name), getattr(second.inputs, name)) for name in INPUT_NAMES]
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


def inputs_of(chunk: ChunkKV | None) -> ChunkInputs:
    """The inputs of a chunk that must have some."""
    assert chunk is not None
    assert chunk.inputs is not None
    return chunk.inputs


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


def main() -> None:
    """Writes a sample store; an earlier release's is never written again."""
    import sys

    from infoflow_kv.store import DiskStore

    store = DiskStore(sys.argv[1])
    for identity in sample_identities():
        store.put(counted_chunk(identity))


if __name__ == "__main__":
    main()

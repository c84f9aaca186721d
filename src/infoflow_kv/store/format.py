"""The bytes of a stored chunk: one safetensors file with the tensors `keys` and `values` and one metadata entry.

The entry `infoflow` is canonical JSON {digest, format_version, identity, key}. `digest` sorts first and safetensors
writes the metadata first, so the digest sits at one fixed place of every file, in this and in all later versions. It
is the SHA-256 of the whole file with its own 64 digits read as zeros: no bit of the file is outside it.
"""

import hashlib
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infoflow_kv.errors import OptionError, StoreError
from infoflow_kv.records import ChunkIdentity, ChunkKV
from infoflow_kv.store import identity as identities

if TYPE_CHECKING:
    from torch import Tensor

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 * 2**20

_PREFIX = rb'{"__metadata__":{"infoflow":"{\"digest\":\"'
_DIGEST_START = LENGTH_BYTES + len(_PREFIX)
_DIGEST_STOP = _DIGEST_START + 64
_ZEROS = b"0" * 64
# KV as it is, and how far it moved behind a neighbour (one number per layer, K/V head and token).
STORED_KINDS = ("none", "movement-2")
_DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


class DamagedChunkError(StoreError):
    """Stored bytes that failed a check; the message is the reason and never holds content."""


class NewerChunkError(StoreError):
    """A sound chunk file of a later format version."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a chunk file says about itself."""

    key: str
    identity: ChunkIdentity
    digest: str


def pack(chunk: ChunkKV) -> tuple[memoryview, memoryview]:
    """Header and payload of the chunk's file, proven readable. Raises StoreError if the header would be too long."""
    from safetensors.torch import save

    check_chunk(chunk)
    keys, values = (t.detach().cpu().contiguous() for t in (chunk.keys, chunk.values))
    if keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
        values = values.clone()  # safetensors refuses tensors that share memory
    key = identities.key(chunk.identity)
    fields = {
        "digest": _ZEROS.decode(),
        "format_version": identities.FORMAT_VERSION,
        "identity": identities.to_fields(chunk.identity),
        "key": key,
    }
    data = memoryview(save({"keys": keys, "values": values}, metadata={"infoflow": identities.dump_json(fields)}))
    start = payload_start(data, len(data))
    head, payload = bytearray(data[:start]), data[start:]
    digest = digest_of([memoryview(head), payload])
    head[_DIGEST_START:_DIGEST_STOP] = digest.encode()
    check_digest(head, digest)
    parse_header(head, len(data))
    return memoryview(head), payload


def unpack(data: bytearray, digest: str, identity: ChunkIdentity) -> ChunkKV:
    """The chunk held by a whole file, whose `digest_of` is `digest`; its tensors share memory with `data`.

    Raises DamagedChunkError for any deviation, also for a sound file of another identity, and NewerChunkError. NaN and
    infinity are not looked for again: they are refused before storing, the digest proves that these are the stored
    bytes, and the look would cost 9 % of a load on idle cores and 15 % on busy ones.
    """
    import torch

    start = payload_start(data, len(data))
    check_digest(data[:start], digest)
    header = parse_header(data[:start], len(data))
    if header.identity != identity:
        raise DamagedChunkError("it holds another chunk than the one its name stands for")
    flat = torch.frombuffer(data, dtype=getattr(torch, identity.model.dtype), offset=start)
    keys, values = flat.view(2, *shape_of(identity)).unbind(0)
    return ChunkKV(identity, keys, values)


def check_chunk(chunk: ChunkKV) -> None:
    """Nothing. Raises OptionError if the tensors are not what the chunk's identity promises, StoreError if the chunk is
    of a kind that is not stored or not finite.

    A chunk that could not be read back, or that would poison every answer that uses it, is refused before it is stored.
    """
    identity, shape = chunk.identity, shape_of(chunk.identity)
    if payload_bytes(identity) == 0:
        raise OptionError(f"a chunk of shape {list(shape)} is empty; expected at least one token, layer and head")
    for name, tensor in (("keys", chunk.keys), ("values", chunk.values)):
        if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{identity.model.dtype}":
            raise OptionError(
                f"{name} are {list(tensor.shape)} {tensor.dtype}; expected {list(shape)} "
                f"{identity.model.dtype} from the chunk's identity"
            )
        if tensor.requires_grad:
            raise OptionError(f"{name} carry a gradient; prefill under torch.inference_mode() or detach them")
        if not _all_finite(tensor):
            raise StoreError(f"{name} hold NaN or infinity; the chunk is not stored")


def shape_of(identity: ChunkIdentity) -> tuple[int, int, int, int]:
    """[layers, kv_heads, tokens, head_dim] of the chunk's keys and of its values."""
    model = identity.model
    return model.num_layers, model.num_kv_heads, len(identity.token_ids), model.head_dim


def payload_bytes(identity: ChunkIdentity) -> int:
    """Bytes of keys and values together. Raises StoreError for a dtype or quantisation that is not stored."""
    if identity.quantisation not in STORED_KINDS:
        raise StoreError(
            f"KV of quantisation {identity.quantisation!r} is not stored; expected one of {', '.join(STORED_KINDS)}"
        )
    if identity.model.dtype not in _DTYPES:
        raise StoreError(f"KV of dtype {identity.model.dtype!r} is not stored; expected one of {', '.join(_DTYPES)}")
    return 2 * math.prod(shape_of(identity)) * _DTYPES[identity.model.dtype][1]


def payload_start(head: bytes | bytearray | memoryview, file_bytes: int) -> int:
    """Offset of the payload, from the file's first bytes. Raises DamagedChunkError if it cannot be right."""
    if len(head) < LENGTH_BYTES:
        raise DamagedChunkError(f"it has only {file_bytes} bytes")
    (header_bytes,) = struct.unpack_from("<Q", head)
    start = LENGTH_BYTES + int(header_bytes)
    if not _DIGEST_STOP <= start <= min(file_bytes, LENGTH_BYTES + MAX_HEADER_BYTES):
        raise DamagedChunkError(f"its header of {header_bytes} bytes does not fit its {file_bytes} bytes")
    return start


def digest_of(blocks: Iterable[memoryview]) -> str:
    """SHA-256 hex of a file's consecutive blocks, the place of the digest read as zeros.

    The first block must reach beyond the digest unless it is the whole file.
    """
    hasher = hashlib.sha256()
    first = True
    for block in blocks:
        if first and len(block) >= _DIGEST_STOP:
            hasher.update(block[:_DIGEST_START])
            hasher.update(_ZEROS)
            block = block[_DIGEST_STOP:]
        hasher.update(block)
        first = False
    return hasher.hexdigest()


def check_digest(head: bytes | bytearray, digest: str) -> None:
    """Nothing. Raises DamagedChunkError unless the file whose `digest_of` is `digest` says so itself."""
    if head[LENGTH_BYTES:_DIGEST_START] != _PREFIX:
        raise DamagedChunkError("it does not begin like a chunk file")
    if head[_DIGEST_START:_DIGEST_STOP] != digest.encode():
        raise DamagedChunkError("its digest does not match its bytes")


def parse_header(head: bytes | bytearray, file_bytes: int) -> Header:
    """What the file says about itself; `head` is everything before the payload.

    Strict: our names, our order, no gaps. Raises DamagedChunkError or, for a later format version, NewerChunkError.
    The library's parser is not used here as it copies the payload; the tests prove that it reads the same.
    """
    try:
        return _parse(head, file_bytes)
    except (DamagedChunkError, NewerChunkError):
        raise
    except StoreError as error:
        raise DamagedChunkError(f"its header is wrong: {error}") from None


def _parse(head: bytes | bytearray, file_bytes: int) -> Header:
    outer = identities.parse_json(bytes(head[LENGTH_BYTES:]))
    entry = _object(outer.get("__metadata__") if isinstance(outer, dict) else None, {"infoflow"})["infoflow"]
    if not isinstance(entry, str):
        raise DamagedChunkError("its header is wrong: the metadata is no text")
    fields = identities.parse_json(entry)
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if type(version) is int and version > identities.FORMAT_VERSION:
        raise NewerChunkError(f"it has format version {version}; this release reads {identities.FORMAT_VERSION}")
    outer = _object(outer, {"__metadata__", "keys", "values"})
    fields = _object(fields, {"digest", "format_version", "identity", "key"})
    if type(version) is not int or version != identities.FORMAT_VERSION:
        raise DamagedChunkError("its header is wrong: no known format version")
    identity = identities.from_fields(fields["identity"])
    key = identities.key(identity)
    if fields["key"] != key:
        raise DamagedChunkError("its header is wrong: key and identity differ")
    try:
        half = payload_bytes(identity) // 2
    except StoreError:  # its message would quote the file
        raise DamagedChunkError("its header is wrong: a dtype or quantisation that is not stored") from None
    for name, first in (("keys", 0), ("values", half)):
        expected = {
            "dtype": _DTYPES[identity.model.dtype][0],
            "shape": list(shape_of(identity)),
            "data_offsets": [first, first + half],
        }
        if outer[name] != expected:
            raise DamagedChunkError(f"its header is wrong: {name} do not have the layout of the identity")
    if half == 0 or len(head) + 2 * half != file_bytes:
        raise DamagedChunkError(f"it has {file_bytes} bytes, its header promises {len(head) + 2 * half}")
    return Header(key, identity, str(fields["digest"]))


def _object(value: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names:
        raise DamagedChunkError(f"its header is wrong: expected an object with exactly {', '.join(sorted(names))}")
    return value


def _all_finite(tensor: "Tensor") -> bool:
    """Whether no element is NaN or infinite. One pass at memory speed: `isfinite().all()` takes 15 times as long."""
    import torch

    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))

"""The bytes of a stored chunk: one safetensors file with the tensors of `payload.parts_of` and one metadata entry.

The entry `infoflow` is canonical JSON {digest, format_version, identity, key}. `digest` sorts first and safetensors
writes the metadata first, so the digest sits at one fixed place of every file, in this and in all later versions. It
is the SHA-256 of the whole file with its own 64 digits read as zeros: no bit of the file is outside it.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from infoflow_kv.errors import StoreError
from infoflow_kv.records import ChunkIdentity, ChunkKV
from infoflow_kv.store import identity as identities
from infoflow_kv.store.payload import IndexCheck, check_chunk, parts_of, tensors_of, view_chunk

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 * 2**20

_PREFIX = rb'{"__metadata__":{"infoflow":"{\"digest\":\"'
_DIGEST_START = LENGTH_BYTES + len(_PREFIX)
_DIGEST_STOP = _DIGEST_START + 64
_ZEROS = b"0" * 64


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
    key = identities.key(chunk.identity)
    fields = {
        "digest": _ZEROS.decode(),
        "format_version": identities.version_of(chunk.identity),
        "identity": identities.to_fields(chunk.identity),
        "key": key,
    }
    data = memoryview(save(tensors_of(chunk), metadata={"infoflow": identities.dump_json(fields)}))
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
    start = payload_start(data, len(data))
    check_digest(data[:start], digest)
    header = parse_header(data[:start], len(data))
    if header.identity != identity:
        raise DamagedChunkError("it holds another chunk than the one its name stands for")
    check = IndexCheck(identity)
    check.feed(memoryview(data)[start:])
    if check.fault:
        raise DamagedChunkError(check.fault)
    return view_chunk(data, start, identity)


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
        raise NewerChunkError(f"it has format version {version}; this release reads up to {identities.FORMAT_VERSION}")
    fields = _object(fields, {"digest", "format_version", "identity", "key"})
    identity = identities.from_fields(fields["identity"])
    if type(version) is not int or version != identities.version_of(identity):
        raise DamagedChunkError("its header is wrong: its format version is not that of its identity")
    key = identities.key(identity)
    if fields["key"] != key:
        raise DamagedChunkError("its header is wrong: key and identity differ")
    try:
        parts = parts_of(identity)
    except StoreError:  # its message would quote the file
        raise DamagedChunkError("its header is wrong: a dtype or quantisation that is not stored") from None
    outer = _object(outer, {"__metadata__", *(part.name for part in parts)})
    for part in parts:
        expected = {"dtype": part.code, "shape": list(part.shape), "data_offsets": [part.start, part.stop]}
        if outer[part.name] != expected:
            raise DamagedChunkError(f"its header is wrong: {part.name} do not have the layout of the identity")
    if any(part.start == part.stop for part in parts) or len(head) + parts[-1].stop != file_bytes:
        raise DamagedChunkError(f"it has {file_bytes} bytes, its header promises {len(head) + parts[-1].stop}")
    return Header(key, identity, str(fields["digest"]))


def _object(value: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names:
        raise DamagedChunkError(f"its header is wrong: expected an object with exactly {', '.join(sorted(names))}")
    return value

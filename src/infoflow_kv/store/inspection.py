"""Checking a chunk file in little memory and without torch."""

import itertools
from collections.abc import Iterator

from infoflow_kv.store.files import read_head, stream_blocks
from infoflow_kv.store.format import (
    DamagedChunkError,
    Header,
    NewerChunkError,
    check_digest,
    digest_of,
    parse_header,
)
from infoflow_kv.store.payload import IndexCheck


def inspect(fd: int, num_bytes: int, key: str) -> Header:
    """What a sound file says about itself. Raises DamagedChunkError with the reason, or NewerChunkError.

    All that `get` checks as well: the whole digest, a strict header, that `key` is the key of its identity, and that
    the positions and visual tokens of a chunk with images lie in their ranges.
    """
    head = read_head(fd, num_bytes)
    newer: NewerChunkError | None = None
    header: Header | None = None
    try:
        header = parse_header(head, num_bytes)
    except NewerChunkError as error:
        newer = error  # believed only if the digest holds: one flipped bit can make a 1 a 3
    check = IndexCheck(header.identity) if header is not None else None
    rest = _watched(stream_blocks(fd, num_bytes - len(head)), check)
    check_digest(head, digest_of(itertools.chain([memoryview(head)], rest)))
    if newer is not None or header is None:
        raise newer or DamagedChunkError("it has no header")
    if header.key != key:
        raise DamagedChunkError("it holds another chunk than the one its name stands for")
    if check is not None and check.fault:
        raise DamagedChunkError(check.fault)
    return header


def _watched(blocks: Iterator[memoryview], check: IndexCheck | None) -> Iterator[memoryview]:
    """The same blocks, each looked at before it is handed on, as the next one overwrites it."""
    for block in blocks:
        if check is not None:
            check.feed(block)
        yield block

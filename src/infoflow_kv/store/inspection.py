"""Checking a chunk file in little memory and without torch."""

import itertools

from infoflow_kv.store.files import read_head, stream_blocks
from infoflow_kv.store.format import (
    DamagedChunkError,
    Header,
    NewerChunkError,
    check_digest,
    digest_of,
    parse_header,
)


def inspect(fd: int, num_bytes: int, key: str) -> Header:
    """What a sound file says about itself. Raises DamagedChunkError with the reason, or NewerChunkError.

    All that `get` checks as well: the whole digest, a strict header, and that `key` is the key of its identity.
    """
    head = read_head(fd, num_bytes)
    newer: NewerChunkError | None = None
    header: Header | None = None
    try:
        header = parse_header(head, num_bytes)
    except NewerChunkError as error:
        newer = error  # believed only if the digest holds: one flipped bit can make a 1 a 3
    rest = stream_blocks(fd, num_bytes - len(head))
    check_digest(head, digest_of(itertools.chain([memoryview(head)], rest)))
    if newer is not None or header is None:
        raise newer or DamagedChunkError("it has no header")
    if header.key != key:
        raise DamagedChunkError("it holds another chunk than the one its name stands for")
    return header

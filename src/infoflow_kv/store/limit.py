"""The size limit of a disk store: least recently used chunks go first."""

import os
from pathlib import Path

from infoflow_kv.errors import StoreError
from infoflow_kv.store.layout import entries_in


def make_room(root: Path, max_bytes: int) -> int:
    """Number of chunks evicted until every file under `root`, whoever wrote it, fits into `max_bytes` together.

    Quarantined files go first, then chunks by their last use. Raises StoreError, and evicts nothing, if even that
    would not be enough, and OSError if the system refuses. Readers are not disturbed: they hold their bytes in memory.
    """
    entries = list(entries_in(root))
    excess = sum(entry.num_bytes for entry in entries) - max_bytes
    candidates = [entry for entry in entries if entry.kind in ("chunk", "quarantine")]
    if excess > sum(entry.num_bytes for entry in candidates):
        raise StoreError(
            f"store '{root}' cannot stay within max_bytes={max_bytes}: chunks being written and foreign files need "
            f"{max_bytes + excess - sum(entry.num_bytes for entry in candidates)} bytes; raise max_bytes"
        )
    evicted = 0
    for entry in sorted(candidates, key=lambda entry: (entry.kind == "chunk", entry.mtime_ns, entry.path)):
        if excess <= 0:
            break
        try:
            os.unlink(entry.path)
            evicted += entry.kind == "chunk"
        except FileNotFoundError:
            pass  # another process evicted it
        excess -= entry.num_bytes
    return evicted

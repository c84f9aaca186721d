"""Chunks on a local or shared disk (POSIX): one file each, no index, no lock file."""

import errno
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from infoflow_kv.errors import OptionError, StoreError
from infoflow_kv.records import ChunkIdentity, ChunkKV
from infoflow_kv.store import files, layout, limit
from infoflow_kv.store import identity as identities
from infoflow_kv.store.format import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    DamagedChunkError,
    NewerChunkError,
    digest_of,
    pack,
    unpack,
)
from infoflow_kv.store.inspection import inspect
from infoflow_kv.store.payload import payload_bytes
from infoflow_kv.store.protocol import StoreCounters, Tally

_log = logging.getLogger(__name__)


class DiskStore:
    """A `ChunkStore` in a folder, which several processes may share.

    Every read is verified to the last bit; whatever fails is a miss, is counted and is moved to `quarantine/`. Opening
    a store writes nothing but its marker into a new one, so that a read-only folder serves hits.

    >>> import tempfile
    >>> list(DiskStore(tempfile.mkdtemp(), max_bytes=40 * 2**30).keys())
    []
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        """Raises StoreError if `path` is a file, a folder that is no store, or a newer format's store.

        `max_bytes` bounds all files in the folder together; None means no limit.
        """
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes <= 0):
            raise OptionError(f"max_bytes must be a positive whole number or None, given {max_bytes!r}")
        self.path = _open(path)
        self.max_bytes = max_bytes
        self._tally = Tally()
        # A hint only, for leaving a folder that its owner closed as it is; a real write tries and reports.
        effective = os.access in os.supports_effective_ids
        self._may_write = os.access(self.path, os.W_OK | os.X_OK, effective_ids=effective)
        if self._may_write:
            files.remove_stale(self.path)

    @property
    def counters(self) -> StoreCounters:
        """What this object did since it was opened."""
        return self._tally.read()

    def get(self, identity: ChunkIdentity) -> ChunkKV | None:
        """The verified chunk, or None. Never raises for what lies on the disk."""
        key = identities.key(identity)
        try:
            judged = layout.look(self.path, key)
        except OSError as error:
            self._miss_unread(key, error)
            return None
        try:
            chunk = self._load(key, identity)
        except OSError as error:
            self._miss_unread(key, error)
            return None
        except NewerChunkError as error:
            _log.warning("stored chunk %s is not used: %s", key, error)
            self._tally.add("misses")
            return None
        except StoreError as error:
            self._tally.add("misses", "damaged")
            _log.warning("stored chunk %s is damaged (%s); %s", key, error, self._set_aside(key, judged))
            return None
        self._tally.add("hits")
        return chunk

    def put(self, chunk: ChunkKV) -> None:
        """Nothing; on return the chunk is on disk and survives a power cut.

        Raises StoreError, leaving no trace, if the disk is full, read-only, gone or failing, or if the chunk is larger
        than `max_bytes`; OptionError if the chunk does not match its identity.
        """
        key = identities.key(chunk.identity)
        doing = f"cannot store chunk {key}"
        try:
            parts = pack(chunk)
            self._check_limit(sum(part.nbytes for part in parts), doing)
            _ensure_marker(self.path)
            make_room = None if self.max_bytes is None else functools.partial(self._make_room, self.max_bytes)
            files.publish(self.path, key, parts, make_room)
        except OSError as error:
            self._tally.add("write_failures")
            raise layout.explain(error, self.path, doing) from error
        except StoreError:
            self._tally.add("write_failures")
            raise
        self._tally.add("written")

    def contains(self, identity: ChunkIdentity) -> bool:
        """Whether a file stands under the chunk's name; only `get` verifies it."""
        return files.is_present(self.path, identities.key(identity))

    def delete(self, key: str) -> bool:
        """Whether anything was stored under the key; it is gone now, quarantined copies included.

        Raises OptionError if `key` is no key, StoreError if the system refuses.
        """
        identities.check_key(key)
        try:
            return files.remove(self.path, key)
        except OSError as error:
            raise layout.explain(error, self.path, f"cannot delete chunk {key}") from error

    def keys(self) -> Iterator[str]:
        """The keys of all chunk files, ascending; those of other processes too."""
        return layout.keys_in(self.path)

    def _load(self, key: str, identity: ChunkIdentity) -> ChunkKV:
        with files.open_chunk(self.path, key) as (fd, num_bytes):
            header_bytes = num_bytes - payload_bytes(identity)
            if not 0 < header_bytes <= LENGTH_BYTES + MAX_HEADER_BYTES:
                # Not the size this chunk has. Find out why without taking that much memory.
                inspect(fd, num_bytes, key)
                raise DamagedChunkError("its size is not that of the chunk its name stands for")
            data = bytearray(num_bytes)
            digest = digest_of(files.read_blocks(fd, memoryview(data)))
            chunk = unpack(data, digest, identity)
            if self._may_write:
                files.touch(fd)
            return chunk

    def _miss_unread(self, key: str, error: OSError) -> None:
        """Counts a miss. A missing file is the ordinary kind; else the system's reason is told, the file left alone."""
        self._tally.add("misses")
        if error.errno != errno.ENOENT:
            self._tally.add("read_failures")
            _log.warning("stored chunk %s cannot be read: %s", key, os.strerror(error.errno or 0))

    def _set_aside(self, key: str, judged: os.stat_result) -> str:
        """What became of the damaged file, for the log."""
        if not self._may_write:
            return "left in place, the store is read-only"
        try:
            moved = files.quarantine(self.path, key, judged)
        except OSError as error:
            return f"left in place ({os.strerror(error.errno or 0)})"
        return "moved to quarantine" if moved else "already replaced"

    def _check_limit(self, num_bytes: int, doing: str) -> None:
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise StoreError(f"{doing}: it has {num_bytes} bytes, the store's max_bytes is {self.max_bytes}; raise it")

    def _make_room(self, max_bytes: int) -> None:
        self._tally.add("evicted", count=limit.make_room(self.path, max_bytes))


def _open(path: str | os.PathLike[str]) -> Path:
    """The root of the store at `path`, made if it is not there yet."""
    given = Path(path).absolute()
    if not os.path.exists(given):
        try:
            given.parent.mkdir(parents=True, exist_ok=True)
            files.make_folder(given)
        except OSError as error:
            raise layout.explain(error, given, "cannot make the folder") from None
    root = layout.resolve(given)
    try:
        _ensure_marker(root)
    except OSError as error:
        if error.errno not in layout.READ_ONLY_ERRNOS:
            raise layout.explain(error, root, "cannot open") from None
        # An empty folder that cannot be written: a store without chunks; `put` will say why.
    return root


def _ensure_marker(root: Path) -> None:
    """Nothing; the folder is ours. Raises StoreError if it is another's, OSError if the marker cannot be written."""
    if layout.has_marker(root):
        return
    # Another process may have begun the store between the two looks, hence the third.
    if not layout.is_empty(root) and not layout.has_marker(root):
        raise StoreError(
            f"'{root}' is not an InfoFlow KV store (it is not empty and has no {layout.MARKER}); "
            "give a new or an empty folder"
        )
    files.publish_marker(root, layout.marker_bytes())

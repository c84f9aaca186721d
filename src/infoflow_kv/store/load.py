"""Reading several chunks at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from infoflow_kv.errors import OptionError
from infoflow_kv.records import ChunkIdentity, ChunkKV
from infoflow_kv.store.protocol import ChunkStore


def load_many(store: ChunkStore, identities: Sequence[ChunkIdentity], max_workers: int = 2) -> list[ChunkKV | None]:
    """What `store.get` gives for each identity, in their order; repeated identities are read once and shared.

    Threads suffice: reading and SHA-256 release Python's lock. More than two gain little, as one core digests about as
    fast as a disk delivers.
    """
    if type(max_workers) is not int or max_workers < 1:
        raise OptionError(f"max_workers must be at least 1, given {max_workers!r}")
    wanted = list(dict.fromkeys(identities))
    if max_workers == 1 or len(wanted) < 2:
        found = [store.get(identity) for identity in wanted]
    else:
        with ThreadPoolExecutor(min(max_workers, len(wanted)), thread_name_prefix="load-chunk") as pool:
            found = list(pool.map(store.get, wanted))
    by_identity = dict(zip(wanted, found, strict=True))
    return [by_identity[identity] for identity in identities]

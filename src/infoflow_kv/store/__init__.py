"""Chunk stores: one chunk, one name, found whole or not at all. Importing this loads no torch."""

from infoflow_kv.store.disk import DiskStore
from infoflow_kv.store.identity import FORMAT_VERSION, key
from infoflow_kv.store.load import load_many
from infoflow_kv.store.memory import MemoryStore
from infoflow_kv.store.protocol import ChunkStore, StoreCounters
from infoflow_kv.store.verify import ChunkRecord, ModelStat, StoreStat, VerifyReport, ls, stat, verify

__all__ = [
    "FORMAT_VERSION",
    "ChunkRecord",
    "ChunkStore",
    "DiskStore",
    "MemoryStore",
    "ModelStat",
    "StoreCounters",
    "StoreStat",
    "VerifyReport",
    "key",
    "load_many",
    "ls",
    "stat",
    "verify",
]

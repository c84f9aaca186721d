"""InfoFlow KV: answers over your own documents from chunk KV that was computed once."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infoflow_kv.chunking import read_paths, split
    from infoflow_kv.decoding import Sampling, decode, sampler
    from infoflow_kv.engine import Engine
    from infoflow_kv.errors import InfoFlowError, ParallelError
    from infoflow_kv.methods import METHODS
    from infoflow_kv.models import load
    from infoflow_kv.parallel.group import Group
    from infoflow_kv.positions import assemble
    from infoflow_kv.prefilling import prefill
    from infoflow_kv.records import Answer, Document
    from infoflow_kv.repairing import repair
    from infoflow_kv.select import AttentionMass, Scene, take
    from infoflow_kv.store import DiskStore, MemoryStore

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Answer",
    "AttentionMass",
    "DiskStore",
    "Document",
    "Engine",
    "Group",
    "InfoFlowError",
    "MemoryStore",
    "ParallelError",
    "Sampling",
    "Scene",
    "assemble",
    "decode",
    "load",
    "prefill",
    "read_paths",
    "repair",
    "sampler",
    "split",
    "take",
]

# Loaded on first use (PEP 562), so that `--help` and the store do not wait for torch and Transformers.
_HOMES = {
    "METHODS": "methods",
    "Answer": "records",
    "AttentionMass": "select",
    "DiskStore": "store",
    "Document": "records",
    "Engine": "engine",
    "Group": "parallel.group",
    "InfoFlowError": "errors",
    "MemoryStore": "store",
    "ParallelError": "errors",
    "Sampling": "decoding",
    "Scene": "select",
    "assemble": "positions",
    "decode": "decoding",
    "load": "models",
    "prefill": "prefilling",
    "read_paths": "chunking",
    "repair": "repairing",
    "sampler": "decoding",
    "split": "chunking",
    "take": "select",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'infoflow_kv' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"infoflow_kv.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

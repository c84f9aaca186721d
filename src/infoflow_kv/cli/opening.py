"""Opens what the verbs work with: documents, store, model. Torch is imported inside, on use."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infoflow_kv.cli.output import is_terminal, note, status
from infoflow_kv.errors import DocumentError, OptionError, StoreError

if TYPE_CHECKING:
    from infoflow_kv.chunking import ReadResult
    from infoflow_kv.engine import Engine
    from infoflow_kv.models import LanguageModel
    from infoflow_kv.records import Document
    from infoflow_kv.store import ChunkStore, DiskStore


@dataclass(frozen=True, slots=True)
class Chunkable:
    """Documents that this engine can chunk, in order, their number of chunks, and why the others are left out."""

    documents: tuple["Document", ...]
    num_chunks: int
    skipped: dict[str, str]


def read_documents(paths: list[str], max_file_bytes: int) -> "ReadResult":
    """The documents behind the paths; DocumentError if a path does not exist or nothing could be read."""
    from infoflow_kv.chunking import read_paths

    if "-" in paths and is_terminal(sys.stdin):
        note("reading documents from the terminal; end with Ctrl-D")
    stdin = sys.stdin.buffer if sys.stdin is not None else None
    return read_paths(paths, max_file_bytes=max_file_bytes, stdin=stdin)


def store_folder(given: str | None) -> Path:
    """The folder that `--store` names, else the default one in the cache."""
    if given is not None:
        return Path(given).expanduser()
    from infoflow_kv.models.embedded import cache_folder

    return cache_folder() / "kv"


def open_store(folder: Path | str) -> "DiskStore":
    """The store in the folder, made if it is not there; OptionError if it cannot be one."""
    from infoflow_kv.store import DiskStore

    try:
        return DiskStore(folder)
    except StoreError as error:
        raise OptionError(str(error)) from error


def check_choice(method: str, budget: float | str, budget_max: float | None = None, geometry: str = "GLOBAL") -> None:
    """Nothing; OptionError for an unknown method or geometry or a budget outside 0..1, before anything slow is done."""
    from infoflow_kv.methods import find_method
    from infoflow_kv.positions import check_geometry
    from infoflow_kv.select import check_budget

    find_method(method)
    check_geometry(geometry)
    if check_budget(budget, budget_max).cover is None and budget_max is not None:
        raise OptionError(f"--budget-max bounds an adaptive budget, and --budget is {budget}; give --budget auto")


def load_model(name: str, dtype: str, device: str) -> "LanguageModel":
    """The model, ready to compute, fingerprint of its weights included."""
    from infoflow_kv.models import load, quiet_transformers

    quiet_transformers()
    with status(f"loading {name}") as say:
        model = load(name, dtype=dtype, device=device, progress=say)
        # Hashed at first use otherwise, which would count as the first request's time.
        _ = model.identity
    return model


def make_engine(model: "LanguageModel", store: "ChunkStore | None", **settings: Any) -> "Engine":
    """The engine over this model and store; `settings` as `Engine` takes them."""
    from infoflow_kv.engine import Engine

    return Engine(model, store, **settings)


def chunkable(engine: "Engine", read: "ReadResult") -> Chunkable:
    """The documents without those that this model's tokenizer cannot take; DocumentError if none is left."""
    documents: list[Document] = []
    skipped = dict(read.skipped)
    num_chunks = 0
    for document in read.documents:
        try:
            num_chunks += len(engine.split(document))
        except DocumentError as error:
            skipped[document.id or document.source or f"document {len(documents) + 1}"] = str(error)
        else:
            documents.append(document)
    if not documents:
        raise DocumentError(f"nothing could be read: {'; '.join(skipped.values())}")
    return Chunkable(tuple(documents), num_chunks, skipped)


def tell_skipped(skipped: dict[str, str]) -> None:
    """Nothing; one line on stderr for each file that was left out."""
    for label, reason in skipped.items():
        note(f"skipped '{label}': {reason}")

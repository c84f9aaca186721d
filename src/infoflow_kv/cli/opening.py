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


_REASONS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Chunkable:
    """Documents that this engine can chunk, in order, their number of chunks, and why the others are left out.

    `images`: how many images, and tokens that stand for parts of them, each chunk of these documents holds, in order.
    `notices`: what of the images was not used.
    """

    documents: tuple["Document", ...]
    num_chunks: int
    skipped: dict[str, str]
    images: tuple[tuple[int, int], ...] = ()
    notices: tuple[str, ...] = ()


def read_documents(paths: list[str], max_file_bytes: int, pdf_pages: bool = False) -> "ReadResult":
    """The documents behind the paths; DocumentError if a path does not exist or nothing could be read.

    `pdf_pages`: the pages of a PDF as images; OptionError where the packages for it are missing.
    """
    from infoflow_kv.chunking import read_paths

    if "-" in paths and is_terminal(sys.stdin):
        note("reading documents from the terminal; end with Ctrl-D")
    stdin = sys.stdin.buffer if sys.stdin is not None else None
    return read_paths(paths, max_file_bytes=max_file_bytes, stdin=stdin, pdf_pages=pdf_pages)


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


def load_model(name: str, dtype: str, device: str, pdf_pages: bool = False) -> "LanguageModel":
    """The model, ready to compute, fingerprint of its weights included; OptionError where `pdf_pages` wants one that
    reads images."""
    from infoflow_kv.models import load, quiet_transformers

    quiet_transformers()
    with status(f"loading {name}") as say:
        model = load(name, dtype=dtype, device=device, progress=say)
        # Hashed at first use otherwise, which would count as the first request's time.
        _ = model.identity
    if pdf_pages and model.vision is None:
        raise OptionError(
            f"--pdf-pages reads pages as images, and {name} reads text only; give a vision-language model, or leave "
            "the option out to read their text"
        )
    return model


def make_engine(model: "LanguageModel", store: "ChunkStore | None", **settings: Any) -> "Engine":
    """The engine over this model and store; `settings` as `Engine` takes them."""
    from infoflow_kv.engine import Engine

    return Engine(model, store, **settings)


def chunkable(engine: "Engine", read: "ReadResult") -> Chunkable:
    """The documents without those that this model cannot take (an odd character, a damaged image, any image where it
    reads text only); DocumentError if none is left."""
    documents: list[Document] = []
    skipped = dict(read.skipped)
    images: list[tuple[int, int]] = []
    notices: dict[str, None] = {}
    for document in read.documents:
        try:
            chunks = engine.split(document)
        except DocumentError as error:
            skipped[document.id or document.source or f"document {len(documents) + 1}"] = str(error)
            continue
        documents.append(document)
        for chunk in chunks:
            prepared = chunk.images.prepared if chunk.images is not None else ()
            images.append((len(prepared), sum(one.num_visual for one in prepared)))
            notices |= dict.fromkeys(notice for one in prepared for notice in one.picture.notices)
    if not documents:
        reasons = list(dict.fromkeys(skipped.values()))
        more = len(reasons) - _REASONS_SHOWN
        shown = "; ".join(reasons[:_REASONS_SHOWN]) + (f"; and {more} more reasons" if more > 0 else "")
        raise DocumentError(f"nothing could be read: {shown}")
    return Chunkable(tuple(documents), len(images), skipped, tuple(images), tuple(notices))


def tell_skipped(skipped: dict[str, str]) -> None:
    """Nothing; one line on stderr for each file that was left out."""
    for label, reason in skipped.items():
        note(f"skipped '{label}': {reason}")

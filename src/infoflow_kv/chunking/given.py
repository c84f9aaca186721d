"""Documents as callers give them: texts or records, always a list."""

from collections.abc import Iterable

from infoflow_kv.errors import OptionError
from infoflow_kv.records import Document

Documents = Iterable[Document | str]


def listed(documents: Documents) -> list[Document]:
    """The documents as Documents; OptionError for a bare string or Document, which would be taken apart silently."""
    if isinstance(documents, (str, Document)):
        raise OptionError(f"documents is one {type(documents).__name__}; expected a list of them: [document]")
    return [as_document(document) for document in documents]


def as_document(given: Document | str) -> Document:
    """A Document of a plain string; Documents as they are."""
    return Document(text=given) if isinstance(given, str) else given

"""Documents, files and questions → token ids: chunks and prompts."""

from infoflow_kv.chunking.given import Documents, as_document, listed
from infoflow_kv.chunking.layout import layout
from infoflow_kv.chunking.pictures import chunks_of
from infoflow_kv.chunking.readers import MAX_FILE_BYTES, ReadResult, read_paths
from infoflow_kv.chunking.split import MIN_CHUNK_TOKENS, document_id, split
from infoflow_kv.chunking.template import Template, render
from infoflow_kv.chunking.tokens import TextEncoder, Tokenizer, replace_surrogates

__all__ = [
    "MAX_FILE_BYTES",
    "MIN_CHUNK_TOKENS",
    "Documents",
    "ReadResult",
    "Template",
    "TextEncoder",
    "Tokenizer",
    "as_document",
    "chunks_of",
    "document_id",
    "layout",
    "listed",
    "read_paths",
    "render",
    "replace_surrogates",
    "split",
]

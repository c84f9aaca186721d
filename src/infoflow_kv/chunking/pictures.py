"""One document of text and images → chunks: an image with the words around it is a unit of reuse.

A short text stands with the image behind it, as its caption or its lead; a short one at the end stands with the last
image. A long text is chunked by itself, as any other.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from infoflow_kv.chunking.split import document_id, split
from infoflow_kv.chunking.tokens import TextEncoder, replace_surrogates
from infoflow_kv.errors import DocumentError
from infoflow_kv.records import Chunk, ChunkImages, Document, Image

# A longer text is worth a chunk of its own: it can then be reused without the image, and the image without it.
GLUED_TOKENS = 64


@runtime_checkable
class Vision(Protocol):
    """What this room uses of a model's images."""

    def read(self, source: Any) -> Any: ...

    def prepare(self, picture: Any) -> Any: ...

    def images(self, token_ids: Sequence[int], prepared: Sequence[Any], tiles: int = 1) -> ChunkImages: ...


def chunks_of(
    document: Document, encoder: TextEncoder, chunk_tokens: int = 512, vision: Vision | None = None, tiles: int = 1
) -> tuple[Chunk, ...]:
    """The chunks of one document, of text (see `split`) or with images. `tiles`: images are prefilled in so many tiles
    along each side."""
    if not document.parts:
        return split(document, encoder, chunk_tokens)
    return split_pictures(document, encoder, chunk_tokens, vision, tiles)


def split_pictures(
    document: Document, encoder: TextEncoder, chunk_tokens: int, vision: Vision | None, tiles: int = 1
) -> tuple[Chunk, ...]:
    """The chunks of a document with images, in order. An image is never cut, however many tokens it has.

    Raises DocumentError for a model that reads no images, for an image that cannot be read, for a document with both
    `text` and `parts`, and for one with neither text nor images.
    """
    if document.text:
        raise DocumentError("a document has both text and parts; put the text into parts")
    name = picture_document_id(document)
    if vision is None and any(isinstance(part, Image) for part in document.parts):
        raise DocumentError(
            f"document '{name}' holds images, and this model reads text only; load a vision-language model, "
            "or leave the document out"
        )
    pieces = _pieces(document)
    if not pieces:
        raise DocumentError(f"document '{name}' has neither text nor images; give it some or leave it out")
    title = replace_surrogates(document.title).strip()
    chunks: list[Chunk] = []
    before: tuple[int, ...] = ()
    for index, piece in enumerate(pieces):
        is_last = index + 1 == len(pieces)
        if isinstance(piece, Image):
            assert vision is not None
            prepared = vision.prepare(vision.read(piece.source))
            ids = before + tuple(prepared.token_ids)
            before = ()
            after = pieces[index + 1] if index + 2 == len(pieces) else None
            if isinstance(after, str):
                caption = encoder.content("\n" + after)[0]
                if len(caption) <= GLUED_TOKENS:
                    ids += caption
                    is_last = True
            chunks.append(Chunk(ids, name, title, images=vision.images(ids, [prepared], tiles)))
            if is_last:
                break  # the caption is in it
            continue
        ids = encoder.content(piece)[0]
        if len(ids) > GLUED_TOKENS or is_last:
            chunks += split(Document(text=piece, id=name), encoder, chunk_tokens)
        else:
            before = ids
    return tuple(replace(chunk, index=number, title=title) for number, chunk in enumerate(chunks))


def picture_document_id(document: Document) -> str:
    """As `document_id`, from all parts."""
    if document.id or document.source:
        return document_id(document)
    whole = hashlib.sha256()
    for part in document.parts:
        is_image = isinstance(part, Image)
        source = part.source if isinstance(part, Image) else part
        data = source if isinstance(source, bytes) else str(source).encode("utf-8", "surrogatepass")
        whole.update(bytes([is_image]) + len(data).to_bytes(8, "little") + data)
    return "doc-" + whole.hexdigest()[:12]


def _pieces(document: Document) -> list[str | Image]:
    """The parts, neighbouring texts joined and empty ones left out, each text ended; the title is the first text."""
    title = replace_surrogates(document.title).strip()
    found: list[str | Image] = [title + "\n"] if title else []
    for part in document.parts:
        if isinstance(part, Image):
            found.append(part)
            continue
        text = replace_surrogates(part).strip()
        if text and found and isinstance(found[-1], str):
            found[-1] += text + "\n\n"
        elif text:
            found.append(text + "\n\n")
    return found

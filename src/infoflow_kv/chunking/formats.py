"""The bytes of one file → documents: text, HTML, PDF, JSONL, images. Errors give the reason only; readers.py names the
file."""

import io
import re
from typing import Any

from lxml import etree  # type: ignore[import-untyped]

from infoflow_kv.chunking.jsonl import jsonl_documents, looks_like_jsonl
from infoflow_kv.chunking.pages import page_pictures
from infoflow_kv.chunking.signatures import IMAGES, binary_kind, is_image
from infoflow_kv.chunking.tokens import replace_surrogates
from infoflow_kv.errors import DocumentError
from infoflow_kv.records import Document, Image

_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
_JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_PDF_SUFFIXES = frozenset({".pdf"})
_IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
# They begin as TIFF does, and what a TIFF reader finds in them is a thumbnail.
_RAW_SUFFIXES = frozenset({".arw", ".cr2", ".dng", ".nef", ".orf", ".pef", ".rw2", ".srw"})
# Files that people have beside their documents and that hold no text to read as it is.
_BINARY = """
    .7z .a .avi .avif .bz2 .class .db .dll .dmg .doc .docx .dylib .epub .exe .flac .gguf .gz .heic .ico .iso .jar .m4a
    .mkv .mobi .mov .mp3 .mp4 .npy .npz .o .odp .ods .odt .ogg .onnx .otf .parquet .arrow .pkl .ppt .pptx .pt .pth .pyc
    .rar .rtf .safetensors .so .sqlite .sqlite3 .tar .tgz .ttf .wav .webm .whl .woff .woff2 .xls .xlsx .xz .zip .zst
"""
_BINARY_SUFFIXES = frozenset(_BINARY.split()) | _RAW_SUFFIXES
_HTML_BLOCKS = """
    address article aside blockquote body dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6
    header hr html main nav ol p pre section summary table ul
"""
_KINDS_READ = f"text, Markdown, HTML, PDF, JSONL and images ({IMAGES}) are read"


def parse(
    data: bytes, *, suffix: str, label: str, path: str, max_bytes: int, pdf_pages: bool = False
) -> tuple[list[Document], dict[str, str]]:
    """Return the documents in one file's bytes, and the reasons for records and pages left out (JSONL, `pdf_pages`).

    An image is known by its first bytes, whatever the suffix, and is not decoded here. Otherwise the suffix decides,
    then the content: a PDF is known by its first bytes; without a suffix HTML and JSONL are too. `label` becomes the
    documents' source. `path` is where the bytes came from, empty for standard input: images are read from there again.
    Text of more than `max_bytes` characters is refused. `pdf_pages`: a PDF is a document for each page, as an image.
    Raises DocumentError with the reason.
    """
    suffix = suffix.lower()
    if is_image(data) and suffix not in _RAW_SUFFIXES:
        return [Document(parts=(Image(path or data),), source=label)], {}
    if suffix in _IMAGE_SUFFIXES:
        raise DocumentError(
            f"a {suffix} file cannot be read: it holds no image of a known kind ({IMAGES}), or its header is damaged"
        )
    if suffix in _BINARY_SUFFIXES:
        raise DocumentError(f"a {suffix} file cannot be read as text; {_KINDS_READ}")
    if data.startswith(b"%PDF-") or suffix in _PDF_SUFFIXES:
        if pdf_pages:
            return pdf_documents(data, label)
        return [Document(text=_some(pdf_text(data, max_bytes)), source=label)], {}
    text = decode(data)
    if suffix in _JSONL_SUFFIXES or (not suffix and looks_like_jsonl(text)):
        return jsonl_documents(text, label, path, max_bytes)
    if suffix in _HTML_SUFFIXES or (not suffix and re.match(r"\s*<(!doctype html|html)\b", text, re.IGNORECASE)):
        text = html_text(text)
    return [Document(text=_some(text), source=label)], {}


def decode(data: bytes) -> str:
    r"""Return the text of UTF-8 bytes, or of UTF-16 bytes that begin with a byte-order mark; `\r\n` becomes `\n`.

    No other encoding is guessed. Raises DocumentError for a binary file and for other encodings.
    """
    if kind := binary_kind(data):
        raise DocumentError(f"binary file ({kind}); {_KINDS_READ}")
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    if not wide and (nul := data.find(b"\0")) >= 0:
        raise DocumentError(f"binary file (a NUL byte at offset {nul}); {_KINDS_READ}")
    try:
        text = data.decode("utf-16" if wide else "utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"not {'UTF-16' if wide else 'UTF-8'} text: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert it, for example with: iconv -f WINDOWS-1252 -t UTF-8"
        ) from error
    if (nul := text.find("\0")) >= 0:
        raise DocumentError(f"binary file (a NUL character at offset {nul}); {_KINDS_READ}")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def pdf_text(data: bytes, max_characters: int) -> str:
    """Return the text of a PDF's pages, blank lines between them. Raises DocumentError if there is none to get."""
    import pypdf  # here, not above: it takes longer to import than the rest of this room
    from pypdf.errors import DependencyError

    pages: list[str] = []
    total = 0
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError("encrypted PDF; save it without a password")
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            total += len(pages[-1])
            if total > max_characters:
                raise DocumentError(f"the PDF unpacks to more than {max_characters:,} characters; split it")
    except DocumentError:
        raise
    except DependencyError as error:
        raise DocumentError("encrypted PDF; save it without a password") from error
    except Exception as error:  # on damaged input pypdf raises errors of many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DocumentError(f"damaged PDF ({reason}); open it and save it anew") from error
    text = replace_surrogates("\n\n".join(p for p in pages if p).replace("\0", ""))
    if not text.strip():
        raise DocumentError(
            "the PDF has no text layer (a scan?); run OCR on it first, or read its pages as images (--pdf-pages)"
        )
    return text


def pdf_documents(data: bytes, label: str) -> tuple[list[Document], dict[str, str]]:
    """Return a document for each page of a PDF, an image named `label:page`, and why other pages were left out."""
    documents: list[Document] = []
    skipped: dict[str, str] = {}
    for number, page in enumerate(page_pictures(data), start=1):
        name = f"{label}:{number}"
        if isinstance(page, DocumentError):
            skipped[name] = str(page)
        else:
            documents.append(Document(parts=(Image(page),), id=name, source=label))
    if not documents:
        raise DocumentError(next(iter(skipped.values())))
    return documents, skipped


def html_text(markup: str) -> str:
    """Return what a reader of the page sees as text: paragraphs apart, scripts, styles and the title left out."""
    parser = etree.HTMLParser(
        target=_VisibleText(), encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True
    )
    parser.feed(replace_surrogates(markup).encode())
    return str(parser.close())


class _VisibleText:
    """Target of lxml's event parser: no tree is built, so depth and damage of the page cost nothing."""

    _UNSEEN = frozenset({"head", "title", "script", "style", "noscript", "template", "svg", "iframe"})
    _BLOCKS = frozenset(_HTML_BLOCKS.split())
    _LINES = frozenset({"li", "tr", "caption", "option"})
    _PARAGRAPH_BREAK, _LINE_BREAK = "\f", "\v"

    def __init__(self) -> None:
        self._pieces = [self._PARAGRAPH_BREAK]
        self._unseen = 0
        self._preformatted = 0

    def start(self, tag: str, attributes: Any) -> None:
        self._unseen += tag in self._UNSEEN
        self._preformatted += tag == "pre"
        if tag == "br":
            self._pieces.append(self._LINE_BREAK)
        elif tag in ("td", "th") and not self._at_break():
            self._pieces.append(" | ")
        self._gap(tag)

    def end(self, tag: str) -> None:
        self._unseen -= tag in self._UNSEEN
        self._preformatted -= tag == "pre"
        self._gap(tag)

    def data(self, text: str) -> None:
        if self._unseen:
            return
        if self._preformatted:
            text = text.replace("\f", " ").replace("\v", " ").replace("\n", self._LINE_BREAK)
        else:
            text = re.sub(r"\s+", " ", text)
            if self._pieces[-1][-1].isspace():
                text = text.lstrip()
        if text:
            self._pieces.append(text)

    def close(self) -> str:
        paragraphs = "".join(self._pieces).split(self._PARAGRAPH_BREAK)
        texts = ("\n".join(line.rstrip() for line in p.split(self._LINE_BREAK)).strip("\n") for p in paragraphs)
        return "\n\n".join(text for text in texts if text)

    def _at_break(self) -> bool:
        return self._pieces[-1][-1] in (self._PARAGRAPH_BREAK, self._LINE_BREAK)

    def _gap(self, tag: str) -> None:
        if tag in self._BLOCKS:
            self._pieces.append(self._PARAGRAPH_BREAK)
        elif tag in self._LINES and not self._at_break():
            self._pieces.append(self._LINE_BREAK)


def _some(text: str) -> str:
    if not text.strip():
        raise DocumentError("empty: no text in it")
    return text

"""The bytes of one file → documents: text, HTML, PDF, JSONL. Errors give the reason only; readers.py names the file."""

import io
import json
import re
from typing import Any

from lxml import etree  # type: ignore[import-untyped]

from infoflow_kv.chunking.tokens import replace_surrogates
from infoflow_kv.errors import DocumentError
from infoflow_kv.records import Document

_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
_JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_PDF_SUFFIXES = frozenset({".pdf"})
# Files that people have beside their documents and that hold no text to read as it is.
_BINARY = """
    .7z .a .avi .avif .bmp .bz2 .class .db .dll .dmg .doc .docx .dylib .epub .exe .flac .gguf .gif .gz .heic .ico .iso
    .jar .jpeg .jpg .m4a .mkv .mobi .mov .mp3 .mp4 .npy .npz .o .odp .ods .odt .ogg .onnx .otf .parquet .arrow .pkl .png
    .ppt .pptx .pt .pth .pyc .rar .rtf .safetensors .so .sqlite .sqlite3 .tar .tgz .tif .tiff .ttf .wav .webm .webp .whl
    .woff .woff2 .xls .xlsx .xz .zip .zst
"""
_BINARY_SUFFIXES = frozenset(_BINARY.split())
_SIGNATURES = {
    b"\x89PNG": "PNG image",
    b"\xff\xd8\xff": "JPEG image",
    b"PK\x03\x04": "ZIP archive or Office file",
    b"\x1f\x8b": "gzip archive",
    b"\x7fELF": "ELF program",
    b"\xd0\xcf\x11\xe0": "old Office file",
    b"GIF89a": "GIF image",
    b"GGUF": "GGUF model",
}
_HTML_BLOCKS = """
    address article aside blockquote body dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6
    header hr html main nav ol p pre section summary table ul
"""
_KINDS_READ = "text, Markdown, HTML, PDF and JSONL are read"


def parse(data: bytes, *, suffix: str, label: str, max_characters: int) -> tuple[list[Document], dict[str, str]]:
    """Return the documents in one file's bytes, and the reasons for records left out (JSONL only).

    The suffix decides, then the content: a PDF is known by its first bytes; without a suffix HTML and JSONL are too.
    `label` becomes the documents' source. Raises DocumentError with the reason.
    """
    suffix = suffix.lower()
    if suffix in _BINARY_SUFFIXES:
        raise DocumentError(f"a {suffix} file cannot be read as text; {_KINDS_READ}")
    if data.startswith(b"%PDF-") or suffix in _PDF_SUFFIXES:
        return [Document(text=_some(pdf_text(data, max_characters)), source=label)], {}
    text = decode(data)
    if suffix in _JSONL_SUFFIXES or (not suffix and _looks_like_jsonl(text)):
        return jsonl_documents(text, label)
    if suffix in _HTML_SUFFIXES or (not suffix and re.match(r"\s*<(!doctype html|html)\b", text, re.IGNORECASE)):
        text = html_text(text)
    return [Document(text=_some(text), source=label)], {}


def decode(data: bytes) -> str:
    r"""Return the text of UTF-8 bytes, or of UTF-16 bytes that begin with a byte-order mark; `\r\n` becomes `\n`.

    No other encoding is guessed. Raises DocumentError for a binary file and for other encodings.
    """
    for signature, kind in _SIGNATURES.items():
        if data.startswith(signature):
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
        raise DocumentError("the PDF has no text layer (a scan?); run OCR on it first")
    return text


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


def jsonl_documents(text: str, label: str) -> tuple[list[Document], dict[str, str]]:
    """Return one document per line `{text, title?, id?}`; other fields are ignored, blank texts reported.

    Without `id` a document is named by its `doc` and `page` if it has both, else by file and line. Raises
    DocumentError that names the first line that is not such an object.
    """
    documents: list[Document] = []
    skipped: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = _record(line, number)
        title, body = record.get("title") or "", record["text"]
        if not body.strip() and not title.strip():
            skipped[f"{label}:{number}"] = "empty: no text in it"
            continue
        name = record.get("id")
        if name is None or name == "":
            doc, page = record.get("doc"), record.get("page")
            name = f"{label}:{number}" if doc is None or page is None else f"{doc}:{page}"
        documents.append(
            Document(
                text=replace_surrogates(body.replace("\r\n", "\n")),
                title=replace_surrogates(title),
                id=replace_surrogates(str(name)),
                source=label,
            )
        )
    if not documents:
        raise DocumentError("empty: no text in it")
    return documents, skipped


def _record(line: str, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise DocumentError(f"line {number} is not JSON ({reason}); each line must be an object with 'text'") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DocumentError(f"line {number} is not an object with a string 'text', as every line must be")
    if not isinstance(record.get("title") or "", str):
        raise DocumentError(f"line {number} has a 'title' that is not a string")
    return record


def _looks_like_jsonl(text: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    if not first.startswith("{"):
        return False
    try:
        return isinstance(_record(first, 1), dict)
    except DocumentError:
        return False


def _some(text: str) -> str:
    if not text.strip():
        raise DocumentError("empty: no text in it")
    return text

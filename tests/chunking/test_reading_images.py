"""Images among the files that people point at: known by content, never decoded here, never from outside a folder."""

import builtins
import io
import json
import os
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from infoflow_kv.chunking import pages, read_paths
from infoflow_kv.chunking.signatures import is_image
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.records import Document, Image

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def encoded(kind: str = "PNG", size: tuple[int, int] = (3, 2), colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", size, colour).save(buffer, kind)
    return buffer.getvalue()


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DocumentError) as caught:
        read_paths([path], **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- files ----


@pytest.mark.parametrize("name", ["a.png", "a.JPG", "a.txt", "a.jsonl", "a.pdf", "a.docx", "a"])
@pytest.mark.parametrize("kind", KINDS)
def test_content_makes_an_image_whatever_the_name(tmp_path, kind, name):
    path = write(tmp_path / name, encoded(kind))
    assert read_paths([path]).documents == (Document(parts=(Image(str(path)),), source=str(path)),)


def test_nothing_is_decoded_and_no_name_becomes_a_title(tmp_path):
    """Damage behind the header is found where the image is chunked; a renamed file is the same stored KV."""
    [document] = read_paths([write(tmp_path / "Harbour.png", encoded()[:12])]).documents
    assert (document.title, document.text) == ("", "")


def test_standard_input_keeps_the_bytes():
    data = encoded()
    [document] = read_paths(["-"], stdin=io.BytesIO(data)).documents
    assert document == Document(parts=(Image(data),), source="-")


@pytest.mark.parametrize("text", ["BMW builds cars.", "II. The harbour", "MM", "RIFF and WEBP", "GIF8 is a format"])
def test_texts_that_begin_like_images_are_texts(tmp_path, text):
    assert not is_image(text.encode())
    assert [d.text for d in read_paths([write(tmp_path / "a.txt", text)]).documents] == [text]


@pytest.mark.parametrize(("name", "data", "reason"), [
    ("a.png", b"words", "a .png file cannot be read: it holds no image of a known kind (PNG, JPEG, WebP, GIF, BMP"),
    ("a.jpeg", b"", "a .jpeg file cannot be read"),
    ("a.png", encoded()[:7], "a .png file cannot be read"),
    ("a.dng", encoded("TIFF"), "a .dng file cannot be read as text"),
    ("a.heic", b"\0\0\0\x18ftypheic", "a .heic file cannot be read as text; text, Markdown, HTML, PDF"),
])  # fmt: skip
def test_what_is_no_image_is_refused_unread(tmp_path, name, data, reason):
    assert reason in refusal(write(tmp_path / name, data))


def test_a_folder_of_images_and_texts(tmp_path):
    for name in ("a.png", "b/c.jpg", "d.txt"):
        write(tmp_path / name, "words" if name == "d.txt" else encoded())
    (tmp_path / "out.png").symlink_to(write(tmp_path.parent / f"{tmp_path.name}.png", encoded()))
    (tmp_path / "in.png").symlink_to("b/c.jpg")
    os.mkfifo(tmp_path / "pipe.png")
    result = read_paths([tmp_path])
    assert [Path(d.source).name for d in result.documents] == ["a.png", "c.jpg", "d.txt", "in.png"]
    assert {Path(p).name: reason[:20] for p, reason in result.skipped.items()} == {
        "out.png": "a link that leaves t",
        "pipe.png": "a named pipe, not a ",
    }
    assert "too large" in refusal(tmp_path / "a.png", max_file_bytes=10)


def test_images_that_a_page_refers_to_are_not_followed(tmp_path):
    write(tmp_path / "a.png", encoded())
    markdown, html = write(tmp_path / "a.md", "![chart](a.png)"), write(tmp_path / "a.html", "<img src=a.png>words")
    assert [(d.text, d.parts) for d in read_paths([markdown, html]).documents] == [
        ("![chart](a.png)", ()),
        ("words", ()),
    ]


# ---- JSONL ----


def lines(*records: Any) -> str:
    return "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)


def test_parts_of_a_line_in_order(tmp_path):
    image = write(tmp_path / "docs/pictures/a.png", encoded())
    parts = [
        {"text": "one\r\ntwo"},
        {"image": "pictures/a.png"},
        {"image": "./pictures/../pictures/a.png"},
        {"text": ""},
    ]
    records = (
        {"parts": parts, "title": "T", "id": 7, "more": 1},
        {"text": "words"},
        {"parts": [], "text": "", "title": "x"},
    )
    for name in ("docs/a.jsonl", "docs/a"):
        path = write(tmp_path / name, lines(*records))
        first, second, third = read_paths([path]).documents
        same = Image(str(image.resolve()))
        assert first == Document(title="T", id="7", source=str(path), parts=("one\ntwo", same, same, ""))
        assert (second.text, second.parts, second.id) == ("words", (), f"{path}:2")
        assert (third.title, third.parts) == ("x", ())


@pytest.mark.parametrize(
    "given", ["/etc/hostname", "../a.png", "sub/../../a.png", "out.png", "outside/a.png", "a\0.png", "../a\n.png"]
)
def test_images_of_a_line_do_not_escape_its_folder(tmp_path, given):
    write(tmp_path / "a.png", encoded())
    write(tmp_path / "docs/ok.png", encoded())
    (tmp_path / "docs/out.png").symlink_to("../a.png")
    (tmp_path / "docs/outside").symlink_to("..")
    path = write(tmp_path / "docs/a.jsonl", lines({"text": "fine"}, {"parts": [{"text": "x"}, {"image": given}]}))
    message = refusal(path)
    assert f"'{path}': line 2, part 2: image" in message
    assert "lies outside the JSONL's folder" in message or "not a usable path" in message
    assert refusal(write(tmp_path / "docs/b.jsonl", lines({"parts": [{"image": str(tmp_path / "docs/ok.png")}]})))


def test_a_line_whose_image_is_not_there_is_left_out(tmp_path):
    write(tmp_path / "words.png", "words")
    os.mkfifo(tmp_path / "pipe.png")
    names = ("gone.png", "words.png", "pipe.png", ".", "")
    path = write(tmp_path / "a.jsonl", lines(*({"parts": [{"image": name}]} for name in names), {"text": "fine"}))
    result = read_paths([path])
    assert [d.text for d in result.documents] == ["fine"]
    assert list(result.skipped) == [f"{path}:{number}" for number in range(1, 6)]
    assert all(reason.startswith(f"line {n}, part 1: image '") for n, reason in enumerate(result.skipped.values(), 1))
    assert "No such file" in refusal(write(tmp_path / "b.jsonl", lines({"parts": [{"image": "gone.png"}]})))


@pytest.mark.parametrize(("record", "reason"), [
    ({"parts": "a.png"}, "'parts' that are no list"),
    ({"parts": {"image": "a.png"}}, "'parts' that are no list"),
    ({"parts": ["a.png"]}, "part 1 is not an object"),
    ({"parts": [{"text": "a"}, {"image": 1}]}, "part 2 is not an object"),
    ({"parts": [{"image": "a.png", "text": "a"}]}, "part 1 is not an object with either"),
    ({"parts": [{}]}, "part 1 is not an object"),
    ({"parts": [{"text": "a"}], "text": "b"}, "both 'text' and 'parts'"),
    ({"parts": None}, "a string 'text'"),
    ({"parts": []}, "empty"),
    ({"parts": [{"text": " "}]}, "empty"),
])  # fmt: skip
def test_lines_that_are_no_documents(tmp_path, record, reason):
    write(tmp_path / "a.png", encoded())
    message = refusal(write(tmp_path / "a.jsonl", lines(record)))
    assert reason in message
    assert "line 1" in message or reason == "empty"


def test_standard_input_has_no_folder_for_images():
    data = lines({"parts": [{"image": "a.png"}]}).encode()
    with pytest.raises(DocumentError, match=r"line 1, part 1: image 'a.png' has no folder to lie in"):
        read_paths(["-"], stdin=io.BytesIO(data))


# ---- pages of a PDF ----


def pdf(*boxes: tuple[float, float]) -> bytes:
    """A PDF with a page of each size in points, a line of text on each."""
    import pypdf

    writer = pypdf.PdfWriter()
    for number, (width, height) in enumerate(boxes):
        page = writer.add_blank_page(width, height)
        stream = pypdf.generic.DecodedStreamObject()
        stream.set_data(f"0 0 1 rg {5 + 10 * number} 5 20 10 re f".encode())
        page[pypdf.generic.NameObject("/Contents")] = writer._add_object(stream)
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


@pytest.fixture
def _renderer() -> None:
    pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed; it is in extra `vlm`")


def opened(document: Document) -> Pillow.Image:
    [part] = document.parts
    assert isinstance(part, Image) and isinstance(part.source, bytes)
    return Pillow.open(io.BytesIO(part.source))


@pytest.mark.usefixtures("_renderer")
def test_each_page_is_a_document_of_one_image(tmp_path):
    path = write(tmp_path / "a.pdf", pdf((60, 40), (60, 40)))
    first, second = read_paths([path], pdf_pages=True).documents
    assert [(d.id, d.source, d.title, d.text) for d in (first, second)] == [
        (f"{path}:1", str(path), "", ""),
        (f"{path}:2", str(path), "", ""),
    ]
    assert opened(first).size == (120, 80)
    assert opened(first).getpixel((20, 60)) == (0, 0, 255)
    assert opened(first).getpixel((2, 2)) == (255, 255, 255)
    assert first.parts != second.parts
    assert read_paths([path], pdf_pages=True).documents == (first, second)  # the same pixels each time
    assert "no text layer" in refusal(path)


@pytest.mark.usefixtures("_renderer")
def test_a_poster_is_drawn_with_bounded_pixels(tmp_path):
    [document] = read_paths([write(tmp_path / "a.pdf", pdf((4000, 2000)))], pdf_pages=True).documents
    width, height = opened(document).size
    assert 0.99 * pages.MAX_PAGE_PIXELS < width * height <= 1.01 * pages.MAX_PAGE_PIXELS
    assert abs(width / height - 2) < 0.01


@pytest.mark.usefixtures("_renderer")
@pytest.mark.parametrize(("data", "reason"), [
    (b"%PDF-1.4", "damaged PDF ("),
    (b"", "damaged PDF ("),
    (pdf(), "the PDF has 0 pages|damaged PDF ("),
    (b"%PDF-1.4\n" + b"[" * 50_000, "damaged PDF ("),
])  # fmt: skip
def test_a_damaged_pdf_has_no_pages(tmp_path, data, reason):
    message = refusal(write(tmp_path / "a.pdf", data), pdf_pages=True)
    assert any(words in message for words in reason.split("|")), message


@pytest.mark.usefixtures("_renderer")
@pytest.mark.parametrize("password", ["", "secret"])
def test_pages_of_an_encrypted_pdf(tmp_path, password):
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf((60, 40)))))
    writer.encrypt(user_password=password, owner_password="owner", algorithm="RC4-128")
    writer.write(tmp_path / "a.pdf")
    if password:
        assert "encrypted PDF" in refusal(tmp_path / "a.pdf", pdf_pages=True)
    else:
        assert len(read_paths([tmp_path / "a.pdf"], pdf_pages=True).documents) == 1


@pytest.mark.usefixtures("_renderer")
def test_too_many_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "MAX_PAGES", 2)
    message = refusal(write(tmp_path / "a.pdf", pdf(*[(60, 40)] * 3)), pdf_pages=True)
    assert "the PDF has 3 pages; 1 to 2 are read as images: split it" in message


@pytest.mark.parametrize(("gone", "words"), [
    (("pypdfium2",), "need pypdfium2, which is not installed: pip install 'infoflow-kv[vlm]'"),
    (("pypdfium2", "PIL"), "need pypdfium2 and Pillow, which are not installed"),
])  # fmt: skip
def test_pages_without_the_renderer(tmp_path, monkeypatch, gone, words):
    found = util.find_spec
    monkeypatch.setattr(pages, "find_spec", lambda name: None if name in gone else found(name))
    with pytest.raises(OptionError) as caught:
        read_paths([write(tmp_path / "a.txt", "words")], pdf_pages=True)
    assert words in str(caught.value)


def test_reading_without_pages_needs_no_renderer(tmp_path, monkeypatch):
    real = builtins.__import__

    def imported(name: str, *rest: Any) -> Any:
        assert name.split(".")[0] not in ("pypdfium2", "PIL"), name
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "pypdfium2", raising=False)
    monkeypatch.setattr(builtins, "__import__", imported)
    assert len(read_paths([write(tmp_path / "a.png", b"\x89PNG\r\n\x1a\n")]).documents) == 1

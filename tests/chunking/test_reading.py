"""Every kind of path and file that people point at: read, or refused in one line; never hung, never half a folder."""

import io
import json
import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_kv.chunking import formats, read_paths, signatures
from infoflow_kv.errors import DocumentError, OptionError

CAP = 20 * 2**20


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def texts(result):
    return [document.text for document in result.documents]


def refusal(path, **options) -> str:
    with pytest.raises(DocumentError) as caught:
        read_paths([path], **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def pdf(*pages: str) -> bytes:
    """A PDF written by hand, one line of text a page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for i, page in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({page}) Tj ET".encode() if page else b""
        objects.append(
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {5 + 2 * i} 0 R"
            f"/Resources<</Font<</F1 3 0 R>>>>>>".encode()
        )
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream))
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(data))
        data += b"%d 0 obj%s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return data + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        len(objects) + 1, table, len(objects) + 1, len(data)
    )  # fmt: skip


# --- text and encodings


@pytest.mark.parametrize("name", ["a.txt", "a.md", "README", "a.rst", "a.py", "a.unheard-of", "A.TXT"])
def test_text_files_have_their_path_as_source_and_no_title(tmp_path, name):
    path = write(tmp_path / name, "# Tea\n\nis hot\n")
    [document] = read_paths([path]).documents
    assert (document.text, document.title, document.id, document.source) == ("# Tea\n\nis hot\n", "", "", str(path))


@pytest.mark.parametrize("data", [
    "é\nb".encode(), b"\xef\xbb\xbf" + "é\nb".encode(), "é\nb".encode("utf-16"), "\ufeffé\nb".encode("utf-16-be"),
    "é\r\nb".encode(), "é\rb".encode(), "é\r\nb".encode("utf-16"),
])  # fmt: skip
def test_unicode_encodings_and_line_ends_give_one_text(tmp_path, data):
    assert texts(read_paths([write(tmp_path / "a.txt", data)])) == ["é\nb"]


def test_other_encodings_are_refused_with_the_offset(tmp_path):
    message = refusal(write(tmp_path / "a.txt", "caf\xe9 au lait".encode("cp1252")))
    assert "a.txt': not UTF-8 text: byte 0xe9 at offset 3" in message
    assert "iconv" in message
    assert "not UTF-16 text" in refusal(write(tmp_path / "b.txt", b"\xff\xfea\x00b"))
    assert "byte 0xed at offset 1" in refusal(write(tmp_path / "c.txt", b"a\xed\xa0\x80"))  # a surrogate in UTF-8


@pytest.mark.parametrize(("name", "data", "reason"), [
    ("a.txt", b"\x89PNG\r\n", "binary file (PNG image)"),
    ("a", b"PK\x03\x04rest", "binary file (ZIP"),
    ("a.txt", b"text\0text", "binary file (a NUL byte at offset 4)"),
    ("a.txt", "a\0".encode("utf-16"), "binary file (a NUL character at offset 1)"),
    ("a.txt", "ab".encode("utf-32"), "binary file"),
    ("a.png", b"even if it is text", "a .png file cannot be read"),
    ("a.docx", b"even if it is text", "a .docx file cannot be read"),
])  # fmt: skip
def test_binary_files_are_refused_by_name_or_content(tmp_path, name, data, reason):
    assert reason in refusal(write(tmp_path / name, data))


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.jsonl", "a"])
@pytest.mark.parametrize("data", [b"", b" \n\t\r\n", b"\xef\xbb\xbf"])
def test_empty_files_are_refused(tmp_path, name, data):
    assert "empty: no text in it" in refusal(write(tmp_path / name, data))


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_unicode_text_comes_back(text):
    data = text.encode("utf-8", "replace")
    expected = data.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        with pytest.raises(DocumentError, match="NUL"):
            formats.decode(data)
    elif not signatures.binary_kind(data):
        assert formats.decode(data) == expected


@given(data=st.binary(max_size=200), suffix=st.sampled_from(["", ".txt", ".html", ".jsonl", ".pdf"]))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_documents_or_a_document_error(data, suffix):
    try:
        documents, _ = formats.parse(data, suffix=suffix, label="x", path="", max_bytes=1000)
    except DocumentError as error:
        assert str(error)
        assert "\n" not in str(error)
    else:
        assert all(document.text.encode() or document.parts for document in documents)


# --- sizes


def test_sparse_file_is_refused_unread(tmp_path):
    path = tmp_path / "big.txt"
    with path.open("wb") as stream:
        stream.truncate(50 * 2**20)
    began = time.perf_counter()
    assert "too large: 52,428,800 bytes" in refusal(path)
    assert time.perf_counter() - began < 1


def test_cap_is_exact(tmp_path):
    path = write(tmp_path / "a.txt", "x" * 100)
    assert texts(read_paths([path], max_file_bytes=100)) == ["x" * 100]
    assert "too large: 100 bytes, at most 99" in refusal(path, max_file_bytes=99)
    with pytest.raises(OptionError, match="at least 1"):
        read_paths([path], max_file_bytes=0)


def test_stream_is_never_read_further_than_the_cap():
    class Endless(io.RawIOBase):
        given = 0

        def read(self, size=-1):
            assert size > 0
            self.given += size
            return b"x" * size

    endless = Endless()
    assert "more than 3,000,000 bytes" in refusal("-", stdin=endless, max_file_bytes=3_000_000)
    assert endless.given == 3_000_001


def test_file_that_grows_after_the_check_is_capped(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "x" * 100)
    monkeypatch.setattr("infoflow_kv.chunking.files._require_regular", lambda *_: None)
    assert "more than 50 bytes" in refusal(path, max_file_bytes=50)


# --- standard input


def test_standard_input_by_content():
    def read(data):
        return read_paths(["-"], stdin=io.BytesIO(data)).documents

    assert [(d.text, d.source) for d in read(b"Tea\r\n")] == [("Tea\n", "-")]
    assert [d.text for d in read(b"<!DOCTYPE html><p>Tea</p>")] == ["Tea"]
    assert [d.text for d in read(b'{"text": "a"}\n{"text": "b"}\n')] == ["a", "b"]
    assert [d.text for d in read(b'{"other": 1}')] == ['{"other": 1}']
    assert "Tea time" in read(pdf("Tea time"))[0].text
    assert "'-': empty" in refusal("-", stdin=io.BytesIO(b""))
    assert "standard input is not available" in refusal("-")


# --- folders and special files


def test_folder_is_read_in_the_order_of_paths(tmp_path):
    for name in ["b.txt", "a/z.txt", "a/b/c.md", "c.txt", ".hidden", ".git/config", "a/.x.txt"]:
        write(tmp_path / name, name)
    result = read_paths([tmp_path])
    assert texts(result) == ["a/b/c.md", "a/z.txt", "b.txt", "c.txt"]
    assert [d.source for d in result.documents] == [str(tmp_path / t) for t in texts(result)]
    assert result.skipped == {}


def test_bad_files_in_a_folder_are_listed_and_the_good_ones_read(tmp_path):
    write(tmp_path / "good.txt", "good")
    write(tmp_path / "bom.txt", b"\xef\xbb\xbfgood")
    write(tmp_path / "latin.txt", b"caf\xe9")
    write(tmp_path / "image.png", b"\x89PNG")
    write(tmp_path / "empty.txt", b" ")
    write(tmp_path / "bad.pdf", b"%PDF-1.4 nothing")
    write(tmp_path / "bad.jsonl", b"{}")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    result = read_paths([tmp_path])
    assert texts(result) == ["good", "good"]
    assert {Path(p).name: reason.split(";")[0][:25] for p, reason in result.skipped.items()} == {
        "latin.txt": "not UTF-8 text: byte 0xe9",
        "image.png": "a .png file cannot be rea",
        "empty.txt": "empty: no text in it",
        "bad.pdf": result.skipped[str(tmp_path / "bad.pdf")][:25],
        "bad.jsonl": "line 1 is not an object w",
        "dangling.txt": "a link to nothing",
        "pipe": "a named pipe, not a file",
    }
    assert result.skipped[str(tmp_path / "bad.pdf")].startswith("damaged PDF (")


def test_links_stay_in_the_tree(tmp_path):
    write(tmp_path / "secret.txt", "secret")
    write(tmp_path / "docs/..data/a.txt", "a")  # how Kubernetes mounts a ConfigMap
    (tmp_path / "docs/a.txt").symlink_to("..data/a.txt")
    (tmp_path / "docs/out.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "docs/loop").symlink_to(tmp_path / "docs")
    (tmp_path / "docs/self").symlink_to(tmp_path / "docs/self")
    (tmp_path / "docs-outside").mkdir()
    write(tmp_path / "docs-outside/b.txt", "b")
    (tmp_path / "docs/near.txt").symlink_to(tmp_path / "docs-outside/b.txt")
    result = read_paths([tmp_path / "docs"])
    assert texts(result) == ["a"]
    assert {Path(p).name: reason.split(";")[0] for p, reason in result.skipped.items()} == {
        "out.txt": "a link that leaves the folder",
        "near.txt": "a link that leaves the folder",
        "loop": "a link to a folder",
        "self": "a link to nothing",
    }
    assert texts(read_paths([tmp_path / "docs/out.txt"])) == ["secret"]  # named by the user: followed
    (tmp_path / "docs2").symlink_to(tmp_path / "docs")
    assert texts(read_paths([tmp_path / "docs2"])) == ["a"]


def test_pipes_sockets_and_devices_never_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        began = time.perf_counter()
        assert "a named pipe, not a file" in refusal(tmp_path / "pipe")
        assert "a socket, not a file" in refusal("socket")
        assert "a device, not a file" in refusal("/dev/zero")
        assert time.perf_counter() - began < 2


def test_pipe_that_takes_a_files_place_after_the_check_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    real, calls = os.stat, []

    def stat_of_the_file_before(path, **options):
        calls.append(path)
        return real(__file__) if str(path) == str(tmp_path / "pipe") else real(path, **options)

    monkeypatch.setattr(os, "stat", stat_of_the_file_before)
    assert "a named pipe, not a file" in refusal(tmp_path / "pipe")
    assert str(tmp_path / "pipe") in map(str, calls)


def test_empty_folder_and_folder_of_bad_files(tmp_path):
    assert "nothing to read in" in refusal(tmp_path)
    for i in range(5):
        write(tmp_path / f"{i}.png", b"")
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "0.png': a .png file" in message
    assert "and 2 more" in message


def test_path_that_does_not_exist_is_an_error_even_among_others(tmp_path):
    good = write(tmp_path / "a.txt", "a")
    with pytest.raises(DocumentError, match=r"missing.txt' does not exist"):
        read_paths([good, tmp_path / "missing.txt"])
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "is a link to nothing" in refusal(tmp_path / "dangling")
    for odd in ["", "a\0b", "x" * 5000, str(good / "below")]:
        assert refusal(odd)


def test_several_paths_keep_their_order_and_the_bad_are_skipped(tmp_path):
    b, a = write(tmp_path / "b.txt", "b"), write(tmp_path / "a.txt", "a")
    bad = write(tmp_path / "c.txt", b"\xff")
    result = read_paths([b, bad, a, b])
    assert texts(result) == ["b", "a", "b"]  # the same document twice is two documents
    assert result.documents[0] == result.documents[2]
    assert list(result.skipped) == [str(bad)]
    with pytest.raises(DocumentError, match=r"nothing could be read in .*c.txt.*not UTF-8"):
        read_paths([bad, bad])
    with pytest.raises(DocumentError, match="no documents were given"):
        read_paths([])
    assert texts(read_paths(str(a))) == ["a"]


def test_five_hundred_tiny_documents(tmp_path):
    for i in range(500):
        write(tmp_path / f"{i:03}.txt", f"Document {i}")
    result = read_paths([tmp_path])
    assert texts(result) == [f"Document {i}" for i in range(500)]


def test_deep_folders_and_odd_names(tmp_path):
    write(tmp_path / Path(*["d"] * 500) / "a.txt", "deep")
    write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/z\xff\n.txt")), "odd")
    result = read_paths([tmp_path])
    assert texts(result) == ["deep", "odd"]
    assert result.documents[1].source.encode().endswith(b"z\\udcff\\n.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_and_folder(tmp_path):
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "locked.txt", "b").chmod(0)
    write(tmp_path / "shut/c.txt", "c").parent.chmod(0)
    result = read_paths([tmp_path])
    (tmp_path / "shut").chmod(0o700)
    assert texts(result) == ["a"]
    assert all("permission denied" in reason for reason in result.skipped.values())
    assert len(result.skipped) == 2


def test_permission_errors_are_told(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "a")

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert "a.txt': permission denied" in refusal(tmp_path / "a.txt")
    monkeypatch.setattr(os, "scandir", denied)
    assert "the folder cannot be listed (permission denied)" in refusal(tmp_path)


# --- JSONL


def test_jsonl_records(tmp_path):
    lines = [
        {"text": "a", "title": "T", "id": "one"}, {"text": "b", "doc": "x.pdf", "page": 3}, {"text": "c", "id": 7},
        {"text": "d\r\ne\u2028f", "title": None}, {"text": " "}, {"text": "", "title": "only"},
    ]  # fmt: skip
    path = write(tmp_path / "a.jsonl", "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    result = read_paths([path])
    assert [(d.text, d.title, d.id) for d in result.documents] == [
        ("a", "T", "one"), ("b", "", "x.pdf:3"), ("c", "", "7"), ("d\ne\u2028f", "", f"{path}:4"),
        ("", "only", f"{path}:6"),
    ]  # fmt: skip
    assert {d.source for d in result.documents} == {str(path)}
    assert result.skipped == {f"{path}:5": "empty: no text in it"}


@pytest.mark.parametrize(("line", "reason"), [
    ("{text: 1}", "line 2 is not JSON (Expecting property name"),
    ('{"text": "a"', "line 2 is not JSON"),
    ("[1]", "line 2 is not an object with a string 'text'"),
    ('{"text": 5}', "line 2 is not an object with a string 'text'"),
    ('{"body": "a"}', "line 2 is not an object with a string 'text'"),
    ('{"text": "a", "title": ["x"]}', "line 2 has a 'title' that is not a string"),
    ("[" * 100_000, "line 2 is not JSON (RecursionError)"),
    ('{"text": ' + "9" * 5000 + "}", "line 2 is not JSON (ValueError)"),
])  # fmt: skip
def test_malformed_jsonl_names_the_line(tmp_path, line, reason):
    assert reason in refusal(write(tmp_path / "a.jsonl", '{"text": "good"}\n' + line + "\n"))


def test_surrogates_in_jsonl_become_replacement_characters(tmp_path):
    path = write(tmp_path / "a.jsonl", r'{"text": "a\ud800b \ud83d\ude00", "title": "\udfff", "id": "\udfff"}')
    [document] = read_paths([path]).documents
    assert (document.text, document.title, document.id) == ("a\ufffdb 😀", "\ufffd", "\ufffd")


# --- HTML


def test_html_shows_what_a_reader_sees(tmp_path):
    page = """<?xml version="1.0" encoding="latin-1"?><!DOCTYPE html>
    <html><head><meta charset="iso-8859-1"><title>Not shown</title>
    <style>p {}</style><script>if (a < b) "</p>"</script></head><body><h1>Tea &amp;
    caf\xe9</h1><p>It is <b> very</b>
    hot.<script>no</script><style>no</style><br>Really.</p><!-- hidden --><ul><li>one<li>two</ul><pre>x = 1
      y = 2</pre><table><tr><td>a<td>b<tr><td>c<td>d</table><svg><title>no</title></svg><noscript>no</noscript>
    <div>End</div></body></html>"""
    for name in ["a.html", "a.htm", "a.XHTML"]:
        assert texts(read_paths([write(tmp_path / name, page)])) == [
            "Tea & café\n\nIt is very hot.\nReally.\n\none\ntwo\n\nx = 1\n      y = 2\n\na | b\nc | d\n\nEnd"
        ]


def test_html_without_text_is_empty(tmp_path):
    assert "empty" in refusal(write(tmp_path / "a.html", "<title>t</title><script>x</script><p> </p>"))


@pytest.mark.parametrize("piece", ["<div>", "<!--", "<b><i>x", "<![CDATA[", "<", "&", "</", "<a b=", "<p>x", "x</pre>"])
def test_hostile_html_takes_linear_time(piece):
    began = time.perf_counter()
    formats.html_text(piece * (500_000 // len(piece)))
    assert time.perf_counter() - began < 10


@given(
    st.lists(st.sampled_from(["<p>", "</p>", "<pre>", "</pre>", "<br>", "<td>", "<li>", " ", "\n", "a", "&#0;", "<!"]))
)
@settings(max_examples=200, deadline=None)
def test_html_keeps_the_words(pieces):
    text = formats.html_text("<html><body>" + "".join(pieces) + " end")
    assert "<!" in pieces or text.endswith("end")
    assert "\f" not in text
    assert "\v" not in text


# --- PDF


def test_pdf_pages_are_paragraphs(tmp_path):
    path = write(tmp_path / "a.pdf", pdf("Tea is hot.", "", "Ice is cold."))
    [document] = read_paths([path]).documents
    assert (document.text, document.title, document.source) == ("Tea is hot.\n\nIce is cold.", "", str(path))
    assert texts(read_paths([write(tmp_path / "b.txt", pdf("By content"))])) == ["By content"]


def test_pdf_without_text_layer(tmp_path):
    assert "no text layer" in refusal(write(tmp_path / "a.pdf", pdf("", "")))


@pytest.mark.parametrize("data", [
    b"", b"%PDF-1.4", b"no pdf at all", pdf("Tea")[:200], pdf("Tea").replace(b"/Pages 2 0 R", b"/Pages 9 0 R"),
    b"%PDF-1.4\n" + b"[" * 50_000,
])  # fmt: skip
def test_damaged_pdf(tmp_path, data):
    message = refusal(write(tmp_path / "a.pdf", data))
    assert "damaged PDF (" in message or "no text layer" in message


@pytest.mark.parametrize("password", ["", "secret"])
def test_encrypted_pdf(tmp_path, password):
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("Tea time"))))
    writer.encrypt(user_password=password, owner_password="owner", algorithm="RC4-128")
    writer.write(tmp_path / "a.pdf")
    if password:
        assert "encrypted PDF" in refusal(tmp_path / "a.pdf")
    else:  # only printing or copying is restricted; every viewer opens it
        assert texts(read_paths([tmp_path / "a.pdf"])) == ["Tea time"]


def test_pdf_that_unpacks_to_too_much(tmp_path):
    with pytest.raises(DocumentError, match="more than 10 characters"):
        formats.pdf_text(pdf("Tea is", "hot today"), max_characters=10)


@given(place=st.integers(0, 700), value=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_pdf_with_one_byte_changed_never_escapes(place, value):
    data = bytearray(pdf("Tea is hot.", "Ice is cold."))
    data[place % len(data)] = value
    try:
        assert formats.pdf_text(bytes(data), CAP).strip()
    except DocumentError as error:
        assert "\n" not in str(error)

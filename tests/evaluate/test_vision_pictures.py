"""Pictures by name and in base64: what leads out of the folder, what is none, what is taken."""

import base64
from pathlib import Path

import pytest

from infoflow_kv.errors import DocumentError
from infoflow_kv.evaluate.vision_pictures import picture_bytes, picture_file

# Starts like a picture; nobody here looks further.
PNG = b"\x89PNG\r\n\x1a\n" + bytes(60)
PACKED = base64.b64encode(PNG).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "png").mkdir()
    (tmp_path / "png" / "one.png").write_bytes(PNG)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["../one.png", "png/../../one.png", "/etc/passwd", "..\\one.png", "C:\\one.png", "C:one.png", "//h/one.png"],
)
def test_names_that_lead_out_are_refused(folder, name):
    with pytest.raises(DocumentError, match="leads out of the data folder"):
        picture_file(folder, name, ("png",))


def test_links_that_lead_out_are_refused(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "one.png"
    outside.write_bytes(PNG)
    (folder / "png" / "link.png").symlink_to(outside)
    (folder / "far").symlink_to(outside.parent)
    (folder / "near.png").symlink_to(folder / "png" / "one.png")
    for name in ("png/link.png", "far/one.png"):
        with pytest.raises(DocumentError, match="a link that leads out"):
            picture_file(folder, name)
    assert picture_file(folder, "near.png") == folder / "near.png"


@pytest.mark.parametrize("name", ["none.png", "png", "", " ", "a\0b", "x" * 5000])
def test_names_of_no_file(folder, name):
    with pytest.raises(DocumentError, match=r"is not there|cannot be read"):
        picture_file(folder, name)


@pytest.mark.parametrize("content", [b"", b"<html>", b"RIFF1234WAVE", b"\x89PNG"])
def test_files_that_are_no_pictures(folder, content):
    (folder / "a.png").write_bytes(content)
    with pytest.raises(DocumentError, match=r"the picture 'a.png' is (empty|none)"):
        picture_file(folder, "a.png")


@pytest.mark.parametrize("start", [PNG, b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"II*\0", b"RIFF\1\2\3\4WEBPVP8 "])
def test_pictures_by_their_first_bytes(folder, start):
    (folder / "a.bin").write_bytes(start)
    assert picture_file(folder, "a.bin") == folder / "a.bin"
    assert picture_bytes(base64.b64encode(start).decode()) == start


def test_base64_with_its_wrappings():
    assert picture_bytes(f"data:image/png;base64,{PACKED}") == PNG
    assert picture_bytes("\n".join(PACKED[i : i + 20] for i in range(0, len(PACKED), 20))) == PNG
    for text in ("data:image/png,abc", "data:image/png;base64"):
        with pytest.raises(DocumentError, match="the picture starts with"):
            picture_bytes(text)
    for text in ("no base64!", "é" * 8, "AAA"):
        with pytest.raises(DocumentError, match="no base64"):
            picture_bytes(text)
    with pytest.raises(DocumentError, match="is empty"):
        picture_bytes("")

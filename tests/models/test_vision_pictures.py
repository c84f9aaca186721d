"""Reading pictures: right, or refused with the reason."""

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny_vlm
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.models.pictures import Picture, read_picture
from infoflow_kv.models.vision import vision as seen_in

KINDS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")


def pixels(picture: Picture) -> np.ndarray:
    return np.asarray(picture.image)


def png_header(width: int, height: int) -> bytes:
    """A PNG of this size that holds no more than a few bytes of pixels."""

    def block(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = block(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + block(b"IDAT", zlib.compress(b"\0" * 64)) + block(b"IEND", b"")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_picture_whatever_its_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.txt"
    path.write_bytes(tiny_vlm.encoded_file(tiny_vlm.image(40, 30), kind))
    picture = read_picture(path)
    assert (picture.width, picture.height, picture.image.mode, picture.notices) == (40, 30, "RGB", ())
    if kind in ("PNG", "BMP", "TIFF", "PPM"):
        np.testing.assert_array_equal(pixels(picture), np.asarray(tiny_vlm.image(40, 30)))


def test_identity_is_of_pixels_and_size() -> None:
    made = tiny_vlm.image(40, 30)
    first = read_picture(tiny_vlm.encoded_file(made), name="a")
    assert first == read_picture(tiny_vlm.encoded_file(made, "BMP"), name="b")
    assert first.sha256 != read_picture(tiny_vlm.encoded_file(tiny_vlm.image(40, 30, seed=1))).sha256
    # One colour: the bytes are the same, the shape is not.
    wide, tall = (read_picture(tiny_vlm.encoded_file(Image.new("RGB", size, "red"))) for size in ((4, 2), (2, 4)))
    assert wide.sha256 != tall.sha256


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_truncated_files_are_refused(kind: str, share: float) -> None:
    data = tiny_vlm.encoded_file(tiny_vlm.image(200, 150), kind)
    with pytest.raises(DocumentError, match=r"damaged or truncated|no image of a known format"):
        read_picture(data[: int(len(data) * share)], name="scan")


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"shot is empty \(0 bytes\)"):
        read_picture(b"", name="shot")
    path = tmp_path / "notes.png"
    path.write_text("The keeper counts the boats.")
    with pytest.raises(DocumentError, match="no image of a known format"):
        read_picture(path)
    for wrong in (tmp_path, tmp_path / "none.png"):
        with pytest.raises(DocumentError, match="is no file"):
            read_picture(wrong)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    with pytest.raises(DocumentError, match="no image of a known format"):
        read_picture(postscript)


@pytest.mark.parametrize("size", [(9_000, 9_000), (10_000, 10_000), (60_000, 60_000)])
def test_bombs_are_refused_by_their_header(size: tuple[int, int]) -> None:
    with pytest.raises(DocumentError, match=r"more than the limit of 64,000,000|is too large"):
        read_picture(png_header(*size))


def test_the_limit_is_a_setting() -> None:
    data = tiny_vlm.encoded_file(tiny_vlm.image(40, 30))
    assert read_picture(data, max_pixels=1200).width == 40
    with pytest.raises(DocumentError, match="40 × 30 pixels, more than the limit of 1,199"):
        read_picture(data, max_pixels=1199)


def test_a_single_pixel_is_a_picture() -> None:
    picture = read_picture(tiny_vlm.encoded_file(Image.new("RGB", (1, 1), "red")))
    assert (picture.width, picture.height) == (1, 1)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG"])
def test_of_several_frames_the_first_is_used_and_said(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "white")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = tiny_vlm.encoded_file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    picture = read_picture(data, name="film")
    assert tuple(pixels(picture)[0, 0]) == (255, 0, 0)
    assert picture.notices == ("film has several frames or pages; the first one is used",)


def test_modes() -> None:
    grey = Image.linear_gradient("L")
    cases = {
        "1": grey.convert("1"),
        "L": grey,
        "P": tiny_vlm.image(32, 32).convert("P"),
        "CMYK": tiny_vlm.image(32, 32).convert("CMYK"),
    }
    for name, made in cases.items():
        data = tiny_vlm.encoded_file(made, "TIFF")
        np.testing.assert_array_equal(pixels(read_picture(data)), np.asarray(made.convert("RGB")), err_msg=name)


def test_cmyk_jpeg_is_not_inverted() -> None:
    data = tiny_vlm.encoded_file(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    red, green, blue = (int(part) for part in pixels(read_picture(data))[8, 8])
    assert red > 240 and green < 15 and blue < 15


def test_transparency_lies_on_white() -> None:
    made = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((0, 128, 255)):
        made.putpixel((x, 0), (200, 0, 0, alpha))
    found = pixels(read_picture(tiny_vlm.encoded_file(made)))[0]
    assert found[0].tolist() == [255, 255, 255] and found[2].tolist() == [200, 0, 0]
    assert abs(int(found[1][1]) - 127) <= 1
    grey = Image.new("LA", (1, 1), (10, 0))
    assert pixels(read_picture(tiny_vlm.encoded_file(grey)))[0, 0].tolist() == [255, 255, 255]
    # A palette whose first entry is see-through, and greyscale with a see-through value.
    palette = Image.new("P", (2, 1))
    palette.putpalette([9, 9, 9, 50, 60, 70])
    palette.putpixel((1, 0), 1)
    found = pixels(read_picture(tiny_vlm.encoded_file(palette, transparency=0)))[0]
    assert found.tolist() == [[255, 255, 255], [50, 60, 70]]
    found = pixels(read_picture(tiny_vlm.encoded_file(Image.new("L", (1, 1), 7), transparency=7)))[0]
    assert found.tolist() == [[255, 255, 255]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled(kind: str) -> None:
    samples = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    data = tiny_vlm.encoded_file(Image.fromarray(samples), kind)
    assert pixels(read_picture(data))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_samples_without_a_range_are_refused() -> None:
    whole = Image.fromarray(np.array([[0, 70_000]], dtype=np.int32))
    with pytest.raises(DocumentError, match="samples from 0 to 70000; expected 0 to 65535"):
        read_picture(tiny_vlm.encoded_file(whole, "TIFF"))
    with pytest.raises(DocumentError, match="floating-point samples"):
        read_picture(tiny_vlm.encoded_file(Image.new("F", (2, 2), 0.5), "TIFF"))


def test_exif_rotation_is_applied() -> None:
    made = Image.new("RGB", (32, 16), "white")
    made.paste("red", (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90° clockwise
    picture = read_picture(tiny_vlm.encoded_file(made, "JPEG", exif=exif, quality=95))
    assert (picture.width, picture.height) == (16, 32)
    assert pixels(picture)[4, 8, 1] < 40 and pixels(picture)[28, 8, 1] > 200


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_spoil_the_picture() -> None:
    data = tiny_vlm.encoded_file(tiny_vlm.image(20, 10), "JPEG", exif=b"Exif\0\0MM\0*\0\0\xff\xff")
    picture = read_picture(data)
    assert (picture.width, picture.height) == (20, 10)


def test_a_phones_two_pictures_in_one_jpeg() -> None:
    small = tiny_vlm.image(8, 8, seed=1)
    data = tiny_vlm.encoded_file(tiny_vlm.image(40, 30), "MPO", save_all=True, append_images=[small])
    picture = read_picture(data)
    assert (picture.width, picture.notices) == (40, ())


def test_without_pillow_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(OptionError, match=r"pip install 'infoflow-kv\[vlm\]'"):
        read_picture(b"x")


def test_pixels_are_decoded_again_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(tiny_vlm.encoded_file(tiny_vlm.image(40, 30)))
    picture = read_picture(path)
    np.testing.assert_array_equal(pixels(picture), np.asarray(tiny_vlm.image(40, 30)))
    path.write_bytes(tiny_vlm.encoded_file(tiny_vlm.image(40, 30, seed=1)))
    with pytest.raises(DocumentError, match="has changed"):
        _ = picture.image


def test_a_file_of_known_bytes_is_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = tiny_vlm.model("qwen3_vl").vision
    data = tiny_vlm.encoded_file(tiny_vlm.image(40, 30))
    first = vision.read(data)
    monkeypatch.setattr(seen_in, "read_picture", lambda source, **_: pytest.fail("decoded again"))
    path = tmp_path / "same.jpg"
    path.write_bytes(data)
    again = vision.read(path)
    assert again == first
    np.testing.assert_array_equal(pixels(again), pixels(first))
    path.write_bytes(tiny_vlm.encoded_file(tiny_vlm.image(40, 30, seed=1)))
    with pytest.raises(pytest.fail.Exception, match="decoded again"):
        vision.read(path)

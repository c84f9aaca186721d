"""The first bytes of a file → what it holds, whatever its name says."""

import re

IMAGES = "PNG, JPEG, WebP, GIF, BMP and TIFF"

_BINARY = {
    b"\x89PNG": "PNG image",
    b"\xff\xd8\xff": "JPEG image",
    b"PK\x03\x04": "ZIP archive or Office file",
    b"\x1f\x8b": "gzip archive",
    b"\x7fELF": "ELF program",
    b"\xd0\xcf\x11\xe0": "old Office file",
    b"GIF89a": "GIF image",
    b"GGUF": "GGUF model",
}
# BMP begins with two letters that a text may begin with too; the size of its second header, one of nine, tells.
_IMAGE = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP|GIF8[79]a|II[*+]\0|MM\0[*+]|"
    rb"BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0",
    re.DOTALL,
)


def is_image(data: bytes) -> bool:
    """Whether these are the first bytes of an image of a kind that is read (`IMAGES`); it may be damaged further on."""
    return _IMAGE.match(data) is not None


def binary_kind(data: bytes) -> str:
    """What a file with these first bytes is, if it is known to hold no text; else empty."""
    return next((kind for signature, kind in _BINARY.items() if data.startswith(signature)), "")

"""Pictures that a data file names or holds, found and looked at by their first bytes; nothing is decoded here."""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from infoflow_kv.errors import DocumentError

_LONGEST_START = 16
# First bytes of what image libraries open; WebP has its name behind the length of the file.
_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\x00", b"MM\x00*")
_KINDS = "PNG, JPEG, GIF, BMP, TIFF or WebP"


def picture_file(folder: Path, name: str, places: Sequence[str] = (".",)) -> Path:
    """Return the file of this name under `folder`, in the first of `places` that has it.

    Raises DocumentError, without the data file's place, for a name that leads out of the folder (absolute, with `..`,
    by a link), for a file that is not there or cannot be read, and for one that does not start like a picture.
    """
    for flavour in (PurePosixPath(name), PureWindowsPath(name)):
        if flavour.anchor or ".." in flavour.parts:
            raise DocumentError(f"the picture '{name}' leads out of the data folder; give a path within it")
    candidates = [folder / place / name for place in places]
    try:
        found = next((file for file in candidates if name.strip() and file.is_file()), None)
        if found is None:
            where = ", ".join(f"'{folder / place}'" for place in places)
            raise DocumentError(f"the picture '{name}' is not there (looked in {where}); put it beside the data file")
        if not found.resolve().is_relative_to(folder.resolve()):
            raise DocumentError(
                f"the picture '{name}' is a link that leads out of the data folder; copy the file there"
            )
        with found.open("rb") as handle:
            start = handle.read(_LONGEST_START)
    except OSError as error:
        raise DocumentError(f"the picture '{name}' cannot be read: {error.strerror or error}") from error
    _check_start(start, f"the picture '{name}'")
    return found


def picture_bytes(text: str) -> bytes:
    """Return the picture that a base64 text holds, a `data:` URI or not.

    Raises DocumentError for text that is no base64 and for bytes that do not start like a picture.
    """
    head, comma, rest = text[:128].partition(",")
    if head.startswith("data:"):
        if not comma or not head.endswith(";base64"):
            raise DocumentError(f"the picture starts with '{text[:40]}'; expected 'data:image/…;base64,' and base64")
        text = rest + text[128:]
    packed = "".join(text.split())  # some writers break the lines
    try:
        data = base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DocumentError(f"the picture is no base64 ({error}): it starts with '{text[:24]}'") from error
    _check_start(data[:_LONGEST_START], "the picture in base64")
    return data


def _check_start(start: bytes, what: str) -> None:
    if not start:
        raise DocumentError(f"{what} is empty; expected {_KINDS}")
    webp = start.startswith(b"RIFF") and start[8:12] == b"WEBP"
    if not webp and not start.startswith(_STARTS):
        raise DocumentError(f"{what} is none: it starts with {start[:8]!r}; expected {_KINDS}")

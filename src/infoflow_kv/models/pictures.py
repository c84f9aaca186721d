"""Reads image files into RGB pictures: right, or refused with the reason; whatever the file's name says.

The rules: the content decides on the format, not the extension; the size is checked in the header, before any pixel is
decoded; a picture is turned as its EXIF tag says; transparency is laid on white; 16-bit greyscale is scaled, not cut
off; of several frames or pages the first one is taken, with a notice. Colour profiles are not applied, as Transformers'
own processors do not either.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infoflow_kv.errors import DocumentError, OptionError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64_000_000
# No EPS, PDF or WMF: for these Pillow starts other programs. JPEG stands for phones' MPO too.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# What Pillow's readers raise on damaged files.
DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, struct.error, zlib.error)


@dataclass(frozen=True, slots=True)
class Picture:
    """An RGB picture of `width` × `height` pixels that has been decoded once and can be again.

    `sha256` (hex) is over size and pixels: the same picture under two names, or in two lossless formats, is the same
    picture. `notices` say what of the file was left out. The pixels are not kept: a thousand photos would be gigabytes,
    and of those that are stored nobody asks for them.
    """

    width: int
    height: int
    sha256: str
    source: bytes | str | Path = field(repr=False, compare=False)
    name: str = field(default="picture", compare=False)
    max_pixels: int = field(default=MAX_PIXELS, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def image(self) -> "Image":
        """The pixels, decoded anew; DocumentError where the file holds another picture by now."""
        found, _ = _pixels(self.source, self.name, self.max_pixels)
        if _digest(found) != self.sha256:
            raise DocumentError(f"{self.name} has changed while it was in use; ask again")
        return found


def read_picture(source: bytes | str | Path, *, name: str = "", max_pixels: int = MAX_PIXELS) -> Picture:
    """The picture in a file or in bytes; `name` is what messages call it (default: the path).

    Raises DocumentError for what is no picture of a known format, damaged, truncated, larger than `max_pixels`, or of
    samples that have no agreed range (floats, 32-bit integers); OptionError where Pillow is not installed.
    """
    require_pillow()
    name = name or ("picture" if isinstance(source, bytes) else f"picture '{shown(source)}'")
    image, notices = _pixels(source, name, max_pixels)
    return Picture(image.width, image.height, _digest(image), source, name, max_pixels, notices)


def shown(path: object) -> str:
    """A path as messages call it: on one line, whatever its name holds, and not without end."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(path)[:200])


def _digest(image: "Image") -> str:
    return hashlib.sha256(f"{image.width}x{image.height}\n".encode() + image.tobytes()).hexdigest()


def _pixels(source: bytes | str | Path, name: str, max_pixels: int) -> tuple["Image", tuple[str, ...]]:
    """The RGB picture, and what of the file was left out."""
    if isinstance(source, bytes):
        return _read(BytesIO(source), name, max_pixels)
    path = Path(source)
    if not path.is_file():
        raise DocumentError(f"{name} is no file; give the path of an image file")
    try:
        with path.open("rb") as handle:
            return _read(handle, name, max_pixels)
    except OSError as error:
        raise DocumentError(f"{name} cannot be read ({error.strerror or error})") from error


def require_pillow() -> None:
    """OptionError with the command that installs it where Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise OptionError("images need Pillow, which is not installed: pip install 'infoflow-kv[vlm]'") from None


def _read(handle: Any, name: str, max_pixels: int) -> tuple["Image", tuple[str, ...]]:
    from PIL import Image, UnidentifiedImageError

    if not handle.read(1):
        raise DocumentError(f"{name} is empty (0 bytes); give an image file")
    handle.seek(0)
    try:
        image: Image.Image = Image.open(handle, formats=FORMATS)
    # A warning is raised only where the program turned warnings into errors; it means the same.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DocumentError(f"{name} is too large ({error}); give a smaller picture") from error
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise DocumentError(f"{name} is no image of a known format ({known}), or its header is damaged") from error
    except DAMAGED as error:
        raise _damaged(name, error) from error
    with image:
        width, height = image.size
        if width * height > max_pixels:
            raise DocumentError(
                f"{name} has {width} × {height} pixels, more than the limit of {max_pixels:,}; "
                "give a smaller picture or raise the limit"
            )
        return _decode(image, name)


def _decode(image: "Image", name: str) -> tuple["Image", tuple[str, ...]]:
    from PIL import Image

    notices = []
    try:
        # A phone's MPO holds previews and depth beside the picture, which is the first.
        if getattr(image, "is_animated", False) and image.format != "MPO":
            notices.append(f"{name} has several frames or pages; the first one is used")
            image.seek(0)
        image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DocumentError(f"{name} is too large ({error}); give a smaller picture") from error
    except DAMAGED as error:
        raise _damaged(name, error) from error
    upright, notice = _turned(image, name)
    return _rgb(upright, name), (*notices, *notice)


def _damaged(name: str, error: BaseException) -> DocumentError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DocumentError(f"{name} is damaged or truncated ({reason}); fetch or export it again")


def _turned(image: "Image", name: str) -> tuple["Image", tuple[str, ...]]:
    """The picture as its EXIF orientation wants it shown; a damaged tag is told, not taken for a damaged picture."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image), ()
    except DAMAGED:
        return image, (f"{name} has damaged EXIF data; it is used as it is stored, not turned",)


def _rgb(image: "Image", name: str) -> "Image":
    """8-bit RGB of any mode of Pillow."""
    from PIL import Image

    if image.mode.startswith("I"):
        return _from_integers(image, name)
    if image.mode == "F":
        raise DocumentError(f"{name} holds floating-point samples, whose range is not known; save it with 8 or 16 bits")
    try:
        # Ends with a premultiplied mode (RGBa) too; `transparency`: one colour or palette entry that is see-through.
        if image.mode.lower().endswith("a") or "transparency" in image.info:
            if image.mode.endswith("a"):
                image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
            layer = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
        return image.convert("RGB")
    except ValueError as error:
        raise DocumentError(f"{name} has colours of mode {image.mode}, unknown here; save it as RGB") from error


def _from_integers(image: "Image", name: str) -> "Image":
    """RGB of greyscale with more than 8 bits: 0–65535 become 0–255."""
    from PIL import Image

    samples: np.ndarray[Any, Any] = np.asarray(image).astype(np.int64)
    low, high = int(samples.min()), int(samples.max())
    if low < 0 or high > 65535:
        raise DocumentError(
            f"{name} holds samples from {low} to {high}; expected 0 to 65535: save it with 8 or 16 bits"
        )
    return Image.fromarray(((samples * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")

"""The pages of a PDF → pictures: for scans, figures and layouts that its text does not hold."""

import math
import threading
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from infoflow_kv.errors import DocumentError, OptionError

SCALE = 2.0
"""Pixels per point: 144 dpi, at which small print can be read; an A4 page has 1190 × 1684 pixels."""
MAX_PAGE_PIXELS = 4_000_000
"""A larger page (a poster) is drawn smaller, with at most so many pixels."""
MAX_PAGES = 1000
MAX_BYTES = 2**30  # of all pages as images, which are held together

_LOCK = threading.Lock()  # PDFium is one state for the whole process


def require_renderer() -> None:
    """OptionError with the command that installs what draws pages, where it is missing."""
    missing = [name for name, module in (("pypdfium2", "pypdfium2"), ("Pillow", "PIL")) if find_spec(module) is None]
    if missing:
        names, verb = " and ".join(missing), "is" if len(missing) == 1 else "are"
        raise OptionError(
            f"PDF pages as images need {names}, which {verb} not installed: pip install 'infoflow-kv[vlm]'"
        )


def page_pictures(data: bytes) -> list[bytes | DocumentError]:
    """Return each page of a PDF as a PNG file's bytes, or why it cannot be drawn.

    The same page gives the same pixels each time (under one version of PDFium). Raises DocumentError for a PDF that
    cannot be opened or has more than MAX_PAGES pages, OptionError where the renderer is not installed.
    """
    require_renderer()
    # Here, not above: it is an extra, and it loads a library.
    import pypdfium2  # type: ignore[import-untyped]

    with _LOCK:
        try:
            pdf = pypdfium2.PdfDocument(data)
        except pypdfium2.PdfiumError as error:
            if "password" in str(error).lower():
                raise DocumentError("encrypted PDF; save it without a password") from error
            raise DocumentError(f"damaged PDF ({error}); open it and save it anew") from error
        try:
            count = len(pdf)
            if not 0 < count <= MAX_PAGES:
                raise DocumentError(f"the PDF has {count:,} pages; 1 to {MAX_PAGES:,} are read as images: split it")
            pdf.init_forms()  # else what was filled into forms is not drawn
            pages: list[bytes | DocumentError] = []
            held = 0
            for index in range(count):
                page = _drawn(pdf, index)
                pages.append(page)
                held += len(page) if isinstance(page, bytes) else 0
                if held > MAX_BYTES:
                    raise DocumentError(f"the PDF's pages are more than {MAX_BYTES:,} bytes as images: split it")
            return pages
        finally:
            pdf.close()


def _drawn(pdf: Any, index: int) -> bytes | DocumentError:
    """One page, or why it cannot be drawn."""
    from pypdfium2 import PdfiumError

    try:
        page = pdf[index]
    except PdfiumError as error:
        return DocumentError(f"damaged page ({error}); open the PDF and save it anew")
    try:
        width, height = page.get_size()
        if not (math.isfinite(width * height) and min(width, height) > 0):
            return DocumentError(f"a page of {width:g} × {height:g} points cannot be drawn")
        scale = min(SCALE, math.sqrt(MAX_PAGE_PIXELS / (width * height)))
        bitmap = page.render(scale=scale)
        try:
            picture = bitmap.to_pil().convert("RGB")
        finally:
            bitmap.close()
    except (PdfiumError, MemoryError, OSError, ValueError) as error:
        return DocumentError(f"a page that cannot be drawn ({error}); open the PDF and save it anew")
    finally:
        page.close()
    buffer = BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)  # pixels count, not bytes: quick is better than small
    return buffer.getvalue()

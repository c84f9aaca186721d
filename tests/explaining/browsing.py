"""A headless Chromium for the tests that look at a page; they are skipped, with the reason, where there is none."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """The running browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; it is in extra `dev`")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium on the PATH; `apt-get install chromium` brings it")
    with playwright.sync_playwright() as driver:
        # As root, as in a container, Chromium has no sandbox.
        running = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()

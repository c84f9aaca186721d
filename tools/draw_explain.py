"""Draws docs/explain.png: the page of `explain` for a few sample documents, answered by the embedded model.

To fit one picture it leaves out the bars of the times and the text of all chunks but the last. Needs Chromium
(`apt-get install chromium`) and the extra `dev`. About a minute; the times in the picture are those of the machine that
it was drawn on. What `make docs` needs for the selection map of docs/results.md goes into benchmarks/results.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from infoflow_kv import Engine, MemoryStore, load
from infoflow_kv.explain import explain
from infoflow_kv.explaining import render_page, selections
from infoflow_kv.models.embedded import EMBEDDED
from infoflow_kv.samples import QUESTIONS, documents

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "explain.png"
SELECTIONS = ROOT / "benchmarks" / "results" / "explained.json"
SHOWN = ("honey.md", "museum.md", "weather.md", "shipwreck.md", "lighthouse.md", "glass.md")
BUDGET, MAX_NEW_TOKENS = 0.15, 24
WIDTH, HEIGHT, SCALE = 1180, 1000, 1
LEFT_OUT = "section[aria-labelledby=time-title], .chunk:not(#chunk-5), footer"


def made_report() -> dict[str, Any]:
    """The report of the first sample question over the documents shown."""
    engine = Engine(load(next(iter(EMBEDDED))), MemoryStore(), budget=BUDGET)
    given = [document for document in documents() if document.source in SHOWN]
    return explain(
        engine,
        QUESTIONS[0].text,
        given,
        max_new_tokens=MAX_NEW_TOKENS,
        on_progress=lambda done, total, step: print(f"{done + 1} of {total}: {step}", file=sys.stderr),
    )


def draw(report: dict[str, Any], picture: Path) -> None:
    """Nothing; the picture shows the page without what is left out, in light colours."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        sys.exit("there is no chromium on the PATH; `apt-get install chromium` brings it")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder) / "report.html"
        file.write_text(render_page(report), encoding="utf-8")
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE, color_scheme="light"
        )
        page.goto(file.as_uri())
        # Not by a style sheet: the page's own policy lets none in.
        page.eval_on_selector_all(LEFT_OUT, "all => all.forEach(part => { part.style.display = 'none'; })")
        page.screenshot(path=picture, full_page=True)
        browser.close()
    with Image.open(picture) as drawn:  # 256 colours are enough, at a third of the bytes
        few = drawn.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(picture, optimize=True)


def keep_selections(report: dict[str, Any], file: Path) -> None:
    """The tokens that each method chose, without their text."""
    found = selections(report)
    for method in found["methods"]:
        for chunk in method["chunks"]:
            chunk["scores"] = [float(f"{score:.3g}") for score in chunk["scores"]]
    file.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    report = made_report()
    draw(report, PICTURE)
    keep_selections(report, SELECTIONS)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes")

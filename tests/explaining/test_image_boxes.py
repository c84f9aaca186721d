"""Images on the page of `explain`: one box each, that says what the method did with their tokens."""

import re
from pathlib import Path
from typing import Any

import pytest

from explaining.browsing import chromium
from explaining.made_reports import made_report
from infoflow_kv.errors import OptionError
from infoflow_kv.explaining import render_page, selections

PICTURES = [
    {"start": 3, "stop": 23, "tokens": 20, "tiles": 1},
    {"start": 23, "stop": 60, "tokens": 32, "tiles": 4},
]


def seen_report() -> dict[str, Any]:
    report = made_report()
    report["chunks"][1]["images"] = PICTURES
    report["chunks"][2]["images"] = []
    return report


def test_the_page_holds_where_images_stand() -> None:
    report = seen_report()
    page = render_page(report)
    assert page.count('"images":') == 1
    assert '"images":[{"start":3,"stop":23,"tokens":20,"tiles":1},' in page
    assert selections(report) == selections(made_report())


@pytest.mark.parametrize("wrong", [
    {"start": 22}, {"start": 60}, {"stop": 23}, {"stop": 61}, {"tokens": 0}, {"tokens": 38}, {"tiles": 0},
    {"start": -1}, {"start": None}, {"tiles": 1.5}, {"tokens": True},
])  # fmt: skip
def test_images_that_do_not_fit_their_chunk_are_refused(wrong: dict[str, Any]) -> None:
    report = seen_report()
    report["chunks"][1]["images"] = [PICTURES[0], PICTURES[1] | wrong]
    with pytest.raises(OptionError, match="image 1 of chunk 1"):
        render_page(report)


def test_an_image_is_one_box_in_a_browser(tmp_path: Path) -> None:
    report = seen_report()
    path = tmp_path / "report.html"
    path.write_text(render_page(report), encoding="utf-8")
    with chromium() as browser:
        page = browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        boxes = page.locator("#chunk-1 .image")
        assert page.locator("#chunk-1 .t").count() == 3 + len(PICTURES)
        for method in report["methods"]:
            page.get_by_role("tab", name=method["name"], exact=True).click()
            part = method["chunks"][1]
            for number, (picture, words) in enumerate(zip(PICTURES, boxes.all_text_contents(), strict=True)):
                own = slice(picture["start"], picture["stop"])
                marked = sum(part["recomputed"][own])
                assert words.startswith(("[image: 20 tokens]", "[image: 32 tokens in 4 tiles]")[number])
                assert ("exact" if part["exact"] else f"]{marked} recomputed") in words
                assert ("r" in boxes.nth(number).get_attribute("class").split()) == (marked > 0)
                found = re.search(r"([\d.]+)\u202f% of the scores", words)
                if part["scores"]:
                    share = part["mass"] * sum(part["scores"][own]) / sum(part["scores"])
                    assert found and float(found[1]) == pytest.approx(100 * share, abs=0.06)
                else:
                    assert found is None
        boxes.first.hover()
        assert "tokens 4 to 23" in page.inner_text("#tip")
        boxes.first.click()
        for key, to in (("ArrowRight", boxes.nth(1)), ("ArrowLeft", boxes.first), ("ArrowLeft", None)):
            page.keyboard.press(key)
            assert to is None or to.evaluate("box => box === document.activeElement")
        assert complaints == []

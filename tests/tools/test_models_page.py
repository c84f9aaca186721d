"""The families that the package lists, the page about them and the table of the tests are one."""

from pathlib import Path

import families
from infoflow_kv.models.tested import list_families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the page."""
    part = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    lines = [line for line in part.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_list_of_the_package_and_the_page_follow_the_table_of_the_tests() -> None:
    expected = [(f.title, [f.rope], list(f.words)) for f in families.FAMILIES.values()]
    assert [(r["name"], r["rope"], r["traits"]) for r in list_families()] == expected
    cells = [[r["name"], f"`{r['class']}`", ", ".join(r["rope"]), ", ".join(r["traits"])] for r in list_families()]
    assert rows("Tested families") == cells


def test_the_page_names_all_that_is_refused() -> None:
    titles = [title for title, *_ in rows("Refused")]
    assert titles == [*(f.title for f in families.REFUSED.values()), "models with code of their own"]

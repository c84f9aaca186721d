"""Fails where a relative link in the docs leads nowhere, or where a generated page is stale; `--write` makes the pages.

Generated: docs/cli.md, the command line's help. It is checked only if it exists.
"""

import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
CLI_PAGE = ROOT / "docs" / "cli.md"

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    """All Markdown that people read: the top of the repository and docs/."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """The fragments that a Markdown page's headings answer to."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {anchor(heading) for heading in headings}


def anchor(heading: str) -> str:
    """`heading` as a link fragment: lower case, punctuation gone, spaces as hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    kept = (c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN")
    return "".join(kept).replace(" ", "-")


def broken_links(root: Path) -> list[str]:
    """One line for every relative link that leads to no file or no heading."""
    found = []
    for page in pages(root):
        text = INLINE_CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
        for groups in LINK.findall(text):
            target = unquote(groups[0] or groups[1])
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            name, _, fragment = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists():
                found.append(f"{page.relative_to(root)}: {target} does not exist")
            elif fragment and path.suffix == ".md" and fragment not in anchors(path):
                found.append(f"{page.relative_to(root)}: {target} has no such heading")
    return found


def cli_page() -> str:
    """The help of every verb as Markdown, as typer writes it."""
    command = [sys.executable, "-m", "typer", "infoflow_kv.cli.app", "utils", "docs", "--name", "infoflow-kv"]
    # A wide plain terminal: the page must not depend on where it is made.
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    # typer escapes quotes as for HTML, which code blocks would show as they are.
    return done.stdout.strip().replace("&quot;", '"').replace("&#x27;", "'") + "\n"


def stale_pages() -> list[str]:
    """One line for every generated page that differs from what would be written now."""
    if CLI_PAGE.exists() and CLI_PAGE.read_text(encoding="utf-8") != cli_page():
        return [f"{CLI_PAGE.relative_to(ROOT)} is stale; run `make docs`"]
    return []


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        CLI_PAGE.parent.mkdir(exist_ok=True)
        CLI_PAGE.write_text(cli_page(), encoding="utf-8")
    lines = broken_links(ROOT) + stale_pages()
    print("\n".join(lines) or f"docs: ok ({len(pages(ROOT))} pages)")
    sys.exit(bool(lines))

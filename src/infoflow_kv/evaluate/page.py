"""One HTML page from the Markdown that the report writes: no links, no scripts, figures inside, light and dark."""

import html
import re
from collections.abc import Mapping

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --soft: #59636e; --rule: #d1d9e0;
  --shade: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #14171a; --soft: #a3adb8; --rule: #3a424b; --shade: #1e2328; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--rule); padding-bottom: .3rem; }
p, ul { max-width: 48rem; }
code { font: .875em ui-monospace, "DejaVu Sans Mono", monospace; background: var(--shade); padding: .1em .3em;
  border-radius: 4px; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--rule); padding: .3rem .6rem; text-align: left; white-space: nowrap; }
thead th { background: var(--shade); } .number { text-align: right; }
figure { margin: 1.5rem 0; } figcaption { color: var(--soft); font-size: .875rem; margin-top: .4rem; }
.picture { background: #ffffff; border: 1px solid var(--rule); border-radius: 8px; padding: .75rem; max-width: 54rem; }
.picture svg { display: block; width: 100%; height: auto; }
"""
_IMAGE = re.compile(r"!\[(.*)\]\(([^)]*)\)")


def render_page(markdown: str, title: str, pictures: Mapping[str, str]) -> str:
    """The page; `pictures` holds the SVG text of every image path in the Markdown.

    Reads what `report.py` writes and no more: headings, paragraphs, lists, tables, images alone in a block, and in
    text code, bold and emphasis. Everything else is escaped.
    """
    body = "\n".join(_block(block, pictures) for block in markdown.strip().split("\n\n"))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _block(block: str, pictures: Mapping[str, str]) -> str:
    if heading := re.match(r"(#{1,3}) (.*)", block):
        level = len(heading[1])
        return f"<h{level}>{_inline(heading[2])}</h{level}>"
    if image := _IMAGE.fullmatch(block):
        caption, path = image[1], image[2]
        name = re.sub(r"[^A-Za-z0-9]+", "-", path).strip("-")
        shown = _embedded(pictures[path], name, caption)
        return f'<figure><div class="picture">{shown}</div><figcaption>{_inline(caption)}</figcaption></figure>'
    lines = block.split("\n")
    if block.startswith("| "):
        return _table(lines)
    if block.startswith("- "):
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    return f"<p>{_inline(' '.join(lines))}</p>"


def _table(lines: list[str]) -> str:
    head, rules, *body = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines)
    numbers = [rule.endswith(":") for rule in rules]

    def row(cells: list[str], tag: str) -> str:
        kinds = [' class="number"' if right else "" for right in numbers]
        return "".join(f"<{tag}{kind}>{_inline(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    inner = "".join(f"<tr>{row(cells, 'td')}</tr>\n" for cells in body)
    return f'<div class="wide"><table><thead><tr>{row(head, "th")}</tr></thead>\n<tbody>\n{inner}</tbody></table></div>'


def _inline(text: str) -> str:
    """Code, bold and emphasis of one line; code is set apart first, for what it holds is foreign text."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(f"<code>{html.escape(p[1:-1])}</code>" if p.startswith("`") else _words(p) for p in parts)


def _words(text: str) -> str:
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))
    return re.sub(r"\*(\S.*?)\*", r"<em>\1</em>", bold)


def _embedded(svg: str, name: str, caption: str) -> str:
    """The SVG without its file head, its ids made this figure's own, so that figures do not clip one another."""
    inner = svg[svg.index("<svg") :].strip()
    inner = re.sub(r"<metadata>.*?</metadata>", "", inner, flags=re.DOTALL)
    # An inline style applies to the whole page: it must not reach beyond the figure.
    inner = inner.replace("*{stroke-linejoin", f"#{name} *{{stroke-linejoin")
    inner = re.sub(r'\bid="', f'id="{name}-', inner)
    inner = inner.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    label = html.escape(caption.replace("`", ""), quote=True)
    return inner.replace("<svg", f'<svg id="{name}" role="img" aria-label="{label}"', 1)

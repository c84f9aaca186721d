"""Draws docs/pipeline.svg: the two halves of the method, and what happens to the tokens of one request."""

import random
from pathlib import Path

INK, SOFT, PAPER = "#1d2433", "#5b6579", "#fbfaf7"
BLUE, ORANGE, GREEN, GREY = "#3566c2", "#e07a2f", "#2f8f6b", "#c9ced8"
CHUNKS = (("A", 17), ("B", 22), ("C", 15), ("D", 24))
WIDTH, HEIGHT = 1000, 520


def text(
    x: float, y: float, body: str, size: int = 15, color: str = INK, anchor: str = "start", weight: str = "400"
) -> str:
    style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style}>{body}</text>'


def box(x: float, y: float, width: float, height: float, title: str, lines: tuple[str, ...], color: str) -> str:
    parts = [
        (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="9" fill="white" '
            f'stroke="{color}" stroke-width="2"/>'
        ),
        text(x + width / 2, y + 24, title, 16, color, "middle", "700"),
    ]
    parts += [text(x + width / 2, y + 45 + 18 * i, line, 13, SOFT, "middle") for i, line in enumerate(lines)]
    return "".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float, color: str = SOFT) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="2.2" marker-end="url(#tip)"/>'


def strip(x: float, y: float, order: tuple[int, ...], chosen: float, seed: int) -> str:
    """Chunks side by side, one bar a token; chosen tokens orange, the first chunk never."""
    pick = random.Random(seed)
    parts = []
    for place, index in enumerate(order):
        name, tokens = CHUNKS[index]
        start = x
        for _ in range(tokens):
            repaired = place > 0 and pick.random() < chosen
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="6" height="26" rx="1.5" fill="{ORANGE if repaired else GREY}"/>'
            )
            x += 8
        parts.append(text((start + x - 2) / 2, y + 44, f"chunk {name}", 12, SOFT, "middle"))
        x += 12
    for _ in range(7):
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="6" height="26" rx="1.5" fill="{BLUE}"/>')
        x += 8
    parts.append(text(x - 29, y + 44, "question", 12, BLUE, "middle"))
    return "".join(parts)


def draw() -> str:
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="Inter, Helvetica, Arial, sans-serif" '
            'aria-label="InfoFlow KV: chunks are prefilled once; a question recomputes few of their tokens">'
        ),
        (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker></defs>'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="{PAPER}"/>',
        text(30, 40, "Once for each document", 18, INK, weight="700"),
        box(30, 58, 190, 84, "documents", ("text, Markdown, HTML,", "PDF, JSONL"), GREEN),
        arrow(222, 100, 266, 100),
        box(270, 58, 190, 84, "chunks", ("whole paragraphs,", "at most 512 tokens"), GREEN),
        arrow(462, 100, 506, 100),
        box(510, 58, 190, 84, "prefill", ("each chunk alone, behind", "the chat header"), GREEN),
        arrow(702, 100, 746, 100),
        box(750, 58, 220, 84, "store", ("KV with keys before RoPE:", "it fits any place later"), GREEN),
        text(30, 176, "For each question", 18, INK, weight="700"),
        (
            f'<path d="M860 144 L860 192 L125 192 L125 208" fill="none" stroke="{SOFT}" stroke-width="2.2" '
            'stroke-dasharray="5 4" marker-end="url(#tip)"/>'
        ),
        box(30, 212, 190, 84, "assemble", ("load, rotate to the", "positions of this request"), BLUE),
        arrow(222, 254, 236, 254),
        box(240, 212, 220, 84, "score", ("how much attention does the", "question pay to each token?"), BLUE),
        arrow(462, 254, 476, 254),
        box(
            480, 212, 240, 84, "repair", ("top 15 % + question, all layers,", "exact causal mask, one forward"), ORANGE
        ),
        arrow(722, 254, 736, 254),
        box(740, 212, 230, 84, "decode", ("token by token on the", "repaired context"), BLUE),
        text(
            30, 344, "The same chunks, two questions, another order: nothing is prefilled again", 15, INK, weight="700"
        ),
        strip(30, 362, (0, 1, 2, 3), 0.2, 4),
        strip(30, 436, (2, 0, 3, 1), 0.2, 9),
        f'<rect x="800" y="364" width="12" height="22" rx="2" fill="{GREY}"/>'
        + text(822, 380, "reused as stored", 13, SOFT),
        f'<rect x="800" y="398" width="12" height="22" rx="2" fill="{ORANGE}"/>'
        + text(822, 414, "recomputed", 13, SOFT),
        f'<rect x="800" y="432" width="12" height="22" rx="2" fill="{BLUE}"/>'
        + text(822, 448, "the question", 13, SOFT),
        text(800, 482, "the first chunk is exact", 13, SOFT),
        text(800, 500, "as it stands", 13, SOFT),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    target = Path(__file__).parent.parent / "docs" / "pipeline.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(draw(), encoding="utf-8")
    print(target)

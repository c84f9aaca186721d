"""One long text → passages: at LongBench's `Passage i:` lines, at blank lines, at sentence ends."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from infoflow_kv.evaluate.items import Passage

PIECE_CHARACTERS = 1_800
"""Texts without marked passages are packed into pieces of about this length: some 400 tokens of English."""

_MARKER = re.compile(r"^Passage (\d+):(?:\n|\Z)", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")
_LINE_END = re.compile(r"\n")
_SPACE = re.compile(r"\s+")
# A sentence ends before white space, so that the space opens the next one, as most tokenizers see it.
_SENTENCE_END = re.compile(r"""[.!?\u2026]+["')\]\u201d\u2019]*(?=\s)|(?=\n[ \t]*\n)""")
_LAST_WORD = re.compile(r"(\w+(?:\.\w+)*)\.\Z")
_SHORT = "mr mrs ms dr st prof rev gen col capt sr jr vs vol fig eq pp cf e.g i.e viz"
_ABBREVIATIONS = frozenset(_SHORT.split())


def marked_passages(context: str) -> list[Passage] | None:
    """Return the passages of a LongBench multi-document context; None if it does not begin with `Passage 1:`.

    Each passage is `Passage i:`, a line with the title, the text; one newline stands between two. Only the next number
    in turn counts as a marker, so that a text may speak of "Passage 7:". A passage of one line is all text; one
    without text is left out. No other character is lost.
    """
    markers: list[re.Match[str]] = []
    for match in _MARKER.finditer(context):
        if int(match[1]) == len(markers) + 1 and (markers or match.start() == 0):
            markers.append(match)
    if not markers:
        return None
    passages = []
    for number, marker in enumerate(markers):
        stop = markers[number + 1].start() - 1 if number + 1 < len(markers) else len(context)
        title, newline, text = context[marker.end() : stop].partition("\n")
        if not newline or not text.strip():
            title, text = "", title + newline + text
        if text.strip():
            passages.append(Passage(title, text))
    return passages


def pieces(text: str, max_characters: int = PIECE_CHARACTERS) -> list[Passage]:
    """Return the text in order as passages without titles, each of at most `max_characters` (blank ends not counted).

    It is cut at blank lines; where a paragraph alone is longer, at line ends, then sentence ends, then spaces, then
    anywhere. Only white space at the cuts is lost.
    """
    units = list(_units(text, max_characters, 0))
    packed = ("".join(units[part.start : part.stop]) for part in pack([len(u) for u in units], max_characters))
    return [Passage("", piece.rstrip().strip("\n")) for piece in packed if piece.strip()]


def sentences(text: str) -> list[str]:
    """Return the text's sentences, each with the white space before it; joined they are the text.

    A sentence ends at `.`, `!`, `?` and closing quotes, unless the next word is in lower case or the full stop
    belongs to an initial or a common abbreviation; and at every blank line.
    """
    found: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        if text[start : match.end()].strip() and _ends_sentence(text, start, match):
            found.append(text[start : match.end()])
            start = match.end()
    if text[start:].strip() or not found:
        found.append(text[start:])
    else:
        found[-1] += text[start:]
    return [sentence for sentence in found if sentence]


def pack(sizes: Sequence[int], limit: int) -> list[range]:
    """Return consecutive ranges over `sizes`, each as long as its sum allows, and of one at least."""
    parts: list[range] = []
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            parts.append(range(start, index))
            start, total = index, 0
        total += size
    if start < len(sizes):
        parts.append(range(start, len(sizes)))
    return parts


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    if not match[0]:  # a blank line
        return True
    following = text[match.end() : match.end() + 80].lstrip()
    if following[:1].islower():
        return False
    word = _LAST_WORD.search(text, max(start, match.end() - 40), match.end())
    if word is None:
        return True
    initial = len(word[1]) == 1 and word[1].isupper() and word[1] != "I"
    return not initial and word[1].lower() not in _ABBREVIATIONS


def _units(text: str, limit: int, level: int) -> Iterator[str]:
    if len(text) <= limit:
        yield text
    elif level == len(_CUTS):
        yield from (text[start : start + limit] for start in range(0, len(text), limit))
    else:
        for part in _CUTS[level](text):
            yield from _units(part, limit, level + 1)


def _cut_after(separator: re.Pattern[str], text: str) -> Iterator[str]:
    start = 0
    for match in separator.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


# Ways to cut, the best first; the next one is for parts that are still too long.
_CUTS: tuple[Callable[[str], Iterable[str]], ...] = (
    partial(_cut_after, _BLANK_LINES),
    partial(_cut_after, _LINE_END),
    sentences,
    partial(_cut_after, _SPACE),
)

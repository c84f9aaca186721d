"""One document → chunks: tokenised once, then cut, so that the chunks' ids together are the document's ids."""

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise

from infoflow_kv.chunking.tokens import Offsets, TextEncoder, replace_surrogates
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.records import Chunk, Document

MIN_CHUNK_TOKENS = 8

# How good a cut is. Where nothing better lies in reach, any place between two characters will do, then any token.
_ANY, _HARD, _SPACE, _LINE, _SENTENCE, _PARAGRAPH = range(6)

_WHITESPACE = re.compile(r"\s+")
_SENTENCE_END = re.compile(r"""[.!?\u2026\u3002\uff01\uff1f]["')\]\u201d\u2019\u300d\u300f\uff09]{0,4}\Z""")
_CJK_SENTENCE_END = re.compile(r"""[\u3002\uff01\uff1f]+["'\u201d\u2019\u300d\u300f\uff09]{0,4}""")


def split(document: Document, encoder: TextEncoder, chunk_tokens: int = 512) -> tuple[Chunk, ...]:
    """Return the document's chunks, in order, each of 1 to `chunk_tokens` tokens; together they are its ids.

    The text is the title and a newline (if there is a title), the stripped text and a blank line. A piece ends at
    the last paragraph end within reach, else sentence end, else line end or space, else at a token; a cut that would
    leave less than a quarter of `chunk_tokens` is not taken. A tail under an eighth is balanced with its neighbour.
    A token that holds the place of the cut stays in the earlier chunk.

    Raises OptionError for `chunk_tokens` under 8, DocumentError for a document without any text.
    """
    if not isinstance(chunk_tokens, int) or chunk_tokens < MIN_CHUNK_TOKENS:
        raise OptionError(f"chunk_tokens is {chunk_tokens!r}; a whole number of at least {MIN_CHUNK_TOKENS} is needed")
    title, body = replace_surrogates(document.title).strip(), replace_surrogates(document.text).strip()
    name = document_id(document)
    if not title and not body:
        raise DocumentError(f"document '{name}' has no text; give it some or leave it out")
    text = (title + "\n" if title else "") + (body + "\n\n" if body else "\n")
    ids, offsets = encoder.content(text)
    edges = _edges(_quality(text, offsets), chunk_tokens)
    return tuple(
        Chunk(token_ids=ids[start:stop], document_id=name, title=title, index=index)
        for index, (start, stop) in enumerate(pairwise(edges))
    )


def document_id(document: Document) -> str:
    """Return the document's name in results: its id, else its source, else `doc-` and a hash of its text."""
    if document.id or document.source:
        return replace_surrogates(document.id or document.source)
    return "doc-" + hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _quality(text: str, offsets: Offsets) -> list[int]:
    """Return, for each token, how good a cut just before it would be."""
    quality = [_HARD] * len(offsets)
    for token in range(1, len(offsets)):
        if offsets[token][0] < offsets[token - 1][1]:  # inside one character
            quality[token] = _ANY
    token = 0
    for place, level in sorted(_places(text).items()):
        while token < len(offsets) and (offsets[token][0] < place or offsets[token][1] <= place):
            token += 1
        if token < len(offsets) and quality[token] != _ANY:
            quality[token] = max(quality[token], level)
    return quality


def _places(text: str) -> dict[int, int]:
    """Return the characters before which a cut makes sense, with how good it is.

    A paragraph or line ends after its newline. A sentence or word ends before the space, which most tokenizers join
    to the next word.
    """
    places: dict[int, int] = {}
    for run in _WHITESPACE.finditer(text):
        newlines = run.group().count("\n")
        ends_sentence = bool(_SENTENCE_END.search(text, max(0, run.start() - 5), run.start()))
        place = run.start() + run.group().rfind("\n") + 1 if newlines else run.start()
        if newlines > 1:
            level = _PARAGRAPH
        elif ends_sentence:
            level = _SENTENCE
        else:
            level = _LINE if newlines else _SPACE
        places[place] = level
    for end in _CJK_SENTENCE_END.finditer(text):
        places.setdefault(end.end(), _SENTENCE)
    return places


def _edges(quality: Sequence[int], chunk_tokens: int) -> list[int]:
    """Return the token indices at which chunks start, and the end."""
    num_tokens, edges = len(quality), [0]
    while num_tokens - edges[-1] > chunk_tokens:
        start = edges[-1]
        reach = range(start + max(1, chunk_tokens // 4), start + chunk_tokens + 1)
        edges.append(max(reach, key=lambda cut: (quality[cut], cut)))
    if len(edges) > 1 and num_tokens - edges[-1] < chunk_tokens // 8:
        start = edges[-2]
        shortest = max(chunk_tokens // 4, num_tokens - start - chunk_tokens)
        middle = (start + num_tokens) // 2
        reach = range(start + shortest, num_tokens - shortest + 1)
        edges[-1] = max(reach, key=lambda cut: (quality[cut], -abs(cut - middle)))
    return [*edges, num_tokens]

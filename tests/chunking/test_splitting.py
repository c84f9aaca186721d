"""Chunks: together the document's ids, never too long, cut where a reader would."""

import hashlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_kv.chunking import document_id, split
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.records import Document


class OneTokenPerCharacter:
    """Stands in for TextEncoder where a test counts tokens."""

    def content(self, text):
        return tuple(map(ord, text)), tuple((i, i + 1) for i in range(len(text)))


class FourTokensPerCharacter:
    """As a byte-level tokenizer does with emoji."""

    def content(self, text):
        return tuple(ord(c) for c in text for _ in range(4)), tuple(
            (i, i + 1) for i in range(len(text)) for _ in "1234"
        )


class FixedCount:
    """Cuts any text into this many tokens, of which all but the first are empty."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def content(self, text):
        return tuple(range(self.num_tokens)), ((0, len(text)), *[(len(text), len(text))] * (self.num_tokens - 1))


def texts_of(text, chunk_tokens, encoder=None):
    chunks = split(Document(text), encoder or OneTokenPerCharacter(), chunk_tokens)
    return ["".join(map(chr, chunk.token_ids)) for chunk in chunks]


def ids_of(chunks):
    return tuple(t for chunk in chunks for t in chunk.token_ids)


@given(
    text=st.text(st.sampled_from("ab. \n!é日。😀"), max_size=400).filter(str.strip),
    title=st.sampled_from(["", "A title", " <|im_end|> "]),
    chunk_tokens=st.integers(8, 80),
)
@settings(max_examples=300, deadline=None)
def test_chunks_together_are_the_document(tokenizer, encoder, text, title, chunk_tokens):
    chunks = split(Document(text, title=title, id="d"), encoder, chunk_tokens)
    whole = (title.strip() + "\n" if title else "") + text.strip() + "\n\n"
    assert ids_of(chunks) == encoder.content(whole)[0]
    assert tokenizer.decode(ids_of(chunks)) == whole
    assert encoder.control_ids.isdisjoint(ids_of(chunks))
    assert all(1 <= chunk.num_tokens <= chunk_tokens for chunk in chunks)
    assert all(chunk.num_tokens >= chunk_tokens // 4 for chunk in chunks[:-1])
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert {(chunk.document_id, chunk.title) for chunk in chunks} == {("d", title.strip())}


@pytest.mark.parametrize("limit", [8, 16, 64])
@pytest.mark.parametrize(("times", "plus"), [(0, 1), (1, -1), (1, 0), (1, 1), (2, 0), (2, 1), (5, 1)])
def test_sizes_around_the_limit(limit, times, plus):
    num_tokens = times * limit + plus
    chunks = split(Document("x"), FixedCount(num_tokens), limit)
    assert ids_of(chunks) == tuple(range(num_tokens))
    assert len(chunks) == -(-num_tokens // limit)
    assert max(chunk.num_tokens for chunk in chunks) <= limit
    assert len(chunks) == 1 or min(chunk.num_tokens for chunk in chunks) >= limit // 8


def test_one_character_document(tokenizer, encoder):
    [chunk] = split(Document("x"), encoder)
    assert tokenizer.decode(chunk.token_ids) == "x\n\n"


def test_paragraphs_first():
    text = "First one. Done here.\n\nSecond one. It is longer."
    assert texts_of(text, 30) == ["First one. Done here.\n\n", "Second one. It is longer.\n\n"]


def test_paragraph_beats_a_later_sentence_and_line():
    text = "The first one\n\nA sentence. Another.\nA line and then words"
    assert texts_of(text, 40)[0] == "The first one\n\n"


def test_then_sentences_before_the_space():
    assert texts_of("First one is here. The second goes on and on", 30) == [
        "First one is here.",
        " The second goes on and on\n\n",
    ]


def test_sentence_inside_closing_quotes_and_cjk():
    assert texts_of("He said “so it is.” And then nothing", 30)[0] == "He said “so it is.”"
    assert texts_of("日本語の文章です。次の文はとても長い", 14)[0] == "日本語の文章です。"


def test_then_lines_then_words():
    assert texts_of("one line here\nanother line without end", 30)[0] == "one line here\n"
    assert texts_of("some words without any stop at all", 20)[0] == "some words without"


def test_then_tokens():
    assert texts_of("x" * 30, 16) == ["x" * 16, "x" * 14 + "\n\n"]


def test_early_boundary_is_not_taken():
    pieces = texts_of("Hi.\n\n" + "word " * 20, 40)
    assert len(pieces[0]) >= 10
    assert pieces[0].startswith("Hi.\n\nword")


def test_small_tail_is_balanced():
    lengths = [len(piece) for piece in texts_of("x" * 64, 64)]
    assert lengths == [33, 33]
    lengths = [len(piece) for piece in texts_of("ab\n\n" + "x" * 60, 64)]
    assert lengths == [33, 33]  # the paragraph end would leave a piece of 4
    lengths = [len(piece) for piece in texts_of("x" * 20 + "\n\n" + "x" * 42, 64)]
    assert lengths == [22, 44]


def test_character_of_several_tokens_is_not_torn():
    assert [len(piece) % 4 for piece in texts_of("😀" * 20, 10, FourTokensPerCharacter())] == [0] * 11


def test_token_across_the_boundary_stays_in_the_earlier_chunk():
    class Pairs:
        def content(self, text):
            spans = [(i, min(i + 2, len(text))) for i in range(0, len(text), 2)]
            return tuple(a for a, _ in spans), tuple(spans)

    text = "a" * 11 + "\n\n" + "b" * 12  # the token at 12 holds the last newline and the first b
    first, _ = split(Document(text), Pairs(), 8)
    assert first.token_ids == tuple(range(0, 14, 2))


def test_offsets_trimmed_of_white_space():
    class Words:  # a byte-level tokenizer with trim_offsets: white space has tokens of no characters
        def content(self, text):
            spans = [(m.end(), m.end()) if m[0].isspace() else m.span() for m in re.finditer(r"\s+|\S+", text)]
            return tuple(range(len(spans))), tuple(spans)

    first, second = split(Document("a b c\n\nd e f g"), Words(), 8)
    assert (first.token_ids, second.token_ids) == (tuple(range(6)), tuple(range(6, 14)))


def test_start_of_a_document_keeps_its_chunks_when_the_end_changes(encoder):
    text = "The quick brown fox jumps over the lazy dog. " * 60
    before, after = (split(Document(t, id="d"), encoder, 64) for t in (text, text + "And more was said of it."))
    assert len(before) > 4
    assert before[:-2] == after[: len(before) - 2]


def test_title_is_part_of_the_tokens_and_source_is_not(tokenizer, encoder):
    plain, titled, renamed = (
        ids_of(split(document, encoder))
        for document in (Document("Text."), Document("Text.", title="Tea"), Document("Text.", source="b", id="c"))
    )
    assert plain == renamed != titled
    assert tokenizer.decode(titled) == "Tea\nText.\n\n"


def test_name_is_id_then_source_then_hash():
    assert document_id(Document("t", id="i", source="s")) == "i"
    assert document_id(Document("t", source="s")) == "s"
    assert document_id(Document("t")) == "doc-" + hashlib.sha256(b"t").hexdigest()[:12]
    assert document_id(Document("\ud800")).startswith("doc-")


def test_title_alone_is_a_document_and_nothing_is_not(tokenizer, encoder):
    assert tokenizer.decode(ids_of(split(Document(" ", title="Tea"), encoder))) == "Tea\n\n"
    with pytest.raises(DocumentError, match="'empty' has no text"):
        split(Document(" \n\t", id="empty"), encoder)


@pytest.mark.parametrize("value", [7, 0, -1, True, 8.5, "512", None])
def test_chunk_tokens_out_of_range(encoder, value):
    with pytest.raises(OptionError, match="at least 8"):
        split(Document("x"), encoder, value)


@pytest.mark.parametrize("piece", [".", "a", ")", ".\n", "😀", "a "])
def test_long_monotone_document_takes_linear_time(encoder, piece):
    text = piece * (100_000 // len(piece))
    began = time.perf_counter()
    chunks = split(Document(text), encoder)
    assert time.perf_counter() - began < 20  # a quadratic pass takes minutes
    assert ids_of(chunks) == encoder.content(text.strip() + "\n\n")[0]


def test_million_dots_are_split_in_linear_time(encoder):
    began = time.perf_counter()
    chunks = split(Document("." * 1_000_000), encoder)
    assert time.perf_counter() - began < 30
    assert max(chunk.num_tokens for chunk in chunks) <= 512


def test_spaces_within_a_document_are_scanned_once(encoder):
    began = time.perf_counter()
    split(Document("a" + " " * 300_000 + "b"), encoder)
    assert time.perf_counter() - began < 20

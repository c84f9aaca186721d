"""Documents of text and images in chunks: what stands with an image, what stands alone, what is refused."""

from dataclasses import dataclass
from typing import Any

import pytest

import tiny
from infoflow_kv.chunking import TextEncoder, chunks_of
from infoflow_kv.chunking.pictures import GLUED_TOKENS
from infoflow_kv.errors import DocumentError
from infoflow_kv.records import ChunkImages, Document, Image

IMAGE_IDS = (390, 391, 391, 392)
LONG = "The lighthouse keeper of Saltmere counts the boats. " * 20


@dataclass(frozen=True)
class Prepared:
    token_ids: tuple[int, ...]


class Vision:
    """Two tokens for every image; remembers what it was asked."""

    def __init__(self) -> None:
        self.tiles: list[int] = []

    def read(self, source: Any) -> Any:
        return source

    def prepare(self, picture: Any) -> Prepared:
        return Prepared(IMAGE_IDS)

    def images(self, token_ids: Any, prepared: Any, tiles: int = 1) -> ChunkImages:
        self.tiles.append(tiles)
        return ChunkImages("0" * 64, (2, 4, 0, 1), None, None, (), tuple(prepared))


@pytest.fixture
def encoder():
    return TextEncoder(tiny.tokenizer())


def text_of(ids):
    return tiny.tokenizer().decode(ids)


def chunks(encoder, *parts, title=""):
    return chunks_of(Document(parts=parts, title=title), encoder, 128, Vision())


def test_a_short_text_stands_with_the_image_behind_it(encoder):
    [chunk] = chunks(encoder, "A map.", Image(b"1"))
    assert chunk.images is not None
    assert chunk.token_ids[-4:] == IMAGE_IDS
    assert text_of(chunk.token_ids[:-4]) == "A map.\n\n"


def test_a_short_text_at_the_end_stands_with_the_last_image(encoder):
    first, second = chunks(encoder, Image(b"1"), "Between.", Image(b"2"), "Behind.")
    assert first.token_ids == IMAGE_IDS
    start = second.token_ids.index(IMAGE_IDS[0])
    assert text_of(second.token_ids[:start]) == "Between.\n\n"
    assert text_of(second.token_ids[start + 4 :]) == "\nBehind.\n\n"
    assert (first.index, second.index) == (0, 1)


def test_a_long_text_is_chunked_by_itself(encoder):
    found = chunks(encoder, LONG, Image(b"1"), LONG)
    kinds = [chunk.images is not None for chunk in found]
    assert kinds.count(True) == 1
    assert not kinds[0]
    assert not kinds[-1]
    assert found[kinds.index(True)].token_ids == IMAGE_IDS
    assert all(chunk.num_tokens <= 128 for chunk in found)
    assert [chunk.index for chunk in found] == list(range(len(found)))
    assert len(encoder.content(LONG)[0]) > GLUED_TOKENS


def test_all_text_is_there_once_and_in_order(encoder):
    found = chunks(encoder, "One.", "Two.", Image(b"1"), LONG, Image(b"2"), "Three.", title="Harbour")
    words = text_of([i for chunk in found for i in chunk.token_ids if i not in IMAGE_IDS])
    assert words.replace("\n", " ").split() == f"Harbour One. Two. {LONG} Three.".split()
    assert {chunk.title for chunk in found} == {"Harbour"}


def test_the_document_is_named_by_all_that_is_in_it(encoder):
    names = {
        chunks(encoder, *parts)[0].document_id
        for parts in (("A.", Image(b"1")), ("B.", Image(b"1")), ("A.", Image(b"2")), (Image(b"A.1"),), (Image(b"1"),))
    }
    assert len(names) == 5


def test_tiles_reach_the_model(encoder):
    vision = Vision()
    chunks_of(Document(parts=(Image(b"1"),)), encoder, 128, vision, 4)
    assert vision.tiles == [4]


def test_text_parts_without_an_image_are_text(encoder):
    [chunk] = chunks(encoder, "Only words.")
    assert chunk.images is None


@pytest.mark.parametrize(
    ("document", "vision", "words"),
    [
        (Document(parts=(Image(b"1"),)), None, "reads text only"),
        (Document("text", parts=(Image(b"1"),)), Vision(), "both text and parts"),
        (Document(parts=("  ", "")), Vision(), "neither text nor images"),
    ],
)
def test_what_cannot_be_chunked_is_refused(encoder, document, vision, words):
    with pytest.raises(DocumentError, match=words):
        chunks_of(document, encoder, 128, vision)


def test_a_text_at_the_edge_of_a_caption_is_there_once(encoder):
    """Whether a last text stands with the image is decided once, whatever a newline before it does to its tokens."""
    for words in range(1, 80):
        text = "boat " * words
        found = chunks(encoder, Image(b"1"), text)
        kept = text_of([i for chunk in found for i in chunk.token_ids if i not in IMAGE_IDS])
        assert kept.split() == text.split()
    assert found[-1].images is None  # the longest stood alone


def test_parts_of_text_alone_need_no_vision(encoder):
    [chunk] = chunks_of(Document(parts=("Only", "words.")), encoder, 128)
    assert text_of(chunk.token_ids) == "Only\n\nwords.\n\n"

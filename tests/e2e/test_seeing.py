"""Documents with images through the engine: one run of the tower for a picture, whatever its name; no two are mixed."""

from pathlib import Path

import pytest

import tiny_vlm
from infoflow_kv import Engine, MemoryStore, load, read_paths
from infoflow_kv.models import LanguageModel
from infoflow_kv.records import Document, Image

QUESTION = "What is on the picture?"


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "idefics3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(tiny_vlm.saved(request.param, tmp_path_factory.mktemp(request.param)))


def png(seed: int) -> bytes:
    return tiny_vlm.encoded_file(tiny_vlm.image(150, 90, seed))


def test_one_picture_as_path_as_bytes_and_in_words_is_looked_at_once(model: LanguageModel, tmp_path: Path) -> None:
    for name in ("a.png", "b"):
        (tmp_path / name).write_bytes(png(11))
    documents = [
        *read_paths([tmp_path]).documents,
        Document(parts=(Image(png(11)),)),
        Document(parts=("The harbour.", Image(png(11)), "Left: the keeper.")),
    ]
    towers = model.vision.towers
    before = towers.runs
    answer = Engine(model, MemoryStore(), budget=1.0).answer(QUESTION, documents, max_new_tokens=4)
    assert towers.runs == before + 1
    assert answer.usage.prefilled_tokens < answer.usage.context_tokens  # the first three are one chunk
    full = Engine(model, method="full").answer(QUESTION, documents, max_new_tokens=4)
    assert answer.token_ids == full.token_ids


def test_two_pictures_of_equal_size_are_two(model: LanguageModel) -> None:
    store = MemoryStore()
    engine = Engine(model, store, budget=1.0)
    documents = [Document(parts=(Image(png(seed)),)) for seed in (21, 22)]
    before = model.vision.towers.runs
    there = engine.answer(QUESTION, documents, max_new_tokens=4)
    back = engine.answer(QUESTION, documents[::-1], max_new_tokens=4)
    assert model.vision.towers.runs == before + 2
    assert (there.usage.cached_chunks, back.usage.cached_chunks) == (0, 2)
    for found, given in ((there, documents), (back, documents[::-1])):
        assert found.token_ids == Engine(model, method="full").answer(QUESTION, given, max_new_tokens=4).token_ids
    assert len({chunk.images.key for document in documents for chunk in engine.split(document)}) == 2

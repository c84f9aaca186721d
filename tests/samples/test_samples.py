"""The sample documents are whole, short enough for one chunk each, and hold what the questions ask for."""

from importlib.resources import files

import pytest
from transformers import AutoTokenizer

from infoflow_kv import samples
from infoflow_kv.models.embedded import ensure_embedded
from infoflow_kv.samples import DEMO_QUESTIONS, QUESTIONS, SampleQuestion


def test_every_file_is_listed_and_has_a_title_and_a_text() -> None:
    names = {entry.name for entry in (files(samples) / "documents").iterdir() if entry.name.endswith(".md")}
    documents = samples.documents()
    assert {document.source for document in documents} == names
    assert len(documents) == len(names) == 15
    assert len({document.title for document in documents}) == 15
    for document in documents:
        assert document.title
        assert not document.title.startswith("#")
        assert document.text
        assert not document.text.startswith("#")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_the_answer_stands_in_the_documents_that_are_named(question: SampleQuestion) -> None:
    texts = {document.source: f"{document.title}\n{document.text}" for document in samples.documents()}
    assert set(question.documents) <= set(texts)
    last = texts[question.documents[-1]]
    assert question.is_answered_by(last)
    # Where two documents are needed, neither would do: the first lacks the answer, the last what was asked about.
    for source in question.documents[:-1]:
        assert not question.is_answered_by(texts[source])


def test_an_answer_is_judged_whatever_its_case() -> None:
    assert QUESTIONS[0].is_answered_by("She collects Glass BOTTLES.")
    assert not QUESTIONS[0].is_answered_by("She collects stamps.")


def test_the_demo_asks_three_questions_and_one_needs_two_documents() -> None:
    assert len(DEMO_QUESTIONS) == 3
    assert any(len(question.documents) == 2 for question in DEMO_QUESTIONS)


def test_a_document_is_one_chunk_of_the_embedded_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded("smollm2-135m"))
    sizes = [len(tokenizer(f"{d.title}\n{d.text}\n\n").input_ids) for d in samples.documents()]
    assert max(sizes) <= 512
    assert 6_500 <= sum(sizes) <= 7_500

"""Every invariant on tiny random models of each family and rotary regime, against plain Transformers."""

import pytest

import tiny
from infoflow_kv.invariants import CHECKS, Subject, check
from infoflow_kv.models import wrap
from infoflow_kv.records import Document

from tolerance import TINY_LOGITS  # isort: skip

QUESTIONS = ["How many nets does boat 3 carry?", "Which boat sails on day 5?"]


def documents(per_document: int, count: int) -> list[Document]:
    lines = lambda j: " ".join(f"Boat {i} of quay {j} carries {i * j + 3} nets." for i in range(per_document))  # noqa: E731
    return [Document(text=lines(j)) for j in range(count)]


@pytest.fixture(scope="module", params=list(tiny.CONFIGS))
def subject(request, tmp_path_factory):
    model = wrap(tiny.hf_model(request.param), tiny.tokenizer(), request.param)
    short = request.param == "llama-dynamic-short"  # chunks inside 128 tokens, requests beyond: the regime changes
    given = documents(1, 5) if short else documents(6, 3)
    folder = tmp_path_factory.mktemp("stores")
    return Subject(model, given, QUESTIONS, folder, chunk_tokens=48 if short else 64, tolerance=TINY_LOGITS)


@pytest.mark.parametrize("name", CHECKS)
def test_invariant(subject, name):
    result = check(subject, name)
    assert result.passed, f"{result.claim} error {result.error:.3g}, allowed {result.tolerance:.3g} ({result.detail})"
    if name.startswith(("full", "budget", "decode")):
        assert len(subject.prompt.chunks) >= 4


def test_the_short_dynamic_model_really_changes_its_regime():
    model = wrap(tiny.hf_model("llama-dynamic-short"), tiny.tokenizer(), "x")
    prompt = Subject(model, documents(1, 5), QUESTIONS, None, chunk_tokens=48).prompt
    assert model.rope_regime(prompt.num_tokens) != model.rope_regime(48)

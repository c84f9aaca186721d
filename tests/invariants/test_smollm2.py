"""Every invariant on the real embedded model, against plain Transformers."""

import pytest

from infoflow_kv import load, samples
from infoflow_kv.invariants import CHECKS, Subject, check
from infoflow_kv.records import Document

MAX_LOGIT_ERROR = 5e-4  # float32, logits span about 30


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    given = [Document(text=d.text[:700], title=d.title) for d in samples.documents()[:4]]
    questions = [q.text for q in samples.DEMO_QUESTIONS][:2]
    return Subject(load("smollm2-135m"), given, questions, tmp_path_factory.mktemp("stores"), chunk_tokens=160)


@pytest.mark.parametrize("name", CHECKS)
def test_invariant(subject, name):
    result = check(subject, name)
    assert result.passed, f"{result.claim} error {result.error:.3g}, allowed {result.tolerance:.3g} ({result.detail})"
    if name.startswith(("full", "budget", "one", "true")):
        assert result.error <= MAX_LOGIT_ERROR

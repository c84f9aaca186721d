"""Real weights on 1, 2, 4 ranks: r = 1 and the ring are plain Transformers' full prefill, r = .15 is one process's."""

import math
from typing import Any

import pytest
import torch
from ranks import run_ranks
from requests_on_ranks import NEW_TOKENS, results

from infoflow_kv import load, samples
from infoflow_kv.engine import Engine
from infoflow_kv.models import greedy
from infoflow_kv.parallel.group import Group
from infoflow_kv.records import Document

MAX_LOGIT_ERROR = 5e-4  # float32, logits span about 30
QUESTION = samples.DEMO_QUESTIONS[0].text
DOCUMENTS = [Document(text=d.text[:900], title=d.title) for d in samples.documents()[-5:]]


def engine(model: Any, method: str, budget: float, group: Group | None = None) -> Engine:
    return Engine(model, method=method, budget=budget, chunk_tokens=160, group=group)


def asked(group: Group) -> dict[str, torch.Tensor]:
    """The three requests on this rank. Its heads cannot be shared by 2 or 4: the layout is Q."""
    model = load("smollm2-135m")
    found: dict[str, torch.Tensor] = {}
    for name, method, budget in (("all", "infoflow", 1.0), ("some", "infoflow", 0.15), ("ring", "full", 0.15)):
        one = engine(model, method, budget, group)
        prompt = one.prompt(QUESTION, DOCUMENTS)
        given = results(one, one.run(prompt, num_new=NEW_TOKENS), prompt.num_tokens)
        found |= {f"{name} {key}": value for key, value in given.items()}
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    model = load("smollm2-135m")
    one = engine(model, "infoflow", 0.15)
    prompt = one.prompt(QUESTION, DOCUMENTS)
    plain = greedy(model.plain(), prompt.token_ids, NEW_TOKENS, model.stop_ids)
    given = results(one, one.run(prompt, num_new=NEW_TOKENS), prompt.num_tokens)
    return given | {"plain tokens": torch.tensor(plain.token_ids), "plain steps": plain.logits}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_agree_with_one_process_and_with_transformers(alone, size):
    errors = {}
    for rank, found in enumerate(run_ranks(asked, size, timeout=300.0)):
        assert torch.equal(found["some selected"], alone["selected"])
        assert torch.equal(found["some tokens"], alone["tokens"])
        for name in ("all", "ring"):
            assert torch.equal(found[f"{name} tokens"], alone["plain tokens"])
        if rank == 0:
            errors = {n: float((found[f"{n} steps"] - alone["plain steps"]).abs().max()) for n in ("all", "ring")}
            errors["some"] = float((found["some steps"] - alone["steps"]).abs().max())
    print(size, errors)
    assert all(math.isfinite(error) and error <= MAX_LOGIT_ERROR for error in errors.values()), errors

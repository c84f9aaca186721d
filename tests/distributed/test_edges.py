"""Requests at the edge of what there is: hardly any rows, ranks without any, and what several ranks refuse."""

from typing import Any

import pytest
import torch
from many_requests import DOCUMENTS, QUESTION, assert_same, engine_of, many, model_of, sampled
from ranks import run_ranks, thorough, watch_ranks

from infoflow_kv.errors import OptionError
from infoflow_kv.parallel.group import Group

SOURCE = "tiny:qwen3"
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}
SHORT = "The keeper counts the boats."
EDGES: list[dict[str, Any]] = [
    {"budget": 0.3, "documents": [SHORT]},  # one chunk, exact already: nothing to select
    {"budget": 0.3, "documents": [SHORT], "head_policy": "none"},
    {"budget": 1.0, "documents": [SHORT], "head_policy": "none"},
    {"budget": 0.3, "documents": [SHORT, SHORT + " Twice."]},  # fewer chunks than ranks
    {"budget": 0.3, "documents": [SHORT, SHORT + " Twice."], "method": "cacheblend"},
    {"budget": 0.3, "documents": [SHORT, SHORT + " Twice."], "method": "influence"},
    {"budget": 0.0},
    {"budget": 0.0, "method": "cacheblend"},
    {"budget": 1e-6},  # one row
    {"budget": 1e-6, "method": "cacheblend"},
    {"budget": 1e-6, "method": "epic", "repair_layers": "1-2"},
    *[{"budget": budget, "suffix": count} for budget in (0.0, 0.3) for count in (1, 2, 3)],
    {"budget": 0.3, "suffix": 1, "method": "cacheblend-gradual"},
    {"method": "full", "suffix": 1},
    {"method": "full", "documents": [SHORT], "suffix": 1},
    {"budget": 0.3, "new": 1},
    {"method": "full", "new": 1},
    {"budget": 0.3, "documents": []},
    {"method": "full", "documents": []},
]


@pytest.mark.parametrize(("size", "layout"), [thorough(3, "Q"), thorough(4, "H"), (4, [2, 2])])
def test_hardly_any_rows(size, layout):
    requests = [{**one, "layout": layout} for one in EDGES]
    expected = many(None, SOURCE, EDGES, SIZES)
    assert expected["8.selected"].numel() == 1
    found = run_ranks(many, size, SOURCE, requests, SIZES, timeout=240.0)
    assert_same(found, expected, requests)
    for number, _ in enumerate(EDGES):
        # The prompt's last row runs on rank 0, and nobody else has its logits.
        assert found[0][f"{number}.first"].tolist() == [1]
        assert all(one[f"{number}.first"].tolist() == [0] for one in found[1:]), EDGES[number]


def test_sampling_with_a_seed_gives_the_text_of_one_process():
    requests = [{"budget": 0.3, "layout": layout} for layout in ("Q", "H")]
    expected = sampled(None, SOURCE, requests)
    greedy = many(None, SOURCE, requests[:1])["0.tokens"]
    assert expected[0] and expected[0] != model_of(SOURCE).text(greedy.tolist())
    for texts in run_ranks(sampled, 2, SOURCE, requests):
        assert texts == expected


def different(group: Group, what: str) -> str:
    """A request that is another one on rank 1; the name of the error that it ends with."""
    model, other = model_of(SOURCE, SIZES), group.rank == 1
    settings: dict[str, Any] = {"layout": "Q"}
    documents, question, method, budget, new = list(DOCUMENTS[:3]), QUESTION, None, None, 2
    if other:
        settings |= {
            "layout": {"layout": "H"}, "head policy": {"head_policy": "none"}, "chunk length": {"chunk_tokens": 32},
            "geometry": {"geometry": "HL-TP"}, "namespace": {"namespace": "other"},
        }.get(what, {})  # fmt: skip
        documents = documents[::-1] if what == "documents" else documents
        question = "What?" if what == "question" else question
        method = "none" if what == "method" else method
        budget = 0.4 if what == "budget" else budget
        new = 3 if what == "tokens" else new
    try:
        engine_of(model, settings, None, group).answer(question, documents, new, method=method, budget=budget)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "none"


WHATS = ["layout", "head policy", "chunk length", "geometry", "namespace", "documents", "question", "method", "budget",
         "tokens"]  # fmt: skip


@pytest.mark.parametrize("what", WHATS)
def test_another_request_on_one_rank_is_told_on_all(what):
    for found in run_ranks(different, 2, what, timeout_seconds=20.0):
        assert found.startswith("ParallelError"), found
        assert "were given another request" in found or "rank" in found


def refused(group: Group) -> list[str]:
    """The errors of settings and requests that have no parallel form, on this rank."""
    model, found = model_of(SOURCE, SIZES), []

    def told(act: Any) -> None:
        try:
            act()
        except OptionError as error:
            found.append(str(error))
        else:
            found.append("nothing")

    for settings in ({"kept_bytes": 1000}, {"plans": True}, {"layout": "Z"}, {"layout": "HQ"}, {"layout": [1, 3]}):
        told(lambda settings=settings: engine_of(model, settings, None, group))
    engine = engine_of(model, {}, None, group)
    prompt = engine.prompt(QUESTION, DOCUMENTS[:1])
    told(lambda: engine.run(prompt, forced_ids=(3, 4)))
    told(lambda: engine.run(prompt, truth=torch.zeros(1)))
    told(lambda: engine_of(model_of(SOURCE, {"num_key_value_heads": 1}), {"layout": [2, 1]}, None, group))
    return found


def test_what_has_no_parallel_form_is_refused_on_all_ranks():
    patterns = ["kept_bytes", "plans", "Z", "HQ does not exist", "3 ranks", "laboratory", "laboratory", "do not divide"]
    for found in run_ranks(refused, 2):
        assert len(found) == len(patterns)
        for message, pattern in zip(found, patterns, strict=True):
            assert pattern in message


def one_fails(group: Group) -> None:
    """A prompt too long for the window is refused on all ranks before anything is exchanged."""
    engine_of(model_of(SOURCE), {}, None, group).answer(QUESTION, DOCUMENTS * 20, 2)


def test_a_prompt_too_long_is_told_on_all_ranks():
    for ended in watch_ranks(one_fails, 2):
        assert ended.status == 1
        assert "PromptTooLongError" in ended.stderr


def test_one_process_alone_has_no_layout_to_refuse():
    with Group.alone() as group:
        engine_of(model_of(SOURCE), {"layout": "H"}, None, group)
        with pytest.raises(OptionError, match="unknown layout"):
            engine_of(model_of(SOURCE), {"layout": "Z"}, None, group)

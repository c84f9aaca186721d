"""The report of `explain` on a tiny model: what it says is what the engine's own runs did."""

import json
from typing import Any

import pytest
import torch

import tiny
from infoflow_kv import Document, Engine, MemoryStore
from infoflow_kv.errors import OptionError, PromptTooLongError
from infoflow_kv.explain import METHODS, explain, token_texts
from infoflow_kv.explaining import render_page
from infoflow_kv.models import LanguageModel, wrap
from infoflow_kv.runs import Run, chunk_reports
from infoflow_kv.select import num_selected

BOATS = [" ".join(f"Boat {i} of quay {j} carries {i * j + 3} nets." for i in range(6)) for j in range(4)]
DOCUMENTS = [Document(text=text, title=f"Quay {j}", source=f"{j}.txt") for j, text in enumerate(BOATS)]
QUESTION = "How many nets does boat 3 of quay 2 carry?"
CHARACTERS = "Grüße 😀 Ωμέγα \ufffd 漢字, 👩‍🚀 and \u200b\u00e9."


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")


@pytest.fixture(scope="module")
def engine(model: LanguageModel) -> Engine:
    return Engine(model, MemoryStore(), chunk_tokens=64)


@pytest.fixture(scope="module")
def report(engine: Engine) -> dict[str, Any]:
    return explain(engine, QUESTION, DOCUMENTS, max_new_tokens=4)


def method(report: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [m for m in report["methods"] if m["name"] == name]
    return dict(found)


def by_hand(run: Run) -> tuple[list[list[int]], list[list[float]] | None]:
    """Marks and scores of each chunk in the request's order, counted out along the prompt."""
    selected = set(run.selection.slots.tolist())
    marks, scores = {}, {}
    slot = len(run.prompt.head_ids)
    for place, chunk in enumerate(run.prompt.chunks):
        slots = range(slot, slot + len(chunk.token_ids))
        marks[run.order[place]] = [int(s in selected) for s in slots]
        if run.selection.scores is not None:
            scores[run.order[place]] = [float(run.selection.scores[s]) for s in slots]
        slot += len(chunk.token_ids)
    return [marks[i] for i in sorted(marks)], [scores[i] for i in sorted(scores)] or None


def test_it_is_a_page_and_plain_json(report: dict[str, Any]) -> None:
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text) == report
    assert render_page(json.loads(text)) == render_page(report)
    assert [m["name"] for m in report["methods"]] == list(METHODS)
    assert (report["question"], report["model"], report["budget"], report["cover"]) == (QUESTION, "tiny", 0.15, None)


@pytest.mark.parametrize("name", [*METHODS, "first-k:3", "cacheblend-gradual", "random"])
@pytest.mark.parametrize("reorder", [False, True])
def test_marks_and_scores_are_those_of_the_run(model: LanguageModel, name: str, reorder: bool) -> None:
    engine = Engine(model, MemoryStore(), chunk_tokens=64, reorder=reorder, geometry="HL-TP", layers="1-2")
    names = [name] if not reorder or name in ("infoflow", "influence", "random") else [name, "infoflow"]
    got = explain(engine, QUESTION, DOCUMENTS, names, max_new_tokens=2)
    run = engine.run(engine.prompt(QUESTION, DOCUMENTS), method=name)
    marks, scores = by_hand(run)
    found = method(got, name)
    if name == "full":
        marks = [[0] * len(m) for m in marks]
    assert [c["recomputed"] for c in found["chunks"]] == marks
    assert found["order"] == list(run.order)
    assert [c["scores"] for c in found["chunks"]] == (scores or [None] * len(marks))
    assert [c["mass"] for c in found["chunks"]] == [c.mass for c in chunk_reports(run)]
    if name not in ("full", "cacheblend-gradual"):  # whose layers run different numbers of rows
        assert sum(map(sum, marks)) == found["usage"]["recomputed_tokens"]
    by_attention = name in ("infoflow", "influence")
    assert (found["layers"], found["geometry"]) == (("1-2", "HL-TP") if by_attention else ("–", "GLOBAL"))


def test_exact_is_the_first_chunk_of_the_order_and_its_tokens_are_never_marked(model: LanguageModel) -> None:
    for reorder in (False, True):
        engine = Engine(model, MemoryStore(), chunk_tokens=64, reorder=reorder, budget=0.5)
        for found in explain(engine, QUESTION, DOCUMENTS, max_new_tokens=1)["methods"]:
            exact = [i for i, chunk in enumerate(found["chunks"]) if chunk["exact"]]
            assert exact == ([] if found["name"] == "full" else found["order"][:1])
            assert not any(sum(found["chunks"][i]["recomputed"]) for i in exact)


def test_reorder_keeps_the_given_order_in_chunks(model: LanguageModel) -> None:
    engine = Engine(model, MemoryStore(), chunk_tokens=64, reorder=True)
    got = explain(engine, QUESTION, DOCUMENTS, ["infoflow", "epic", "none", "full"], max_new_tokens=1)
    found = method(got, "infoflow")
    assert found["order"] != sorted(found["order"])
    assert [c["title"] for c in got["chunks"]] == [c.title for d in DOCUMENTS for c in engine.split(d)]
    assert [m["reorder"] for m in got["methods"]] == [True, True, False, False]
    assert method(got, "none")["order"] == method(got, "full")["order"] == list(range(len(got["chunks"])))
    render_page(got)


def test_the_row_of_full_prefill(engine: Engine, report: dict[str, Any]) -> None:
    full, prompt = method(report, "full"), engine.prompt(QUESTION, DOCUMENTS)
    assert (full["kl_first"], full["js_first"], full["same_first_token"]) == (None, None, None)
    usage = full["usage"]
    assert (usage["reusable_tokens"], usage["recomputed_tokens"]) == (0, 0)
    assert usage["prefilled_tokens"] == usage["context_tokens"] == prompt.context_tokens
    assert full["answer"] == report["full_answer"] == engine.answer(QUESTION, DOCUMENTS, 4, method="full").text


def test_answers_are_those_of_the_engine_from_stored_chunks(engine: Engine, report: dict[str, Any]) -> None:
    for found in report["methods"]:
        answer = engine.answer(QUESTION, DOCUMENTS, 4, method=found["name"])
        assert found["answer"] == answer.text
        assert found["usage"]["new_tokens"] == answer.usage.new_tokens
        if found["name"] != "full":
            assert found["usage"]["cached_chunks"] == found["usage"]["chunks"] == len(report["chunks"])
            assert found["usage"]["prefilled_tokens"] == found["usage"]["measured_tokens"] == 0
        timings = found["timings"]
        assert 0 < timings["repair_seconds"] < timings["ttft_seconds"]


def test_without_a_store_every_method_starts_from_nothing(model: LanguageModel) -> None:
    got = explain(Engine(model, chunk_tokens=64), QUESTION, DOCUMENTS, ["none", "infoflow"], max_new_tokens=1)
    assert [m["usage"]["cached_chunks"] for m in got["methods"]] == [0, 0]
    assert len({m["usage"]["prefilled_tokens"] for m in got["methods"]}) == 1
    assert got["full_answer"] is not None and "full" not in [m["name"] for m in got["methods"]]
    render_page(got)


def test_distances_are_those_of_the_first_token(engine: Engine, report: dict[str, Any]) -> None:
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    full = engine.run(prompt, method="full").logits[-1]
    for found in report["methods"]:
        if found["name"] == "full":
            continue
        ours = engine.run(prompt, method=found["name"]).logits[-1]
        log_p, log_q = torch.log_softmax(full.double(), -1), torch.log_softmax(ours.double(), -1)
        p, q = log_p.exp(), log_q.exp()
        middle = ((p + q) / 2).log2()
        js = float((p * (log_p.exp().log2() - middle) + q * (log_q.exp().log2() - middle)).sum() / 2)
        assert found["kl_first"] == pytest.approx(float((p * (log_p - log_q)).sum()), rel=1e-3, abs=1e-9)
        assert found["js_first"] == pytest.approx(js, rel=1e-3, abs=1e-9)
        assert found["same_first_token"] == bool(full.argmax() == ours.argmax())
    assert max(m["kl_first"] or 0 for m in report["methods"]) > 1e-4
    whole = explain(Engine(engine.model, engine.store, chunk_tokens=64, budget=1.0), QUESTION, DOCUMENTS, ["infoflow"])
    assert whole["methods"][0]["kl_first"] < 1e-6


def test_an_adaptive_budget_says_what_it_took_and_why(model: LanguageModel) -> None:
    engine = Engine(model, MemoryStore(), chunk_tokens=64, budget="auto:0.4", budget_max=0.5)
    got = explain(engine, QUESTION, DOCUMENTS, ["infoflow", "none"], max_new_tokens=1)
    found = method(got, "infoflow")
    assert (got["budget"], got["cover"]) == (0.5, 0.4)
    assert "cover" in found["reason"] and "auto:0.4" in found["reason"]
    assert method(got, "none")["reason"] == ""
    covered = sum(s for c in found["chunks"] for s, m in zip(c["scores"], c["recomputed"], strict=True) if m)
    total = sum(sum(c["scores"]) for c in found["chunks"] if not c["exact"])
    assert covered >= 0.4 * total or found["usage"]["recomputed_tokens"] == num_selected(
        0.5, found["usage"]["reusable_tokens"]
    )
    page = render_page(got)
    assert "auto: 40\u202f% of the predicted influence, at most 50\u202f%" in page
    assert found["reason"] in page


def test_tokens_together_are_the_text(engine: Engine, report: dict[str, Any]) -> None:
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    for got, chunk in zip(report["chunks"], prompt.chunks, strict=True):
        assert len(got["tokens"]) == chunk.num_tokens
        assert "".join(got["tokens"]) == engine.model.text(list(chunk.token_ids))
        assert (got["id"], got["title"]) == (chunk.id, chunk.title)
    assert len(report["prompt_tokens"]) == len(prompt.suffix_ids)
    assert QUESTION in "".join(report["prompt_tokens"])
    assert "<|im_end|>" in report["prompt_tokens"]  # control tokens are shown


def test_a_character_of_several_tokens_stands_whole_at_its_last(engine: Engine) -> None:
    ids, offsets = engine.encoder.content(CHARACTERS)
    texts = token_texts(tiny.tokenizer(), ids)
    assert len(texts) == len(ids) > len(CHARACTERS)
    assert "".join(texts) == CHARACTERS
    assert texts[:7] == ["G", "r", "", "ü", "", "ß", "e"]
    ends = {offset: place for place, offset in enumerate(offsets)}
    for place, (text, offset) in enumerate(zip(texts, offsets, strict=True)):
        if CHARACTERS[offset[0] : offset[1]] == "\ufffd":  # cannot be told from half a character until more is known
            continue
        assert ("\ufffd" in text) <= (place > 0 and CHARACTERS[offsets[place - 1][0]] == "\ufffd")
        if text and "\ufffd" not in text:
            assert ends[offset] == place
    assert token_texts(tiny.tokenizer(), ids[: texts.index("😀")])[-1] == "\ufffd"  # a character cut in two
    assert token_texts(tiny.tokenizer(), []) == []


def test_progress_names_every_run(model: LanguageModel) -> None:
    steps: list[tuple[int, int, str]] = []
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    explain(engine, QUESTION, DOCUMENTS, ["none"], 1, on_progress=lambda *step: steps.append(step))
    assert steps == [(0, 3, "storing chunks"), (1, 3, "full"), (2, 3, "none")]
    explain(engine, QUESTION, DOCUMENTS, ["full"], 1, on_progress=lambda *step: steps.append(step))
    assert steps[3:] == [(0, 1, "full")]


def test_one_document_and_none(engine: Engine) -> None:
    for documents in (DOCUMENTS[:1], []):
        got = explain(engine, QUESTION, documents, max_new_tokens=1)
        assert [sum(map(sum, (c["recomputed"] for c in m["chunks"]))) for m in got["methods"]][-2:] == [0, 0]
        render_page(got)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["infoflw"]}, "unknown method 'infoflw'; did you mean 'infoflow'"),
        ({"methods": ["infoflow", "oracle"]}, "'oracle' needs the full prefill.*laboratory"),
        ({"methods": []}, "no method to explain"),
        ({"methods": "full"}, "methods is the string 'full'; expected a list"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 is not a whole number of at least 1"),
        ({"documents": "text"}, "documents is one str"),
    ],
)
def test_bad_options(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        explain(engine, QUESTION, **{"documents": DOCUMENTS, **options})


def test_what_cannot_be_run(model: LanguageModel) -> None:
    reordered = Engine(model, MemoryStore(), reorder=True)
    with pytest.raises(OptionError, match="reorder needs a method that scores tokens; none of none, full does"):
        explain(reordered, QUESTION, DOCUMENTS, ["none", "full"])
    with pytest.raises(PromptTooLongError):
        explain(Engine(model), QUESTION, DOCUMENTS, ["full"], max_new_tokens=10**6)


def test_new_tokens_that_change_the_rotary_regime_are_refused() -> None:
    longrope = wrap(tiny.hf_model("phi3-longrope"), tiny.tokenizer(), "longrope")
    with pytest.raises(OptionError, match="longrope"):
        explain(Engine(longrope), QUESTION, ["Boats."], ["full"], max_new_tokens=120)

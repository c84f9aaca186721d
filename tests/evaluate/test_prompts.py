"""Prompts of other evaluations: what the model reads is the template, word for word."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.evaluate.arms import parse_arms
from infoflow_kv.evaluate.items import Item, Passage
from infoflow_kv.evaluate.measuring import Bench, documents_of
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.prompts import check_prompt, read_prompts, worded
from infoflow_kv.models import wrap

TEMPLATE = "Answer from the logs.\n\nThe logs:\n{context}\n\nAnswer from the logs.\n\nQuestion: {input}\nAnswer:"
ITEM = Item(
    "i",
    "boats",
    "Who sails?",
    ("Ann",),
    (Passage("First log", "Ann sails."), Passage("", "No title here."), Passage("Last log", "Bob rows.")),
    instruction="Its own.",
)


def test_the_parts_of_a_template() -> None:
    found = worded(ITEM, {"boats": TEMPLATE})
    assert found.instruction == "Answer from the logs.\n\nThe logs:"
    assert found.question == "Answer from the logs.\n\nQuestion: Who sails?\nAnswer:"
    texts = [passage.text for passage in found.passages]
    assert texts == ["Passage 1:\nFirst log\nAnn sails.", "No title here.", "Passage 3:\nLast log\nBob rows."]
    assert {passage.title for passage in found.passages} == {""}
    assert (found.id, found.answers) == (ITEM.id, ITEM.answers)


def test_braces_of_a_question_stay() -> None:
    asked = replace(ITEM, question="What is {context} in {input}?")
    assert worded(asked, {"boats": TEMPLATE}).question.count("What is {context} in {input}?") == 1


def test_what_the_model_reads() -> None:
    """Documents, question and instruction stand in the prompt as the template has them, once each."""
    model = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")
    bench = Bench(model, Options(prompts={"boats": TEMPLATE}, chunk_tokens=64, max_new_tokens=2, continuation=1))
    item = bench.worded(ITEM)
    prompt = bench.engine(item).prompt(item.question, documents_of(item))
    text = model.tokenizer.decode(prompt.token_ids)
    behind = text.index("Answer from the logs.\n\nQuestion: Who sails?\nAnswer:")
    before = text.index("Answer from the logs.\n\nThe logs:")
    assert before < text.index("Passage 1:\nFirst log\nAnn sails.") < text.index("Passage 3:\nLast log") < behind
    assert "Its own." not in text and Options().instruction not in text
    assert text.count("Answer from the logs.") == 2
    # No words but the template's behind the documents.
    assert text.count("Question:") == 1 and text.count("Answer:") == 1
    assert text[text.index("Bob rows.") + 9 :].startswith("\n\nAnswer from the logs.")
    [row] = bench.rows(ITEM, parse_arms("full", ()))
    assert row["context_tokens"] == prompt.context_tokens


def test_a_template_that_begins_with_the_documents_has_no_instruction() -> None:
    model = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")
    bench = Bench(model, Options(prompts={"boats": "{context}\nQ: {input}"}, chunk_tokens=64))
    item = bench.worded(ITEM)
    text = model.tokenizer.decode(bench.engine(item).prompt(item.question, documents_of(item)).token_ids)
    assert Options().instruction not in text and "Its own." not in text and "Q: Who sails?" in text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("no places", "has {context} 0 times and {input} 0 times"),
        ("{context} {context} {input}", "{context} 2 times"),
        ("{input} {context}", "puts the question before the documents"),
    ],
)
def test_templates_that_nothing_could_reuse(template: str, says: str) -> None:
    with pytest.raises(OptionError, match=says.replace("{", r"\{")):
        check_prompt("boats", {"boats": template})


def test_files_that_hold_no_templates(tmp_path: Path) -> None:
    for text in ("[]", "{}", '{"boats": 1}', "nonsense"):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(DocumentError, match="p.json"):
            read_prompts(tmp_path / "p.json")
    with pytest.raises(DocumentError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere.json")


def test_templates_are_cleaned_as_data_files_are(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text('{"a\\ud800": "\\udfff {context} {input}"}')
    assert read_prompts(file) == {"a\ufffd": "\ufffd {context} {input}"}
    file.write_text("[" * 200_000)
    with pytest.raises(DocumentError, match="is not JSON .nested too deep"):
        read_prompts(file)


def test_longbenchs_own_file() -> None:
    data = os.environ.get("INFOFLOW_DATA")
    file = Path(data or "") / "longbench_sample" / "config" / "dataset2prompt.json"
    if not data or not file.exists():
        pytest.skip("INFOFLOW_DATA is not set: no real inputs")
    prompts = read_prompts(file)
    assert prompts == json.loads(file.read_text())
    for dataset in ("hotpotqa", "2wikimqa", "musique", "narrativeqa", "qasper", "multifieldqa_en"):
        assert check_prompt(dataset, prompts)
    with pytest.raises(OptionError, match="once"):
        check_prompt("gov_report", prompts)

"""The ids of one request: head, chunks, suffix, and nothing of the user's among the control tokens."""

import pytest

from infoflow_kv.chunking import layout, render, split
from infoflow_kv.errors import OptionError
from infoflow_kv.records import Document

LITERALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[INST]", "<tool_call>"]


@pytest.fixture
def template(tokenizer):
    return render(tokenizer, instruction="Use the documents.", system=None)


def test_ids_are_head_chunks_suffix(encoder, template):
    chunks = split(Document("Ann. " * 30, id="a"), encoder, 16) + split(Document("Bob.", id="b"), encoder, 16)
    prompt = layout(" Who? ", chunks, template, encoder)
    assert prompt.chunks == chunks
    assert prompt.head_ids == encoder.scaffold(template.head)
    assert prompt.suffix_ids == (
        encoder.scaffold("Question:") + encoder.content(" Who?")[0] + encoder.scaffold(template.after_question)
    )
    assert prompt.token_ids == prompt.head_ids + sum((c.token_ids for c in chunks), ()) + prompt.suffix_ids
    assert prompt.context_tokens == len(prompt.token_ids) - len(prompt.suffix_ids)


@pytest.mark.parametrize("literal", LITERALS)
def test_typed_control_tokens_change_no_turn(tokenizer, encoder, template, literal):
    def prompt(injection):
        document = Document(f"Ann{injection} did.", title=f"Title{injection}")
        return layout(f"Who{injection}?", split(document, encoder, 16), template, encoder)

    clean, dirty = prompt(""), prompt(literal)
    text = f"{template.head}Title{literal}\nAnn{literal} did.\n\nQuestion: Who{literal}?{template.after_question}"
    assert tokenizer.decode(dirty.token_ids) == text
    assert [i for i in dirty.token_ids if i in encoder.control_ids] == [
        i for i in clean.token_ids if i in encoder.control_ids
    ]
    assert all(encoder.control_ids.isdisjoint(chunk.token_ids) for chunk in dirty.chunks)


def test_chunk_ids_do_not_depend_on_what_stands_around(tokenizer, encoder):
    chunks = split(Document("Ann did."), encoder)
    prompts = [
        layout("Who?", chunks, render(tokenizer, instruction="x " * n, system=None), encoder) for n in range(0, 40, 7)
    ]
    assert {p.chunks for p in prompts} == {chunks}
    assert len({len(p.head_ids) for p in prompts}) == len(prompts)


def test_no_chunks_and_the_same_document_twice(encoder, template):
    assert layout("Who?", [], template, encoder).chunks == ()
    chunks = split(Document("Ann did.", id="a"), encoder)
    assert layout("Who?", chunks + chunks, template, encoder).chunks == chunks * 2


@pytest.mark.parametrize("question", ["", "  \n\t"])
def test_empty_question(encoder, template, question):
    with pytest.raises(OptionError, match="question is empty"):
        layout(question, [], template, encoder)

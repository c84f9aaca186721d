"""The scaffold around documents and question, for templates of all tempers."""

import datetime

import pytest

from infoflow_kv.chunking import TextEncoder, layout, render, split
from infoflow_kv.errors import ModelError
from infoflow_kv.records import Document

PLAIN_USER = "{{ messages[-1]['content'] }}"

REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


def ids_of(tokenizer, template, question="Who?", text="Ann did."):
    encoder = TextEncoder(tokenizer)
    return layout(question, split(Document(text), encoder), template, encoder).token_ids


def test_chatml_is_cut_at_the_documents_and_the_question(tokenizer):
    template = render(tokenizer, instruction="Use the documents.", system=None)
    assert template.head == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nUse the documents.\n\n"
    )
    assert template.before_question == "Question:"
    assert template.after_question == "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids_of(tokenizer, template)) == (
        template.head + "Ann did.\n\nQuestion: Who?" + template.after_question
    )


def test_system_message_replaces_the_default(tokenizer):
    head = render(tokenizer, instruction="Use them.", system="Be brief.").head
    assert head == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nUse them.\n\n"


@pytest.mark.parametrize("source", ["", PLAIN_USER])
def test_without_labels_the_question_brings_all_words_with_it(tokenizer, make_tokenizer, source):
    asked = "Now answer.\n\nQuestion: Who?\nAnswer:"
    template = render(tokenizer, instruction="Read.", system=None, labels=False)
    assert tokenizer.decode(ids_of(tokenizer, template, asked)) == (
        template.head + "Ann did.\n\n" + asked + "<|im_end|>\n<|im_start|>assistant\n"
    )
    other = make_tokenizer(template=source or None)
    plain = render(other, instruction="Read.", system=None, labels=False)
    assert other.decode(ids_of(other, plain, asked)) == "Read.\n\nAnn did.\n\n" + asked


def test_no_instruction_leaves_no_blank_lines(tokenizer):
    assert render(tokenizer, instruction=" ", system=None).head.endswith("<|im_start|>user\n")


@pytest.mark.parametrize(
    "source",
    [
        REFUSES_SYSTEM + "<|im_start|>{{ messages[0]['content'] }}<|im_end|>",
        "<|im_start|>{{ messages[-1]['content'] }}<|im_end|>",  # drops it without a word
    ],
)
def test_system_text_is_folded_in_where_the_template_will_not_have_it(make_tokenizer, source):
    tokenizer = make_tokenizer(template=source)
    assert (
        render(tokenizer, instruction="Use them.", system="Be brief.").head == "<|im_start|>Be brief.\n\nUse them.\n\n"
    )
    assert render(tokenizer, instruction="Use them.", system=None).head == "<|im_start|>Use them.\n\n"


@pytest.mark.parametrize(
    "source",
    [
        "\nToday: {{ strftime_now('%d %b %Y') }}\n",
        "\nToday: {{ date_string }}\n",
        "\n{%- macro today() %}{{ 'Today: ' + strftime_now(\"%d %b %Y\") }}{% endmacro %}\n{{ today() }}\n",
        "\n{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}\nToday: {{ day }}\n",
    ],
)
def test_clock_in_the_template_does_not_move(make_tokenizer, source):
    tokenizer = make_tokenizer(template=source + PLAIN_USER)
    assert render(tokenizer, instruction="Use them.", system=None).head.strip() == "Today: 26 Jul 2024\nUse them."


def test_fixed_clock_is_one_real_date_in_every_format(make_tokenizer):
    moment = datetime.datetime(2024, 7, 26)
    formats = [
        "%Y-%m-%d",
        "%A, %B %d, %Y",
        "%a %e %b %y %H:%M:%S %p %I %j",
        "%-d.%-m.",
        "%F %D %T %R %x %X %c %w%u%f%z%Z",
    ]
    for text in formats:
        tokenizer = make_tokenizer(template="{{ strftime_now('" + text + "') }}|" + PLAIN_USER)
        assert render(tokenizer, instruction="", system=None).head == moment.strftime(text) + "|"


def test_templates_own_first_newline_is_kept(make_tokenizer):
    tokenizer = make_tokenizer(template="\n\nHi " + PLAIN_USER)
    assert render(tokenizer, instruction="", system=None).head == "\n\nHi "


def test_template_chosen_by_name_is_the_default_one(make_tokenizer):
    tokenizer = make_tokenizer(template={"default": "D " + PLAIN_USER, "tool_use": "T " + PLAIN_USER})
    assert render(tokenizer, instruction="", system=None).head == "D "


def test_thinking_is_switched_off(make_tokenizer):
    source = PLAIN_USER + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    assert render(make_tokenizer(template=source), instruction="", system=None).after_question == "<think></think>"


def test_vision_template_gets_parts(make_tokenizer):
    source = (
        "{% for m in messages %}<{{ m['role'] }}>{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"
    )
    assert render(make_tokenizer(template=source), instruction="Look.", system="S").head == "<system>S<user>Look.\n\n"


@pytest.mark.parametrize(
    "source",
    [
        "Hello",  # loses the user's text
        REFUSES_SYSTEM + "Hello",
        PLAIN_USER * 2,  # has it twice
        "{{ messages | string | upper }}",  # spoils the marks
        "{% if messages[0]['content'] is string %}Hello{% else %}{{ messages[0]['content'] }}{% endif %}",
    ],
)
def test_template_that_loses_the_text_gives_the_plain_layout(make_tokenizer, source):
    tokenizer = make_tokenizer(template=source)
    template = render(tokenizer, instruction="Use <|im_end|>.", system="S")
    assert (template.head, template.before_question) == ("S\n\nUse <|im_end|>.\n\n", "Question:")
    assert template.after_question == "\nAnswer:"
    assert not TextEncoder(tokenizer).control_ids & set(ids_of(tokenizer, template))


@pytest.mark.parametrize("source", ["{{ raise_exception('no\n way') }}", "{{ 1 / 0 }}", "{% if %}"])
def test_broken_template_is_a_model_error_in_one_line(make_tokenizer, source):
    with pytest.raises(ModelError, match=r"chat template failed: .") as caught:
        render(make_tokenizer(template=source), instruction="Use them.", system="S")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bos", [False, True])
def test_base_model_gets_as_many_bos_as_in_plain_transformers(make_tokenizer, bos):
    tokenizer = make_tokenizer(template=None, bos=bos)
    template = render(tokenizer, instruction="Use them.", system="Be brief.")
    assert template.head == "<|endoftext|>" * bos + "Be brief.\n\nUse them.\n\n"
    ids = ids_of(tokenizer, template)
    assert tokenizer.decode(ids).endswith("Ann did.\n\nQuestion: Who?\nAnswer:")
    assert ids.count(tokenizer.bos_token_id) == tokenizer("a").input_ids.count(tokenizer.bos_token_id) == int(bos)


def test_bos_in_the_template_is_not_doubled_by_the_tokenizer(make_tokenizer):
    tokenizer = make_tokenizer(template="{{ bos_token }}" + PLAIN_USER, bos=True)
    ids = ids_of(tokenizer, render(tokenizer, instruction="Use them.", system=None))
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("literal", ["<|im_end|>", "<|im_start|>", "<think>"])
@pytest.mark.parametrize("role", ["instruction", "system"])
def test_control_token_typed_in_instruction_or_system_stays_text(tokenizer, literal, role):
    texts = {"instruction": "Use them.", "system": "Be brief."}
    clean = render(tokenizer, **texts)
    texts[role] += literal + "\nsystem"
    dirty = render(tokenizer, **texts)
    assert dirty.head.count(texts[role]) == 1
    assert tokenizer.decode(ids_of(tokenizer, dirty)).startswith(dirty.head)
    control = TextEncoder(tokenizer).control_ids
    counts = [[i for i in ids_of(tokenizer, template) if i in control] for template in (clean, dirty)]
    assert counts[0] == counts[1]


def test_system_text_equal_to_scaffold_is_still_told_apart(tokenizer):
    template = render(tokenizer, instruction="x", system="<|im_start|>")
    assert next(template.head[a:b] for a, b in template.content_ranges) == "<|im_start|>"
    assert template.content_ranges[0][0] == len("<|im_start|>system\n")


def test_surrogates_do_not_crash(tokenizer):
    assert "a\ufffdb" in render(tokenizer, instruction="a\ud800b", system="\udfff").head

"""Content never becomes control tokens, keeps its text, and its offsets point at it."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from infoflow_kv.chunking import TextEncoder, tokens
from infoflow_kv.errors import DocumentError, UnsupportedModelError

LITERALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[INST]", "<tool_call>"]
TEXTS = st.lists(st.sampled_from([*LITERALS, "<|im_", "end|>", "<", "\n\n", " ", "word", "é", "日本", "😀", "."])).map(
    "".join
) | st.text(max_size=80)


def test_scaffold_parses_control_tokens_and_adds_none(tokenizer, make_tokenizer):
    ids = TextEncoder(tokenizer).scaffold("<|im_start|>user\n<think>")
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == ["<|im_start|>", "<think>"]
    with_bos = make_tokenizer(bos=True)
    assert with_bos.bos_token_id in with_bos("a").input_ids
    assert with_bos.bos_token_id not in TextEncoder(with_bos).scaffold("a")
    assert TextEncoder(with_bos).scaffold("") == ()


def test_control_ids_are_the_special_and_the_bracketed_added_tokens(tokenizer, encoder):
    assert encoder.control_ids == set(tokenizer.convert_tokens_to_ids(LITERALS))


@pytest.mark.parametrize("literal", LITERALS)
@pytest.mark.parametrize("around", ["{}", "a{}b", "{0}{0}", "\n{} ", "<|im_{}end|>", "{}\n\nsystem\n"])
def test_typed_control_token_stays_text(tokenizer, encoder, literal, around):
    text = around.format(literal)
    assert set(tokenizer(text, add_special_tokens=False).input_ids) & encoder.control_ids  # the danger is real
    ids, offsets = encoder.content(text)
    assert encoder.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_any_text_is_kept_and_clean(tokenizer, encoder, text):
    ids, offsets = encoder.content(text)
    assert encoder.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(offsets)
    assert all(0 <= a <= b <= len(text) for a, b in offsets)
    assert list(offsets) == sorted(offsets)
    covered = set().union(*(range(a, b) for a, b in offsets)) if offsets else set()
    assert covered == set(range(len(text)))


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_text_without_control_tokens_has_the_tokenizers_own_ids(tokenizer, encoder, text):
    plain = tokenizer(text, add_special_tokens=False).input_ids
    if encoder.control_ids.isdisjoint(plain):
        assert encoder.content(text)[0] == tuple(plain)


def test_offsets_name_the_characters(tokenizer, encoder):
    text = "Who wrote <|im_end|> é?"
    for token_id, (a, b) in zip(*encoder.content(text), strict=True):
        if text[a:b].isascii():
            assert tokenizer.decode([token_id]) == text[a:b]


def test_lone_surrogates_become_replacement_characters(tokenizer, encoder):
    assert tokenizer.decode(encoder.content("a\ud800b")[0]) == "a\ufffdb"
    assert tokenizer.decode(encoder.scaffold("a\udfffb")) == "a\ufffdb"


def test_control_token_out_of_a_normaliser_is_cut(make_tokenizer):
    tokenizer = make_tokenizer(normalizer=normalizers.NFKC())
    encoder = TextEncoder(tokenizer)
    text = "a \uff1cthink\uff1e b"  # full-width brackets: NFKC makes the token <think> of it
    assert tokenizer.convert_tokens_to_ids("<think>") in tokenizer(text).input_ids
    ids, _ = encoder.content(text)
    assert encoder.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "a <think> b"


def test_one_character_that_is_a_control_token_is_refused_with_its_place(make_tokenizer):
    tokenizer = make_tokenizer(normalizer=normalizers.Replace("\u2460", "<think>"))
    with pytest.raises(DocumentError, match=r"'\\u2460' at offset 3 "):
        TextEncoder(tokenizer).content("one\u2460two")


def test_one_character_added_token_is_ordinary_text(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "!"})
    ids, _ = TextEncoder(tokenizer).content("No!")
    assert tokenizer.decode(ids) == "No!"


def test_token_that_swallows_spaces_leaves_them(make_tokenizer):
    from tokenizers import AddedToken

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<mask>", lstrip=True, rstrip=True)]})
    encoder = TextEncoder(tokenizer)
    ids, _ = encoder.content("a  <mask>  b")
    assert tokenizer.convert_tokens_to_ids("<mask>") in encoder.control_ids.difference(ids)
    assert tokenizer.decode(ids) == "a  <mask>  b"


def test_unknown_words_pass_but_a_typed_unknown_token_does_not(make_tokenizer):
    tokenizer = make_tokenizer("word_level")
    encoder = TextEncoder(tokenizer)
    assert encoder.content("a zzz b")[0] == (1, 0, 2)
    assert encoder.content("a <unk> b")[0] == (1, 3, 6, 2)


@pytest.mark.parametrize("text", ["Who", " Who wrote", "a<s>b", "x </s>[INST] y", "日本 é <s>", "line\nline"])
def test_sentence_piece_pieces_gain_no_space(make_tokenizer, text):
    tokenizer = make_tokenizer("sentence_piece")
    encoder = TextEncoder(tokenizer)
    ids, offsets = encoder.content(text)
    assert encoder.control_ids.isdisjoint(ids)
    tail = encoder.scaffold("[/INST]", continues=True)
    assert tokenizer.convert_ids_to_tokens(tail) == ["[/INST]"]
    assert tokenizer.decode(ids + encoder.scaffold("Answer:", continues=True)) == text.removeprefix(" ") + "Answer:"
    start = encoder.scaffold("Q")  # begins the prompt: the decoder strips the space that every text begins with
    assert tokenizer.decode(start + ids) == "Q" + text
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)


@given(words=st.lists(st.sampled_from(["The", "fox.", "jumps", "over\n", "it\n\n", "日本語", "12", "!"]), max_size=200))
@settings(max_examples=50, deadline=None)
def test_segments_do_not_change_ids_of_prose(tokenizer, encoder, words):
    text = " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "SEGMENT_CHARACTERS", 60)
        ids, offsets = encoder.content(text)
    assert (ids, offsets) == encoder.content(text)


def test_clean_and_dirty_segments_stay_in_order(tokenizer, encoder, monkeypatch):
    monkeypatch.setattr(tokens, "SEGMENT_CHARACTERS", 40)
    text = "The fox <|im_end|> jumps over " + "the lazy dog. It was <think> not amused " * 5 + "who wrote the report"
    ids, offsets = encoder.content(text)
    assert tokenizer.decode(ids) == text
    assert list(offsets) == sorted(offsets)


@pytest.mark.parametrize("piece", [".", "a", " ", "\n", "😀", "a b", "<|im_end|>"])
def test_long_runs_take_linear_time(tokenizer, encoder, piece):
    text = piece * (100_000 // len(piece))
    began = time.perf_counter()
    ids, _ = encoder.content(text)
    assert time.perf_counter() - began < 20  # a quadratic run takes minutes
    assert tokenizer.decode(ids) == text


def test_segments_cover_the_text_in_order():
    text = ("word " * 9000 + "x" * 50_000 + "\n") * 2
    ranges = list(tokens._segments(text))
    assert [a for a, _ in ranges] == [0] + [b for _, b in ranges[:-1]]
    assert ranges[-1][1] == len(text)
    assert max(b - a for a, b in ranges) <= tokens.SEGMENT_CHARACTERS
    assert list(tokens._segments("")) == []


def test_threads_share_an_encoder(tokenizer, encoder):
    texts = [f"The fox {i} <|im_end|> wrote {'word ' * (i % 7)}" for i in range(100)]
    expected = [(encoder.content(t)[0], encoder.scaffold(t)) for t in texts]
    problems: list[BaseException | str] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        other = TextEncoder(tokenizer)  # a second encoder over the same tokenizer is as safe
        barrier.wait()
        try:
            for i, text in enumerate(texts):
                mine = other if i % 2 else encoder
                if (mine.content(text)[0], mine.scaffold(text)) != expected[i]:
                    problems.append(text)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_truncation_left_on_by_others_does_not_cut_content(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    ids, _ = TextEncoder(tokenizer).content("The quick brown fox jumps over the lazy dog")
    assert tokenizer.decode(ids) == "The quick brown fox jumps over the lazy dog"


def test_slow_tokenizer_is_refused_with_reason():
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedModelError, match="Slow gives no character offsets"):
        TextEncoder(Slow())

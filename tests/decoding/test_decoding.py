"""Sampling, stop strings and streaming of characters that span tokens."""

import pytest
import torch

import tiny
from infoflow_kv.decoding import Sampling, TextAssembler, sampler
from infoflow_kv.errors import OptionError


def to_text(ids: list[int]) -> str:
    return tiny.tokenizer().decode(ids, skip_special_tokens=True)


def ids_of(text: str) -> list[int]:
    return tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]


def feed(text: str, stop: tuple[str, ...] = (), end: bool = True) -> tuple[list[str], TextAssembler]:
    assembler = TextAssembler(to_text, frozenset({2}), stop)
    pieces = []
    for token in ids_of(text) + ([2] if end else []):
        pieces.append(assembler.push(token))
        if assembler.reason:
            break
    else:
        pieces.append(assembler.finish())
    return pieces, assembler


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 family", "한글", "a�b"])
def test_streamed_pieces_join_to_the_whole_text(text):
    pieces, assembler = feed(text)
    assert "".join(pieces) == text == assembler.text
    assert assembler.reason == "eos"
    if "�" not in text:
        assert all("�" not in piece for piece in pieces)


@pytest.mark.parametrize("stop", [("STOP",), ("xyz", "STOP"), ("P",), ("STOP more",)])
def test_a_stop_string_is_never_sent_in_part(stop):
    pieces, assembler = feed("one two STOP more text", stop)
    expected = "one two STOP more text".split(min(stop, key=lambda s: "one two STOP more text".find(s) % 99))[0]
    assert "".join(pieces) == assembler.text == expected
    assert assembler.reason == "stop"


def test_a_beginning_of_a_stop_string_that_never_completes_is_given_in_the_end():
    pieces, assembler = feed("one two STO", ("STOP",))
    assert "".join(pieces) == "one two STO"
    assert assembler.reason == "eos"


def test_the_length_limit_is_its_own_reason():
    pieces, assembler = feed("one two", end=False)
    assert "".join(pieces) == "one two"
    assert assembler.reason == "length"


def test_a_stop_string_that_ends_in_a_character_of_several_tokens_is_never_sent_in_part():
    pieces, assembler = feed("one END→ two", ("END→",))
    assert "".join(pieces) == assembler.text == "one "


def test_a_tiny_temperature_is_greedy_not_a_crash():
    logits = torch.tensor([1.0, 1.5, -3.0])
    assert sampler(Sampling(1e-300))(logits) == 1


def test_an_empty_stop_string_is_refused():
    with pytest.raises(OptionError, match="stop string is empty"):
        TextAssembler(to_text, frozenset(), ("a", ""))


def test_greedy_takes_the_largest_logit():
    assert sampler(Sampling())(torch.tensor([0.0, 3.0, 1.0])) == 1


def test_the_seed_decides_the_sample():
    logits = torch.randn(400, generator=torch.Generator().manual_seed(0))
    draw = lambda seed: [pick(logits) for pick in [sampler(Sampling(1.0, 0.9, seed))] for _ in range(20)]  # noqa: E731
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_top_p_keeps_the_smallest_nucleus():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))
    pick = sampler(Sampling(1.0, 0.75, 0))
    assert {pick(logits) for _ in range(200)} == {1, 2}
    tiny_p = sampler(Sampling(1.0, 1e-9, 0))
    assert {tiny_p(logits) for _ in range(20)} == {1}


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_sampling_values_outside_their_range_are_refused(values):
    with pytest.raises(OptionError, match="outside"):
        Sampling(**values)

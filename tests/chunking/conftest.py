"""Small tokenizers built in process: byte-level BPE (as GPT-2, Llama 3, Qwen) and SentencePiece style (as Llama 2)."""

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from infoflow_kv.chunking import TextEncoder

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. It was not amused!\n\nWho wrote the report?",
    "Question: what is the answer? Answer: the documents say so.\n",
    "system user assistant You are a helpful assistant im_start im_end think INST endoftext",
    "1234567890 Ünïcödé 日本語の文章。次の文。 😀 «quotes» (parentheses) [brackets] <angles> | pipes",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NOT_SPECIAL = ["<think>", "</think>", "[INST]", "<tool_call>"]
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(
    *, template: str | None = CHATML, bos: bool = False, normalizer: normalizers.Normalizer | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; `bos` makes it put `<|endoftext|>` before every text, as Llama 3 does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(text, normalized=normalizer is not None) for text in NOT_SPECIAL])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def sentence_piece() -> PreTrainedTokenizerFast:
    """A BPE tokenizer that puts `▁` before the first word, with an unknown token and byte fallback for the rest."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["[INST]", "[/INST]"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def word_level() -> PreTrainedTokenizerFast:
    """One token per word, and `<unk>` for the words it lacks."""
    vocab = {"<unk>": 0, "a": 1, "b": 2, "<": 3, "unk": 4, ">": 5, "unk>": 6}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level()


@pytest.fixture(scope="session")
def encoder(tokenizer: PreTrainedTokenizerFast) -> TextEncoder:
    return TextEncoder(tokenizer)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`byte_level`, `sentence_piece` and `word_level` by name."""
    kinds = {"byte_level": byte_level, "sentence_piece": sentence_piece, "word_level": word_level}
    return lambda kind="byte_level", **options: kinds[kind](**options)

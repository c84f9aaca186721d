"""The tokenizer that a GGUF file describes, the same one under every supported transformers.

Why not `AutoTokenizer.from_pretrained(gguf_file=…)` alone: up to 5.23 it ignores `tokenizer.ggml.pre` (how the text is
cut before the merges), takes `<|im_start|>` for SmolLM2's end token and cleans up spaces when it decodes. So byte-level
vocabularies, which most models have, are built here from the file's own metadata; the others are left to transformers,
with the special tokens set right afterwards.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from infoflow_kv.errors import ModelError

# Token types of the GGUF format.
_CONTROL = 3
_USER_DEFINED = 4

_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"

# `tokenizer.ggml.pre` → the pattern that cuts the text; None: GPT-2's own cut, built into ByteLevel.
_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
# These cut off every digit first, then cut like GPT-2.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})


def read_tokenizer(path: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file with its special tokens and chat template; `metadata` are the file's fields.

    Raises ModelError where the metadata are incomplete.
    """
    try:
        tokens = list(metadata["tokenizer.ggml.tokens"])
        cut = metadata.get("tokenizer.ggml.pre", "")
        known = cut in _SPLITS or cut in _SINGLE_DIGITS
        if metadata["tokenizer.ggml.model"] == "gpt2" and known and "tokenizer.ggml.merges" in metadata:
            tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
                tokenizer_object=_byte_level(tokens, metadata), clean_up_tokenization_spaces=False
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
            tokenizer.clean_up_tokenization_spaces = False
        for role, key in _SPECIAL_TOKENS.items():
            index = metadata.get(f"tokenizer.ggml.{key}")
            if index is not None:
                setattr(tokenizer, role, tokens[index])
    except (KeyError, IndexError) as error:
        raise ModelError(f"cannot read the tokenizer of {path.name}: the file lacks {error}") from error
    tokenizer.chat_template = metadata.get("tokenizer.chat_template") or tokenizer.chat_template
    window = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if window:
        tokenizer.model_max_length = int(window)
    return tokenizer


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The token ids that end an answer: end of text, end of turn, end of message; ascending, no repeats."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return sorted({int(metadata[f"tokenizer.ggml.{key}"]) for key in keys if f"tokenizer.ggml.{key}" in metadata})


def _byte_level(tokens: list[str], metadata: Mapping[str, Any]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"the tokenizer lists {len(tokens) - len(vocab)} tokens twice; the GGUF file is damaged")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata["tokenizer.ggml.pre"])
    tokenizer.decoder = decoders.ByteLevel()

    types = metadata.get("tokenizer.ggml.token_type", ())
    of_type = {kind: [t for t, found in zip(tokens, types, strict=False) if found == kind] for kind in set(types)}
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in of_type.get(_CONTROL, ())])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in of_type.get(_USER_DEFINED, ())])

    if metadata.get("tokenizer.ggml.add_bos_token"):
        index = int(metadata["tokenizer.ggml.bos_token_id"])
        bos = tokens[index]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, index)]
        )
    return tokenizer


def _pre_tokenizer(cut: str) -> pre_tokenizers.PreTokenizer:
    if cut in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    pattern = _SPLITS[cut]
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

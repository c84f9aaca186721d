"""The one place that makes token ids.

Two ways in, never mixed: `scaffold` for the text that *we* or the model's template wrote, where control tokens are
meant; `content` for what users brought (documents, titles, questions), where a typed control token such as
`<|im_end|>` is ordinary text and can never become the control token itself.
"""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from infoflow_kv.errors import ComputeError, DocumentError, UnsupportedModelError

SEGMENT_CHARACTERS = 20_000
"""Longer content is encoded in pieces of at most this many characters: bounded work per call, whatever the text."""

_BATCH_SEGMENTS = 256
_GUARD = "\n"
_CONTROL_LOOK = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SAFE_CUTS = (
    re.compile(r"(?<=\w)(?= \w)"),  # before a single space between words: every known pre-tokenizer cuts there
    re.compile(r"(?<=\S\n)(?=\S)"),  # after a single newline
    re.compile(r"(?<=\S)(?=\s)"),
)

# One lock for the process: a fast tokenizer called by two threads may raise "Already borrowed" (bug_kinds.md, L05).
_LOCK = threading.Lock()

Offsets = tuple[tuple[int, int], ...]


class Tokenizer(Protocol):
    """What this room uses of a Hugging Face fast tokenizer."""

    @property
    def is_fast(self) -> bool: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    @property
    def chat_template(self) -> Any: ...

    def __call__(self, text: Any, **options: Any) -> Any: ...

    def get_chat_template(self) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def replace_surrogates(text: str) -> str:
    """Return the text with each lone surrogate (which has no UTF-8 form) replaced by U+FFFD; lengths stay equal."""
    return _SURROGATE.sub("\ufffd", text)


def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id and text of every token that content must never produce.

    These are the added tokens that are special or look like a control token (`<think>`, `[INST]`). A one-character
    added token is left out: it cannot be told from ordinary text. Tokens added to the tokenizer later are not seen.
    """
    return {
        token_id: str(token.content)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if len(token.content) > 1 and (token.special or _CONTROL_LOOK.fullmatch(token.content))
    }


def encode_plainly(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Return the ids as the tokenizer makes them, control tokens parsed; one thread at a time."""
    with _LOCK:
        encoded = tokenizer(
            replace_surrogates(text),
            add_special_tokens=add_special_tokens,
            split_special_tokens=False,
            truncation=False,
            padding=False,
            verbose=False,
        )
    return tuple(encoded["input_ids"])


class TextEncoder:
    """Turns text into token ids with one tokenizer; safe to share between threads.

    Raises UnsupportedModelError for a tokenizer without character offsets (a slow one).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModelError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets; "
                "a model with a fast tokenizer (tokenizer.json) is needed"
            )
        self._tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        # The unknown and byte tokens also stand for characters that the vocabulary lacks; only if typed are they cut.
        unknown_id = getattr(tokenizer, "unk_token_id", None)
        self._forbidden = frozenset(i for i, t in self._control.items() if i != unknown_id and not _BYTE.fullmatch(t))
        self._guarded = False
        self._guarded = self._adds_prefix()

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that `content` never returns. Unknown and byte tokens, which odd characters give, are not among them."""
        return self._forbidden

    def scaffold(self, text: str, *, continues: bool = False) -> tuple[int, ...]:
        """Return the ids of text from a chat template: control tokens are parsed, none is added.

        `continues` says that other text stands before it, so that no tokenizer adds a space at its start.
        """
        if not text:
            return ()
        if not (continues and self._guarded):
            return encode_plainly(self._tokenizer, text, add_special_tokens=False)
        text = replace_surrogates(text)
        [(ids, _)] = self._encode(text, [(0, len(text))])
        return tuple(ids)

    def content(self, text: str) -> tuple[tuple[int, ...], Offsets]:
        """Return the ids of users' text and, for each, its characters `[start, stop)` in that text.

        Control tokens in the text stay text: it is cut after the first character of each and the pieces are encoded
        alone, until none is left. Lone surrogates count as U+FFFD. Tokens of one character that takes several
        tokens share its offsets. Raises DocumentError for a single character that is itself a control token.
        """
        text = replace_surrogates(text)
        pending = list(_segments(text))
        clean: list[tuple[int, list[int], list[tuple[int, int]]]] = []
        while pending:
            dirty: list[tuple[int, int]] = []
            for (start, stop), (ids, offsets) in zip(pending, self._encode(text, pending), strict=True):
                cuts = self._cuts(text, start, stop, ids, offsets)
                if cuts:
                    dirty.extend(pairwise([start, *cuts, stop]))
                else:
                    clean.append((start, ids, offsets))
            pending = dirty
        clean.sort(key=lambda piece: piece[0])
        all_ids = tuple(i for _, ids, _ in clean for i in ids)
        if not self._forbidden.isdisjoint(all_ids):
            raise ComputeError("a control token was left in content after encoding; please report this tokenizer")
        return all_ids, tuple((start + a, start + b) for start, _, offsets in clean for a, b in offsets)

    def _cuts(
        self, text: str, start: int, stop: int, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Return where to cut the segment `text[start:stop]` so that its control tokens fall apart; empty if clean."""
        cuts: set[int] = set()
        offended = False
        for token_id, (a, b) in zip(ids, offsets, strict=True):
            literal = self._control.get(token_id)
            if literal is None:
                continue
            typed = text.find(literal, start + a, start + b)
            if typed < 0 and token_id not in self._forbidden:
                continue
            offended = True
            cuts.add((typed if typed >= 0 else start + a) + 1)
        inner = sorted(c for c in cuts if start < c < stop)
        if offended and not inner:
            if stop - start == 1:
                raise DocumentError(
                    f"the character {text[start]!a} at offset {start} becomes a control token of this model's "
                    "tokenizer; remove it from the text"
                )
            inner = [(start + stop) // 2]  # a normaliser made it from one character: halve until that stands alone
        return inner

    def _encode(
        self, text: str, segments: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Yield ids and segment-relative offsets of each segment, in order."""
        for first in range(0, len(segments), _BATCH_SEGMENTS):
            pieces = [text[a:b] for a, b in segments[first : first + _BATCH_SEGMENTS]]
            if not self._guarded:
                yield from self._call(pieces)
                continue
            guarded = self._call([_GUARD + piece for piece in pieces])
            for piece, (ids, offsets) in zip(pieces, guarded, strict=True):
                if any(a < len(_GUARD) < b for a, b in offsets):  # the guard merged with the text
                    yield from self._call([piece])
                    continue
                kept = [(i, (a - 1, b - 1)) for i, (a, b) in zip(ids, offsets, strict=True) if b > len(_GUARD)]
                yield [i for i, _ in kept], [o for _, o in kept]

    def _call(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        with _LOCK:
            encoded = self._tokenizer(
                texts,
                add_special_tokens=False,
                split_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                truncation=False,
                padding=False,
                verbose=False,
            )
            return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def _adds_prefix(self) -> bool:
        """Whether the tokenizer puts a space before the first word of a text (SentencePiece families).

        Each piece is then encoded behind a newline whose tokens are dropped, so that a piece from the middle of a
        document does not gain a space.
        """
        [(alone, _), (behind, offsets)] = self._call(["a", _GUARD + "a"])
        return [i for i, (_, b) in zip(behind, offsets, strict=True) if b > len(_GUARD)] != list(alone)


def _segments(text: str) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges that cover the text, each at most SEGMENT_CHARACTERS, cut where tokens end anyway."""
    start = 0
    while len(text) - start > SEGMENT_CHARACTERS:
        low, high = start + SEGMENT_CHARACTERS // 2, start + SEGMENT_CHARACTERS
        cut = high
        for pattern in _SAFE_CUTS:
            places = [m.start() for m in pattern.finditer(text, low, high)]
            if places:
                cut = places[-1]
                break
        yield start, cut
        start = cut
    if start < len(text):
        yield start, len(text)

"""The frozen records that travel between the rooms. No logic beyond derived counts.

This file imports no torch at run time, so that the store and the command line start quickly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

StopReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Document:
    """What users bring: one text.

    `title`, where given, is shown to the model and so is part of the tokens; `source` (a path, a URL) is a label
    only: renaming a file never changes stored KV. `id` names the document in results; empty means "take the source,
    else the content's hash".
    """

    text: str
    title: str = ""
    id: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of reuse: consecutive tokens of one document, never across documents."""

    token_ids: tuple[int, ...]
    document_id: str
    title: str = ""
    index: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def id(self) -> str:
        """`document#index`, for people and for results."""
        return f"{self.document_id}#{self.index}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The one place of a request's token ids, the same for every method: head, chunks, suffix."""

    head_ids: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    suffix_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids in order, as an ordinary prefill would see them."""
        return self.head_ids + tuple(t for c in self.chunks for t in c.token_ids) + self.suffix_ids

    @property
    def context_tokens(self) -> int:
        return len(self.head_ids) + sum(c.num_tokens for c in self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.context_tokens + len(self.suffix_ids)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What of a model decides its KV: fingerprints (SHA-256, hex) and layout."""

    weights: str
    tokenizer: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """Everything that decides a chunk's stored bytes. `store.identity.key` hashes it; nothing else names a chunk.

    `rope` is the fingerprint of the rotary regime *during the chunk's prefill* (frequencies, scaling, windows).
    `head_ids` are the tokens that stood before the chunk in its prefill; empty under head policy `none`.
    `quantisation`: `none`, or `movement-2` for a record that holds not KV but how far V moved.
    """

    model: ModelIdentity
    rope: str
    head_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    namespace: str = "public"
    quantisation: str = "none"


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Position-free KV of one chunk: keys *before* RoPE.

    keys, values: `[layers, kv_heads, tokens, head_dim]` in the model's dtype. Readers never write into them.
    """

    identity: ChunkIdentity
    keys: "Tensor"
    values: "Tensor"

    @property
    def num_tokens(self) -> int:
        return len(self.identity.token_ids)

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)


@dataclass(frozen=True, slots=True)
class Span:
    """Slots `start..stop-1` of one chunk in the assembled context."""

    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Context:
    """Assembled chunks at their positions: what selection and repair work on.

    keys (rotated), values: `[layers, kv_heads, slots, head_dim]`; slots ≥ context + prompt + new tokens, of which the
    first `num_tokens` are filled. `exact_tokens` leading tokens need no repair: their KV is what full prefill gives.
    The buffers belong to one request and are written by repair and decode; they are never stored.
    """

    keys: "Tensor"
    values: "Tensor"
    token_ids: "Tensor"
    spans: tuple[Span, ...]
    exact_tokens: int

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def reusable_tokens(self) -> int:
        """Tokens that may be selected for repair: all that do not stand in the exact prefix."""
        return self.num_tokens - self.exact_tokens


@dataclass(frozen=True, slots=True)
class Selection:
    """Which context slots are recomputed, ascending int64 `[selected]`, and the scores behind the choice.

    `layer_counts`: rows of the context that each layer ran, where that is not the same number in all; the first
    `full_layers` ran all of them. `reason`: why so many, where that needs saying.
    """

    slots: "Tensor"
    scores: "Tensor | None" = None
    layer_counts: tuple[int, ...] = ()
    full_layers: int = 0
    reason: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that the budget paid for: the selected ones; the mean of the other layers where some ran all rows."""
        counts = self.layer_counts[self.full_layers :] if self.full_layers else ()
        return round(sum(counts) / len(counts)) if counts else int(self.slots.shape[0])

    @property
    def mean_rows(self) -> float:
        """Context rows computed, mean over all layers: what the repair really costs."""
        counts = self.layer_counts
        return sum(counts) / len(counts) if counts else float(self.slots.shape[0])


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    `recomputed_tokens` counts reusable tokens done again, `prefilled_tokens` those that had no stored KV: never mixed.
    """

    context_tokens: int
    prompt_tokens: int
    chunks: int
    cached_chunks: int
    reusable_tokens: int
    recomputed_tokens: int
    prefilled_tokens: int
    new_tokens: int
    measured_tokens: int = 0  # tokens whose context sensitivity had to be measured on the way
    kept_tokens: int = 0  # reusable tokens that earlier requests over the same documents had recomputed


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each phase. `ttft_seconds` runs from the request in hand to the first new token known."""

    load_seconds: float = 0.0
    assemble_seconds: float = 0.0
    score_seconds: float = 0.0
    repair_seconds: float = 0.0
    ttft_seconds: float = 0.0
    decode_seconds: float = 0.0
    # Predicted before anything ran, where the request was planned: of the way taken, and of full prefill.
    predicted_seconds: float = 0.0
    predicted_full_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """What happened to one chunk: `recomputed` tokens, its share `mass` of the scores, its place `order`."""

    id: str
    title: str
    tokens: int
    recomputed: int
    mass: float
    order: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request."""

    text: str
    method: str
    model: str
    stop_reason: StopReason
    usage: Usage
    timings: Timings
    chunks: tuple[ChunkReport, ...]
    token_ids: tuple[int, ...]
    selection: Selection
    notices: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The object that `ask --json` prints."""
        from dataclasses import asdict

        return {
            "answer": self.text,
            "method": self.method,
            "model": self.model,
            "stop_reason": self.stop_reason,
            "usage": asdict(self.usage),
            "timings": {k: round(v, 6) for k, v in asdict(self.timings).items()},
            "chunks": [asdict(c) for c in self.chunks],
            "notices": list(self.notices),
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a streamed answer; the last one carries the whole `answer`."""

    text: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class AddReport:
    """What `Engine.add` did: chunks and tokens, and how many of them were already stored."""

    documents: int
    chunks: int
    cached_chunks: int
    tokens: int
    prefilled_tokens: int
    seconds: float
    skipped: Mapping[str, str] = field(default_factory=dict)

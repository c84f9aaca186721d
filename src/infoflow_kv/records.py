"""The frozen records that travel between the rooms. No logic beyond derived counts.

This file imports no torch at run time, so that the store and the command line start quickly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from infoflow_kv.models import Memory

StopReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a document: the bytes of an image file, or the path of one."""

    source: "bytes | str | PathLike[str]"


@dataclass(frozen=True, slots=True)
class Document:
    """What users bring: one text, or `parts`: texts and images in order.

    `title`, where given, is shown to the model and so is part of the tokens; `source` (a path, a URL) is a label
    only: renaming a file never changes stored KV. `id` names the document in results; empty means "take the source,
    else the content's hash".
    """

    text: str = ""
    title: str = ""
    id: str = ""
    source: str = ""
    parts: tuple[str | Image, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """The images of a chunk as far as they are known without running the vision tower.

    key, layout: the chunk identity's `inputs` and `inputs_layout`. positions, visual: see `ChunkInputs`. cells: token
    indices that are prefilled apart from each other (an image in tiles); none where the chunk is prefilled as one.
    prepared: what the model's vision adapter made of each picture, in order.
    """

    key: str
    layout: tuple[int, ...]
    positions: "Tensor"
    visual: "Tensor"
    cells: tuple["Tensor", ...]
    prepared: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of reuse: consecutive tokens of one document, never across documents."""

    token_ids: tuple[int, ...]
    document_id: str
    title: str = ""
    index: int = 0
    images: ChunkImages | None = None

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
    `quantisation`: `none`, or `movement-2` for a record that holds not KV but how far V moved. Of a chunk with images,
    `inputs` is the SHA-256 (hex) of all that decides its KV beside the token ids (pixels, processor settings, vision
    tower, positions, tiles), and `inputs_layout` the sizes (visual tokens, hidden, early-layer rows, axes) of its
    `ChunkInputs`; both are empty for text.
    """

    model: ModelIdentity
    rope: str
    head_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    namespace: str = "public"
    quantisation: str = "none"
    inputs: str = ""
    inputs_layout: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """What the layers read of a chunk with images beside its token ids: with it rows are repaired without pixels.

    positions: `[axes, tokens]` int32, RoPE positions relative to the chunk's first. visual: `[visual]` int32, which
    tokens stand for parts of an image, ascending. embeddings: `[visual, hidden]`, what the first layer reads there
    instead of the tokens' embeddings. layer_rows: `[early, visual, hidden]`, what is added there to the output of the
    first layers (deepstack); no rows for most models. Both in the model's dtype.
    """

    positions: "Tensor"
    visual: "Tensor"
    embeddings: "Tensor"
    layer_rows: "Tensor"

    @property
    def span(self) -> int:
        """How far the next chunk's first position is from this one's."""
        return int(self.positions.max()) + 1

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """(visual tokens, hidden, early-layer rows, axes), as in the chunk's identity."""
        early, num_visual, hidden = self.layer_rows.shape
        return int(num_visual), int(hidden), int(early), int(self.positions.shape[0])

    @property
    def num_bytes(self) -> int:
        return int(self.positions.nbytes + self.visual.nbytes + self.embeddings.nbytes + self.layer_rows.nbytes)


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Position-free KV of one chunk: keys *before* RoPE.

    keys, values: `[layers, kv_heads, tokens, head_dim]` in the model's dtype. Readers never write into them.
    """

    identity: ChunkIdentity
    keys: "Tensor"
    values: "Tensor"
    inputs: ChunkInputs | None = None  # of a chunk with images

    @property
    def num_tokens(self) -> int:
        return len(self.identity.token_ids)

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes) + (self.inputs.num_bytes if self.inputs is not None else 0)


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
    The buffers belong to one request and are written by repair and decode; they are never stored. `visual`: what the
    layers read in slots that hold parts of images. `shift`: what is added to a slot behind the context to get its RoPE
    position (0 for text; an image takes fewer positions than slots). `cells`: slots that were prefilled apart from each
    other, where that is finer than chunks (images in tiles). `memory`: of a request that several ranks share, where its
    KV lies; `keys` and `values` then have no slots.
    """

    keys: "Tensor"
    values: "Tensor"
    token_ids: "Tensor"
    spans: tuple[Span, ...]
    exact_tokens: int
    visual: "VisualRows | None" = None
    shift: int = 0
    cells: "tuple[Tensor, ...]" = ()
    memory: "Memory | None" = None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def reusable_tokens(self) -> int:
        """Tokens that may be selected for repair: all that do not stand in the exact prefix."""
        return self.num_tokens - self.exact_tokens


@dataclass(frozen=True, slots=True)
class VisualRows:
    """What the layers read in some slots instead of the embeddings of their tokens.

    slots: `[visual]` int64, ascending. embeddings: `[visual, hidden]`. layer_rows: `[early, visual, hidden]`, see
    `ChunkInputs`.
    """

    slots: "Tensor"
    embeddings: "Tensor"
    layer_rows: "Tensor"


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

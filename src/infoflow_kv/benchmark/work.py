"""What a request must compute and move at least, counted: the ideal that stands beside every measurement.

One multiply-add is two FLOPs. Norms, rotary angles, softmax and activations are left out: they are a few per cent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import LanguageModel
from infoflow_kv.shapes import Int, Tensor


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that decide its work.

    `linear_shapes`: (outputs, inputs) of the weight matrices of one layer (the first) that a row meets.
    `layer_weights`: weights that a row meets in each layer; of a mixture of experts, those of the experts that it is
    sent to. `windows`: sliding window of each layer, None without one. `value_bytes`: bytes of one number.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    linear_shapes: tuple[tuple[int, int], ...]
    layer_weights: tuple[int, ...]
    windows: tuple[int | None, ...]
    value_bytes: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_weights)

    @property
    def kv_weights(self) -> int:
        """Weights of a layer's K and V projections: all that a row without further use meets in the last layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.hidden

    @property
    def qkv_weights(self) -> int:
        return self.kv_weights + self.num_heads * self.head_dim * self.hidden

    @property
    def pair_flops(self) -> int:
        """FLOPs of one row and one slot that it sees, in one layer, all heads: a product with K, one with V."""
        return 4 * self.num_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that one row meets, output matrix included."""
        return (sum(self.layer_weights) + self.vocab * self.hidden) * self.value_bytes


def shape_of(model: LanguageModel) -> ModelShape:
    """The sizes of a model, read off its own matrices."""
    plain = model.plain()
    decoder, config = plain.get_decoder(), plain.config.get_text_config()
    layers = list(decoder.layers)
    vocab, hidden = plain.get_output_embeddings().weight.shape
    if len(layers) != model.num_layers:
        raise ComputeError(f"the model has {len(layers)} layers of its own, expected {model.num_layers}")
    chosen = getattr(config, "num_experts_per_tok", None)
    return ModelShape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden=int(hidden),
        vocab=int(vocab),
        linear_shapes=tuple((m.out_features, m.in_features) for m in linears(layers[0])),
        layer_weights=tuple(met_weights(layer, chosen) for layer in layers),
        windows=tuple(window_of(layer) for layer in layers),
        value_bytes=model.dtype.itemsize,
    )


def linears(layer: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]


def met_weights(layer: torch.nn.Module, experts_per_token: int | None) -> int:
    """Weights of a layer that one row is multiplied with. Transformers stacks experts: [experts, outputs, inputs]."""
    dense = sum(module.weight.numel() for module in linears(layer))
    stacked = [p for p in layer.parameters() if p.ndim == 3]
    return dense + sum(p.numel() * (experts_per_token or p.shape[0]) // p.shape[0] for p in stacked)


def window_of(layer: torch.nn.Module) -> int | None:
    """The sliding window that the layer's attention asks for."""
    for module in layer.modules():
        window = getattr(module, "sliding_window", None)
        if isinstance(window, int):
            return window
    return None


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of the weight matrices and of attention; `pairs` of rows and slots and `row_layers`, over all layers."""

    linear_flops: int = 0
    attention_flops: int = 0
    pairs: int = 0
    row_layers: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.linear_flops + other.linear_flops,
            self.attention_flops + other.attention_flops,
            self.pairs + other.pairs,
            self.row_layers + other.row_layers,
        )

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops

    def record(self) -> dict[str, Any]:
        return {
            "linear_flops": self.linear_flops,
            "attention_flops": self.attention_flops,
            "pairs": self.pairs,
            "row_layers": self.row_layers,
        }


def count_pairs(ranks: Int[Tensor, " rows"], window: int | None = None) -> int:
    """How many slots these rows see together: each those up to its own rank, inside the window.

    >>> count_pairs(torch.tensor([0, 4, 9]))
    16
    """
    seen = ranks.to(torch.int64) + 1
    return int((seen if window is None else seen.clamp_max(window)).sum())


def forward_work(
    shape: ModelShape, ranks: Int[Tensor, " rows"], num_logits: int = 1, *, whole_last: bool = False
) -> Work:
    """Rows of these ranks (ascending) through all layers, logits of the last `num_logits` of them.

    In the last layer a row without logits is worth its K and V alone; `whole_last` counts all of it, as ordinary
    prefill computes it.
    """
    work = Work(linear_flops=2 * num_logits * shape.vocab * shape.hidden)
    for layer in range(shape.num_layers):
        if layer + 1 < shape.num_layers or whole_last:
            work += layer_work(shape, layer, ranks)
            continue
        kept = ranks[ranks.numel() - num_logits :]
        left = ranks.numel() - num_logits
        work += layer_work(shape, layer, kept)
        work += Work(linear_flops=2 * left * shape.kv_weights)
    return work


def layer_work(shape: ModelShape, layer: int, ranks: Int[Tensor, " rows"]) -> Work:
    """Rows of these ranks through one layer."""
    rows, pairs = ranks.numel(), count_pairs(ranks, shape.windows[layer])
    return Work(2 * rows * shape.layer_weights[layer], pairs * shape.pair_flops, pairs, rows)


def scoring_work(shape: ModelShape, prompt_ranks: Int[Tensor, " prompt"], last_layer: int) -> Work:
    """The prompt's rows through the layers up to the last one that scores; there only queries meet keys."""
    work = Work()
    for layer in range(last_layer):
        work += layer_work(shape, layer, prompt_ranks)
    pairs = count_pairs(prompt_ranks, shape.windows[last_layer])
    rows = prompt_ranks.numel()
    return work + Work(2 * rows * shape.qkv_weights, pairs * shape.pair_flops // 2, pairs, rows)


def narrowing_work(
    shape: ModelShape,
    layer_counts: Sequence[int],
    context: Int[Tensor, " context"],
    slots: Int[Tensor, " selected"],
    prompt_ranks: Int[Tensor, " prompt"],
) -> Work:
    """A rule that drops rows on the way: `layer_counts` context rows in each layer, all of `context` or some of them.

    Which rows a layer ran is known only where it ran all of them or the selected `slots`; of another number, the pairs
    are those of as many rows at the mean rank of the selected ones.
    """
    logit_row = prompt_ranks[-1:]
    work = Work(linear_flops=2 * shape.vocab * shape.hidden)
    for layer, count in enumerate(layer_counts):
        if layer + 1 == shape.num_layers:
            left = count + prompt_ranks.numel() - 1
            return work + layer_work(shape, layer, logit_row) + Work(linear_flops=2 * left * shape.kv_weights)
        if count == context.numel():
            rows = context
        elif count == slots.numel():
            rows = slots
        else:
            middle = int(slots.double().mean()) if slots.numel() else 0
            rows = torch.full((count,), middle, dtype=torch.int64)
        work += layer_work(shape, layer, torch.cat([rows.cpu(), prompt_ranks.cpu()]))
    return work


def chunk_work(shape: ModelShape, lengths: Sequence[int], head_tokens: int) -> Work:
    """Each chunk prefilled alone behind `head_tokens` tokens whose KV is there; no logits."""
    work = Work()
    for length in lengths:
        work += forward_work(shape, torch.arange(head_tokens, head_tokens + length), num_logits=0)
    return work

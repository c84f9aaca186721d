"""What this machine reaches at bare products and copies, in the model's own shapes: no request can be quicker."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from infoflow_kv.benchmark.timing import measure, tidy, wait_for
from infoflow_kv.benchmark.work import ModelShape, Work
from infoflow_kv.models import LanguageModel

ROWS = 512  # of a weight product: about a budget of 0.15 on 3,400 tokens
SLOTS = 2048  # that attention goes over
TILE = 64, 512  # rows and slots of bare attention products whose logits stay in a processor's cache
TILES = 8  # products to one reading of the clock
BUFFER_BYTES = 256 * 2**20  # beyond any processor's caches
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best rates of this run: FLOP/s of the layers' weight products; of attention, the better of its two bare products
    in cache and of torch's fused kernel without a mask; bytes/s of a copy (read plus written) and of a matrix-vector
    product (read)."""

    linear_flops_per_second: float
    attention_flops_per_second: float
    copy_bytes_per_second: float
    read_bytes_per_second: float

    def higher(self, other: "Ceilings") -> "Ceilings":
        """The better of both in each: a ceiling is the best that was seen, before or after."""
        return Ceilings(
            max(self.linear_flops_per_second, other.linear_flops_per_second),
            max(self.attention_flops_per_second, other.attention_flops_per_second),
            max(self.copy_bytes_per_second, other.copy_bytes_per_second),
            max(self.read_bytes_per_second, other.read_bytes_per_second),
        )

    def record(self) -> dict[str, Any]:
        return {
            "linear_gflops_per_second": tidy(self.linear_flops_per_second / 1e9),
            "attention_gflops_per_second": tidy(self.attention_flops_per_second / 1e9),
            "copy_gb_per_second": tidy(self.copy_bytes_per_second / 1e9),
            "read_gb_per_second": tidy(self.read_bytes_per_second / 1e9),
        }

    def seconds(self, shape: ModelShape, work: Work, moved_bytes: int = 0) -> float:
        """The least time of this work at these rates; the weights are read meanwhile, `moved_bytes` copied besides."""
        linear = max(work.linear_flops / self.linear_flops_per_second, shape.weight_bytes / self.read_bytes_per_second)
        return linear + work.attention_flops / self.attention_flops_per_second + self.copying(moved_bytes)

    def copying(self, moved_bytes: int) -> float:
        """Seconds of reading and writing so many bytes."""
        return 2 * moved_bytes / self.copy_bytes_per_second


def measure_ceilings(
    model: LanguageModel,
    shape: ModelShape,
    *,
    rows: int = ROWS,
    slots: int = SLOTS,
    buffer_bytes: int = BUFFER_BYTES,
    repeats: int = REPEATS,
) -> Ceilings:
    """The ceilings of this machine now, in the dtype and on the device of the model and with torch's threads."""
    dtype, device = model.dtype, model.device
    # A vector product needs a matrix; 4,096 columns keep the vector in the nearest cache.
    matrix = torch.ones((max(1, buffer_bytes // dtype.itemsize // 4096), 4096), dtype=dtype, device=device)
    target, vector = torch.empty_like(matrix), torch.ones(4096, dtype=dtype, device=device)
    weights = [torch.rand(shape_, dtype=dtype, device=device) for shape_ in shape.linear_shapes]
    inputs = {size: torch.rand((rows, size), dtype=dtype, device=device) for _, size in shape.linear_shapes}
    group = shape.num_heads // shape.num_kv_heads
    query = torch.rand((shape.num_kv_heads, group * rows, shape.head_dim), dtype=dtype, device=device)
    keys = torch.rand((shape.num_kv_heads, slots, shape.head_dim), dtype=dtype, device=device)
    tile_rows, tile_slots = min(TILE[0], rows), min(TILE[1], slots)
    tile_query, tile_keys = query[:, : group * tile_rows].contiguous(), keys[:, :tile_slots].contiguous()

    def linear() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        wait_for(device)

    def products() -> None:
        for _ in range(TILES):
            torch.bmm(torch.bmm(tile_query, tile_keys.transpose(1, 2)), tile_keys)
        wait_for(device)

    def fused() -> None:
        F.scaled_dot_product_attention(query[None], keys[None], keys[None])
        wait_for(device)

    def copy() -> None:
        target.copy_(matrix)
        wait_for(device)

    def read() -> None:
        torch.mv(matrix, vector)
        wait_for(device)

    with torch.inference_mode():
        best = {
            name: timed.low
            for name, timed in measure(
                {"linear": linear, "products": products, "fused": fused, "copy": copy, "read": read}, repeats
            ).items()
        }
    linear_flops = 2 * rows * sum(outputs * inputs_ for outputs, inputs_ in shape.linear_shapes)
    copied = 2 * matrix.nbytes / best["copy"]
    return Ceilings(
        linear_flops_per_second=linear_flops / best["linear"],
        attention_flops_per_second=shape.pair_flops
        * max(TILES * tile_rows * tile_slots / best["products"], rows * slots / best["fused"]),
        copy_bytes_per_second=copied,
        # Where the dtype's vector product is slow, memory itself still is not: a copy reads half of what it moves.
        read_bytes_per_second=max(matrix.nbytes / best["read"], copied / 2),
    )

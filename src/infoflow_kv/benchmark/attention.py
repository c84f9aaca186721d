"""How quick is the staircase kernel against causal SDPA on the full square, in pairs of a row and a slot per second?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from infoflow_kv.benchmark.timing import OnStep, measure, tidy, wait_for
from infoflow_kv.benchmark.work import count_pairs
from infoflow_kv.errors import OptionError
from infoflow_kv.ops import AttentionSpec, Staircase
from infoflow_kv.shapes import Float, Int, Tensor

Skew = Literal["even", "late"]
SKEWS: tuple[Skew, ...] = ("even", "late")
CHECKED_ROWS = 64


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one layer's attention: query heads, K/V heads and width of a head."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim) < 1 or self.heads % self.kv_heads:
            raise OptionError(
                f"{self.heads} heads, {self.kv_heads} K/V heads of width {self.head_dim}; expected numbers of at least "
                "1, and heads a multiple of K/V heads"
            )

    @property
    def pair_flops(self) -> int:
        return 4 * self.heads * self.head_dim


def draw_ranks(num_rows: int, num_keys: int, skew: Skew, seed: int = 0) -> Int[Tensor, " rows"]:
    """Ascending ranks of `num_rows` rows among `num_keys` keys, drawn without repetition.

    `even`: each as likely as the next, mean rank about a half. `late`: rank r in proportion to r³, mean rank about 0.8
    while few are drawn, as where the prompt attends mostly to what stands before it.
    """
    if not 1 <= num_rows <= num_keys:
        raise OptionError(f"{num_rows} rows of {num_keys} keys; expected 1 to as many rows as keys")
    generator = torch.Generator().manual_seed(seed)
    # The largest of log-weight + Gumbel noise are a draw without replacement in proportion to the weights.
    uniform = torch.rand(num_keys, generator=generator, dtype=torch.float64).clamp_(1e-12, 1 - 1e-12)
    scores = -torch.log(-torch.log(uniform))
    if skew == "late":
        scores += 3 * torch.log(torch.arange(1, num_keys + 1, dtype=torch.float64))
    return torch.sort(torch.topk(scores, num_rows).indices).values


def measure_attention(
    shape: AttentionShape,
    num_keys: int,
    num_rows: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    repeats: int = 5,
    warmup: int = 1,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> list[dict[str, Any]]:
    """One record per arm: `causal` (SDPA, all rows), the staircase on even and on late rows, both with cuts made anew.

    A Staircase is made once per forward and used in every layer, so cuts are not part of the arms `even` and `late`;
    `even-anew` and `late-anew` show what one layer would pay for them. `max_error` is against float64, on 64 rows.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(heads: int, rows: int) -> Tensor:
        return torch.randn((heads, rows, shape.head_dim), generator=generator).to(device, dtype)

    query, keys, values = noise(shape.heads, num_keys), noise(shape.kv_heads, num_keys), noise(shape.kv_heads, num_keys)
    spec = AttentionSpec(scale=shape.head_dim**-0.5)
    ranks = {skew: draw_ranks(num_rows, num_keys, skew, seed).to(device) for skew in SKEWS}
    rows = {skew: query[:, chosen].contiguous() for skew, chosen in ranks.items()}
    stairs = {skew: Staircase(chosen) for skew, chosen in ranks.items()}
    target = query.device

    def causal() -> Tensor:
        out = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=spec.scale, enable_gqa=True
        )
        wait_for(target)
        return out[0]

    def staircase(skew: Skew, anew: bool) -> Callable[[], Tensor]:
        def run() -> Tensor:
            made = Staircase(ranks[skew]) if anew else stairs[skew]
            out = made.attend(rows[skew], keys, values, spec)
            wait_for(target)
            return out

        return run

    everything = torch.arange(num_keys, device=target)
    arms: dict[str, Callable[[], Tensor]] = {"causal": causal}
    used: dict[str, Tensor] = {"causal": everything}
    for skew in SKEWS:
        for anew in (False, True):
            name = f"{skew}-anew" if anew else skew
            arms[name], used[name] = staircase(skew, anew), ranks[skew]
    # Outputs are dropped at once: memory is then used again from call to call, as in a model's layers.
    quiet = {name: dropping(run) for name, run in arms.items()}
    with torch.inference_mode():
        timed = measure(quiet, repeats, warmup, on_step=on_step)
        outputs = {name: run() for name, run in arms.items()}
    square = count_pairs(everything) / timed["causal"].median
    records = []
    for name, own in timed.items():
        pairs = count_pairs(used[name])
        given = query[:, used[name]]
        records.append(
            {
                "arm": name,
                "heads": shape.heads,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "keys": num_keys,
                "rows": used[name].numel(),
                "mean_rank": tidy(float(used[name].double().mean()) / num_keys),
                "pairs": pairs,
                **own.record(),
                "pairs_per_second": tidy(pairs / own.median),
                "gflops_per_second": tidy(pairs * shape.pair_flops / own.median / 1e9),
                "rate_ratio": tidy(pairs / own.median / square),
                "ideal_seconds": tidy(pairs / square),
                "max_error": tidy(largest_error(outputs[name], given, keys, values, used[name], spec.scale)),
            }
        )
    return records


def dropping(run: Callable[[], Tensor]) -> Callable[[], None]:
    def quietly() -> None:
        run()

    return quietly


def largest_error(
    out: Float[Tensor, "heads rows head_dim"],
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    ranks: Int[Tensor, " rows"],
    scale: float,
) -> float:
    """Largest difference to dense float64 attention over rows spread evenly, as a share of the largest value there."""
    picked = torch.linspace(0, ranks.numel() - 1, min(CHECKED_ROWS, ranks.numel()), device=ranks.device).round().long()
    group = query.shape[0] // keys.shape[0]
    wide_keys, wide_values = (x.double().repeat_interleave(group, dim=0) for x in (keys, values))
    logits = query[:, picked].double() @ wide_keys.transpose(1, 2) * scale
    hidden = torch.arange(keys.shape[1], device=ranks.device)[None] > ranks[picked][:, None]
    expected = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1) @ wide_values
    return float((out[:, picked].double() - expected).abs().max() / expected.abs().max())

"""RoPE similarity between the selected tokens and the prompt (the paper's Table 2).

The paper gives numbers and no formula. The definition here reproduces how they behave: RoPE turns the pair of
coordinates k of a token at position p by the angle p·θ_k, so what two tokens' rotations have in common is the mean of
cos((p_i − p_j)·θ_k) over the frequencies: 1 for the same place, falling with distance. For each selected context token
the largest similarity to any prompt row is taken; `mean_of_max` is its mean over the selected tokens, `max` its largest
value. EPIC's tokens stand at chunk starts, never right before the prompt, hence its low `max`.
"""

from dataclasses import dataclass

import torch

from infoflow_kv.models import Rotary
from infoflow_kv.shapes import Int, Tensor


@dataclass(frozen=True, slots=True)
class RopeSimilarity:
    """Both lie in -1..1."""

    mean_of_max: float
    max: float


def rope_similarity(
    selected: Int[Tensor, " selected"], prompt: Int[Tensor, " prompt"], rotary: Rotary
) -> RopeSimilarity | None:
    """The similarity of tokens at these GLOBAL positions to prompt rows at theirs; None where nothing is selected."""
    if selected.numel() == 0 or prompt.numel() == 0:
        return None
    distances = (prompt[None, :] - selected[:, None]).abs()
    by_distance = rotary.tables(torch.arange(int(distances.max()) + 1)).similarity().to(distances.device)
    best = by_distance[distances].amax(dim=1)
    return RopeSimilarity(float(best.mean()), float(best.max()))

"""InfoFlow's selector: the attention that the prompt pays to each context token, summed over a layer set.

The rivals and relatives that only weigh this attention otherwise are `weigh` functions below.
"""

from collections.abc import Callable

import torch

from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.models import AttentionInput, StopForward, forward_rows
from infoflow_kv.ops import attention_mass
from infoflow_kv.ops.mass import Reduction
from infoflow_kv.select.base import Scene
from infoflow_kv.shapes import Float, Tensor

Weigh = Callable[[Scene, int], Float[Tensor, "kv_heads context"]]


class AttentionMass:
    """Scores by attention mass (paper, eq. 7) over `layers`; the forward stops after the last of them.

    `reduction`: `sum` (the paper), `l2` (its released code) or `entropy`. `weigh`: how much a token counts in a layer
    for each K/V head, beside the attention that it gets.
    """

    def __init__(self, layers: tuple[int, ...], reduction: Reduction = "sum", weigh: Weigh | None = None) -> None:
        self.layers = frozenset(layers)
        self.reduction: Reduction = reduction
        self.weigh = weigh

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        context = scene.context
        total = torch.zeros(context.num_tokens, dtype=torch.float32, device=context.keys.device)
        end = context.num_tokens + scene.prompt_ids.shape[0]
        ranks = torch.arange(context.num_tokens, end, device=context.keys.device)
        last, seen = max(self.layers), 0

        def add(given: AttentionInput, keys: Tensor) -> None:
            nonlocal seen
            if given.layer in self.layers:
                weight = self.weigh(scene, given.layer) if self.weigh is not None else None
                total.add_(
                    attention_mass(given.query, keys, ranks, context.num_tokens, given.spec, self.reduction, weight)
                )
                seen += 1
            if given.layer == last:
                raise StopForward

        # The prompt's K/V that this leaves in its slots are those over unrepaired KV; repair writes them anew.
        rotary = scene.rotary.at(slice(context.num_tokens, end))
        forward_rows(scene.model, scene.prompt_ids, ranks, ranks, rotary, context.keys, context.values, on_layer=add)
        if seen != len(self.layers):
            raise ComputeError(f"attention mass came from {seen} layers, expected {len(self.layers)}")
        return total


def value_norm(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """‖v‖₁ of each token, as VATP weighs attention: a token whose value is small moves little, however attended."""
    return scene.context.values[layer, :, : scene.context.num_tokens].float().abs().sum(dim=-1)


def sensitivity(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """How far the token's value moved when its chunk was prefilled behind a neighbour (docs/method.md, section 6)."""
    if scene.sensitivity is None:
        raise ComputeError("the influence selector needs the chunks' context sensitivity, and the scene has none")
    return scene.sensitivity[layer].float()


def true_deviation(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """‖V_full − V_reused‖ of each token: what repair would really change. Needs a full prefill: for the lab only."""
    if scene.truth is None:
        raise OptionError("the oracle needs the values of a full prefill; it is for the laboratory (`eval predict`)")
    count = scene.context.num_tokens
    moved = scene.truth[layer, :, :count].float() - scene.context.values[layer, :, :count].float()
    distance: Tensor = moved.norm(dim=-1)
    return distance

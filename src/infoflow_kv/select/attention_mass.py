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
        return self.per_layer(scene).sum(dim=0)

    def per_layer(self, scene: Scene) -> Float[Tensor, "some context"]:
        """The scores of each layer of the set, in ascending order of layers."""
        context = scene.context
        scores: list[Tensor] = []
        end = context.num_tokens + scene.prompt_ids.shape[0]
        ranks = torch.arange(context.num_tokens, end, device=context.keys.device)
        last = max(self.layers)

        def add(given: AttentionInput, keys: Tensor, values: Tensor) -> Tensor | None:
            if given.layer not in self.layers:
                return None
            weight = self.weigh(scene, given.layer) if self.weigh is not None else None
            score, out = attention_mass(
                given.query, keys, values, ranks, context.num_tokens, given.spec, self.reduction, weight
            )
            scores.append(score)
            if given.layer == last:
                raise StopForward
            return out

        # The prompt's K/V that this leaves in its slots are those over unrepaired KV; repair writes them anew.
        rotary = scene.rotary.at(slice(context.num_tokens, end))
        keys, values = context.keys, context.values
        forward_rows(scene.model, scene.prompt_ids, ranks, ranks, rotary, keys, values, on_layer=add, attends_last=True)
        if len(scores) != len(self.layers):
            raise ComputeError(f"attention mass came from {len(scores)} layers, expected {len(self.layers)}")
        return torch.stack(scores)


def value_norm(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """‖v‖₁ of each token, as VATP weighs attention: a token whose value is small moves little, however attended."""
    return scene.context.values[layer, :, : scene.context.num_tokens].float().abs().sum(dim=-1)


def sensitivity(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """How far the token's value moved when its chunk was prefilled behind a neighbour (docs/method.md, section 7)."""
    if scene.sensitivity is None:
        raise ComputeError("the influence selector needs the chunks' context sensitivity, and the scene has none")
    return scene.sensitivity[layer].float().expand(scene.model.num_kv_heads, -1)


def true_deviation(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """‖V_full − V_reused‖ of each token: what repair would really change. Needs a full prefill: for the lab only."""
    if scene.truth is None:
        raise OptionError("the oracle needs the values of a full prefill; it is for the laboratory (`eval predict`)")
    count = scene.context.num_tokens
    moved = scene.truth[layer, :, :count].float() - scene.context.values[layer, :, :count].float()
    distance: Tensor = moved.norm(dim=-1)
    return distance

"""InfoFlow's selector: the attention that the prompt pays to each context token, summed over a layer set.

The rivals and relatives that only weigh this attention otherwise are `weigh` functions below.
"""

from collections.abc import Callable

import torch

from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.models import AttentionInput, Rows, StopForward, forward_rows, memory_of
from infoflow_kv.ops.mass import Reduction
from infoflow_kv.select.base import Scene
from infoflow_kv.shapes import Float, Tensor

# The weight of each context slot for each K/V head, of those that lie in this process.
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
        own = self._own(scene).sum(dim=0, keepdim=True)
        return memory_of(scene.context).whole(own, scene.context.num_tokens)[0]

    def per_layer(self, scene: Scene) -> Float[Tensor, "some context"]:
        """The scores of each layer of the set, in ascending order of layers."""
        return memory_of(scene.context).whole(self._own(scene), scene.context.num_tokens)

    def _own(self, scene: Scene) -> Float[Tensor, "some own_context"]:
        """The scores of the context slots that lie in this process."""
        context = scene.context
        scores: list[Tensor] = []
        end = context.num_tokens + scene.prompt_ids.shape[0]
        ranks = torch.arange(context.num_tokens, end, device=scene.model.device)
        last = max(self.layers)

        def add(given: AttentionInput, rows: Rows) -> Tensor | None:
            if given.layer not in self.layers:
                return None
            weight = self.weigh(scene, given.layer) if self.weigh is not None else None
            score, out = rows.mass(given, context.num_tokens, self.reduction, weight)
            scores.append(score)
            if given.layer == last:
                raise StopForward
            return out

        # The prompt's K/V that this leaves in its slots are those over unrepaired KV; repair writes them anew.
        rotary = scene.rotary.at(slice(context.num_tokens, end))
        forward_rows(
            scene.model, scene.prompt_ids, ranks, rotary, memory_of(context),
            on_layer=add, attends_last=True, spreading="repeat",
        )  # fmt: skip
        if len(scores) != len(self.layers):
            raise ComputeError(f"attention mass came from {len(scores)} layers, expected {len(self.layers)}")
        return torch.stack(scores)


def value_norm(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """‖v‖₁ of each token, as VATP weighs attention: a token whose value is small moves little, however attended."""
    return own_values(scene, layer).abs().sum(dim=-1)


def sensitivity(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """How far the token's value moved when its chunk was prefilled behind a neighbour (docs/method.md, section 7)."""
    if scene.sensitivity is None:
        raise ComputeError("the influence selector needs the chunks' context sensitivity, and the scene has none")
    own = scene.sensitivity[layer].float()[memory_of(scene.context).own_context(scene.context.num_tokens)]
    return own.expand(own_values(scene, layer).shape[0], -1)


def true_deviation(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context"]:
    """‖V_full − V_reused‖ of each token: what repair would really change. Needs a full prefill: for the lab only."""
    if scene.truth is None:
        raise OptionError("the oracle needs the values of a full prefill; it is for the laboratory (`eval predict`)")
    moved = scene.truth[layer, :, : scene.context.num_tokens].float() - own_values(scene, layer)
    distance: Tensor = moved.norm(dim=-1)
    return distance


def own_values(scene: Scene, layer: int) -> Float[Tensor, "kv_heads context head_dim"]:
    """The layer's values of the K/V heads and context slots that lie in this process, float32."""
    memory = memory_of(scene.context)
    return memory.own_values(layer)[:, : memory.own_context(scene.context.num_tokens).numel()].float()

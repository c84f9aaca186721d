"""InfoFlow's selector: the attention that the prompt pays to each context token, summed over a layer set."""

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import AttentionInput, StopForward, forward_rows
from infoflow_kv.ops import attention_mass
from infoflow_kv.ops.mass import Reduction
from infoflow_kv.select.base import Scene
from infoflow_kv.shapes import Float, Tensor


class AttentionMass:
    """Scores by attention mass (paper, eq. 7) over `layers`; the forward stops after the last of them.

    `reduction`: `sum` (the paper) or `l2` (its released code).
    """

    def __init__(self, layers: tuple[int, ...], reduction: Reduction = "sum") -> None:
        self.layers = frozenset(layers)
        self.reduction: Reduction = reduction

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        context = scene.context
        total = torch.zeros(context.num_tokens, dtype=torch.float32, device=context.keys.device)
        end = context.num_tokens + scene.prompt_ids.shape[0]
        ranks = torch.arange(context.num_tokens, end, device=context.keys.device)
        last, seen = max(self.layers), 0

        def add(given: AttentionInput, keys: Tensor) -> None:
            nonlocal seen
            if given.layer in self.layers:
                total.add_(attention_mass(given.query, keys, ranks, context.num_tokens, given.spec, self.reduction))
                seen += 1
            if given.layer == last:
                raise StopForward

        # The prompt's K/V that this leaves in its slots are those over unrepaired KV; repair writes them anew.
        rotary = scene.rotary.at(slice(context.num_tokens, end))
        forward_rows(scene.model, scene.prompt_ids, ranks, ranks, rotary, context.keys, context.values, on_layer=add)
        if seen != len(self.layers):
            raise ComputeError(f"attention mass came from {seen} layers, expected {len(self.layers)}")
        return total

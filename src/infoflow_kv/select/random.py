"""The control: a uniform random choice."""

import torch

from infoflow_kv.select.base import Scene
from infoflow_kv.shapes import Float, Tensor


class Random:
    """Uniform over reusable tokens, by the request's seed."""

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        generator = torch.Generator().manual_seed(scene.seed)
        return torch.rand(scene.context.num_tokens, generator=generator).to(scene.context.keys.device)

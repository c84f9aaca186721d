"""A request on some ranks is the request in one process: same tokens chosen, same answer, same logits."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from requests_on_ranks import answered, engine_of, on_ranks, tiny_model

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}


def alone(name: str, sizes: dict[str, int], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    settings = {key: value for key, value in settings.items() if key != "layout"}
    return answered(engine_of(tiny_model(name, **sizes), settings))


@pytest.mark.parametrize(
    ("size", "layout", "budget"), [(1, "H", 0.15), (2, "Q", 0.15), (4, "H", 0.15), (4, "Q", 1.0), (4, [2, 2], 0.15)]
)
def test_it_is_the_request_in_one_process(size, layout, budget):
    settings = {"budget": budget, "layout": layout}
    expected = alone("qwen3", SIZES, settings)
    for rank, found in enumerate(run_ranks(on_ranks, size, "qwen3", settings, SIZES)):
        assert torch.equal(found["selected"], expected["selected"])
        assert torch.equal(found["tokens"], expected["tokens"])
        if rank == 0:
            error = (found["steps"] - expected["steps"]).abs().max() / expected["steps"].abs().max()
            assert error < 1e-5

"""What plain Transformers does not keep where a model attends through sliding windows: the KV of a whole prompt."""

from collections.abc import Sequence
from typing import Any

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.arms import Arm
from infoflow_kv.methods import find_method
from infoflow_kv.models.probe import layer_windows


def smallest_window(config: Any) -> int | None:
    """The smallest sliding window of the model's layers, in tokens; None where every layer sees everything."""
    num_layers = int(config.num_hidden_layers)
    kinds = list(getattr(config, "layer_types", None) or [None] * num_layers)
    return min((window for window in layer_windows(config, kinds, num_layers) if window is not None), default=None)


def keeps_whole(window: int | None, prompt_tokens: int, new_tokens: int) -> bool:
    """Whether the KV of a prompt is still whole after so many new tokens; the last of these is never cached.

    A window of n tokens keeps the n - 1 before the one that attends.
    """
    return window is None or prompt_tokens + new_tokens - 1 <= window - 1


def check_truth(arms: Sequence[Arm], window: int | None, item: str, prompt_tokens: int, new_tokens: int) -> None:
    """Nothing; OptionError where an arm needs a full prefill's values of this item, and nothing keeps them."""
    needing = [arm.name for arm in arms if find_method(arm.method).in_laboratory_only]
    if needing and not keeps_whole(window, prompt_tokens, new_tokens):
        raise OptionError(
            f"arm '{needing[0]}' needs the values of a full prefill, and of item '{item}' ({prompt_tokens} tokens and "
            f"{new_tokens} new ones) plain Transformers keeps only the last ones: the model's sliding window has "
            f"{window}; leave the arm out, or give shorter items"
        )

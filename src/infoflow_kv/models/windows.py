"""Sliding windows: which layers have one, whether the model obeys it, and how far news from other chunks can reach."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from infoflow_kv.models.hooks import Attend, AttentionInput
from infoflow_kv.shapes import Int, Tensor

# So narrow that the probe's few tokens reach past it.
NARROW_TOKENS = 8

Windows = tuple[int | None, ...]


def layer_windows(config: Any, kinds: list[str | None], num_layers: int) -> Windows:
    """The sliding window of each layer, from the config's layer types where it has them."""
    window = getattr(config, "sliding_window", None)
    if kinds[0] is None:
        uses = getattr(config, "use_sliding_window", True)
        return (int(window) if window and uses else None,) * num_layers
    return tuple(int(window) if kind == "sliding_attention" and window else None for kind in kinds)


def obeys(plain: Any, ids: Int[Tensor, " tokens"]) -> bool:
    """Whether a narrower window in the config changes what the plain model gives; configs carry windows that the
    model's class never looks at. The plain model is left with the narrow window."""
    wide = _logits(plain, ids, ids.shape[0])
    return not torch.equal(wide, _logits(plain, ids, NARROW_TOKENS))


def _logits(plain: Any, ids: Tensor, window: int) -> Tensor:
    plain.config.get_text_config().sliding_window = window
    with torch.inference_mode():
        logits: Tensor = plain(input_ids=ids[None], use_cache=False).logits
    return logits


def narrowed(windows: Windows) -> Windows:
    """The same layers with windows of at most `NARROW_TOKENS`."""
    return tuple(None if window is None else min(window, NARROW_TOKENS) for window in windows)


def through(windows: Windows, attend: Attend) -> Attend:
    """`attend` with these windows in place of the model's own."""

    def attend_narrowly(given: AttentionInput) -> Any:
        return attend(replace(given, spec=replace(given.spec, window=windows[given.layer])))

    return attend_narrowly


@dataclass(frozen=True, slots=True)
class Reach:
    """How far what stands before a chunk reaches into it.

    `windowed_layers` of `num_layers` see at most `window_tokens` (the longest of their windows): a token at least that
    far from its chunk's start sees nothing of other chunks there. `reach_tokens`: tokens of a chunk from this one on
    have exact keys and values whatever stands before; None where a layer without a window brings news to all of them.
    """

    num_layers: int
    windowed_layers: int
    window_tokens: int | None
    reach_tokens: int | None


def reach(windows: Windows) -> Reach:
    """The reach of a model with these windows, layer by layer.

    >>> reach((4, None, 4)).windowed_layers, reach((4, 4, 4)).reach_tokens
    (2, 6)
    """
    have = [window for window in windows if window is not None]
    # Each layer brings news one window further, and the last layer's output is in no key and no value.
    before_last = [window - 1 for window in windows[:-1] if window is not None]
    is_bounded = len(before_last) == len(windows) - 1
    return Reach(len(windows), len(have), max(have, default=None), sum(before_last) if is_bounded else None)

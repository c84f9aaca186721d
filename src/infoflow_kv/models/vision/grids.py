"""Runs of placeholders and tiles of a grid: the integer arithmetic that all families share."""

from collections.abc import Sequence
from itertools import groupby

from infoflow_kv.errors import ComputeError, DocumentError
from infoflow_kv.shapes import Int, Tensor


def placeholder_runs(token_ids: Sequence[int], image_token_id: int) -> list[int]:
    """The lengths of the runs of placeholders, in order.

    >>> placeholder_runs([5, 9, 9, 5, 9], 9)
    [2, 1]
    """
    return [len(list(group)) for token, group in groupby(token_ids) if token == image_token_id]


def check_runs(token_ids: Sequence[int], image_token_id: int, expected: Sequence[int]) -> None:
    """ComputeError unless the runs of placeholders are just the expected ones.

    Placeholders beyond the images come from a text that spells the model's image token.
    """
    found = placeholder_runs(token_ids, image_token_id)
    if found != list(expected):
        raise ComputeError(
            f"the tokens have runs of {found} image placeholders, the images are of {list(expected)}; an image must be "
            f"whole, and no text may hold the image token {image_token_id}"
        )


def split_tiles(index: Int[Tensor, "rows columns"], k: int) -> tuple[Int[Tensor, " tile"], ...]:
    """k × k tiles of a grid of indices, as even as can be, each ascending; fewer where the grid is smaller than k.

    >>> import torch
    >>> [tile.tolist() for tile in split_tiles(torch.arange(6).view(2, 3), 2)]
    [[0, 1], [2], [3, 4], [5]]
    """
    if k < 0:
        raise ComputeError(f"a grid of {k} × {k} tiles was asked for; expected k of 0 or more")
    # `tensor_split`: parts differ by one at most; `chunk` would leave the last ones empty (6 columns in 4 parts).
    return tuple(
        tile.reshape(-1).sort().values
        for band in index.tensor_split(max(k, 1), dim=0)
        for tile in band.tensor_split(max(k, 1), dim=1)
        if tile.numel()
    )


def too_narrow(width: int, height: int, ratio: int) -> DocumentError:
    """The error for a picture whose sides differ by more than a processor takes."""
    return DocumentError(
        f"a picture has {width} × {height} pixels; expected a longer side of at most {ratio} times the shorter one: "
        "crop it or cut it in pieces"
    )

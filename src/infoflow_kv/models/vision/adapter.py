"""What every family of vision-language models answers for its images: the one interface, and its two records."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from infoflow_kv.models.pictures import Picture
from infoflow_kv.shapes import Float, Int, Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """One picture as a model sees it, before its tower runs; no pixel is processed yet.

    `token_ids` stand for it in the prompt: markers and placeholders, `num_visual` of them. `grid` is the family's own
    account of the sizes (Qwen: 1, rows and columns of patches; Idefics: rows and columns of views, 0 for one view).
    `key`: SHA-256 (hex) of all that decides its features: pixels, processor settings, tower, dtype.
    """

    picture: Picture
    token_ids: tuple[int, ...]
    num_visual: int
    grid: tuple[int, ...]
    key: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the tower made of one picture, in the language part's dtype and in the order of its placeholders.

    `layer_rows`: what is added to the output of the first decoder layers (deepstack); no rows for most models.
    """

    embeddings: Float[Tensor, "visual hidden"] = field(repr=False)
    layer_rows: Float[Tensor, "early visual hidden"] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return int(self.embeddings.nbytes + self.layer_rows.nbytes)


@runtime_checkable
class VisionAdapter(Protocol):
    """A family's images. Thread-safe: nothing of a request is kept, on it or on the model.

    `num_axes`: rows of positions (3 under M-RoPE). `num_early`: decoder layers after which rows are added. `hidden`:
    width of a feature. Every token equal to `image_token_id` stands for a part of an image. `template_ids`: what the
    model's chat template writes for an image, where `Prepared.token_ids` belong.
    """

    name: str
    num_axes: int
    num_early: int
    hidden: int
    image_token_id: int
    template_ids: tuple[int, ...]

    @property
    def settings(self) -> str:
        """SHA-256 (hex) of the image processor's settings."""
        ...

    @property
    def tower_fingerprint(self) -> str:
        """SHA-256 (hex) of the weights, dtype and config of the tower and what leads from it to the decoder."""
        ...

    def prepare(self, picture: Picture) -> Prepared:
        """Tokens and sizes of a picture; DocumentError where this model's processor cannot take it."""
        ...

    def encode(self, prepared: Prepared) -> Encoded:
        """The picture's features, by the model's own processor and tower."""
        ...

    def positions(self, token_ids: Sequence[int], prepared: Sequence[Prepared]) -> Int[Tensor, "axes tokens"]:
        """int32 positions of a run of text and whole images from its first token on, as the model itself gives them.

        `prepared`: the images in it, in order. ComputeError where they do not fit the placeholders.
        """
        ...

    def tiles(self, prepared: Prepared, k: int) -> tuple[Int[Tensor, " tile"], ...]:
        """The picture's visual tokens in k × k tiles of its grid, split evenly, as ascending indices among them; tiles
        from top left, line by line. One tile for k of 0 or 1, fewer tiles where the grid is smaller than k."""
        ...

    def forward_inputs(self, token_ids: Sequence[int], prepared: Sequence[Prepared]) -> dict[str, Tensor]:
        """The keywords of the whole model's own forward over these tokens and pictures: the reference of the probe."""
        ...


def digest(*parts: str) -> str:
    """SHA-256 (hex) of texts, each with its length before it, so that no two lists of texts look alike."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode()
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()


def settings_digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of an image processor's settings, without names that do not touch the pixels.

    Which of the PIL and torchvision processors a folder names is left out as well: ours is always the PIL one.
    """
    ignored = {"image_processor_type", "processor_class", "feature_extractor_type", "_valid_processor_keys"}
    known = {key: value for key, value in settings.items() if key not in ignored}
    return digest(json.dumps(known, sort_keys=True, default=str))

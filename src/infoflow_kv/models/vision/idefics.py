"""Images of Idefics3 and SmolVLM: square views of the picture and one of the whole, positions on one axis."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from infoflow_kv.errors import ComputeError, ModelError
from infoflow_kv.models.pictures import Picture
from infoflow_kv.models.vision.adapter import Encoded, Prepared
from infoflow_kv.models.vision.grids import check_runs, split_tiles
from infoflow_kv.models.vision.pillow import PillowAdapter
from infoflow_kv.models.vision.processors import refuse_sizes, refuse_type
from infoflow_kv.models.vision.tower import Tower
from infoflow_kv.shapes import Int, Tensor

# The same code under two names; SmolVLM's first checkpoints name Idefics3's.
PROCESSORS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")


class IdeficsVision(PillowAdapter):
    """The adapter of Idefics3 and SmolVLM, whose processors differ in name only; see `VisionAdapter`."""

    _processor_class = "Idefics3ImageProcessorPil"
    num_axes = 1
    num_early = 0

    def __init__(
        self, hf: Any, processor_config: Mapping[str, Any] | None, tokenizer: Any, defaults: Mapping[str, Any]
    ) -> None:
        vision = hf.config.vision_config
        self.name = str(hf.config.model_type)
        self.hidden = int(hf.config.text_config.hidden_size)
        self.image_token_id = int(hf.config.image_token_id)
        self.template_ids: tuple[int, ...] = (self.image_token_id,)
        self._model = hf.model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._view = int(vision.image_size)
        # Features of a view's side, after the connector has drawn scale × scale patches into one.
        self._side = self._view // int(vision.patch_size) // int(hf.config.scale_factor)
        given = dict(processor_config) if processor_config is not None else dict(defaults)
        refuse_type(self.name, given, PROCESSORS)
        view = {"longest_edge": self._view}
        self._given = {"size": {"longest_edge": 4 * self._view}, "max_image_size": view, **given}
        refuse_sizes(self.name, self._given, {"max_image_size": view})
        self._tower = Tower(
            {"connector": self._model.connector, "vision_model": self._model.vision_model},
            vision,
            {"scale_factor": hf.config.scale_factor},
        )

    def prepare(self, picture: Picture) -> Prepared:
        rows, columns = self._views(picture.width, picture.height)
        num_visual = (rows * columns + 1) * self._side**2
        token_ids = self._token_ids(rows, columns)
        found = token_ids.count(self.image_token_id)
        # Both ends are the same marker, unless the tokenizer does not know it and spells it in pieces.
        if found != num_visual or token_ids[0] != token_ids[-1]:
            raise ModelError(
                f"the tokenizer of this {self.name} model gives {found} placeholders between {token_ids[0]} and "
                f"{token_ids[-1]} for an image of {num_visual}; take tokenizer and weights from the same model"
            )
        return Prepared(
            picture=picture,
            token_ids=token_ids,
            num_visual=num_visual,
            grid=(rows, columns),
            key=self._key(picture, self._dtype),
        )

    def encode(self, prepared: Prepared) -> Encoded:
        batch = self._processor(images=[prepared.picture.image], return_row_col_info=True, return_tensors="pt")
        made = int(batch["rows"][0][0]), int(batch["cols"][0][0])
        if made != prepared.grid:
            raise ComputeError(f"the image processor made {made} views, expected {prepared.grid}")
        device = self._model.device
        mask = batch.get("pixel_attention_mask")
        with torch.no_grad():
            out = self._model.get_image_features(
                batch["pixel_values"].to(device), None if mask is None else mask.to(device)
            )
        embeddings = torch.cat(list(out.pooler_output)).to(self._dtype)
        if embeddings.shape[0] != prepared.num_visual:
            # The model takes a view whose processed pixels are all exactly 0 for padding and leaves it out.
            raise ComputeError(f"the tower gave {embeddings.shape[0]} features, expected {prepared.num_visual}")
        return Encoded(embeddings, embeddings.new_zeros(0, *embeddings.shape))

    def positions(self, token_ids: Sequence[int], prepared: Sequence[Prepared]) -> Int[Tensor, "axes tokens"]:
        check_runs(
            token_ids,
            self.image_token_id,
            [self._side**2 for one in prepared for _ in range(one.grid[0] * one.grid[1] + 1)],
        )
        return torch.arange(len(token_ids), dtype=torch.int32)[None]

    def tiles(self, prepared: Prepared, k: int) -> tuple[Int[Tensor, " tile"], ...]:
        """As the protocol says, over the joined grid of the views; the view of the whole picture is the last tile."""
        rows, columns = prepared.grid
        side = self._side
        index = torch.arange(prepared.num_visual)
        if k <= 1:
            return split_tiles(index[None], k)
        if not rows:
            return split_tiles(index.view(side, side), k)
        views = index[: rows * columns * side**2].view(rows, columns, side, side)
        joined = views.transpose(1, 2).reshape(rows * side, columns * side)
        return (*split_tiles(joined, k), index[rows * columns * side**2 :])

    def forward_inputs(self, token_ids: Sequence[int], prepared: Sequence[Prepared]) -> dict[str, Tensor]:
        batch = self._processor(images=[[one.picture.image for one in prepared]], return_tensors="pt")
        device = self._model.device
        names = ("pixel_values", "pixel_attention_mask")
        given = {name: batch[name].to(device) for name in names if batch.get(name) is not None}
        return {"input_ids": torch.tensor([list(token_ids)], device=device), **given}

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.text_model.dtype
        return dtype

    def _token_ids(self, rows: int, columns: int) -> tuple[int, ...]:
        """The image's text, as Transformers' own processor spells it, in tokens; it starts and ends with a special
        token, so the text around it does not change them."""
        fake = getattr(self._tokenizer, "fake_image_token", "<fake_token_around_image>")
        whole = getattr(self._tokenizer, "global_image_token", "<global-img>")
        image = self._tokenizer.convert_ids_to_tokens(self.image_token_id) * self._side**2
        lines = [
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        text = "".join(lines) + ("\n" if lines else "") + f"{fake}{whole}{image}{fake}"
        with self._lock:  # a fast tokenizer called by two threads may raise "Already borrowed"
            return tuple(self._tokenizer(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"])

    def _views(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of views that the processor will cut; 0, 0 where the view of the whole is the only one.

        Not the processor's `get_number_of_image_patches`, whose rounding differs from what it then does.
        """
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

        processor, side = self._processor, self._view
        if not processor.do_image_splitting:
            return 0, 0
        if processor.do_resize:
            # Only the shape is read: an array of this shape without memory.
            blank = np.broadcast_to(np.uint8(0), (3, height, width))
            height, width = get_resize_output_image_size(blank, processor.size["longest_edge"])
        ratio = width / height
        if width >= height:
            wide = math.ceil(width / side)
            tall = math.ceil(int(wide * side / ratio) / side)
        else:
            tall = math.ceil(height / side)
            wide = math.ceil(int(tall * side * ratio) / side)
        return (tall, wide) if tall > 1 or wide > 1 else (0, 0)

"""Images of the Qwen-VL families: patches merged 2 × 2, positions on three axes, deepstack rows in Qwen3-VL."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infoflow_kv.errors import ComputeError, DocumentError, UnsupportedModelError
from infoflow_kv.models.pictures import Picture
from infoflow_kv.models.vision.adapter import Encoded, Prepared
from infoflow_kv.models.vision.grids import check_runs, split_tiles, too_narrow
from infoflow_kv.models.vision.pillow import PillowAdapter
from infoflow_kv.models.vision.processors import refuse_sizes, refuse_type
from infoflow_kv.models.vision.tower import Tower
from infoflow_kv.shapes import Int, Tensor

LARGEST_RATIO = 200  # `smart_resize` of Transformers refuses more
# What the released models of the families come with, for a model without processor settings.
QWEN2_SETTINGS: Mapping[str, Any] = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}}
QWEN3_SETTINGS: Mapping[str, Any] = {
    "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


class QwenVision(PillowAdapter):
    """The adapter of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and its mixture of experts; see `VisionAdapter`."""

    _processor_class = "Qwen2VLImageProcessorPil"
    num_axes = 3

    def __init__(
        self, hf: Any, processor_config: Mapping[str, Any] | None, tokenizer: Any, defaults: Mapping[str, Any]
    ) -> None:
        vision = hf.config.vision_config
        self.name = str(hf.config.model_type)
        self.hidden = int(hf.config.text_config.hidden_size)
        self.image_token_id = int(hf.config.image_token_id)
        self.num_early = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        self._model = hf.model
        self._markers = int(hf.config.vision_start_token_id), int(hf.config.vision_end_token_id)
        self.template_ids: tuple[int, ...] = (self._markers[0], self.image_token_id, self._markers[1])
        self._merge = int(vision.spatial_merge_size)
        sizes = {
            "patch_size": int(vision.patch_size),
            "temporal_patch_size": int(vision.temporal_patch_size),
            "merge_size": self._merge,
        }
        given = dict(processor_config) if processor_config is not None else dict(defaults)
        refuse_type(self.name, given, ("Qwen2VLImageProcessor",))
        refuse_sizes(self.name, given, sizes)
        if not given.get("do_resize", True):
            raise UnsupportedModelError(f"the processor settings of this {self.name} model say do_resize = false")
        self._given = {**sizes, **given}
        self._tower = Tower({"visual": self._model.visual}, vision, {})

    def prepare(self, picture: Picture) -> Prepared:
        rows, columns = self._patches(picture.width, picture.height)
        num_visual = rows * columns // self._merge**2
        start, end = self._markers
        return Prepared(
            picture=picture,
            token_ids=(start, *[self.image_token_id] * num_visual, end),
            num_visual=num_visual,
            grid=(1, rows, columns),
            key=self._key(picture, self._dtype),
        )

    def encode(self, prepared: Prepared) -> Encoded:
        batch = self._processor(images=[prepared.picture.image], return_tensors="pt")
        grid = batch["image_grid_thw"].to(self._model.visual.device)
        if tuple(grid[0].tolist()) != prepared.grid:
            raise ComputeError(f"the image processor made patches {grid[0].tolist()}, expected {list(prepared.grid)}")
        with torch.no_grad():
            out = self._model.get_image_features(batch["pixel_values"].to(grid.device), grid)
        embeddings = joined(out.pooler_output).to(self._dtype)
        early = [joined(rows).to(self._dtype) for rows in getattr(out, "deepstack_features", None) or ()]
        layer_rows = torch.stack(early) if early else embeddings.new_zeros(0, *embeddings.shape)
        if embeddings.shape[0] != prepared.num_visual or layer_rows.shape[0] != self.num_early:
            raise ComputeError(
                f"the tower gave {embeddings.shape[0]} features and {layer_rows.shape[0]} layers of rows, expected "
                f"{prepared.num_visual} and {self.num_early}"
            )
        return Encoded(embeddings, layer_rows)

    def positions(self, token_ids: Sequence[int], prepared: Sequence[Prepared]) -> Int[Tensor, "axes tokens"]:
        check_runs(token_ids, self.image_token_id, [one.num_visual for one in prepared])
        ids = torch.tensor([list(token_ids)])
        # The model's own rule; unlike its forward it leaves no state (`rope_deltas`) on the module.
        found, _ = self._model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_token_id).int(),
            image_grid_thw=torch.tensor([one.grid for one in prepared]) if prepared else None,
        )
        positions: Tensor = found[:, 0].to(torch.int32)
        return positions

    def tiles(self, prepared: Prepared, k: int) -> tuple[Int[Tensor, " tile"], ...]:
        _, rows, columns = prepared.grid
        return split_tiles(torch.arange(prepared.num_visual).view(rows // self._merge, columns // self._merge), k)

    def forward_inputs(self, token_ids: Sequence[int], prepared: Sequence[Prepared]) -> dict[str, Tensor]:
        batch = self._processor(images=[one.picture.image for one in prepared], return_tensors="pt")
        device = self._model.visual.device
        ids = torch.tensor([list(token_ids)], device=device)
        return {
            "input_ids": ids,
            "pixel_values": batch["pixel_values"].to(device),
            "image_grid_thw": batch["image_grid_thw"].to(device),
            "mm_token_type_ids": (ids == self.image_token_id).int(),
        }

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.language_model.dtype
        return dtype

    def _patches(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches that the processor will make of a picture."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if max(width, height) > LARGEST_RATIO * min(width, height):
            raise too_narrow(width, height, LARGEST_RATIO)
        processor = self._processor
        size = processor.size
        try:
            tall, wide = smart_resize(
                height,
                width,
                factor=processor.patch_size * processor.merge_size,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
        except ValueError as error:
            raise DocumentError(f"a picture of {width} × {height} pixels cannot be resized for this model") from error
        return tall // processor.patch_size, wide // processor.patch_size


def joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features as one tensor; Transformers gives some as one tensor, others for each image, by version."""
    return features if isinstance(features, Tensor) else torch.cat(list(features))

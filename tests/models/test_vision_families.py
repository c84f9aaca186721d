"""Tokens, positions, features and tiles of pictures against Transformers' own processors and forwards."""

import itertools
from typing import Any

import pytest
import torch
import transformers as tf

import tiny_vlm
from infoflow_kv.errors import ComputeError, DocumentError, ModelError, UnsupportedModelError
from infoflow_kv.models.probe import probe
from infoflow_kv.models.text_part import TextPart
from infoflow_kv.models.vision import FAMILIES, Prepared, VisionAdapter, find_adapter, read_processor_config
from tolerance import TINY_LOGITS, assert_close

pytestmark = pytest.mark.skipif(tiny_vlm.OLD, reason=tiny_vlm.TOO_OLD)

SIZES = ((200, 120), (90, 170))  # pictures of different grids


def run_of(family: str, adapter: VisionAdapter, sizes: Any = SIZES) -> tuple[list[int], list[Prepared]]:
    """Text, image, text, image, text: the token ids and the images in them."""
    prepared = [adapter.prepare(tiny_vlm.picture(*size, seed=seed)) for seed, size in enumerate(sizes)]
    texts = ["The keeper of", "\nand the boats ", "counts them?"]
    ids: list[int] = []
    for text, image in itertools.zip_longest(texts[: len(sizes) + 1], prepared):
        ids += tiny_vlm.tokenizer(family)(text, add_special_tokens=False)["input_ids"]
        ids += image.token_ids if image is not None else ()
    return ids, prepared


@pytest.mark.parametrize("family", tiny_vlm.FAMILIES)
def test_features_and_positions_give_the_full_forward(family: str) -> None:
    hf = tiny_vlm.hf_model(family)
    adapter = tiny_vlm.adapter(family, hf)
    ids, prepared = run_of(family, adapter)
    # Raises by itself if the placeholders are not as many as the features.
    full = hf(**tiny_vlm.reference_inputs(family, ids, [one.picture for one in prepared])).logits
    encoded = [adapter.encode(one) for one in prepared]
    part = TextPart(hf)
    mask = torch.tensor([ids]) == adapter.image_token_id
    embeddings = part.get_input_embeddings()(torch.tensor([ids])).clone()
    embeddings[mask] = torch.cat([one.embeddings for one in encoded])
    positions = adapter.positions(ids, prepared).long()
    extra = {}
    if adapter.num_early:
        rows = torch.cat([one.layer_rows for one in encoded], dim=1)
        extra = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(rows)}
    at = positions[:, None] if adapter.num_axes > 1 else positions
    ours = part(inputs_embeds=embeddings, position_ids=at, **extra).logits
    assert_close(ours, full, TINY_LOGITS)
    # Pictures matter in these models: without their features the last logits are others.
    blank = embeddings.clone()
    blank[mask] = 0
    assert float((part(inputs_embeds=blank, position_ids=at).logits - full)[:, -1].abs().max()) > 0.1
    last = part(inputs_embeds=embeddings, position_ids=at, logits_to_keep=2, **extra).logits
    assert_close(last, ours[:, -2:], TINY_LOGITS)


@pytest.mark.parametrize("family", [f for f in tiny_vlm.FAMILIES if tiny_vlm.is_qwen(f)])
def test_positions_are_the_models_own(family: str) -> None:
    hf = tiny_vlm.hf_model(family)
    adapter = tiny_vlm.adapter(family, hf)
    ids, prepared = run_of(family, adapter)
    inputs = tiny_vlm.reference_inputs(family, ids, [one.picture for one in prepared])
    wanted, _ = hf.model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    found = adapter.positions(ids, prepared)
    assert found.dtype == torch.int32 and torch.equal(found.long(), wanted[:, 0])
    assert hf.model.rope_deltas is None
    # A run from its own start on is the same shifted: what makes a chunk movable.
    start = ids.index(prepared[1].token_ids[0], ids.index(prepared[0].token_ids[-1]))
    alone = adapter.positions(ids[start:], prepared[1:])
    assert torch.equal(alone + found[:, start : start + 1], found[:, start:])
    text = ids[:3]
    assert torch.equal(adapter.positions(text, []), torch.arange(3, dtype=torch.int32).expand(3, 3))


def test_one_axis_counts_tokens() -> None:
    adapter = tiny_vlm.adapter("idefics3", tiny_vlm.hf_model("idefics3"))
    ids, prepared = run_of("idefics3", adapter)
    assert torch.equal(adapter.positions(ids, prepared), torch.arange(len(ids), dtype=torch.int32)[None])


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_stray_and_missing_placeholders_are_refused(family: str) -> None:
    adapter = tiny_vlm.adapter(family, tiny_vlm.hf_model(family))
    ids, prepared = run_of(family, adapter)
    for wrong, images in (
        ([*ids, adapter.image_token_id], prepared),
        (ids, prepared[:1]),
        (ids[: len(ids) // 2], prepared),
        ([adapter.image_token_id], []),
    ):
        with pytest.raises(ComputeError, match="image placeholders"):
            adapter.positions(wrong, images)


@pytest.mark.parametrize("size", [(1, 1), (200, 120), (120, 200), (30, 30), (64, 64), (500, 9), (3, 400)])
def test_idefics_tokens_are_its_processors(size: tuple[int, int]) -> None:
    adapter = tiny_vlm.adapter("idefics3", tiny_vlm.hf_model("idefics3"))
    tokenizer = tiny_vlm.tokenizer("idefics3")
    processor = tf.Idefics3Processor(tiny_vlm.reference_processor("idefics3"), tokenizer, image_seq_len=4)
    picture = tiny_vlm.picture(*size)
    wanted = processor(text="See<image>here", images=[picture.image])["input_ids"][0]
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("See", "here"))
    assert [*before, *adapter.prepare(picture).token_ids, *after] == list(wanted)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_sizes_are_foreseen_as_the_processor_makes_them(family: str) -> None:
    """`encode` compares what the processor made with what was foreseen, and raises if they differ."""
    adapter = tiny_vlm.adapter(family, tiny_vlm.hf_model(family))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 260, (30, 2), generator=generator).tolist()
    for width, height in [*sizes, (256, 64), (64, 65), (128, 127), (33, 32), (1, 1), (200, 1)]:
        prepared = adapter.prepare(tiny_vlm.picture(width, height))
        assert adapter.encode(prepared).embeddings.shape[0] == prepared.num_visual
        assert prepared.token_ids.count(adapter.image_token_id) == prepared.num_visual


def test_a_picture_too_narrow_for_the_processor_is_refused() -> None:
    adapter = tiny_vlm.adapter("qwen3_vl", tiny_vlm.hf_model("qwen3_vl"))
    with pytest.raises(DocumentError, match="2 × 500 pixels; expected a longer side of at most 200 times"):
        adapter.prepare(tiny_vlm.picture(2, 500))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "idefics3"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 16])
def test_tiles_part_the_picture(family: str, k: int) -> None:
    adapter = tiny_vlm.adapter(family, tiny_vlm.hf_model(family))
    for size in ((200, 120), (64, 64), (20, 20)):
        prepared = adapter.prepare(tiny_vlm.picture(*size))
        tiles = adapter.tiles(prepared, k)
        assert sorted(torch.cat(tiles).tolist()) == list(range(prepared.num_visual))
        assert all(tile.numel() and torch.equal(tile, tile.sort().values) for tile in tiles)
        if k <= 1:
            assert len(tiles) == 1
        elif tiny_vlm.is_qwen(family):
            rows, columns = (side // tiny_vlm.MERGE for side in prepared.grid[1:])
            assert len(tiles) == min(k, rows) * min(k, columns)
            # Each a rectangle of its own, even to one row and one column.
            shapes = [(len({int(i) // columns for i in t}), len({int(i) % columns for i in t})) for t in tiles]
            assert [a * b for a, b in shapes] == [t.numel() for t in tiles]
            assert all(max(side) - min(side) <= 1 for side in zip(*shapes, strict=True))


def test_idefics_tiles_cross_views_and_end_with_the_whole() -> None:
    adapter = tiny_vlm.adapter("idefics3", tiny_vlm.hf_model("idefics3"))
    prepared = adapter.prepare(tiny_vlm.picture(64, 32))  # 2 × 4 views of 2 × 2 features
    assert prepared.grid == (2, 4)
    tiles = adapter.tiles(prepared, 2)
    assert len(tiles) == 5 and tiles[-1].tolist() == [32, 33, 34, 35]
    assert tiles[0].tolist() == list(range(8)) and tiles[2].tolist() == list(range(16, 24))
    joined = adapter.tiles(prepared, 4)
    assert joined[1].tolist() == [4, 5, 6, 7] or joined[1].numel() == 2


def test_keys_tell_what_features_depend_on() -> None:
    family = "qwen3_vl"
    hf = tiny_vlm.hf_model(family)
    adapter = tiny_vlm.adapter(family, hf)
    picture = tiny_vlm.picture(64, 64)
    first = adapter.prepare(picture).key
    assert adapter.prepare(tiny_vlm.picture(64, 64)).key == first
    assert adapter.prepare(tiny_vlm.picture(64, 64, seed=1)).key != first
    settings = {**tiny_vlm.processor_config(family), "image_mean": [0.4] * 3}
    other = find_adapter(hf, settings, tiny_vlm.tokenizer(family))
    assert other is not None and other.prepare(picture).key != first
    assert tiny_vlm.adapter(family, tiny_vlm.hf_model(family, dtype=torch.bfloat16)).prepare(picture).key != first
    assert tiny_vlm.adapter(family, tiny_vlm.hf_model(family, seed=1)).prepare(picture).key != first
    with torch.no_grad():
        next(hf.model.language_model.parameters()).add_(1.0)
    assert adapter.prepare(picture).key == first
    with torch.no_grad():
        next(hf.model.visual.parameters()).add_(1.0)
    assert adapter.prepare(picture).key != first


def test_half_precision_features_are_of_the_models_dtype() -> None:
    adapter = tiny_vlm.adapter("qwen3_vl", tiny_vlm.hf_model("qwen3_vl", dtype=torch.bfloat16))
    encoded = adapter.encode(adapter.prepare(tiny_vlm.picture(64, 64)))
    assert encoded.embeddings.dtype == encoded.layer_rows.dtype == torch.bfloat16
    assert encoded.num_bytes == encoded.embeddings.numel() * 2 * 4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_probe_accepts_the_text_part_and_leaves_the_tower_alone(family: str) -> None:
    hf = tiny_vlm.hf_model(family)
    adapter = tiny_vlm.adapter(family, hf)
    prepared = adapter.prepare(tiny_vlm.picture(64, 64))
    before = adapter.encode(prepared)
    fingerprint = adapter.tower_fingerprint
    support = probe(TextPart(hf))
    assert all(support.rotated_layers) and support.max_error < 1e-5
    assert hf.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(adapter.encode(prepared).embeddings, before.embeddings)
    assert adapter.tower_fingerprint == fingerprint


def test_processor_settings_of_another_model_are_refused() -> None:
    hf = tiny_vlm.hf_model("qwen3_vl")
    tokenizer = tiny_vlm.tokenizer("qwen3_vl")
    with pytest.raises(ModelError, match="patch_size = 14, its tower was made for 16"):
        find_adapter(hf, {"patch_size": 14}, tokenizer)
    with pytest.raises(UnsupportedModelError, match="are for CLIPImageProcessor; expected Qwen2VLImageProcessor"):
        find_adapter(hf, {"image_processor_type": "CLIPImageProcessor"}, tokenizer)
    idefics = tiny_vlm.hf_model("idefics3")
    with pytest.raises(ModelError, match="max_image_size"):
        find_adapter(idefics, {"max_image_size": {"longest_edge": 364}}, tiny_vlm.tokenizer("idefics3"))
    foreign = find_adapter(idefics, tiny_vlm.processor_config("idefics3"), tiny_vlm.tokenizer("qwen3_vl"))
    assert foreign is not None
    with pytest.raises(ModelError, match="take tokenizer and weights from the same"):
        foreign.prepare(tiny_vlm.picture(20, 20))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_settings_come_from_the_folder_or_from_the_family(family: str, tmp_path: Any) -> None:
    hf = tiny_vlm.hf_model(family)
    assert read_processor_config(str(tmp_path)) is None
    default = find_adapter(hf, None, tiny_vlm.tokenizer(family))
    assert default is not None
    assert default.encode(default.prepare(tiny_vlm.picture(40, 40))).embeddings.shape[0] > 0
    tiny_vlm.reference_processor(family).save_pretrained(tmp_path)
    read = read_processor_config(str(tmp_path))
    ours = find_adapter(hf, read, tiny_vlm.tokenizer(family))
    assert ours is not None and ours.settings == tiny_vlm.adapter(family, hf).settings


def test_text_models_have_no_adapter() -> None:
    import tiny

    assert find_adapter(tiny.hf_model("llama"), None, tiny.tokenizer()) is None

"""Tiny random vision-language models, their tokenizers and pictures, made in the process."""

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import tiny
from infoflow_kv.models.pictures import Picture, read_picture
from infoflow_kv.models.vision import VisionAdapter, find_adapter

QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IDEFICS_TOKENS = [
    "<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>",
    *[f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)],
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = tiny.SIZES
MERGE = 2
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}
# Few tokens: 4 to 30 merged patches, or views of 32 × 32 pixels with 4 tokens each.
VIEW = 32
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "idefics3", "qwen2_vl", "qwen3_vl_moe", "smolvlm")

# With Transformers 5.16 Qwen2-VL's rotary function has another name, and Idefics' PIL processor asks for torchvision:
# both are refused there, with the reason. Qwen3-VL works.
OLD = tuple(map(int, tf.__version__.split(".")[:2])) < (5, 24)
TOO_OLD = f"Transformers {tf.__version__} is too old for the images of this family"


def is_qwen(family: str) -> bool:
    return family in PATCH


@cache
def _tokenizer(is_qwen: bool) -> Any:
    special = [*tiny.SPECIAL, *(QWEN_TOKENS if is_qwen else IDEFICS_TOKENS)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["The keeper of Saltmere counts the boats and draws them.\n\n"] * 4, trainer)
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[2], additional_special_tokens=special
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>" if is_qwen else "<image>"
    made.chat_template = TEMPLATE.replace("IMAGE", image)
    return made


def tokenizer(family: str) -> Any:
    """A byte-level BPE tokenizer of 400 tokens with the family's image tokens and a chat template that takes images."""
    return _tokenizer(is_qwen(family))


def _qwen_ids() -> dict[str, int]:
    ids = tokenizer("qwen3_vl").convert_tokens_to_ids(QWEN_TOKENS)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, ids, strict=True))


def _qwen2(family: str, config: Any, vision: dict[str, Any]) -> Any:
    text = {**TEXT, "num_attention_heads": 2, "num_key_value_heads": 1}
    return config(
        text_config={**text, **tiny.rope("default", mrope_section=[4, 6, 6])},
        vision_config={"depth": 2, "num_heads": 2, "patch_size": PATCH[family], "spatial_merge_size": MERGE, **vision},
        **_qwen_ids(),
    )


def _qwen3(family: str, config: Any, **extra: Any) -> Any:
    section = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return config(
        text_config={**TEXT, "head_dim": 32, **tiny.rope("default", **section), **extra},
        vision_config={
            "depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH[family],
            "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 64,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2],
        },
        **_qwen_ids(),
    )  # fmt: skip


def _idefics(config: Any) -> Any:
    return config(
        text_config=tf.LlamaConfig(**TEXT),
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": VIEW, "patch_size": 8,
        },
        image_token_id=tokenizer("idefics3").convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _qwen2("qwen2_vl", tf.Qwen2VLConfig, {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": lambda: _qwen2(
        "qwen2_5_vl",
        tf.Qwen2_5_VLConfig,
        {
            "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": lambda: _qwen3("qwen3_vl", tf.Qwen3VLConfig),
    "qwen3_vl_moe": lambda: _qwen3(
        "qwen3_vl_moe", tf.Qwen3VLMoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "idefics3": lambda: _idefics(tf.Idefics3Config),
    "smolvlm": lambda: _idefics(tf.SmolVLMConfig),
}  # fmt: skip


def hf_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A fresh random model; its matrices are scaled so that attention is far from uniform and pictures matter."""
    config = CONFIGS[family]()
    torch.manual_seed(seed)
    hf = tf.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim >= 2 and "norm" not in name and "embed" not in name:
                parameter.mul_(4.0)
    return hf.to(dtype).requires_grad_(False)


def processor_config(family: str) -> dict[str, Any]:
    """Settings of the family's image processor that give few tokens."""
    if not is_qwen(family):
        return {"size": {"longest_edge": 4 * VIEW}, "max_image_size": {"longest_edge": VIEW}}
    side = PATCH[family] * MERGE
    return {
        "size": {"shortest_edge": 4 * side**2, "longest_edge": 30 * side**2},
        "patch_size": PATCH[family],
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def adapter(family: str, hf: Any) -> VisionAdapter:
    found = find_adapter(hf, processor_config(family), tokenizer(family))
    assert found is not None
    return found


def image(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture of random soft blobs."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(small.numpy()).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded_file(made: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The picture as a file's bytes."""
    buffer = BytesIO()
    made.save(buffer, format=kind, **options)
    return buffer.getvalue()


def picture(width: int, height: int, seed: int = 0) -> Picture:
    return read_picture(encoded_file(image(width, height, seed)))


def reference_processor(family: str) -> Any:
    """Transformers' own PIL image processor with the settings of `processor_config`."""
    kind = tf.Qwen2VLImageProcessorPil if is_qwen(family) else tf.Idefics3ImageProcessorPil
    return kind(**copy.deepcopy(processor_config(family)))


def reference_inputs(family: str, token_ids: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Any]:
    """The keywords of a full Transformers forward over these tokens and pictures."""
    ids = torch.tensor([list(token_ids)])
    images = [[one.image for one in pictures]] if not is_qwen(family) else [one.image for one in pictures]
    batch = dict(reference_processor(family)(images=images, return_tensors="pt"))
    inputs: dict[str, Any] = {"input_ids": ids, **batch}
    if is_qwen(family):
        token = _qwen_ids()["image_token_id"]
        inputs["mm_token_type_ids"] = (ids == token).int()
    return inputs


def model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The product's model over a fresh copy of `hf_model`."""
    from infoflow_kv.models.seeing import wrap_vision

    return wrap_vision(hf_model(family, seed, dtype), tokenizer(family), family, processor_config(family))


def saved(family: str, folder: Path, seed: int = 0) -> Path:
    """The folder, with `hf_model`, its tokenizer and the image processor's settings as Transformers keeps them."""
    hf_model(family, seed).save_pretrained(folder)
    tokenizer(family).save_pretrained(folder)
    kind = "Qwen2VLImageProcessor" if is_qwen(family) else "Idefics3ImageProcessor"
    settings = {**processor_config(family), "image_processor_type": kind}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder

"""The table of families whose images are understood; a new family is a row here and an adapter beside."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from infoflow_kv.models.vision.adapter import VisionAdapter
from infoflow_kv.models.vision.idefics import IdeficsVision
from infoflow_kv.models.vision.qwen import QWEN2_SETTINGS, QWEN3_SETTINGS, QwenVision

Make = Callable[[Any, Mapping[str, Any] | None, Any, Mapping[str, Any]], VisionAdapter]


@dataclass(frozen=True, slots=True)
class Family:
    """How the images of a family are handled: the adapter, the modules it relies on, and processor settings for a
    model that comes without any."""

    make: Make
    modules: tuple[str, ...]
    defaults: Mapping[str, Any]


FAMILIES: Mapping[str, Family] = {
    "idefics3": Family(IdeficsVision, ("vision_model", "connector", "text_model"), {}),
    "smolvlm": Family(IdeficsVision, ("vision_model", "connector", "text_model"), {}),
    "qwen2_vl": Family(QwenVision, ("visual", "language_model"), QWEN2_SETTINGS),
    "qwen2_5_vl": Family(QwenVision, ("visual", "language_model"), QWEN2_SETTINGS),
    "qwen3_vl": Family(QwenVision, ("visual", "language_model"), QWEN3_SETTINGS),
    "qwen3_vl_moe": Family(QwenVision, ("visual", "language_model"), QWEN3_SETTINGS),
}


def find_adapter(hf: Any, processor_config: Mapping[str, Any] | None, tokenizer: Any) -> VisionAdapter | None:
    """The adapter of a loaded vision-language model, None for a text model and for families without a row.

    `hf`: the whole model with its output layer. `processor_config`: what `read_processor_config` found, None for the
    family's own. Raises ModelError or UnsupportedModelError where these settings do not fit the model.
    """
    family = FAMILIES.get(str(getattr(hf.config, "model_type", "")))
    core = getattr(hf, "model", None)
    if family is None or not all(hasattr(core, module) for module in family.modules):
        return None
    return family.make(hf, processor_config, tokenizer, family.defaults)

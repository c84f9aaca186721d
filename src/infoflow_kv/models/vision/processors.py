"""The settings of a model's image processor, from its folder or from the model; ours is always the PIL processor.

Transformers' torchvision processors resize by other arithmetic, so their pixels differ in the last bits from these.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoflow_kv.errors import ModelError, UnsupportedModelError
from infoflow_kv.models.pictures import require_pillow


def read_processor_config(folder: str) -> dict[str, Any] | None:
    """The image processor's settings in a model folder or of a hub id, None if a folder has none; ModelError where
    they cannot be read.

    Read from `processor_config.json` (where Transformers 5 writes them) or `preprocessor_config.json`.
    """
    from transformers.image_processing_base import ImageProcessingMixin

    names = ("processor_config.json", "preprocessor_config.json")
    if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in names):
        return None
    try:
        return dict(ImageProcessingMixin.get_image_processor_dict(folder)[0])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # Other settings make other pixels and token counts: what cannot be read is never replaced by defaults.
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the image processor's settings of '{folder}' cannot be read ({reason})") from error


def make_processor(class_name: str, settings: Mapping[str, Any]) -> Any:
    """Transformers' image processor of this name with these settings, which needs Pillow and nothing else.

    UnsupportedModelError where this version of Transformers wants torchvision for it all the same.
    """
    require_pillow()
    import transformers

    try:
        return getattr(transformers, class_name).from_dict(dict(settings))
    except ImportError as error:
        raise UnsupportedModelError(
            f"{class_name} of transformers {transformers.__version__} does not run with Pillow alone; use transformers "
            "5.24 or later"
        ) from error


def refuse_type(name: str, given: Mapping[str, Any], expected: Sequence[str]) -> None:
    """UnsupportedModelError where processor settings are those of another family's processor."""
    kind = given.get("image_processor_type") or given.get("feature_extractor_type") or expected[0]
    if str(kind).removesuffix("Fast").removesuffix("Pil") not in expected:
        raise UnsupportedModelError(
            f"the processor settings of this {name} model are for {kind}; expected {' or '.join(expected)}"
        )


def refuse_sizes(name: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """ModelError where processor settings do not fit the model's tower; settings that are not given do."""
    for setting, value in wanted.items():
        if found.get(setting, value) != value:
            raise ModelError(
                f"the processor settings of this {name} model say {setting} = {found[setting]}, its tower was made for "
                f"{value}; take both files from the same model"
            )

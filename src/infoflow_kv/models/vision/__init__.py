"""Images of vision-language models: tokens, positions, features and tiles of a picture, one adapter for each family."""

from infoflow_kv.models.vision.adapter import Encoded, Prepared, VisionAdapter
from infoflow_kv.models.vision.families import FAMILIES, find_adapter
from infoflow_kv.models.vision.processors import read_processor_config
from infoflow_kv.models.vision.tower_cache import TowerCache
from infoflow_kv.models.vision.vision import Vision

__all__ = [
    "FAMILIES",
    "Encoded",
    "Prepared",
    "TowerCache",
    "Vision",
    "VisionAdapter",
    "find_adapter",
    "read_processor_config",
]

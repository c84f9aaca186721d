"""What all adapters share: Transformers' Pillow processor of their family, and the fingerprints."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from infoflow_kv.models.pictures import Picture
from infoflow_kv.models.vision.adapter import digest, settings_digest
from infoflow_kv.models.vision.processors import make_processor
from infoflow_kv.models.vision.tower import Tower


class PillowAdapter:
    """The shared part of a `VisionAdapter`: a processor of this class with the settings `_given`, and a tower."""

    _processor_class: str
    _given: Mapping[str, Any]
    _tower: Tower

    @cached_property
    def _processor(self) -> Any:
        return make_processor(self._processor_class, self._given)

    @cached_property
    def settings(self) -> str:
        return settings_digest(self._processor.to_dict())

    @property
    def tower_fingerprint(self) -> str:
        return self._tower.fingerprint

    def _key(self, picture: Picture, dtype: torch.dtype) -> str:
        """What decides the picture's features, see `Prepared`."""
        return digest(picture.sha256, self.settings, self.tower_fingerprint, str(dtype))

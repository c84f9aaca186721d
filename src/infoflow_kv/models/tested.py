"""The model families that are tested. What decides about a model is the probe; this list is for people."""

import json
from importlib.resources import files
from typing import Any


def list_families() -> list[dict[str, Any]]:
    """`{name, class, rope, traits}` of each, as tools/write_models.py wrote it from what it found on the models."""
    found: list[dict[str, Any]] = json.loads((files(__package__) / "tested.json").read_text(encoding="utf-8"))
    return found

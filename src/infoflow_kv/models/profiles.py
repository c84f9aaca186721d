"""Profiles: what `calibrate` found out about a model, one JSON file per weights and dtype in the cache."""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infoflow_kv.models.embedded import cache_folder
from infoflow_kv.records import ModelIdentity

logger = logging.getLogger(__name__)

FORMAT = 1
_LAYERS = re.compile(r"[a-z0-9.,-]{1,400}")


@dataclass(frozen=True, slots=True)
class Profile:
    """`layers`: method → layer set, as `layer_set` reads it. `measurements`: what the choice rests on, for people and
    figures: distances per single layer and per set, on how many items of which data."""

    weights: str
    dtype: str
    model: str
    layers: Mapping[str, str]
    measurements: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def profiles_folder() -> Path:
    """Where profiles are kept."""
    return cache_folder() / "profiles"


def profile_file(identity: ModelIdentity) -> Path:
    """Where the profile of these weights is kept."""
    return profiles_folder() / f"{identity.weights[:32]}-{identity.dtype}.json"


def write_profile(profile: Profile, file: Path) -> None:
    """Nothing; on return the file is there, whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    record = {**asdict(profile), "layers": dict(profile.layers), "measurements": dict(profile.measurements)}
    partial.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, file)


def find_profile(identity: ModelIdentity) -> Profile | None:
    """The profile of these weights in this dtype; None where there is none that fits (the log says why)."""
    file = profile_file(identity)
    profile = read_profile(file)
    if profile is not None and (profile.weights, profile.dtype) != (identity.weights, identity.dtype):
        logger.warning("the profile %s is not used: it was measured on other weights or another dtype", file)
        return None
    return profile


def read_profile(file: Path) -> Profile | None:
    """The profile in the file; None where there is none, or none that this version can read (the log says so)."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r}, expected {FORMAT}")
        layers = {str(method): str(text) for method, text in record["layers"].items()}
        if not all(_LAYERS.fullmatch(text) for text in layers.values()):
            raise ValueError("layer sets that are no layer sets")
        return Profile(
            weights=str(record["weights"]),
            dtype=str(record["dtype"]),
            model=str(record["model"]),
            layers=layers,
            measurements=dict(record["measurements"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the profile %s is not used: %s; run `infoflow-kv calibrate` again", file, error)
        return None

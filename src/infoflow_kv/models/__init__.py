"""The only importer of Transformers: loading, the two hooks, the support probe, the shared forward of rows."""

from infoflow_kv.models.hooks import AttentionInput, StopForward
from infoflow_kv.models.loading import load, quiet_transformers, wrap
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.rotary import Rotary, RotaryTables
from infoflow_kv.models.rows import forward_rows

__all__ = [
    "AttentionInput",
    "LanguageModel",
    "Rotary",
    "RotaryTables",
    "StopForward",
    "forward_rows",
    "load",
    "quiet_transformers",
    "wrap",
]

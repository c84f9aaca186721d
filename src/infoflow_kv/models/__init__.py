"""The only importer of Transformers: loading, the three hooks, the support probe, the shared forward of rows."""

from infoflow_kv.models.hooks import AttentionInput, StopForward
from infoflow_kv.models.loading import load, quiet_transformers, wrap
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.plain import PlainRun, greedy
from infoflow_kv.models.rotary import Rotary, RotaryTables
from infoflow_kv.models.rows import RowRule, forward_rows

__all__ = [
    "AttentionInput",
    "LanguageModel",
    "PlainRun",
    "Rotary",
    "RotaryTables",
    "RowRule",
    "StopForward",
    "forward_rows",
    "greedy",
    "load",
    "quiet_transformers",
    "wrap",
]

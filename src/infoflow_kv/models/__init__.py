"""The only importer of Transformers: loading, the three hooks, the support probe, the shared forward of rows."""

from infoflow_kv.models.hooks import AttentionInput, StopForward
from infoflow_kv.models.loading import load, quiet_transformers, wrap
from infoflow_kv.models.memory import LocalMemory, Measure, Memory, Rows, Spreading, memory_of
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.plain import PlainRun, greedy
from infoflow_kv.models.rotary import Rotary, RotaryTables
from infoflow_kv.models.rows import Deviate, RowRule, forward_rows

__all__ = [
    "AttentionInput",
    "Deviate",
    "LanguageModel",
    "LocalMemory",
    "Measure",
    "Memory",
    "PlainRun",
    "Rotary",
    "RotaryTables",
    "RowRule",
    "Rows",
    "Spreading",
    "StopForward",
    "forward_rows",
    "greedy",
    "load",
    "memory_of",
    "quiet_transformers",
    "wrap",
]

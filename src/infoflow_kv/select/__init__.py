"""Selectors: which context tokens are recomputed. One small file each; a Selector has one method."""

from infoflow_kv.select.attention_mass import AttentionMass, sensitivity, true_deviation, value_norm
from infoflow_kv.select.base import EVEN, Allocation, Scene, Selector, best, take
from infoflow_kv.select.budget import AUTO_CEILING, AUTO_COVER, Budget, check_budget, num_selected
from infoflow_kv.select.deviation import Deviation, constant, shrinking
from infoflow_kv.select.layers import layer_set, layers_text
from infoflow_kv.select.places import ChunkStarts, Seams, tokens_at_seams, tokens_at_starts
from infoflow_kv.select.random import Random

__all__ = [
    "AUTO_CEILING",
    "AUTO_COVER",
    "EVEN",
    "Allocation",
    "AttentionMass",
    "Budget",
    "ChunkStarts",
    "Deviation",
    "Random",
    "Scene",
    "Seams",
    "Selector",
    "best",
    "check_budget",
    "constant",
    "layer_set",
    "layers_text",
    "num_selected",
    "sensitivity",
    "shrinking",
    "take",
    "tokens_at_seams",
    "tokens_at_starts",
    "true_deviation",
    "value_norm",
]

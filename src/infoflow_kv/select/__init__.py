"""Selectors: which context tokens are recomputed. One small file each; a Selector has one method."""

from infoflow_kv.select.attention_mass import AttentionMass
from infoflow_kv.select.base import Scene, Selector, check_budget, num_selected, take
from infoflow_kv.select.layers import layer_set
from infoflow_kv.select.random import Random

__all__ = ["AttentionMass", "Random", "Scene", "Selector", "check_budget", "layer_set", "num_selected", "take"]

"""Tensors in, tensors out: staircase attention, attention mass, LSE merge. Knows no model and no request."""

from infoflow_kv.ops.mass import attention_mass
from infoflow_kv.ops.spec import AttentionSpec
from infoflow_kv.ops.staircase import Staircase, staircase_attention

__all__ = ["AttentionSpec", "Staircase", "attention_mass", "staircase_attention"]

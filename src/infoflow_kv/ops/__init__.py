"""Tensors in, tensors out: staircase attention, attention mass, LSE merge. Knows no model and no request."""

from infoflow_kv.ops.attention import AttentionSpec, staircase_attention
from infoflow_kv.ops.mass import attention_mass

__all__ = ["AttentionSpec", "attention_mass", "staircase_attention"]

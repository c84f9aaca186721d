"""What a measurement ran on: the record of `infoflow_kv.evaluate`, under the name that the benchmarks import."""

from infoflow_kv.evaluate.environment import environment, processor

__all__ = ["environment", "processor"]

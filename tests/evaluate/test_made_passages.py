"""Items whose facts stand at chosen places of passages: each passage must be one chunk."""

from dataclasses import replace

import pytest

import tiny
from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.measuring import Bench
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.variable_tracking import tracking_items
from infoflow_kv.models import wrap


def test_a_hop_in_two_chunks_is_refused() -> None:
    model = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")
    [item, *_] = tracking_items([2], ["forward"], gap=1, count=1, chunk_tokens=60, form="value")
    small = Bench(model, Options(chunk_tokens=16))
    with pytest.raises(OptionError, match="places its facts by passages, and passage 0 of"):
        small.check_passages(item)
    Bench(model, Options(chunk_tokens=512)).check_passages(item)
    small.check_passages(replace(item, meta={}))

"""Ranks answer one request at a time, and who leaves one in the middle takes the others with it: nobody is left waiting
for messages, or takes the next request's for this one's."""

import time
from typing import Any

import pytest
from ranks import run_ranks, watch_ranks
from requests_on_ranks import DOCUMENTS, QUESTION, engine_of, tiny_model

import tiny
from infoflow_kv.errors import OptionError
from infoflow_kv.models import wrap
from infoflow_kv.parallel.group import Group


def asks_twice(group: Group) -> dict[str, Any]:
    """A second request while the first one's stream is open, and again when that has ended."""
    engine = engine_of(tiny_model("qwen3"), {"budget": 0.3}, group)
    stream = engine.stream(QUESTION, DOCUMENTS, 4)
    next(stream)
    with pytest.raises(OptionError, match="one request at a time"):
        engine.answer(QUESTION, DOCUMENTS, 4)
    first = [piece.answer for piece in stream][-1]
    assert first is not None
    return {"first": first.text, "second": engine.answer(QUESTION, DOCUMENTS, 4).text}


def leaves(group: Group) -> None:
    """Rank 1 stops reading its stream; the others read on."""
    engine = engine_of(tiny_model("qwen3"), {"budget": 0.3}, group)
    stream = engine.stream(QUESTION, DOCUMENTS, 6)
    next(stream)
    if group.rank == 1:
        stream.close()  # type: ignore[attr-defined]
        return
    list(stream)


def runs_and_goes_on(group: Group) -> None:
    """Rank 1's request up to the first logits fails, and whoever made it there takes no notice and stays."""
    hf = tiny.hf_model("qwen3")
    engine = engine_of(wrap(hf, tiny.tokenizer(), "qwen3"), {"budget": 0.3}, group)
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    engine.run(prompt)

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    if group.rank != 1:
        engine.run(prompt)
        return
    hf.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.run(prompt)
    time.sleep(8)


def test_a_second_request_waits_for_the_end_of_the_first():
    for found in run_ranks(asks_twice, 2):
        assert found["first"] == found["second"]


def test_who_closes_a_stream_early_ends_the_others():
    first, second, third = watch_ranks(leaves, 3, timeout_seconds=60.0)
    assert second.status == 0, second.stderr
    for other in (first, third):
        assert other.status == 1 and "ParallelError" in other.stderr
        assert other.seconds < 40, "the closed connection tells, not the limit"


def test_a_run_that_fails_on_one_rank_ends_the_others_though_that_rank_stays():
    first, second, third = watch_ranks(runs_and_goes_on, 3, timeout_seconds=60.0)
    assert second.status == 0, second.stderr
    for other in (first, third):
        assert other.status == 1 and "ParallelError" in other.stderr
        assert other.seconds < second.seconds - 4, "its connections are closed when it fails, not when it ends"

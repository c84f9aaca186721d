"""A request holds its context's KV once: stored parts are let go while they are copied."""

import gc
import weakref

import pytest
import torch

import infoflow_kv.placing as room
import tiny
from infoflow_kv import DiskStore, Engine
from infoflow_kv.errors import ComputeError
from infoflow_kv.models import wrap
from infoflow_kv.positions import assemble_one_by_one

TEXTS = [" ".join(f"Boat {n} of row {r} carries {n * r + 3} nets." for r in range(9)) for n in range(6)]


@pytest.fixture(scope="module")
def model():
    return wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")


@pytest.mark.parametrize("geometry", ["GLOBAL", "HL-TP"])
def test_parts_are_let_go_as_they_are_copied(model, tmp_path, monkeypatch, geometry):
    alive = []

    def watched(model, identities, parts, *rest):
        given = []

        def one_by_one():
            for part in parts:
                given.append(weakref.ref(part.values))
                yield part
                del part
                gc.collect()
                alive.append(sum(ref() is not None for ref in given))

        return assemble_one_by_one(model, identities, one_by_one(), *rest)

    monkeypatch.setattr(room, "assemble_one_by_one", watched)
    Engine(model, DiskStore(tmp_path), chunk_tokens=64).add(TEXTS)
    gc.freeze()  # what lives by now need not be searched each time
    try:
        Engine(model, DiskStore(tmp_path), chunk_tokens=64, geometry=geometry).answer("How many nets?", TEXTS, 1)
    finally:
        gc.unfreeze()
    assert len(alive) >= 6
    if geometry == "GLOBAL":
        assert max(alive) <= 2  # the one being copied, and the one before
    else:
        assert max(alive) >= 6  # another geometry assembles them again


def test_a_part_that_was_not_announced_is_refused(model, tmp_path):
    engine = Engine(model, DiskStore(tmp_path), chunk_tokens=64)
    parts = engine._supply.parts(engine.prompt("How many nets?", TEXTS))
    swapped = [*parts.all[:1], parts.all[2], parts.all[1], *parts.all[3:]]
    tables = model.rotary().tables(torch.arange(1900))
    with pytest.raises(ComputeError, match="not the one that was announced"):
        assemble_one_by_one(model, parts.identities, swapped, tables, 1900, 0)

"""A rank that is killed, stopped or fails in a request: the others end with the error, and the store stays sound."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ended, Loss, run_ranks, thorough, watch_ranks
from requests_on_ranks import answered, engine_of, on_ranks, tiny_model

import tiny
from infoflow_kv.errors import ParallelError
from infoflow_kv.models import wrap
from infoflow_kv.parallel.group import Group
from infoflow_kv.store import verify

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and the engine's settings
    "H": (4, {"layout": "H"}),
    "Q": (3, {"layout": "Q"}),
    "ring": (3, {"method": "full"}),
}
PHASES = {
    "H": ("begin", "load", "move", "score", "repair", "decode"),
    "Q": ("begin", "load", "score", "repair", "decode"),
    "ring": ("begin", "load", "repair", "decode"),
}
CASES = [(kind, phase) for kind, phases in PHASES.items() for phase in phases]
LIMIT = 5.0  # seconds of an exchange where a rank is stopped


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """The tokens of one process, by kind."""
    found = {}
    for kind, (_, settings) in KINDS.items():
        alone = {name: value for name, value in settings.items() if name != "layout"}
        found[kind] = answered(engine_of(tiny_model("qwen3", **SIZES), alone))["tokens"]
    return found


def told(ended: Ended) -> str:
    """The phase that the rank's error names; it ended by itself, with the error, and without any other complaint."""
    assert ended.status == 1, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("infoflow_kv.errors.ParallelError: rank "), ended.stderr
    assert "Warning" not in ended.stderr and "Exception ignored" not in ended.stderr, ended.stderr
    assert ended.result is None
    return last.partition("phase '")[2].partition("'")[0]


def assert_lost(kind: str, store: Path, lose: Loss, timeout_seconds: float, within: float) -> None:
    size, settings = KINDS[kind]
    settings = settings | {"store": str(store)}
    ended = watch_ranks(on_ranks, size, "qwen3", settings, SIZES, timeout_seconds=timeout_seconds, lose=lose)
    assert ended[lose.rank].status == -signal.SIGKILL
    others = [one for rank, one in enumerate(ended) if rank != lose.rank]
    named = {told(one) for one in others}
    slowest = max(one.seconds for one in others)
    print(f"{kind} {lose.phase} {lose.signal}: {slowest:.2f} s, named {sorted(named)}")
    # Another rank may wait for what this one sent in the phase before, or need it only in the next.
    around = PHASES[kind][max(0, PHASES[kind].index(lose.phase) - 1) :][:3]
    assert named <= set(around)
    assert slowest < within


def assert_sound(kind: str, store: Path, expected: dict[str, torch.Tensor]) -> None:
    """Nothing that is stored is damaged, and the next run gives the answer of one process."""
    report = verify(store)
    assert not report.damaged and not report.unreadable
    size, settings = KINDS[kind]
    for found in run_ranks(on_ranks, size, "qwen3", settings | {"store": str(store)}, SIZES):
        assert torch.equal(found["tokens"], expected[kind])
    assert not verify(store).damaged


@pytest.mark.parametrize(
    ("kind", "phase"), [case if case[0] == "H" or case[1] == "repair" else thorough(*case) for case in CASES]
)
def test_a_killed_rank_ends_the_others_and_the_next_run_works(
    kind: str, phase: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """Long before the limit: the closed connection tells."""
    rank = CASES.index((kind, phase)) % KINDS[kind][0]
    assert_lost(kind, tmp_path / "kv", Loss(rank, phase), timeout_seconds=60.0, within=10.0)
    assert_sound(kind, tmp_path / "kv", expected)


@pytest.mark.parametrize(
    ("kind", "phase"), [("H", "move"), thorough("H", "decode"), thorough("Q", "repair"), ("ring", "repair")]
)
def test_a_stopped_rank_ends_the_others_after_the_limit(
    kind: str, phase: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """Its connections stay open: the limit tells."""
    assert_lost(kind, tmp_path / "kv", Loss(1, phase, "SIGSTOP"), timeout_seconds=LIMIT, within=LIMIT + 5.0)
    if phase == "move":  # the store is being written
        assert_sound(kind, tmp_path / "kv", expected)


def fails(group: Group, where: str, settings: dict[str, Any]) -> None:
    """One layer of rank 1's model fails, in a prefill of a chunk or in the request's own rows."""
    hf = tiny.hf_model("qwen3", **SIZES)
    engine = engine_of(wrap(hf, tiny.tokenizer(), "qwen3"), settings, group)

    def fail(*_: Any) -> None:
        if group.phase_name == where:
            raise RuntimeError("the device is gone")

    if group.rank == 1:
        hf.model.layers[1].register_forward_pre_hook(fail)
    answered(engine)


@pytest.mark.parametrize("where", ["load", "repair", "decode"])
def test_a_rank_whose_model_fails_ends_the_others(where: str, tmp_path: Path) -> None:
    settings = {"layout": "Q", "store": str(tmp_path / "kv")}
    ended = watch_ranks(fails, 3, where, settings, timeout_seconds=60.0)
    assert ended[1].status == 1
    assert ended[1].stderr.strip().splitlines()[-1] == "RuntimeError: the device is gone"
    for other in (0, 2):
        told(ended[other])
        assert ended[other].seconds - ended[1].seconds < 10.0
    report = verify(tmp_path / "kv")
    assert not report.damaged and not report.unreadable


def has_other_weights(group: Group) -> str:
    """Rank 1 has changed one weight: it would answer from other keys and values."""
    hf = tiny.hf_model("qwen3", **SIZES)
    model = wrap(hf, tiny.tokenizer(), "qwen3")
    if group.rank == 1:
        with torch.no_grad():
            hf.model.layers[0].self_attn.v_proj.weight.mul_(2)
    with pytest.raises(ParallelError, match=r"phase 'begin': rank\(s\) 1 were given another request") as caught:
        answered(engine_of(model, {}, group))
    return caught.value.phase


def test_ranks_with_different_weights_do_not_answer() -> None:
    assert run_ranks(has_other_weights, 2) == ["begin"] * 2


def loses_its_store(group: Group, folder: str) -> dict[str, torch.Tensor]:
    """Each rank has a store of its own; that of rank 1 is a file when the request comes."""
    own = Path(folder) / str(group.rank)
    engine = engine_of(tiny_model("qwen3", **SIZES), {"layout": "H", "store": str(own)}, group)
    if group.rank == 1:
        own.rename(own.with_name("gone"))
        own.write_text("no folder")
    return answered(engine)


def test_a_store_that_breaks_on_one_rank_costs_no_answer(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    for found in run_ranks(loses_its_store, 2, str(tmp_path)):
        assert torch.equal(found["tokens"], expected["H"])

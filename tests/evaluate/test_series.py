"""Which rows a figure shows: made data sets apart, nothing missing counted as a miss, all arms over the same sets."""

from pathlib import Path
from typing import Any

import pytest

from evaluate.lab_rows import made_run, row
from infoflow_kv.evaluate.figures import series
from infoflow_kv.evaluate.figures.series import Plate, plates
from infoflow_kv.evaluate.findings import find

FEW = 200  # resamples
ARMS = ("full", "none", "infoflow@0.15")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each figure is given, by its name; nothing is drawn."""
    given: dict[str, Any] = {}

    def bind(draw: Any, data: Any, name: str, **options: Any) -> Any:
        given[name] = data
        return lambda folder: [Path(folder, name)]

    monkeypatch.setattr(series, "_bind", bind)
    return given


def needles(dataset: str, *, prediction: str | None = "It is 77.", **meta: Any) -> list[dict[str, Any]]:
    facts = {"task": "niah", "kind": "one", "length": 1000, **meta}
    return [
        row(f"{dataset}{depth}{meta}", arm, dataset=dataset, answers=["77"], prediction=prediction, group="hay",
            meta={**facts, "depth": depth})
        for depth in (0.0, 0.5) for arm in ARMS
    ]  # fmt: skip


def tracking(dataset: str) -> list[dict[str, Any]]:
    meta = {"task": "vt", "hops": 2, "order": "forward"}
    return [row(f"{dataset}{i}", arm, dataset=dataset, answers=["7"], meta=meta) for i in range(2) for arm in ARMS]


def named(rows: list[dict[str, Any]]) -> dict[str, Plate]:
    return {plate.name: plate for plate in plates(find(rows, resamples=FEW))}


def test_one_figure_a_made_data_set(drawn: dict[str, Any]) -> None:
    rows = needles("near/1") + needles("far", length=2000) + tracking("vt_a") + tracking("vt_b")
    found = named(rows)
    assert {"needle-near-1", "needle-far", "hops-vt_a", "hops-vt_b"} <= found.keys()
    assert not {"needle", "hops"} & found.keys()
    assert (found["needle-far"].dataset, found["needle-far"].task) == ("far", "niah")
    assert found["needle-far"].caption.endswith(": `far`")
    assert {r["length"] for r in drawn["needle-far"]} == {2000}
    assert {"needle", "hops"} <= named(needles("far") + tracking("vt")).keys()


def test_the_heat_map_has_whole_needles_at_any_place_only(drawn: dict[str, Any]) -> None:
    placed = needles("niah", place="start") + needles("niah", kind="split")
    placed += needles("niah", kind="two-chunk") + needles("places", place="end")
    named(needles("niah") + placed)
    assert len(drawn["needle"]) == 2 * len(ARMS)
    drawn.clear()
    named(placed)
    assert "needle" not in drawn


def test_what_was_not_generated_is_no_miss(drawn: dict[str, Any]) -> None:
    rows = needles("niah") + tracking("vt")
    named([{**r, "prediction": None} if r["arm"] == "none" else r for r in rows])
    assert {r["accuracy"] for r in drawn["needle"] if r["arm"] == "none"} == {None}
    assert {r["accuracy"] for r in drawn["needle"] if r["arm"] == "full"} == {1.0}
    assert {r["accuracy"] for r in drawn["hops"] if r["arm"] == "none"} == {None}
    for point in drawn["hops"]:  # bounds of what is shown, for every arm
        assert point["low"] <= point["log_probability"] <= point["high"]


def test_records_of_users_that_look_made_break_nothing(drawn: dict[str, Any]) -> None:
    odd = [
        {"task": "niah"},
        {"task": "vt"},
        {"task": "vt", "hops": "two"},
        {"task": "niah", "kind": "one", "depth": "x"},
    ]
    rows = [row(f"q{i}", arm, dataset=f"d{i}", meta=meta) for i, meta in enumerate(odd) for arm in ARMS]
    named(rows)
    assert not {name for name in drawn if name.startswith(("needle", "hops"))}


def test_curves_are_over_the_data_sets_that_all_arms_have(drawn: dict[str, Any]) -> None:
    rows = [r for r in made_run(items=4) if r["dataset"] in ("musique", "hotpotqa") and "[" not in r["arm"]]
    rows = [{**r, "kl_cont": 9.0} if r["dataset"] == "hotpotqa" and r["arm"] != "full" else r for r in rows]
    core = [r for r in rows if r["dataset"] == "musique" or r["arm"] in ("full", "none", "epic@0.15")]
    caption = named(core)["budgets-kl"].caption
    assert "pooled over `musique`" in caption
    assert all(point["value"] < 1 and point["high"] < 1 for point in drawn["budgets-kl"])
    assert all(point["y"] < 1 for point in drawn["pareto-rows"])
    assert "pooled over all data sets" in named(rows)["budgets-kl"].caption


def test_intervals_of_few_clusters_are_said_in_the_caption(drawn: dict[str, Any]) -> None:
    rows = [row(f"q{i}", a, group=f"d{i % 3}", kl_cont=i / 9) for i in range(6) for a in ("infoflow@0.15", "epic@0.15")]
    assert "(few clusters: 3)" in named(rows)["budgets-kl"].caption
    apart = [{**r, "group": ""} for r in rows]
    assert "few clusters" not in named(apart)["budgets-kl"].caption


def test_times_are_said_to_be_an_upper_bound(drawn: dict[str, Any]) -> None:
    caption = named(made_run(items=2))["pareto-ttft"].caption
    for words in ("start with the KV in memory", "15 teacher-forced rows", "upper bound", "`infoflow-kv bench`"):
        assert words in caption

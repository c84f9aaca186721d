"""Which rows a figure shows: made data sets apart, nothing missing counted as a miss, all arms over the same sets."""

from pathlib import Path
from typing import Any

import pytest

from evaluate.lab_rows import made_run, row
from infoflow_kv.evaluate.figures import series
from infoflow_kv.evaluate.figures.points import num_layers
from infoflow_kv.evaluate.figures.series import Plate, plates
from infoflow_kv.evaluate.findings import find
from infoflow_kv.evaluate.tables import budget_table, found_by

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
    assert ": `far`, found, %. Whole needles" in found["needle-far"].caption
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


def test_all_arms_of_a_figure_stand_on_the_same_items(drawn: dict[str, Any]) -> None:
    """epic ran on the two easy items only: its mean beside one over all four would be no comparison."""
    easy = [row(f"q{i}", arm, kl_cont=0.1) for i in range(2) for arm in ("infoflow@0.15", "epic@0.15")]
    hard = [row(f"q{i}", "infoflow@0.15", kl_cont=0.9) for i in (2, 3)]
    layers = [row(f"q{i}", "infoflow[layers=3,7]@0.15", kl_cont=0.2, layers="3,7") for i in range(4)]
    once = [row("q0", "a3@0.15", kl_cont=0.0)]
    found = named([row(f"q{i}", "full") for i in range(4)] + easy + hard + layers + once)
    assert {p["arm"]: p["value"] for p in drawn["budgets-kl"]} == {"infoflow": 0.1, "epic": 0.1}
    assert {p["y"] for p in drawn["pareto-rows"]} == {0.1}
    for name in ("budgets-kl", "budgets-js", "pareto-rows", "pareto-ttft"):
        caption = found[name].caption
        assert "same 2 items; left out, as they have too few of them: `a3@0.15`" in caption
    assert "same 4 items" in found["layers-infoflow"].caption


def test_arms_that_are_drawn_elsewhere_are_named_as_such(drawn: dict[str, Any]) -> None:
    arms = ("full", "none", "infoflow@0.15", "infoflow[reorder]@0.15", "infoflow[repair_layers=0-14]@0.15")
    more = ("infoflow[geometry=HL-TP]@0.15", "infoflow[layers=3,7]@0.15")
    rows = [row(f"q{i}", arm) for i in range(6) for arm in (*arms, *more)]
    rows += [row(f"q{i}", "influence@0.8") | {"arm": "influence@auto:0.8", "budget": "auto:0.8"} for i in range(6)]
    rows += [row(f"q{i}", "influence@0.3") for i in range(6)]
    found = named(rows)
    assert [p["arm"] for p in drawn["pareto-rows"]] == [
        "full", "none", "infoflow", "infoflow[reorder]", "infoflow[repair_layers=0-14]", "infoflow[geometry=HL-TP]",
        "influence@auto:0.8", "influence",
    ]  # fmt: skip
    assert "influence@auto:0.8" in {p["arm"] for p in drawn["budgets-kl"]}
    assert "Not drawn: the layer variants (1)" in found["pareto-rows"].caption
    assert "Not drawn: the layer and geometry variants (2)" in found["budgets-kl"].caption


def test_captions_say_what_is_drawn(drawn: dict[str, Any]) -> None:
    rows = needles("niah") + needles("niah", kind="split") + needles("niah", place="start") + tracking("vt")
    found = named(rows)
    needle, hops = found["needle"].caption, found["hops"].caption
    assert "Whole needles at any place in their passage, 1 item a cell" in needle
    assert "Not drawn: 4 items whose needle is cut, spread or placed" in needle
    assert "nats a token. 2 items a point" in hops and "With intervals (few clusters: 2)" in hops
    assert "stand a little apart" in hops and "stand a little apart" in found["budgets-kl"].caption
    alone = named([{**r, "prediction": None, "group": "d"} for r in tracking("vt")])["hops"]
    assert "Without intervals (too few documents)" in alone.caption and "log-probability" in alone.caption
    assert alone.field == "log_probability"


@pytest.mark.parametrize(
    "meta",
    [
        {"length": 10**400},
        {"length": True},
        {"length": 0},
        {"depth": -5},
        {"depth": 10**350},
        {"depth": True},
        {"task": "vt", "hops": 10**400},
        {"task": "vt", "hops": 0},
        {"task": "vt", "hops": True},
        {"task": "vt", "hops": 1.5},
    ],
)
def test_facts_out_of_range_are_neither_drawn_nor_a_column(drawn: dict[str, Any], meta: dict[str, Any]) -> None:
    facts = {"task": "niah", "kind": "one", "length": 1000, "depth": 0.5, **meta}
    rows = [row(f"q{i}", arm, answers=["77"], meta=facts) for i in range(2) for arm in ARMS]
    findings = find(rows, resamples=FEW)
    assert not {"needle", "hops"} & {plate.name for plate in plates(findings)}
    assert found_by(findings, "made", "vt", "hops") == ""


def test_the_layer_axis_ends_with_the_model(drawn: dict[str, Any]) -> None:
    sets = {"infoflow@0.15": "2-6", "infoflow[layers=3,7]@0.15": "3,7", "a3@0.15": "all"}
    rows = [row(f"q{i}", arm, layers=layers) for i in range(2) for arm, layers in sets.items()]
    assert num_layers(find(rows, resamples=FEW)) == 8
    assert num_layers(find([{**rows[0], "delta_k": {"reused": [0.1] * 30}}, *rows[1:]], resamples=FEW)) == 30
    assert num_layers(find([row("q", "a3@0.15")], resamples=FEW)) is None
    named(rows)
    assert [p["layers"] for p in drawn["layers-infoflow"]] == [[2, 3, 4, 5, 6], [3, 7]]


def test_times_are_medians_as_in_the_table(drawn: dict[str, Any]) -> None:
    rows = [row(f"q{i}", "full", ttft_seconds=1.0) for i in range(3)]
    rows += [row(f"q{i}", "infoflow@0.15", ttft_seconds=t) for i, t in enumerate((0.1, 0.2, 0.9))]
    caption = named(rows)["pareto-ttft"].caption
    assert [p["x"] for p in drawn["pareto-ttft"] if p["arm"] == "infoflow"] == [0.2] and "median" in caption
    assert "| TTFT ÷ full, median of items |" in budget_table(find(rows, resamples=FEW))

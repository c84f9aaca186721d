"""Scores, comparisons, gates and recovery on rows whose results are worked out by hand."""

import math
from typing import Any

import pytest

from evaluate.lab_rows import made_run, row
from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.measures import MEASURES, measure
from infoflow_kv.evaluate.scoring import (
    Score,
    compare,
    core_datasets,
    gates,
    interval_of,
    pooled_datasets,
    recovered,
    score,
)

NEEDLE = {"task": "niah", "kind": "one", "length": 1000, "depth": 0.5}
TRACKING = {"task": "vt", "hops": 3}


def by(scores: list[Score], dataset: str, arm: str) -> Score:
    [found] = [s for s in scores if (s.dataset, s.arm) == (dataset, arm)]
    return found


def full(item: str, **changes: Any) -> dict[str, Any]:
    """Full prefill on an item that the model cannot answer without its context."""
    fields = {"gold_nll": 1.5, "closed_gold_nll": 3.0, "closed_prediction": "no idea", "ttft_seconds": 2.0}
    return row(item, "full", **{**fields, **changes})


def test_means_medians_and_tails_pool_data_sets_equally() -> None:
    rows = [row("a1", "x", dataset="a", kl_cont=0.1), row("a2", "x", dataset="a", kl_cont=0.3)]
    rows += [row("b1", "x", dataset="b", kl_cont=0.6)]
    scores = score(rows)
    a, pooled = by(scores, "a", "x").summaries["kl_cont"], by(scores, "pooled", "x").summaries["kl_cont"]
    assert (a.n, a.mean, a.median) == (2, pytest.approx(0.2), pytest.approx(0.2))
    assert a.p95 == pytest.approx(0.29)  # 95 % of the way from 0.1 to 0.3
    assert (pooled.n, pooled.mean, pooled.median) == (3, pytest.approx(0.4), pytest.approx(0.4))
    assert pooled.p95 == pytest.approx((0.29 + 0.6) / 2)
    assert by(scores, "pooled", "x").n == 3
    assert [s.dataset for s in scores] == ["a", "b", "pooled"]


def test_shares_of_one_arm() -> None:
    rows = [full("q1"), full("q2"), row("q1", "x", top1=True, prefix=8), row("q2", "x", top1=False, prefix=16)]
    rows[2] |= {"gold_nll": 2.0, "ttft_seconds": 0.5, "selection_lift": 3.0}
    rows[3] |= {"gold_nll": 1.75, "ttft_seconds": 1.5}
    found = by(score(rows), "made", "x").summaries
    assert found["top1"].mean == 0.5
    assert found["prefix_share"].mean == 0.75
    assert found["identical"].mean == 0.5
    assert found["nll_delta"].mean == 0.375  # (0.5 + 0.25) / 2
    assert found["ttft_ratio"].mean == 0.5  # (0.25 + 0.75) / 2
    assert (found["selection_lift"].n, found["selection_lift"].mean) == (1, 3.0)
    assert found["recomputed_share"].mean == pytest.approx(0.15)
    assert found["recomputed_share_all"].mean == pytest.approx(0.12)
    assert found["computed_share"].mean == pytest.approx(0.15)


def test_an_empty_continuation_is_shared_in_full() -> None:
    [one] = measure([row("q1", "x", prefix=0, prefix_of=0)])
    assert (one["prefix_share"], one["identical"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("prediction", "answers", "longbench", "exact", "paper"),
    [
        ("The Oberoi Group.", ["Oberoi Group"], 1.0, 1.0, 1.0),
        ("April 1, 1954", ["1 April 1954"], 1.0, 0.0, 0.8),  # cut at the comma: 2 of 2 and 2 of 3 words
        ("Yes, both are American.", ["yes"], 0.4, 0.0, 1.0),
        ("Delhi", ["Paris", "delhi"], 1.0, 1.0, 1.0),
        ("", ["x"], 0.0, 0.0, 0.0),
    ],
)
def test_f1_by_both_protocols(
    prediction: str, answers: list[str], longbench: float, exact: float, paper: float
) -> None:
    [one] = measure([row("q1", "x", prediction=prediction, answers=answers)])
    assert one["f1_longbench"] == pytest.approx(longbench)
    assert one["exact_match"] == exact
    assert one["f1_paper"] == pytest.approx(paper)
    assert one["hit"] is None


def test_made_items_are_found_or_not() -> None:
    rows = [
        row("n1", "x", prediction="It is 4471903.", answers=["4471903"], meta=NEEDLE),
        row("n2", "x", prediction="It is 44719.", answers=["4471903"], meta=NEEDLE),
        row("n3", "x", prediction="7 only", answers=["7", "12"], meta=NEEDLE),
        row("v1", "x", prediction="b, a", answers=["A", "B", "C", "D"], meta=TRACKING),
        row("v2", "x", prediction=None, answers=["A"], meta=TRACKING),
    ]
    found = measure(rows)
    assert [r["hit"] for r in found] == [1.0, 0.0, 0.0, 0.5, None]  # v1: two of four occur
    assert all(r["f1_longbench"] is None for r in found)


def test_a_question_set_that_lists_its_hops_is_no_variable_tracking() -> None:
    for meta in (
        {"hops": [{"question": "who?"}], "kind": "bridge"},
        {"hops": 2},
        {"kind": "one", "length": 1, "depth": 0},
    ):
        [one] = measure([row("q1", "x", meta=meta)])
        assert (one["hit"], one["choice"], one["f1_longbench"]) == (None, None, 1.0)


def test_choices_are_scored_by_their_letter() -> None:
    said = {"c1": "The answer is (B).", "c2": "C", "c3": "Because", "c4": None}
    rows = [row(i, "x", prediction=p, answers=["B"], meta={"task": "choice"}) for i, p in said.items()]
    found = measure(rows)
    assert [r["choice"] for r in found] == [1.0, 0.0, 0.0, None]
    assert all(r["f1_longbench"] is r["exact_match"] is r["f1_paper"] is r["hit"] is None for r in found)
    rows = [full(f"c{i}", answers=["B"], prediction="B", meta={"task": "choice"}) for i in range(6)]
    assert [(g.field, g.passed) for g in gates(rows)] == [("nll_delta", True), ("choice", True)]


def test_measuring_leaves_the_rows_and_measures_once() -> None:
    rows = [row("q1", "x")]
    measured = measure(rows)
    assert "hit" not in rows[0]
    assert set(MEASURES) <= set(measured[0])
    assert measure(measured) == measured


def test_an_arm_of_two_geometries_is_refused() -> None:
    with pytest.raises(OptionError, match="arm 'x' has rows of different geometry"):
        score([row("q1", "x"), row("q2", "x", geometry="HL-TP")])


def test_differences_are_paired_and_weigh_data_sets_equally() -> None:
    rows = [row("a1", "x", dataset="a", kl_cont=0.1), row("a2", "x", dataset="a", kl_cont=0.3)]
    rows += [row("b1", "x", dataset="b", kl_cont=0.6), row("b2", "x", dataset="b", kl_cont=9.0)]
    rows += [row(f"a{i}", "y", dataset="a", kl_cont=0.2) for i in (1, 2)] + [row("b1", "y", dataset="b", kl_cont=0.3)]
    [found] = compare(rows, "y", "kl_cont")
    assert (found.arm, found.reference, found.difference.n) == ("x", "y", 3)
    assert found.difference.mean == pytest.approx(0.15)  # sets' means 0 and 0.3; b2 has no partner
    assert found.tally == (1, 0, 2)  # lower is better
    assert found.difference.low == -math.inf  # b has one item: nobody knows its spread


def test_sign_flips_holm_and_intervals() -> None:
    rows = [row(f"q{i}", "y", kl_cont=0.5) for i in range(4)]
    rows += [row(f"q{i}", "x", kl_cont=0.25) for i in range(4)]
    rows += [row(f"q{i}", "z", kl_cont=0.5) for i in range(4)]
    x, z = compare(rows, "y", "kl_cont")
    assert (x.difference.mean, x.difference.low, x.difference.high) == (-0.25, -0.25, -0.25)
    assert x.p == 0.125  # 2 of 16 sign patterns
    assert x.p_holm == 0.25
    assert (z.p, z.p_holm, z.tally) == (1.0, 1.0, (0, 4, 0))
    assert [c.arm for c in compare(rows, "y", "kl_cont", arms=["z"])] == ["z"]


@pytest.mark.parametrize(
    ("field", "right", "wrong", "meta"),
    [
        ("top1", {"top1": True}, {"top1": False}, {}),
        ("identical", {"prefix": 16}, {"prefix": 3}, {}),
        ("exact_match", {"prediction": "Oberoi Group"}, {"prediction": "Hilton"}, {}),
        ("choice", {"prediction": "B", "answers": ["B"]}, {"prediction": "C", "answers": ["B"]}, {"task": "choice"}),
        ("hit", {"prediction": "It is 7", "answers": ["7"]}, {"prediction": "It is 8", "answers": ["7"]}, NEEDLE),
    ],
)
def test_yes_and_no_are_compared_by_mcnemar(field: str, right: Any, wrong: Any, meta: Any) -> None:
    """3 against 1 of 5 items in one document: McNemar's 2 · (1 + 4) / 2⁴; flips of the document would give 1."""
    answers = {"answers": right.get("answers", ["Oberoi Group"]), "meta": meta}
    gate = {"closed_gold_nll": 9.0, "closed_prediction": "no idea"}
    rows = [row(f"q{i}", "full", **{**gate, **right, **answers}) for i in range(8)]
    rows += [row(f"q{i}", arm, **{**(right if good else wrong), **answers}, group="d")
             for i, pair in enumerate([(1, 0), (1, 0), (1, 0), (0, 1), (1, 1)])
             for arm, good in zip(("x", "y"), pair, strict=True)]  # fmt: skip
    [found] = compare(rows, "y", field, arms=["x"])
    assert found.p == pytest.approx(2 * 5 / 2**4)
    assert (found.tally, found.difference.clusters) == ((3, 1, 1), 1)


def test_shares_keep_the_sign_flips() -> None:
    rows = [full(f"v{i}", answers=["A1", "B1"], prediction="A1 B1", meta=TRACKING) for i in range(6)]
    rows += [row(f"v{i}", arm, answers=["A1", "B1"], prediction=said, meta=TRACKING)
             for arm, said in (("x", "A1 B1"), ("y", "A1")) for i in range(6)]  # fmt: skip
    [found] = compare(rows, "y", "hit", arms=["x"])
    assert (found.difference.mean, found.p) == (0.5, 2 / 2**6)


def test_intervals_know_their_clusters() -> None:
    rows = [row(f"q{i}", arm, kl_cont=i / 9, group=f"doc{i % 4}") for arm in ("x", "y") for i in range(8)]
    rows += [row(f"r{i}", arm, dataset="b", kl_cont=i / 9) for arm in ("x", "y") for i in range(2)]
    [one] = compare([r for r in rows if r["dataset"] == "made"], "y", "kl_cont")
    [both] = compare(rows, "y", "kl_cont")
    assert (one.difference.clusters, one.difference.is_weak) == (4, True)
    assert (both.difference.clusters, both.difference.is_weak) == (6, False)
    interval = interval_of(rows, "x", "kl_cont")
    assert interval is not None and interval.clusters == 6


def test_arms_are_pooled_over_the_same_data_sets() -> None:
    rows = [row("a1", arm, dataset="a", kl_cont=0.25) for arm in ("x", "y", "z")]
    rows += [row("b1", arm, dataset="b", kl_cont=0.75) for arm in ("x", "y")]
    scores = score(rows)
    assert [by(scores, "pooled", arm).summaries["kl_cont"].mean for arm in "xyz"] == [0.25] * 3
    assert core_datasets(scores) == ["a"]
    both = score([r for r in rows if r["arm"] != "z"])
    assert by(both, "pooled", "x").summaries["kl_cont"].mean == 0.5
    none = score([r for r in rows if (r["dataset"], r["arm"]) != ("a", "x")])
    assert core_datasets(none) == [] and all(s.dataset != "pooled" for s in none)


def test_answers_are_pooled_where_all_arms_that_answer_do() -> None:
    """y wrote answers on b only: on a it has none, and x's there must not stand beside y's of b."""
    rows = [full(f"{d}{i}", dataset=d) for d in "ab" for i in range(6)]
    rows += [row(f"{d}{i}", arm, dataset=d, prediction=None if (d, arm) == ("a", "y") else d)
             for d in "ab" for arm in "xy" for i in range(6)]  # fmt: skip
    scores = score(rows)
    assert pooled_datasets(scores, "kl_cont") == ["a", "b"]
    assert pooled_datasets(scores, "f1_longbench") == ["b"]
    assert by(scores, "pooled", "x").summaries["f1_longbench"].n == 6
    assert by(scores, "pooled", "x").summaries["kl_cont"].n == 12


def test_items_of_one_document_flip_together() -> None:
    rows = [
        row(f"q{i}", arm, kl_cont=kl, group=f"doc{i // 2}") for arm, kl in (("x", 0.1), ("y", 0.4)) for i in range(4)
    ]
    [found] = compare(rows, "y", "kl_cont")
    assert found.p == 0.5  # 2 documents: 2 of 4 patterns


def test_higher_is_better_for_answers() -> None:
    rows = [full(f"q{i}") for i in range(6)]
    rows += [row(f"q{i}", "x", prediction="wrong") for i in range(6)]
    [found] = compare(rows, "full", "f1_longbench")
    assert (found.difference.mean, found.tally) == (-1.0, (0, 0, 6))


def test_comparing_unknown_names_is_refused() -> None:
    rows = [row("q1", "x"), row("q1", "y")]
    with pytest.raises(OptionError, match="unknown measure 'kl'"):
        compare(rows, "x", "kl")
    with pytest.raises(OptionError, match="unknown arm 'w'"):
        compare(rows, "w", "kl_cont")
    with pytest.raises(OptionError, match="unknown arm 'v'"):
        compare(rows, "x", "kl_cont", arms=["v"])


def test_arms_without_a_common_item_are_left_out() -> None:
    assert compare([row("q1", "x"), row("q2", "y")], "x", "kl_cont") == []


def gated_rows() -> list[dict[str, Any]]:
    """Set `can` needs its context; `knows` is answered without it; on `unknown` nobody asked without it."""
    rows = []
    for i in range(6):
        rows.append(full(f"can{i}", dataset="can"))
        rows.append(full(f"knows{i}", dataset="knows", closed_gold_nll=1.5, closed_prediction="Oberoi Group"))
        rows.append(full(f"unknown{i}", dataset="unknown", closed_gold_nll=None, closed_prediction=None))
        for dataset, gold in (("can", 1.75), ("knows", 2.5), ("unknown", 2.5)):
            rows.append(row(f"{dataset}{i}", "x", dataset=dataset, gold_nll=gold, kl_cont=gold))
    return rows


def test_gates() -> None:
    found = {(g.dataset, g.field): g for g in gates(gated_rows())}
    assert {key: g.passed for key, g in found.items()} == {
        ("can", "nll_delta"): True,
        ("can", "f1_longbench"): True,
        ("can", "f1_paper"): True,
        ("knows", "nll_delta"): False,
        ("knows", "f1_longbench"): False,
        ("knows", "f1_paper"): False,
        ("unknown", "nll_delta"): None,
        ("unknown", "f1_longbench"): None,
        ("unknown", "f1_paper"): None,
    }
    nll = found["can", "nll_delta"]
    assert (nll.n, nll.full, nll.closed) == (6, 1.5, 3.0)
    f1 = found["can", "f1_longbench"]
    assert (f1.full, f1.closed) == (1.0, 0.0)


def test_a_gate_has_three_outcomes_and_says_which() -> None:
    beats, not_better = gates(gated_rows())[0], gates(gated_rows())[3]
    few = gates([full(f"q{i}", group="d") for i in range(3)])[0], gates([full(f"q{i}") for i in range(2)])[0]
    unknown = gates([full("q", closed_gold_nll=None)])[0]
    assert (beats.passed, beats.why) == (True, "full prefill beats the model without context")
    assert (not_better.passed, not_better.why) == (False, "full prefill does not beat the model without context")
    assert [(g.passed, g.why) for g in few] == [
        (None, f"too few documents to say ({clusters} of at least 6)") for clusters in (1, 2)
    ]
    assert (unknown.passed, unknown.why) == (None, "not measured")


def test_made_sets_are_gated_by_what_is_found() -> None:
    rows = [full(f"n{i}", answers=["77"], prediction="77", meta=NEEDLE) for i in range(6)]
    assert [(g.field, g.passed) for g in gates(rows)] == [("nll_delta", True), ("hit", True)]


def test_task_measures_count_only_sets_that_pass() -> None:
    rows = gated_rows()
    pooled = by(score(rows), "pooled", "x").summaries
    assert (pooled["nll_delta"].n, pooled["nll_delta"].mean) == (6, 0.25)
    assert (pooled["exact_match"].n, pooled["f1_longbench"].n) == (6, 6)
    assert (pooled["kl_cont"].n, pooled["kl_cont"].mean) == (18, 2.25)  # distances count everywhere
    assert by(score(rows), "knows", "x").summaries["nll_delta"].mean == 1.0
    [task] = compare(rows, "full", "nll_delta")
    assert (task.difference.n, task.difference.mean) == (6, 0.25)
    [distance] = compare(rows, "full", "kl_cont")
    assert distance.difference.n == 18
    assert compare([r for r in rows if r["dataset"] == "knows"], "full", "exact_match") == []


def test_intervals_of_means() -> None:
    rows = gated_rows()
    interval = interval_of(rows, "x", "nll_delta")
    assert interval is not None and (interval.mean, interval.low, interval.high, interval.n) == (0.25, 0.25, 0.25, 6)
    assert interval_of(rows, "x", "selection_lift") is None
    with pytest.raises(OptionError, match="unknown measure"):
        interval_of(rows, "x", "kl")


def test_recovery_is_a_ratio_of_means() -> None:
    rows = [full(f"q{i}", kl_cont=0.0) for i in range(2)]
    rows += [row("q0", "none", kl_cont=0.4), row("q1", "none", kl_cont=0.6)]
    rows += [row("q0", "x", kl_cont=0.1), row("q1", "x", kl_cont=0.3)]
    found = recovered(rows, "kl_cont")
    assert list(found) == ["x"]
    assert found["x"] is not None and found["x"].mean == pytest.approx(0.6)  # (1.0 - 0.4) / 1.0; mean of ratios: 0.625


def test_no_recovery_without_a_gap_or_its_arms() -> None:
    rows = [row(f"q{i}", arm, kl_cont=0.0) for i in range(3) for arm in ("full", "none", "x")]
    assert recovered(rows, "kl_cont") == {"x": None}
    assert recovered([r for r in rows if r["arm"] != "none"], "kl_cont") == {}


def test_a_made_run_ranks_as_it_was_made() -> None:
    scores = score(made_run(items=4))
    kl = {s.arm: s.summaries["kl_cont"].mean for s in scores if s.dataset == "pooled"}
    assert kl["full"] == 0.0
    assert (
        kl["influence@0.3"] < kl["infoflow@0.3"] < kl["cacheblend@0.3"] < kl["epic@0.3"] < kl["random@0.3"] < kl["none"]
    )

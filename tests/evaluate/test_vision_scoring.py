"""Published numbers and paired tests of predictions about pictures, worked out by hand."""

import doctest
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from evaluate.lab_rows import row as lab_row
from infoflow_kv.errors import InputError
from infoflow_kv.evaluate import vision_scoring
from infoflow_kv.evaluate.results import read_rows
from infoflow_kv.evaluate.vision_readers import read_vision_items
from infoflow_kv.evaluate.vision_scoring import (
    as_json,
    compare_vision,
    read_predictions,
    score_vision,
)
from infoflow_kv.evaluate.vision_tables import difference_table, score_table

DATA = os.environ.get("INFOFLOW_DATA", "")


def row(item: str, arm: str, prediction: str | None, answer: str = "12", **changes: Any) -> dict[str, Any]:
    fields = {"dataset": "charts", "metric": "relaxed", "group": "", "options": {}, "meta": {}}
    return {"_id": item, "arm": arm, "prediction": prediction, "answers": [answer], **fields, **changes}


def arms(hits: dict[str, str], right: str = "12", **changes: Any) -> list[dict[str, Any]]:
    """Rows of arms by their hits: "110" is right, right and wrong on three items."""
    return [
        row(f"{changes.get('dataset', 'q')}-{number}", arm, right if hit == "1" else "wrong", right, **changes)
        for arm, marks in hits.items()
        for number, hit in enumerate(marks)
    ]


def one(found: list[Any], **wanted: Any) -> Any:
    [match] = [f for f in found if all(getattr(f, name) == value for name, value in wanted.items())]
    return match


def save(path: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail, encoding="utf-8")
    return path


class TestScores:
    def test_the_metric_of_each_row_decides(self):
        rows = [
            row("a", "x", "2008", "2010"),
            row("b", "x", "2010", "2010"),
            row("c", "x", "no", "yes", dataset="text", metric="ocr"),
            row("d", "x", "x+y", "X+y", dataset="text", metric="ocr_formula"),
            row("e", "x", "it says yes", "Yes", dataset="text", metric="ocr"),
            row("f", "x", "abcd", "abxy", dataset="info", metric="anls"),
            row("g", "x", None, "abxy", dataset="info", metric="anls"),
        ]
        found = {(s.dataset, s.field): (s.n, s.mean) for s in score_vision(rows)}
        assert found == {
            ("charts", "relaxed"): (2, 1.0),
            ("charts", "strict"): (2, 0.5),
            ("text", "ocr"): (3, pytest.approx(1 / 3)),
            ("info", "anls"): (1, 0.5),
        }

    def test_rotated_options_are_averaged_over_their_cycles(self):
        """A cycle of one item weighs as much as one of three."""
        marks = {"0": "111", "1": "0", "2": "10", "3": "0"}
        rows = [
            row(f"{cycle}-{i}", "x", "B" if hit == "1" else "A", "B", metric="option", meta={"cycle_category": cycle})
            for cycle, hits in marks.items()
            for i, hit in enumerate(hits)
        ]
        [score] = score_vision(rows)
        assert (score.field, score.n, score.mean) == ("option", 7, (1 + 0 + 0.5 + 0) / 4)
        assert score.interval.mean == pytest.approx(4 / 7)
        del rows[0]["meta"]["cycle_category"]
        assert score_vision(rows)[0].mean == pytest.approx(4 / 7)

    def test_numbers_are_broken_down_by_a_fact(self):
        rows = arms({"x": "11"}, meta={"kind": "value"}) + arms({"x": "100"}, dataset="charts", meta={"kind": "count"})
        rows.append(row("other", "x", "wrong"))
        found = score_vision(rows, by="kind")
        assert [(s.part, s.field, s.n, s.mean) for s in found if s.field == "relaxed"] == [
            ("value", "relaxed", 2, 1.0),
            ("count", "relaxed", 3, pytest.approx(1 / 3)),
        ]

    def test_two_halves_weigh_the_same_and_arms_must_have_both(self):
        rows = arms({"x": "1111", "y": "1111"}, dataset="human") + arms({"x": "10"}, dataset="augmented")
        found = score_vision(rows)
        pooled = [s for s in found if s.dataset == "pooled" and s.field == "relaxed"]
        assert [(s.arm, s.n, s.mean) for s in pooled] == [("x", 6, 0.75)]
        assert pooled[0].interval.mean == pytest.approx(0.75)

    def test_questions_about_one_picture_are_one_cluster(self):
        rows = arms({"x": "1010"}, group="one.png")
        score = score_vision(rows)[0]
        assert score.interval.clusters == 1 and score.interval.low == -math.inf
        json.dumps(as_json([score], []), allow_nan=False)


class TestComparisons:
    def test_mcnemar_by_hand(self):
        """x is right and none wrong on five items, the other way round on one: 2 · (1 + 6) / 64."""
        rows = arms({"none": "00000111", "full": "11111111", "x": "11111011"})
        found = compare_vision(rows)
        ours = one(found, arm="x", reference="none", field="relaxed")
        assert (ours.p, ours.test, ours.dataset) == (14 / 64, "mcnemar", "charts")
        assert ours.tally == (5, 2, 1) and ours.difference.n == 8 and ours.difference.mean == 0.5
        assert ours.p == pytest.approx(stats.binomtest(1, 6).pvalue)
        full = one(found, arm="full", reference="none", field="relaxed")
        assert full.p == 2 / 32 and full.tally == (5, 3, 0)
        # Holm over the two arms that `none` is compared with: 2 · 2/32, then the larger of 14/64 and that.
        assert (full.p_holm, ours.p_holm) == (pytest.approx(4 / 32), pytest.approx(14 / 64))
        against_full = one(found, arm="x", reference="full", field="relaxed")
        assert (against_full.p, against_full.tally) == (1.0, (0, 7, 1))
        assert one(found, arm="none", reference="full", field="relaxed").p == 2 / 32

    def test_only_items_that_both_answered_count(self):
        rows = arms({"none": "0000", "x": "1111"})
        rows[1]["prediction"] = None
        ours = one(compare_vision(rows), arm="x", field="relaxed")
        assert (ours.difference.n, ours.p) == (3, 2 / 8)

    def test_equal_arms_and_absent_references(self):
        rows = arms({"none": "0110", "x": "0110"})
        found = compare_vision(rows)
        assert {(c.reference, c.p) for c in found} == {("none", 1.0)}
        assert compare_vision(arms({"x": "01", "y": "10"})) == []
        assert [c.reference for c in compare_vision(arms({"x": "01", "y": "10"}), ["y"])] == ["y", "y"]

    def test_anls_has_no_hits_and_is_tested_by_sign_flips(self):
        changes = {"metric": "anls", "dataset": "info"}
        rows = [row(f"{i}", "none", "abcd", "abxy", **changes) for i in range(4)]
        rows += [row(f"{i}", "x", "abxy", "abxy", **changes) for i in range(4)]
        [found] = compare_vision(rows)
        assert (found.field, found.test, found.difference.mean) == ("anls", "sign-flip", 0.5)
        assert found.p == 2 / 16  # all four signs alike, one way or the other

    def test_anls_that_is_whole_by_chance_keeps_its_test(self):
        """Whether the test is McNemar's must not depend on the values that happened to come out."""
        rows = arms({"none": "0000", "x": "1111"}, metric="anls")
        for each in rows:
            each["group"] = "one.png" if each["_id"] < "q-2" else "two.png"
        [found] = compare_vision(rows)
        assert (found.test, found.p) == ("sign-flip", 0.5)  # two clusters

    def test_data_sets_apart_and_together(self):
        rows = arms({"none": "0000", "x": "1111"}, dataset="human") + arms({"none": "01", "x": "00"}, dataset="auto")
        found = [c for c in compare_vision(rows) if c.field == "relaxed"]
        assert [(c.dataset, c.difference.mean) for c in found] == [("human", 1.0), ("auto", -0.5), ("pooled", 0.25)]
        assert found[2].p == pytest.approx(stats.binomtest(1, 5).pvalue)

    def test_json_names_everything(self):
        rows = arms({"none": "0011", "x": "1111"})
        record = as_json(score_vision(rows), compare_vision(rows))
        first = json.loads(json.dumps(record, allow_nan=False))["differences"][0]
        assert first["tally"] == {"wins": 2, "ties": 2, "losses": 0}
        assert first["dataset"] == "charts" and first["test"] == "mcnemar" and first["difference"]["n"] == 4


class TestRows:
    def test_rows_of_predict_and_of_others_are_read(self, tmp_path):
        own = [{k: v for k, v in row("a", "x", "12").items() if k not in ("group", "options", "meta")}]
        (tmp_path / "run").mkdir()
        # Rows of the laboratory have more fields; what this reads of them, `eval score` reads as well.
        more = {**lab_row("b", "full", prediction="12", answers=["12"]), "metric": "relaxed", "options": {}}
        save(tmp_path / "run" / "rows.jsonl", [more])
        found = read_predictions([save(tmp_path / "own.jsonl", own), tmp_path / "run"])
        assert [(r["_id"], r["group"], r["options"], r["meta"]) for r in found] == [
            ("a", "", {}, {}),
            ("b", "", {}, {}),
        ]
        assert found[1]["kl_first"] == more["kl_first"]
        assert [r["_id"] for r in read_rows([tmp_path / "run"])] == ["b"]
        assert read_predictions(str(tmp_path / "own.jsonl")) == found[:1]

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"metric": "relax"}, "metric is 'relax'; expected one of relaxed, strict"),
            ({"metric": 1}, "metric is 1, expected str"),
            ({"answers": []}, "expected a list of at least one visible text"),
            ({"answers": [" "]}, "expected a list of at least one visible text"),
            ({"answers": "12"}, "answers is '12', expected list"),
            ({"prediction": 12}, "prediction is 12, expected str or null"),
            ({"options": {"A": 1}}, "expected letters with texts"),
            ({"options": "A"}, "options is 'A', expected dict"),
            ({"dataset": "pooled"}, "'pooled' is what all data sets together are called"),
            ({"format": 99}, "format 99"),
        ],
    )
    def test_broken_rows_are_named_with_their_line(self, tmp_path, change, why):
        path = save(tmp_path / "rows.jsonl", [row("a", "x", "12"), {**row("b", "x", "12"), **change}])
        with pytest.raises(InputError) as caught:
            read_predictions(path)
        assert f"{path}, line 2: " in str(caught.value) and why in str(caught.value)

    def test_what_is_no_row(self, tmp_path):
        for text, why in (
            ("{\n{}\n", "line 1: not a JSON line"),
            ("[1]\n", "line 1: a list where"),
            ("", "no rows in"),
        ):
            (tmp_path / "a.jsonl").write_text(text)
            with pytest.raises(InputError, match=why):
                read_predictions(tmp_path / "a.jsonl")
        missing = {k: v for k, v in row("a", "x", "12").items() if k != "metric"}
        with pytest.raises(InputError, match="no metric; a prediction on a vision set has"):
            read_predictions(save(tmp_path / "a.jsonl", [missing]))
        with pytest.raises(InputError, match="cannot be read"):
            read_predictions(tmp_path / "none.jsonl")

    @pytest.mark.parametrize(
        ("field", "value"),
        [("metric", "ocr"), ("answers", ["13"]), ("dataset", "other"), ("options", {"A": "x"}), ("group", "p")],
    )
    def test_arms_of_an_item_must_be_asked_and_scored_alike(self, tmp_path, field, value):
        path = save(tmp_path / "a.jsonl", [row("a", "x", "12"), {**row("a", "y", "12"), field: value}])
        with pytest.raises(InputError, match=rf"line 2: item 'a' has {field} .* at .*, line 1"):
            read_predictions(path)

    def test_an_arm_comes_once(self, tmp_path):
        path = save(tmp_path / "a.jsonl", [row("a", "x", "12")] * 2)
        with pytest.raises(InputError, match="line 2: item 'a' has arm 'x' already at .*, line 1"):
            read_predictions(path)

    def test_a_torn_last_line_is_left_out_and_told(self, tmp_path, caplog):
        path = save(tmp_path / "a.jsonl", [row("a", "x", "12")], tail='{"_id": "b", "pre')
        with caplog.at_level(logging.WARNING):
            assert len(read_predictions(path)) == 1
        assert "line 2 is torn" in caplog.text


class TestTables:
    def test_scores_and_differences_as_markdown(self):
        rows = arms({"none": "000001", "x|@0.15": "111111"}) + arms({"none": "01", "x|@0.15": "11"}, dataset="b")
        scores = score_table(score_vision(rows))
        assert "| `charts` | relaxed accuracy | `none` | 6 | 16.7 |" in scores
        assert "| `pooled` | relaxed accuracy, years exact | `x¦@0.15` | 8 | 100.0 |" in scores
        told = difference_table(compare_vision(rows))
        # 2 / 2^5, and twice that after nothing: one arm alone is compared with `none`.
        assert "| `charts` | relaxed accuracy | `x¦@0.15` | `none` | 6 |" in told
        assert "| 0.062 | 0.062 | mcnemar | 5/1/0 |" in told
        assert len({line.count("|") for line in told.splitlines()}) == 1

    def test_parts_have_a_column(self):
        told = score_table(score_vision(arms({"x": "10"}, meta={"kind": "count"}), by="kind"))
        assert "| data set | measure | part | arm |" in told and "| `count` |" in told

    def test_nothing_to_tell(self):
        assert score_table([]) == difference_table([]) == ""


@pytest.mark.parametrize(
    ("only_arm", "only_none", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 2 / 32),
        (3, 3, 1.0),  # twice the tail would be more than 1
        (2, 1, 1.0),
        (9, 1, 2 * (1 + 10) / 1024),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
        (5, 10, 2 * (1 + 15 + 105 + 455 + 1365 + 3003) / 2**15),
        (0, 40, 2 / 2**40),
    ],
)
def test_mcnemars_exact_values(only_arm, only_none, p):
    both, ours = "1" * 3 + "0" * 2, "1" * only_arm + "0" * only_none
    theirs = "0" * only_arm + "1" * only_none
    found = one(compare_vision(arms({"none": both + theirs, "x": both + ours})), field="relaxed")
    assert found.p == pytest.approx(p, rel=1e-12) and found.tally == (only_arm, 5, only_none)


def test_doctests_of_the_module():
    assert doctest.testmod(vision_scoring).failed == 0


@pytest.mark.skipif(not DATA, reason="INFOFLOW_DATA does not name the folder of real inputs")
def test_a_run_on_real_files_from_items_to_tables(tmp_path):
    """Full prefill knows every answer, `none` every second, an arm all but each tenth."""
    rows = []
    for file in (
        "chartqa_format/test_augmented.json",
        "plotqa/test_human.json",
        "ocrbench_format/OCRBench_sample.json",
    ):
        for number, item in enumerate(read_vision_items(Path(DATA) / "vlm" / file).items):
            for arm, knows in (("full", True), ("none", number % 2 == 0), ("infoflow@0.15", number % 10 != 9)):
                said = item.answers[0] if knows else "I cannot see that"
                rows.append({**item.row_fields, "arm": arm, "prediction": said})
    rows = read_predictions(save(tmp_path / "rows.jsonl", rows))
    scores, found = score_vision(rows), compare_vision(rows)
    assert all(s.mean == 1 for s in scores if s.arm == "full")
    chart = {"dataset": "chartqa_format-test_augmented", "field": "relaxed"}
    assert one(scores, arm="none", **chart).mean == 0.5
    assert one(scores, arm="infoflow@0.15", **chart).mean == 0.9
    ours = one(found, arm="infoflow@0.15", reference="full", **chart)
    assert ours.tally == (0, 144, 16) and ours.p == 2 / 2**16
    assert one(found, arm="infoflow@0.15", reference="none", **chart).tally == (64, 96, 0)
    assert {s.part for s in score_vision(rows, by="kind")} == {"value", "argmax", "difference", "count"}
    assert "`infoflow@0.15`" in score_table(scores) and "mcnemar" in difference_table(found)

"""Questions about pictures in the laboratory's own tables: each is measured by its metric alone, texts as ever."""

import pytest

from evaluate.lab_rows import made_run, row
from infoflow_kv.evaluate.measures import MEASURES, measure
from infoflow_kv.evaluate.scoring import compare, gates, score
from infoflow_kv.evaluate.vision_metrics import FIELDS


def pictured(item: str, arm: str, prediction: str | None, **changes: object) -> dict[str, object]:
    fields = {"metric": "relaxed", "options": {}}
    return {**row(item, arm, prediction=prediction, answers=["2010"]), **fields, **changes}


def test_a_row_is_measured_by_its_metric_alone() -> None:
    chart, letter, unsaid = measure(
        [
            pictured("a", "x", "2008"),
            pictured("b", "x", "the dog", metric="option", answers=["B"], options={"A": "cat", "B": "dog"}),
            pictured("c", "x", None),
        ]
    )
    assert (chart["relaxed"], chart["strict"], chart["option"], chart["f1_longbench"]) == (1.0, 0.0, None, None)
    assert (letter["option"], letter["relaxed"], letter["choice"], letter["exact_match"]) == (1.0, None, None, None)
    assert all(unsaid[field] is None for field in FIELDS)


def test_texts_have_no_measure_of_pictures() -> None:
    rows = measure(made_run())
    assert all(row[field] is None for row in rows for field in FIELDS)
    assert not set(FIELDS) & {field for s in score(rows) for field in s.summaries}
    assert not set(FIELDS) & {g.field for g in gates(rows)}


def test_the_closed_book_gates_the_set_and_mcnemar_compares_the_arms() -> None:
    items = [f"q{number}" for number in range(8)]
    rows = [pictured(i, "full", "2010", closed_prediction="no picture", closed_gold_nll=3.0) for i in items]
    rows += [pictured(i, "none", "2008" if i == "q0" else "red") for i in items]
    gated = {g.field: g.passed for g in gates(rows)}
    assert gated == {"nll_delta": True, "relaxed": True}  # it decides on the strict one as well
    [relaxed] = compare(rows, "full", "relaxed")
    [strict] = compare(rows, "full", "strict")
    assert (relaxed.p, relaxed.tally) == (2 / 2**7, (0, 1, 7))
    assert (strict.p, strict.tally) == (2 / 2**8, (0, 0, 8))
    for row_ in rows[:8]:
        row_["closed_prediction"] = "2010"
    assert compare(rows, "full", "relaxed") == compare(rows, "full", "strict") == []


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_a_task_measure(field: str) -> None:
    assert (MEASURES[field].kind, MEASURES[field].better, MEASURES[field].percent) == ("task", "higher", True)

"""Rows read back: what is refused, with file and line, and what is paired with what."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from evaluate.lab_rows import RUN, made_run, row, write
from infoflow_kv.errors import InputError, OptionError
from infoflow_kv.evaluate.results import paired, read_rows, read_runs

Record = dict[str, Any]


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(texts), encoding="utf-8")
    return path


def line(item: str = "q1", arm: str = "full", **changes: Any) -> str:
    return json.dumps(row(item, arm, **changes)) + "\n"


def test_reads_folders_and_files_in_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [row("q1", "full"), row("q1", "none")], RUN)
    second = write(tmp_path / "b", [row("q2", "full")])
    rows = read_rows([first, second / "rows.jsonl"])
    assert [(r["_id"], r["arm"]) for r in rows] == [("q1", "full"), ("q1", "none"), ("q2", "full")]
    assert read_rows([str(first)])[0] == row("q1", "full")


def test_optional_fields_come_as_none(tmp_path: Path) -> None:
    short = row("q1", "full")
    for field in ("closed_gold_nll", "closed_prediction", "selection_lift", "delta_k", "delta_v", "timings", "meta"):
        del short[field]
    [read] = read_rows([write(tmp_path / "a", [short])])
    assert read["selection_lift"] is None and read["closed_prediction"] is None and read["meta"] == {}


def test_a_torn_last_line_is_left_out_with_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = lines(tmp_path / "rows.jsonl", line("q1"), line("q2")[:-40])
    with caplog.at_level(logging.WARNING):
        rows = read_rows([file])
    assert [r["_id"] for r in rows] == ["q1"]
    assert "line 2 is torn" in caplog.text


def test_a_last_line_torn_inside_a_letter(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(line("q1").encode() + '{"format": 1, "_id": "ü'.encode()[:-1])
    assert len(read_rows([file])) == 1


def test_a_complete_last_line_without_line_feed_counts(tmp_path: Path) -> None:
    assert len(read_rows([lines(tmp_path / "rows.jsonl", line("q1"), line("q2").rstrip())])) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{torn}\n" + line("q2"), r"line 2: not a JSON line .*predict the item again"),
        ("[1]\n", "line 2: a list where a JSON object"),
        (line("q2", kl_cont=float("nan")), "line 2: not a JSON line .NaN is not a number"),
        (line("q2").replace('"kl_cont": 0.1', '"kl_cont": 1e999'), "line 2: kl_cont is inf, expected int or float"),
        (line("q2", kl_cont="0.1"), "line 2: kl_cont is '0.1', expected int or float"),
        (line("q2", kl_cont=True), "line 2: kl_cont is True, expected int or float"),
        (line("q2", top1=1), "line 2: top1 is 1, expected bool"),
        (line("q2", answers=[]), "line 2: answers is .., expected a list of at least one text"),
        (line("q2", prefix=17), "line 2: prefix 17 is not within 0 and prefix_of 16"),
        (line("q2", format=2), "line 2: format 2, and this version .* reads format 1; update infoflow-kv"),
        (line("q2", format=0), "line 2: format 0, .*eval predict. again"),
        (line("q2", format="1"), "line 2: format '1', .*eval predict. again"),
    ],
)
def test_bad_lines_are_refused_with_their_place(tmp_path: Path, text: str, says: str) -> None:
    file = lines(tmp_path / "rows.jsonl", line("q1"), text)
    with pytest.raises(InputError, match=says) as refused:
        read_rows([file])
    assert str(file) in str(refused.value)


def test_missing_fields_are_named(tmp_path: Path) -> None:
    short = row("q1", "full")
    del short["kl_cont"], short["group"]
    with pytest.raises(InputError, match="line 1: no group, kl_cont; .*predict again"):
        read_rows([write(tmp_path / "a", [short])])


def test_an_arm_twice_is_refused_across_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [row("q1", "full")])
    second = write(tmp_path / "b", [row("q2", "full"), row("q1", "full")])
    with pytest.raises(
        InputError, match=r"b/rows.jsonl, line 2: item 'q1' has arm 'full' already at .*a/rows.jsonl, line 1"
    ):
        read_rows([first, second])


def test_other_token_ids_are_refused_but_reordered_arms_may_have_them(tmp_path: Path) -> None:
    other = row("q1", "infoflow[reorder]@0.15", token_ids_sha256="other", reorder=True)
    assert len(read_rows([write(tmp_path / "a", [row("q1", "full"), other])])) == 2
    with pytest.raises(
        InputError, match=r"line 2: arm 'none' of item 'q1' saw other token ids than arm 'full' at .*line 1"
    ):
        read_rows([write(tmp_path / "b", [row("q1", "full"), row("q1", "none", token_ids_sha256="other")])])
    # The reordered arm may come first: the others are still compared among themselves.
    rows = [other, row("q1", "full"), row("q1", "none", token_ids_sha256="third")]
    with pytest.raises(InputError, match="line 3: arm 'none'"):
        read_rows([write(tmp_path / "c", rows)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context_tokens": 999}, "another context_tokens .999, not 1000. than arm 'full' at .*line 1"),
        ({"prompt_tokens": 31}, "another prompt_tokens"),
        ({"prefix_of": 8}, "another prefix_of .8, not 16."),
        ({"margin": 1.1}, "another margin"),
        ({"full_gold_nll": 1.6}, "another full_gold_nll"),
        ({"prompt_ids_sha256": "other"}, "saw other token ids than arm 'full'"),
    ],
)
def test_a_reordered_arm_of_another_prompt_is_refused(tmp_path: Path, change: Record, says: str) -> None:
    """Its own token ids may differ; what the item has whatever the order may not."""
    first = write(tmp_path / "a", [row("q1", "full"), row("q1", "none", margin=1.0001)])  # as another machine rounds
    same = {"token_ids_sha256": "moved", "reorder": True}
    second = write(tmp_path / "b", [row("q1", "infoflow[reorder]@0.15", **same)])
    assert len(read_rows([first, second])) == 3
    third = write(tmp_path / "c", [row("q1", "infoflow[reorder]@0.15", **same, **change)])
    with pytest.raises(InputError, match=f"arm 'infoflow.reorder.@0.15' of item 'q1' .*{says}"):
        read_rows([first, third])


def test_halves_may_lie_further_apart_on_another_machine(tmp_path: Path) -> None:
    rows = [row("q1", "full"), row("q1", "none", margin=1.125)]
    assert len(read_rows([write(tmp_path / "a", rows, {**RUN, "dtype": "bfloat16"})])) == 2
    with pytest.raises(InputError, match="another margin"):
        read_rows([write(tmp_path / "b", rows, RUN)])


def test_one_name_for_two_layer_sets_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [row("q1", "infoflow@0.15", layers="2-6")], RUN)
    second = write(tmp_path / "b", [row("q2", "infoflow@0.15", layers="20-23")], RUN)
    with pytest.raises(InputError, match=r"arm 'infoflow@0.15' has layers 20-23 here and 2-6 at .*one calibration"):
        read_rows([first, second])


OPTIONS: Record = {"continuation": 3, "seed": 0, "generate": None, "instruction": "Answer.", "max_new_tokens": 32}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"continuation": 16}, "continuation: 3, now 16"),
        ({"max_new_tokens": 64}, "max_new_tokens: 32, now 64"),
        ({"instruction": "Be brief."}, "instruction: "),
        ({"prompts": {"made": "{context} {input}"}}, "prompt: none, now "),
        ({"lengthen": 900}, "lengthen: none, now 900"),
        ({"generate": "none", "kv_error": True}, ""),
        ({"prompts": None, "lengthen": None}, ""),
        ({"prompts": {"else": "{context} {input}"}}, ""),
    ],
)
def test_runs_of_one_data_set_with_other_options_do_not_mix(tmp_path: Path, change: Record, says: str) -> None:
    first = write(tmp_path / "a", [row("q1", "full")], {**RUN, "options": OPTIONS})
    second = write(tmp_path / "b", [row("q2", "full")], {**RUN, "options": OPTIONS | change})
    other = write(tmp_path / "c", [row("q3", "full", dataset="else")], {**RUN, "options": OPTIONS | change})
    assert len(read_rows([first, other])) == 2  # each has tables of its own, and the report says its options
    if not says:
        assert len(read_rows([first, second])) == 2
        return
    with pytest.raises(InputError, match=f"data set 'made' that were measured with other options .*{says}"):
        read_rows([first, second])
    with pytest.raises(InputError, match="measured with other options"):
        read_rows([first / "rows.jsonl", second])


def test_no_data_set_is_named_as_all_of_them_together(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1: 'pooled' is what all data sets together are called"):
        read_rows([write(tmp_path / "a", [row("q1", "full", dataset="pooled")])])


def test_nested_too_deep(tmp_path: Path) -> None:
    file = lines(tmp_path / "rows.jsonl", "[" * 200_000 + "\n", line("q1"))
    with pytest.raises(InputError, match="line 1: not a JSON line .nested too deep"):
        read_rows([file])
    (tmp_path / "run.json").write_text('{"a":' * 600 + "1" + "}" * 600)
    with pytest.raises(InputError, match="run.json is not JSON .nested too deep"):
        read_runs([tmp_path])


def test_one_id_for_two_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="item 'q1' has dataset 'b' here and 'made' at .*two ids"):
        read_rows([write(tmp_path / "a", [row("q1", "full"), row("q1", "none", dataset="b")])])


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows.jsonl does not exist; give a folder that .infoflow-kv eval predict"):
        read_rows([tmp_path])
    with pytest.raises(InputError, match="no rows in .*eval predict"):
        read_rows([write(tmp_path / "a", [])])


def test_runs_of_two_models_do_not_mix(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [row("q1", "full")], RUN)
    second = write(tmp_path / "b", [row("q2", "full")], {**RUN, "weights": "def456"})
    assert read_runs([first]) == [RUN]
    assert read_runs([first, first / "rows.jsonl", tmp_path / "without"]) == [RUN]
    with pytest.raises(InputError, match="differ in weights .abc123 and def456.*report each run by itself"):
        read_rows([first, second])


def test_a_bad_run_record(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [row("q1", "full")], {**RUN, "format": 3})
    with pytest.raises(InputError, match="run.json: format 3.*update infoflow-kv"):
        read_rows([folder])
    (folder / "run.json").write_text("{")
    with pytest.raises(InputError, match="run.json is not JSON"):
        read_rows([folder])


def test_pairs_are_the_items_that_both_arms_have() -> None:
    rows = [
        row("q1", "x", kl_cont=0.5, group="doc"),
        row("q2", "x", kl_cont=0.25),
        row("q3", "x"),
        row("q2", "y", kl_cont=0.75),
        row("q1", "y", kl_cont=1.0, group="doc"),
        row("q4", "y"),
    ]
    pairs = paired(rows, "x", "y", "kl_cont")
    assert pairs == (["q1", "q2"], [0.5, 0.25], [1.0, 0.75], ["made/doc", "made/q2"], ["made", "made"])


def test_pairs_leave_out_what_was_not_measured() -> None:
    rows = [row("q1", "x", selection_lift=2.0), row("q1", "y"), row("q2", "x"), row("q2", "y", selection_lift=1.0)]
    assert paired(rows, "x", "y", "selection_lift").ids == []
    assert paired(rows, "x", "x", "top1").a == [1.0, 1.0]


def test_pairs_of_unknown_names_are_refused() -> None:
    rows = [row("q1", "full"), row("q1", "none")]
    with pytest.raises(OptionError, match="unknown arm 'nune'; did you mean 'none'"):
        paired(rows, "full", "nune", "kl_cont")
    with pytest.raises(OptionError, match="unknown field 'kl_kont'; did you mean 'kl_cont'"):
        paired(rows, "full", "none", "kl_kont")
    with pytest.raises(OptionError, match="field 'arm' is no number"):
        paired(rows, "full", "none", "arm")


def test_a_made_run_reads_back(tmp_path: Path) -> None:
    rows = made_run(items=2)
    assert read_rows([write(tmp_path / "a", rows, RUN)]) == rows

"""Every layout of questions about pictures, and every way in which such a file can be wrong."""

import base64
import csv
import doctest
import json
import os
from pathlib import Path
from typing import Any

import pytest

from infoflow_kv.errors import DocumentError, InputError, OptionError
from infoflow_kv.evaluate import vision_items
from infoflow_kv.evaluate.vision_items import SETS, VisionItem, find_set
from infoflow_kv.evaluate.vision_metrics import METRICS
from infoflow_kv.evaluate.vision_readers import read_vision_items

DATA = os.environ.get("INFOFLOW_DATA", "")

# Starts like a picture; nobody here looks further.
PNG = b"\x89PNG\r\n\x1a\n" + bytes(60)
PACKED = base64.b64encode(PNG).decode()

CHARTQA = {"imgname": "one.png", "query": "How many?", "label": "12", "kind": "value"}
INFOVQA = {"questionId": 7, "question": "Who?", "image_local_name": "one.png", "answers": ["Ada", "Ada L."]}
OCRBENCH = {
    "dataset_name": "IIIT5K",
    "id": 3,
    "image_path": "images/one.png",
    "question": "what is written in the image?",
    "answers": "STOP",
    "type": "Regular Text Recognition",
}
VISION = {"_id": "a", "question": "Who?", "answers": ["Ada"], "images": ["images/one.png"], "metric": "anls"}
ROTATED = {
    "index": "0",
    "question": "Which?",
    "answer": "B",
    "A": "red",
    "B": "blue",
    "image": PACKED,
    "category": "single",
    "cycle_category": "0",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place in ("png", "images"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "one.png").write_bytes(PNG)
    return tmp_path


def save(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1), encoding="utf-8")
    return path


def save_table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def refusal(path: Path, error: type[InputError] = DocumentError, **wishes: Any) -> str:
    with pytest.raises(error) as caught:
        read_vision_items(path, **wishes)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


class TestLayouts:
    def test_chartqa(self, folder):
        loaded = read_vision_items(save(folder / "test_human.json", [CHARTQA, {**CHARTQA, "label": ["3", "three"]}]))
        dataset = f"{folder.name}-test_human"  # the halves are reported apart
        assert loaded.layout == "chartqa" and loaded.skipped == {} and len(loaded.sha256) == 64
        assert loaded.items[0] == VisionItem(
            id=f"{dataset}-1",
            dataset=dataset,
            question="How many?",
            answers=("12",),
            images=(folder / "png" / "one.png",),
            metric="relaxed",
            suffix="Answer the question with a single word.",
            max_new_tokens=16,
            group="one.png",
            meta={"kind": "value"},
        )
        assert (loaded.items[1].id, loaded.items[1].answers) == (f"{dataset}-2", ("3", "three"))

    def test_infovqa_is_a_list_in_an_object(self, folder):
        whole = {"dataset_name": "infographicVQA", "data": [INFOVQA, {**INFOVQA, "questionId": 8}], "more": [1]}
        for text in (json.dumps(whole, indent=1), json.dumps(whole), " \n" + json.dumps(whole, separators=(",", ":"))):
            loaded = read_vision_items(save(folder / "val.json", text))
            assert [item.id for item in loaded.items] == ["7", "8"]
        item = loaded.items[0]
        assert (item.dataset, item.metric, item.max_new_tokens) == ("val", "anls", 32)
        assert item.answers == ("Ada", "Ada L.") and item.images == (folder / "images" / "one.png",)
        assert item.text == "Who?\nAnswer the question using a single word or phrase."

    def test_docvqa_has_another_name_for_its_pictures(self, folder):
        record = {**{k: v for k, v in INFOVQA.items() if k != "image_local_name"}, "image": "images/one.png"}
        [item] = read_vision_items(save(folder / "val.json", {"data": [record]}), rules="docvqa").items
        assert item.images == (folder / "images" / "one.png",) and item.metric == "anls"

    def test_ocrbench_scores_formulas_by_a_rule_of_their_own(self, folder):
        formula = {**OCRBENCH, "id": 4, "type": "Handwritten Mathematical Expression Recognition"}
        plain, formula_item = read_vision_items(save(folder / "OCRBench.json", [OCRBENCH, formula])).items
        assert (plain.id, plain.metric, plain.text) == ("OCRBench-3", "ocr", "what is written in the image?")
        assert formula_item.metric == "ocr_formula"
        # Longer than what rows take of other facts, but tables are broken down by it.
        assert formula_item.row_fields["meta"]["type"] == formula["type"]

    def test_rotated_options_share_their_picture(self, folder):
        second = {**ROTATED, "index": "1", "answer": "A", "A": "blue", "B": "red", "image": "0", "cycle_category": "1"}
        loaded = read_vision_items(save_table(folder / "HRBench4K.tsv", ROTATED, second))
        first, rotated = loaded.items
        assert loaded.layout == "vlmeval" and first.id == "HRBench4K-0" and first.metric == "option"
        assert first.text == "Which?\nA. red\nB. blue\nAnswer the option letter directly."
        assert first.images == (PNG,) and first.images[0] is rotated.images[0]
        assert first.group == rotated.group and first.group.startswith("picture-")
        assert (rotated.answers, rotated.options) == (("A",), {"A": "blue", "B": "red"})
        assert first.meta == {"category": "single", "cycle_category": "0"}

    def test_tables_name_nothing_but_what_they_hold(self, folder):
        """An empty cell is none; a list stands in a cell as Python writes it; quoted cells hold line feeds."""
        rows = [
            {"index": "5", "question": "Two\nlines?", "answer": "['x', 2]", "A": "", "image_path": "images/one.png"},
            {
                "index": "6",
                "question": "None?",
                "answer": "",
                "A": "",
                "image_path": "['images/one.png', 'png/one.png']",
            },
            {
                "index": "7",
                "question": "Both?",
                "answer": "y",
                "A": "",
                "image_path": "['images/one.png', 'png/one.png']",
            },
        ]
        loaded = read_vision_items(save_table(folder / "InfoVQA_VAL.tsv", *rows), rules="infovqa")
        first, second = loaded.items
        assert (first.question, first.answers, first.options) == ("Two\nlines?", ("x", "2"), {})
        assert second.images == (folder / "images" / "one.png", folder / "png" / "one.png")
        [why] = loaded.skipped.values()
        assert "line 4" in why and "no gold answer" in why  # the first row takes lines 2 and 3

    def test_lines_of_ones_own(self, folder):
        records = [
            VISION,
            {**VISION, "_id": "b", "images": f"data:image/png;base64,{PACKED}", "dataset": "mine", "group": "page"},
            {**VISION, "_id": "c", "options": {"A": "x", "B": "y"}, "answers": ["b"], "metric": "option"},
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        first, second, third = read_vision_items(save(folder / "own.jsonl", lines)).items
        assert (first.dataset, first.metric, first.suffix, first.group) == ("own", "anls", "", "images/one.png")
        assert (second.dataset, second.images, second.group) == ("mine", (PNG,), "page")
        assert (third.text, third.answers) == ("Who?\nA. x\nB. y", ("b",))
        [ruled, *_] = read_vision_items(folder / "own.jsonl", rules="infovqa", dataset="d").items
        assert ruled.suffix and ruled.dataset == "d"

    def test_wishes_and_limits(self, folder):
        path = save(folder / "a.json", [CHARTQA] * 3)
        assert [i.id for i in read_vision_items(path, dataset="plots", limit=2).items] == ["plots-1", "plots-2"]
        [item] = read_vision_items(path, rules="realworldqa", limit=1).items
        assert (item.metric, item.suffix) == ("realworld", "")
        with pytest.raises(OptionError, match="limit is 0"):
            read_vision_items(path, limit=0)
        with pytest.raises(OptionError, match="unknown vision set 'chart'; did you mean 'chartqa'"):
            read_vision_items(path, rules="chart")

    def test_golds_lose_no_break_spaces_and_blanks(self, folder):
        record = {**CHARTQA, "label": ["September\u00a023,\u202f2004", " \u00a0"]}
        [item] = read_vision_items(save(folder / "a.json", [record])).items
        assert item.answers == ("September 23, 2004",)

    def test_what_a_row_says_of_its_item(self, folder):
        [item] = read_vision_items(save(folder / "own.jsonl", json.dumps({**VISION, "note": "n", "list": [1]}))).items
        assert item.row_fields == {
            "_id": "a",
            "dataset": "own",
            "group": "images/one.png",
            "answers": ["Ada"],
            "metric": "anls",
            "options": {},
            "meta": {"note": "n"},
        }


class TestBrokenFiles:
    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"imgname": None}, "'imgname' is null; expected a string"),
            ({"imgname": "two.png"}, "the picture 'two.png' is not there"),
            ({"imgname": ""}, "'imgname' is empty"),
            ({"query": " "}, "'query' is empty"),
            ({"label": 12}, "'label' is a number; expected a string or a list"),
            ({"label": ["12", None]}, "'label' is a list; expected a string or a list of strings"),
            ({"metric": "relax"}, "unknown vision metric 'relax'; did you mean 'relaxed'"),
        ],
    )
    def test_a_broken_record_is_named_with_its_line(self, folder, change, why):
        message = refusal(save(folder / "a.json", [CHARTQA, {**CHARTQA, **change}]))
        assert why in message and "line 8, record 2" in message

    def test_a_missing_field_and_an_unknown_layout(self, folder):
        message = refusal(save(folder / "a.json", [{"imgname": "one.png", "label": "1"}]))
        assert "'query' is missing (fields here: 'imgname', 'label')" in message
        assert "fit no known layout" in refusal(save(folder / "b.json", [{"text": "x"}]))
        assert "not an object" in refusal(save(folder / "c.json", [1]))

    def test_a_broken_record_within_data(self, folder):
        whole = {"name": 'a {"data": [', "data": [INFOVQA, {**INFOVQA, "questionId": 8, "answers": "x", "question": 1}]}
        message = refusal(save(folder / "a.json", whole))
        assert "line 13, record 2: 'question' is a number" in message

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "line 1: empty"),
            ("[]", "line 1: empty"),
            ('{"data": []}', "line 1: empty"),
            ('{\n"data": [\n{"a": }]}', "line 3: not JSON"),
            ('{"data": [1, 2}', "line 1: not JSON"),
            ('{\n"data": [NaN]\n}', "NaN is not a finite number"),
            ('[{"imgname": 1}', "line 1, record 1: not JSON (the list is not closed"),
            ("what", "line 1: not JSON"),
        ],
    )
    def test_what_is_no_json(self, folder, text, why):
        assert why in refusal(save(folder / "a.json", text))

    def test_a_broken_line_of_lines(self, folder):
        assert "line 2: not JSON" in refusal(save(folder / "own.jsonl", json.dumps(VISION) + "\n{\n"))

    def test_files_that_are_none(self, folder):
        assert "does not exist" in refusal(folder / "none.json")
        assert "is a folder" in refusal(folder)
        assert "Parquet" in refusal(save(folder / "a.parquet", "PAR1"))
        (folder / "a.json").write_bytes(b"[\n\xff]")
        assert "line 2: not UTF-8" in refusal(folder / "a.json")

    def test_ids_occur_once(self, folder):
        message = refusal(save(folder / "a.json", {"data": [INFOVQA, INFOVQA]}), OptionError)
        assert "record 2: the id '7' is taken by" in message

    def test_a_set_must_not_be_named_like_all(self, folder):
        message = refusal(save(folder / "own.jsonl", json.dumps({**VISION, "dataset": "pooled"})), OptionError)
        assert "'pooled'" in message

    def test_nothing_to_score(self, folder):
        loaded = read_vision_items(save(folder / "a.json", [{**CHARTQA, "label": " "}, CHARTQA]))
        assert len(loaded.items) == 1 and list(loaded.skipped) == [f"{folder.name}-a-1"]
        assert "none of its 1 records" in refusal(save(folder / "a.json", [{**CHARTQA, "label": []}]))

    def test_rules_must_be_known_where_no_layout_tells_them(self, folder):
        path = save(folder / "own.jsonl", json.dumps({k: v for k, v in VISION.items() if k != "metric"}))
        assert "give the rules of a set: chartqa, " in refusal(path)
        assert read_vision_items(path, rules="infovqa").items[0].metric == "anls"

    def test_an_answer_must_be_one_of_the_letters(self, folder):
        message = refusal(save_table(folder / "a.tsv", {**ROTATED, "answer": "C"}))
        assert "line 2: the answer is 'C'; expected one of the letters A, B" in message

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"options": ["x"]}, "'options' is a list"),
            ({"options": {"A": 1}}, "'options' is an object; expected an object of letters and texts"),
            ({"images": []}, "'images' is empty"),
            ({"images": [1]}, "'images' is a list; expected a string or a list of strings"),
            ({"images": "[1"}, "'images' starts like a list and is none"),
            ({"images": "[" * 5000}, "'images' starts like a list and is none"),
            ({"metric": 1}, "'metric' is a number"),
        ],
    )
    def test_broken_lines_of_ones_own(self, folder, change, why):
        assert why in refusal(save(folder / "own.jsonl", json.dumps({**VISION, **change})))

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("index\tquestion\n1\n", "line 2: 1 cells in a table of 2 columns"),
            ("index\tindex\n1\t2\n", "line 1: the table's head names columns twice"),
            ('index\tquestion\n1\t"open\n', "line 2: no table with tabs"),
            ("", "line 1: empty"),
            ("index\tquestion\n", "line 1: empty"),
        ],
    )
    def test_broken_tables(self, folder, text, why):
        assert why in refusal(save(folder / "a.tsv", text))

    def test_the_limit_of_cells_is_put_back(self, folder):
        csv.field_size_limit(before := 131_072)  # Python's own, whatever ran before
        packed = base64.b64encode(PNG + bytes(200_000)).decode()
        [item] = read_vision_items(save_table(folder / "a.tsv", {**ROTATED, "image": packed})).items
        assert len(item.images[0]) == len(PNG) + 200_000 and csv.field_size_limit() == before

    @pytest.mark.parametrize(
        ("image", "why"),
        [
            ("99", "'image' is '99', the index of no record that has a picture"),
            ("0", "'image' is '0', the index of no record that has a picture"),
            ("?" * 100, "the picture is no base64"),
            ("A" * 100, "the picture in base64 is none: it starts with b'\\x00"),
            (PACKED[:-3], "the picture is no base64"),
        ],
    )
    def test_pictures_in_a_table_that_are_none(self, folder, image, why):
        message = refusal(save_table(folder / "a.tsv", {**ROTATED, "image": image}))
        assert why in message and "line 2" in message and len(message) < 400


def test_every_set_names_metrics_that_exist():
    assert all({s.metric, *s.metric_of.values()} <= set(METRICS) and s.max_new_tokens > 0 for s in SETS.values())
    assert all(name == s.name == find_set(name).name for name, s in SETS.items())


def test_doctests_of_the_module():
    assert doctest.testmod(vision_items).failed == 0


@pytest.mark.skipif(not DATA, reason="INFOFLOW_DATA does not name the folder of real inputs")
@pytest.mark.parametrize(
    ("file", "layout", "questions", "pictures", "metric"),
    [
        ("plotqa/test_human.json", "chartqa", 6, 6, "relaxed"),
        ("chartqa_format/test_augmented.json", "chartqa", 160, 40, "relaxed"),
        ("infovqa_format/infographicsVQA_sample.json", "infovqa", 85, 43, "anls"),
        ("ocrbench_format/OCRBench_sample.json", "ocrbench", 24, 24, "ocr"),
    ],
)
def test_real_files_are_read_whole_and_score_their_own_golds(file, layout, questions, pictures, metric):
    loaded = read_vision_items(Path(DATA) / "vlm" / file)
    assert (loaded.layout, len(loaded.items), loaded.skipped) == (layout, questions, {})
    assert len({item.group for item in loaded.items}) == pictures
    for item in loaded.items:
        assert item.metric == metric and all(isinstance(p, Path) and p.is_file() for p in item.images)
        assert METRICS[metric].score(item.answers[0], item.answers, item.options) == 1
        assert METRICS[metric].score("none of these", item.answers, item.options) == 0
        assert all(gold.isprintable() for gold in item.answers)

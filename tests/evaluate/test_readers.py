"""Every data format that is read, and every way in which a file can be wrong."""

import json
import os
import re
from pathlib import Path

import pytest

from infoflow_kv.errors import DocumentError, InputError, OptionError
from infoflow_kv.evaluate.items import Item, Passage
from infoflow_kv.evaluate.readers import fit, lengthen, read_items

DATA = os.environ.get("INFOFLOW_DATA", "")

CHUNKS = {
    "_id": "a",
    "dataset": "musique",
    "question": "Who?",
    "answers": ["Ada", "Ada Lovelace"],
    "passages": [{"title": "One", "text": "First text."}, {"title": "", "text": "Second text."}],
    "supporting": [1],
}
LONGBENCH = {
    "input": "Who?",
    "context": "Passage 1:\nOne\nFirst text.\nPassage 2:\nTwo\nSecond\ntext.",
    "answers": ["Ada"],
    "length": 8,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "b",
}
LONGBENCH_V2 = {
    "_id": "c",
    "domain": "Law",
    "sub_domain": "Contracts",
    "difficulty": "hard",
    "length": "short",
    "question": "Which?",
    **{f"choice_{letter}": f"choice {letter.lower()}" for letter in "ABCD"},
    "answer": "A",
    "context": "One paragraph.\n\nAnother one.",
}
CACHEBLEND = {
    "ctxs": [{"title": "", "text": "one"}, {"title": "T", "text": "two"}],
    "question": "Who?",
    "answers": [["Ada", "Lovelace"], ["Ada L."]],
}
KV = {"ordered_kv_records": [[f"k{i}", f"v{i}"] for i in range(12)], "key": "k7", "value": "v7"}
RECORDS = {
    "chunks": CHUNKS,
    "longbench": LONGBENCH,
    "longbench_v2": LONGBENCH_V2,
    "cacheblend": CACHEBLEND,
    "kv_retrieval": KV,
}


def save(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def refusal(path: Path, error: type[InputError] = DocumentError) -> str:
    with pytest.raises(error) as caught:
        read_items(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def num_words(passage: Passage) -> int:
    return len(f"{passage.title} {passage.text}".split())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("listed", [False, True])
def test_numbers_that_are_none_are_refused_with_their_line(tmp_path, number, listed):
    """They could be written into no row: `predict` would fall over them after hours."""
    record = json.dumps({**CHUNKS, "score": 0.5}).replace("0.5", number)
    first = json.dumps({**CHUNKS, "_id": "z"})
    path = tmp_path / "a.jsonl"
    path.write_text(f"[{first},\n{record}]" if listed else f"{first}\n{record}\n")
    message = refusal(path)
    assert "line 2" in message and f"{number} is not a finite number" in message


def test_a_users_fields_of_our_names_may_hold_anything():
    meta = {"hops": [{"passage": [1]}, {"passage": "x"}], "needle_passage": {}, "dropped_passages": "two"}
    item = Item("a", "d", "Q?", ("x",), (Passage("", "one"), Passage("", "two")), (0,), meta=meta)
    shorter = fit(item, lambda i: len(i.passages), 1)
    assert shorter is not None and shorter.passages == (Passage("", "one"),)
    assert shorter.meta["hops"] == meta["hops"] and shorter.meta["dropped_passages"] == 1


class TestFormats:
    def test_chunks(self, tmp_path):
        hops = [{"question": "q", "answer": "a", "passage": 1}]
        loaded = read_items(save(tmp_path / "musique.chunks.jsonl", {**CHUNKS, "type": "2hop", "hops": hops}))
        assert loaded.format == "chunks" and loaded.skipped == {}
        assert loaded.items == (
            Item(
                id="a",
                dataset="musique",
                question="Who?",
                answers=("Ada", "Ada Lovelace"),
                passages=(Passage("One", "First text."), Passage("", "Second text.")),
                supporting=(1,),
                meta={"type": "2hop", "hops": hops},
            ),
        )

    def test_what_may_be_missing_from_a_chunks_record(self, tmp_path):
        record = {name: CHUNKS[name] for name in ("_id", "question", "answers")}
        (only,) = read_items(save(tmp_path / "mine.jsonl", {**record, "passages": [{"text": "t"}]})).items
        assert (only.dataset, only.supporting, only.group, only.instruction) == ("mine", (), "", "")
        assert only.passages == (Passage("", "t"),)

    @pytest.mark.parametrize(
        ("fields", "group"), [({"doc": "story"}, "story"), ({"doc": "handbook.pdf", "page": 7}, "handbook.pdf:7")]
    )
    def test_items_of_one_document_share_a_group(self, tmp_path, fields, group):
        loaded = read_items(save(tmp_path / "a.jsonl", {**CHUNKS, **fields}, {**CHUNKS, **fields, "_id": "z"}))
        assert [i.group for i in loaded.items] == [group, group]
        assert all(loaded.items[0].meta[name] == value for name, value in fields.items())

    def test_items_that_share_gold_passages_share_a_group_also_through_others(self, tmp_path):
        golds = {"a": ["p", "q"], "b": ["r", "s"], "c": ["t", "t2"], "d": ["q", "r"]}
        records = [{**CHUNKS, "_id": i, "passage_ids": ids, "supporting": [0, 1]} for i, ids in golds.items()]
        groups = {i.id: i.group for i in read_items(save(tmp_path / "a.jsonl", *records)).items}
        assert groups["a"] == groups["b"] == groups["d"] != groups["c"]
        pages = [{**CHUNKS, "_id": i, "passage_ids": [["x.pdf", 1], ["y.pdf", 2]]} for i in "ab"]
        assert {i.group for i in read_items(save(tmp_path / "a.jsonl", *pages)).items} == {"y.pdf:2"}

    def test_longbench(self, tmp_path):
        (only,) = read_items(save(tmp_path / "hotpotqa.jsonl", LONGBENCH)).items
        assert only.passages == (Passage("One", "First text."), Passage("Two", "Second\ntext."))
        assert only.meta == {"length": 8, "language": "en", "all_classes": None}
        assert (only.id, only.dataset, only.question, only.answers) == ("b", "hotpotqa", "Who?", ("Ada",))
        assert (only.supporting, only.instruction) == ((), "")

    def test_questions_about_one_longbench_context_share_a_group(self, tmp_path):
        other = {**LONGBENCH, "_id": "y", "context": "Another story."}
        loaded = read_items(save(tmp_path / "a.jsonl", LONGBENCH, {**LONGBENCH, "_id": "x"}, other))
        first, second, third = (i.group for i in loaded.items)
        assert first == second != third

    def test_longbench_records_without_a_question_are_skipped_and_a_file_of_them_refused(self, tmp_path):
        summary = {**LONGBENCH, "_id": "s", "input": ""}
        loaded = read_items(save(tmp_path / "a.jsonl", LONGBENCH, summary))
        assert [i.id for i in loaded.items] == ["b"] and "no question" in loaded.skipped["s"]
        assert "line 1" in refusal(save(tmp_path / "gov_report.jsonl", summary))

    def test_longbench_v2(self, tmp_path):
        (only,) = read_items(save(tmp_path / "v2.jsonl", LONGBENCH_V2)).items
        assert only.question == "Which?\nChoices:\n(A) choice a\n(B) choice b\n(C) choice c\n(D) choice d"
        assert only.answers == ("A",), "the letter A is no article here"
        assert only.meta["choices"]["D"] == "choice d" and only.meta["difficulty"] == "hard"
        assert only.meta["task"] == "choice"
        assert only.passages == (Passage("", "One paragraph.\n\nAnother one."),)

    def test_cacheblend(self, tmp_path):
        path = tmp_path / "wikimqa_s.json"
        path.write_text(json.dumps([CACHEBLEND, CACHEBLEND]), encoding="utf-8")
        loaded = read_items(path)
        assert loaded.format == "cacheblend"
        assert [i.id for i in loaded.items] == ["wikimqa_s-1", "wikimqa_s-2"]
        assert loaded.items[0].answers == ("Ada", "Lovelace", "Ada L.")
        assert loaded.items[0].passages == (Passage("", "one"), Passage("T", "two"))

    def test_key_value_retrieval(self, tmp_path):
        (only,) = read_items(save(tmp_path / "kv-retrieval-12_keys.jsonl", KV)).items
        assert [len(p.text.splitlines()) for p in only.passages] == [5, 5, 2]
        assert only.supporting == (1,) and '"k7": "v7"' in only.passages[1].text
        assert only.answers == ("v7",) and "k7" in only.question and only.meta["place_in_passage"] == 2

    @pytest.mark.parametrize("name", RECORDS)
    def test_lines_and_lists_give_the_same_items(self, tmp_path, name):
        (tmp_path / "lists").mkdir()
        (tmp_path / "lists" / "a.json").write_text(json.dumps([RECORDS[name]], indent=1), encoding="utf-8")
        lines = read_items(save(tmp_path / "a.json", RECORDS[name]))
        listed = read_items(tmp_path / "lists" / "a.json")
        assert lines.format == listed.format == name
        assert lines.items == listed.items and lines.sha256 != listed.sha256

    def test_blank_lines_windows_lines_and_a_byte_order_mark_do_no_harm(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(r).encode() for r in (CHUNKS,)) + b"\r\n\r\n")
        assert len(read_items(path).items) == 1

    def test_a_lone_surrogate_is_replaced_everywhere(self, tmp_path):
        line = json.dumps({**CHUNKS, "question": "Who \udc80?", "note": ["\ud800"]})
        (only,) = read_items(save(tmp_path / "a.jsonl", line)).items
        assert only.question == "Who \ufffd?" and only.meta["note"] == ["\ufffd"]

    def test_limit_counts_usable_items(self, tmp_path):
        records = [{**CHUNKS, "_id": "x", "answers": ["The."]}, *({**CHUNKS, "_id": i} for i in "abc")]
        loaded = read_items(save(tmp_path / "a.jsonl", *records), limit=2)
        assert [i.id for i in loaded.items] == ["a", "b"]
        assert "line 1" in loaded.skipped["x"] and "'The.'" in loaded.skipped["x"]
        with pytest.raises(OptionError, match="limit is 0"):
            read_items(tmp_path / "a.jsonl", limit=0)


class TestBadFiles:
    @pytest.mark.parametrize(
        ("line", "part"),
        [
            ('{"_id": "a",', "not JSON"),
            ("nonsense", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ('"a string"', "not an object"),
            ("17", "not an object"),
            ({"id": 1, "body": "?"}, "fit no known format"),
        ],
    )
    def test_a_line_that_is_no_record(self, tmp_path, line, part):
        message = refusal(save(tmp_path / "a.jsonl", "", line))
        assert part in message and re.search(r"line [12]\b", message)

    @pytest.mark.parametrize(
        ("name", "field"),
        [(name, field) for name, record in RECORDS.items() for field in record
         if field not in {"dataset", "supporting", "length", "language", "all_classes", "domain", "sub_domain",
                          "difficulty"}],
    )  # fmt: skip
    def test_a_missing_field(self, tmp_path, name, field):
        second = {key: value for key, value in RECORDS[name].items() if key != field}
        message = refusal(save(tmp_path / "a.jsonl", RECORDS[name], second))
        assert "line 2" in message and f"'{field}' is missing" in message

    def test_the_first_record_decides_the_format(self, tmp_path):
        assert "line 2" in refusal(save(tmp_path / "a.jsonl", CHUNKS, LONGBENCH))
        assert "line 2" in refusal(save(tmp_path / "a.jsonl", KV, CHUNKS))

    @pytest.mark.parametrize(
        ("record", "part"),
        [
            ({**CHUNKS, "_id": 5}, "'_id' is a number"),
            ({**CHUNKS, "dataset": None}, "'dataset' is null"),
            ({**CHUNKS, "question": ["Who?"]}, "'question' is a list"),
            ({**CHUNKS, "question": " \n"}, "'question' is empty"),
            ({**CHUNKS, "answers": "Ada"}, "'answers' is a string"),
            ({**CHUNKS, "answers": ["Ada", 1815]}, "'answers' holds a number"),
            ({**CHUNKS, "answers": [["Ada"]]}, "'answers' holds a list"),
            ({**CHUNKS, "passages": {}}, "'passages' is an object"),
            ({**CHUNKS, "passages": []}, "no passages"),
            ({**CHUNKS, "passages": ["text"]}, "passage 0 of 'passages' is a string"),
            ({**CHUNKS, "passages": [{"title": "t"}]}, "passage 0 of 'passages': 'text' is missing"),
            ({**CHUNKS, "passages": [{"text": "t"}, {"text": " "}]}, "passage 1 of 'passages': 'text' is empty"),
            ({**CHUNKS, "passages": [{"title": 1, "text": "t"}]}, "'title' is a number"),
            ({**CHUNKS, "supporting": 1}, "'supporting' must be a list"),
            ({**CHUNKS, "supporting": [True]}, "'supporting' must be a list"),
            ({**LONGBENCH, "context": "  "}, "'context' is empty"),
            ({**LONGBENCH, "context": "Passage 1:\n\nPassage 2:\n"}, "no passages"),
            ({**LONGBENCH, "input": None}, "'input' is null"),
            ({**LONGBENCH_V2, "answer": "E"}, "'answer' is 'E'"),
            ({**LONGBENCH_V2, "choice_C": 3}, "'choice_C' is a number"),
            ({**CACHEBLEND, "ctxs": []}, "no passages"),
            ({**CACHEBLEND, "answers": [[["Ada"]]]}, "'answers' holds a list"),
            ({**KV, "ordered_kv_records": [["k7"]]}, "must be a list of [key, value]"),
            ({**KV, "key": "other"}, "0 times"),
            ({**KV, "value": "v8"}, "must be in"),
        ],
    )
    def test_a_wrong_value(self, tmp_path, record, part):
        message = refusal(save(tmp_path / "a.jsonl", "", "", record))
        assert "line 3" in message and part in message

    @pytest.mark.parametrize("supporting", [[2], [0, -1]])
    def test_supporting_outside_the_passages(self, tmp_path, supporting):
        bad = {**CHUNKS, "_id": "z", "supporting": supporting}
        message = refusal(save(tmp_path / "a.jsonl", CHUNKS, bad), OptionError)
        assert "line 2" in message and "supporting" in message

    def test_a_gold_passage_named_twice_counts_once(self, tmp_path):
        (only,) = read_items(save(tmp_path / "a.jsonl", {**CHUNKS, "supporting": [1, 0, 1]})).items
        assert only.supporting == (1, 0)

    def test_an_id_that_occurs_twice_names_both_lines(self, tmp_path):
        message = refusal(save(tmp_path / "a.jsonl", CHUNKS, {**CHUNKS, "_id": "b"}, CHUNKS), OptionError)
        assert "line 1" in message and "line 3" in message and "'a'" in message

    @pytest.mark.parametrize("content", ["", "\n \n", "[]", " [\n]\n"])
    def test_an_empty_file(self, tmp_path, content):
        assert "empty" in refusal(save(tmp_path / "a.jsonl", content))

    @pytest.mark.parametrize(
        ("content", "part"),
        [
            ('[\n{"ctxs": 1},\n{"ctxs"\n]', "line 2"),
            ("[\n%s,\n%s", "line 3"),
            ("[\n%s,\n%s\n%s]", "line 3"),
            ("[\n%s,\n%s,\n]", "line 4"),
            ("[\n%s\n] more", "line 2"),
            ("[\n%s,\n5]", "line 3"),
        ],
    )
    def test_a_broken_list(self, tmp_path, content, part):
        path = tmp_path / "a.json"
        path.write_text(content.replace("%s", json.dumps(CACHEBLEND)), encoding="utf-8")
        assert part in refusal(path)

    def test_bytes_that_are_not_utf8(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes(json.dumps(CHUNKS).encode() + b'\n{"_id": "caf\xe9"}\n')
        assert "line 2: not UTF-8" in refusal(path)

    def test_no_file(self, tmp_path):
        assert "does not exist" in refusal(tmp_path / "none.jsonl")
        assert "give one file" in refusal(tmp_path)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        assert "not a regular file" in refusal(tmp_path / "pipe")

    def test_golds_that_normalise_to_nothing_everywhere(self, tmp_path):
        message = refusal(save(tmp_path / "a.jsonl", {**CHUNKS, "answers": ["The", "!"]}))
        assert "line 1" in message and "'!'" in message


@pytest.mark.skipif(not DATA, reason="INFOFLOW_DATA is not set: no real inputs")
class TestRealFiles:
    @pytest.mark.parametrize(
        ("name", "format_name", "count", "num_passages"),
        [
            ("hotpotqa/hotpotqa.chunks.jsonl", "chunks", 190, {4, 10}),
            ("hotpotqa/hotpotqa.jsonl", "longbench", 190, {4, 10}),
            ("2wikimqa/2wikimqa.chunks.jsonl", "chunks", 200, {10}),
            ("2wikimqa/2wikimqa.jsonl", "longbench", 200, {10}),
            ("musique/musique.chunks.jsonl", "chunks", 186, {20}),
            ("musique/musique.jsonl", "longbench", 186, {20}),
            ("fairytaleqa/fairytaleqa.chunks.jsonl", "chunks", 200, None),
            ("fairytaleqa/fairytaleqa.jsonl", "longbench", 200, None),
            ("nq_multidoc/nq_multidoc.chunks.jsonl", "chunks", 200, {20}),
            ("kv_retrieval/kv-retrieval-75_keys.jsonl", "kv_retrieval", 100, {15}),
            ("contoso_hr/contoso_hr.chunks.jsonl", "chunks", 125, {8}),
            ("product_docs/product_docs.chunks.jsonl", "chunks", 43, {8}),
            ("cacheblend/musique_s.json", "cacheblend", 98, {10}),
            ("cacheblend/wikimqa_s.json", "cacheblend", 63, {10}),
            ("longbench_sample/2wikimqa.jsonl", "longbench", 12, None),
            ("longbench_sample/hotpotqa.jsonl", "longbench", 8, None),
            ("longbench_sample/musique.jsonl", "longbench", 4, None),
            ("longbench_sample/narrativeqa.jsonl", "longbench", 3, None),
            ("longbench_sample/qasper.jsonl", "longbench", 6, None),
            ("longbench_sample/qmsum.jsonl", "longbench", 5, None),
            ("longbench_sample/passage_retrieval_en.jsonl", "longbench", 10, None),
        ],
    )
    def test_every_record_becomes_an_item(self, name, format_name, count, num_passages):
        loaded = read_items(Path(DATA, name))
        assert loaded.format == format_name and len(loaded.items) == count and not loaded.skipped
        if num_passages:
            assert {len(i.passages) for i in loaded.items} == num_passages

    @pytest.mark.parametrize("name", ["hotpotqa", "2wikimqa", "musique"])
    def test_both_shapes_of_a_set_hold_the_same_passages(self, name):
        official = read_items(Path(DATA, name, f"{name}.jsonl")).items
        chunks = read_items(Path(DATA, name, f"{name}.chunks.jsonl")).items
        assert [(i.id, i.passages) for i in official] == [(i.id, i.passages) for i in chunks]

    @pytest.mark.parametrize(
        ("name", "groups"),
        [("fairytaleqa/fairytaleqa.chunks.jsonl", 29), ("fairytaleqa/fairytaleqa.jsonl", 29),
         ("contoso_hr/contoso_hr.chunks.jsonl", 103), ("product_docs/product_docs.chunks.jsonl", 28)],
    )  # fmt: skip
    def test_groups(self, name, groups):
        assert len({i.group for i in read_items(Path(DATA, name)).items}) == groups

    def test_a_summary_set_asks_no_question(self):
        assert "no question" in refusal(Path(DATA, "longbench_sample", "gov_report.jsonl"))

    def test_musique_can_be_doubled(self):
        items = read_items(Path(DATA, "musique", "musique.chunks.jsonl")).items
        longer = lengthen(items[0], items, 4000, num_words, seed=1)
        assert 3500 < sum(map(num_words, longer.passages)) <= 4000
        assert [longer.passages[h["passage"]] for h in longer.meta["hops"]] == [
            items[0].passages[h["passage"]] for h in items[0].meta["hops"]
        ]

"""Needles: once in the text, where they should be, with the length asked for; new values for every seed."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_kv.errors import DocumentError, OptionError
from infoflow_kv.evaluate.items import check_items
from infoflow_kv.evaluate.niah import needle_items, read_essays

DATA = os.environ.get("INFOFLOW_DATA", "")
LONGEST = 25
ESSAYS = [
    "\n\n".join(
        " ".join(f"Sentence {n} of {e} speaks {'and speaks ' * ((n * 7 + p) % 9)}on." for n in range(p * 6, p * 6 + 6))
        for p in range(12)
    )
    for e in ("art", "love", "history", "nature")
]
CONTROLS = [
    ("one", None), ("one", "start"), ("one", "middle"), ("one", "end"), ("split", None),
    ("two-chunk", None), ("two-chunk", "start"), ("two-chunk", "middle"), ("two-chunk", "end"),
]  # fmt: skip


def num_words(text: str) -> int:
    return len(text.split())


def make(lengths=(300,), depths=(0.5,), seeds=1, kinds=("one",), **options):
    options = {"chunk_tokens": 60, "count_tokens": num_words, **options}
    return needle_items(ESSAYS, lengths, depths, seeds, kinds, **options)


def needle_of(item) -> str:
    facts = item.meta
    if facts["kind"] == "two-chunk":
        return f"{facts['person']}'s special magic number is {facts['value']}."
    return f"Old travellers report that the special magic {facts['city']} number is {facts['value']}."


@settings(deadline=None)
@given(
    st.sampled_from(CONTROLS), st.integers(300, 900), st.floats(0, 1), st.integers(0, 99), st.integers(66, 120)
)  # fmt: skip
def test_what_holds_for_every_needle(control, length, depth, seed, chunk_tokens):
    kind, place = control
    (item,) = make([length], [depth], kinds=[kind], places=[place], seed=seed, chunk_tokens=chunk_tokens)
    facts, texts = item.meta, [p.text for p in item.passages]
    joined = " ".join(texts)

    # the needle and its value are there once, and so is its city
    assert joined.count(needle_of(item)) == joined.count(facts["value"]) == joined.count(facts["city"]) == 1
    assert item.answers == (facts["value"],) and re.fullmatch(r"\d{7}", facts["value"])
    assert facts["city"] in item.question and facts["value"] not in item.question

    # as long as asked for, to the sentence; chunks of the size asked for, with the needle
    assert length - LONGEST < num_words(joined) == facts["tokens"] <= length
    assert all(num_words(text) <= chunk_tokens for text in texts)
    assert facts["task"] == "niah"

    # at the depth asked for, to the sentence, or to the passage where its place in it is fixed
    before = num_words(joined[: joined.index(facts["value"])]) / num_words(joined)
    reach = LONGEST if (kind, place) in {("one", None), ("two-chunk", None)} else chunk_tokens
    assert abs(facts["measured_depth"] - depth) * facts["tokens"] <= reach + 20
    assert abs(before - facts["measured_depth"]) * length <= 25

    # in the passages that it says
    text = texts[facts["needle_passage"]]
    assert all(facts["city"] in texts[i] or facts["value"] in texts[i] for i in item.supporting)
    if kind == "split":
        first, second = item.supporting
        assert second == first + 1 == facts["needle_passage"] + 1 and needle_of(item) not in text
        assert texts[first].endswith(f"magic {facts['city']} number")
        assert texts[second].startswith(f"is {facts['value']}.")
        assert facts["boundary_distance_characters"] == 0
    else:
        assert item.supporting[-1] == facts["needle_passage"]
        assert text[facts["offset_characters"] :].startswith(needle_of(item))
        after = len(text) - facts["offset_characters"] - len(needle_of(item))
        assert facts["boundary_distance_characters"] == min(facts["offset_characters"], after)
        assert facts["passage_characters"] == len(text)
        if place == "start":
            assert facts["offset_characters"] == 0
        elif place == "end":
            assert after == 0
        elif place == "middle":
            assert facts["offset_characters"] > 0 < after
    if kind == "two-chunk":
        keeper, value = item.supporting
        assert keeper != value and f"The keeper of {facts['city']} is {facts['person']}." in texts[keeper]
        assert facts["city"] not in texts[value]
    # what stands around it is whole sentences
    without = re.sub(r"Old travellers .*?\d{7}\.|The keeper .*? is \w+\.|\w+'s special .*?\d{7}\.", "", joined)
    assert re.fullmatch(r"(\s*Sentence \d+ of \w+ speaks (and speaks )*on\.)*\s*", without)


def test_all_combinations_with_ids_of_their_own():
    items = make(
        [200, 300], [0, 0.5, 1.0], 2, ("one", "split", "two-chunk"), places=(None, "start", "middle", "end")
    )  # fmt: skip
    assert len(items) == 2 * 3 * 2 * (4 + 1 + 4)
    kept, skipped = check_items(items)
    assert kept == items and not skipped
    assert {i.dataset for i in items} == {"niah"} and all(p.title == "" for i in items for p in i.passages)


def test_data_sets_of_two_names_share_no_id():
    items = [*make(), *make(dataset="niah_places")]
    assert [i.dataset for i in items] == ["niah", "niah_places"]
    assert len({i.id for i in items}) == 2 and items[0].passages == items[1].passages


def test_the_ends_are_reached_and_depths_grow():
    items = make(depths=[d / 10 for d in range(11)])
    measured = [i.meta["measured_depth"] for i in items]
    assert measured[0] == 0 and measured[-1] == 1 and measured == sorted(measured)
    assert items[0].passages[0].text.startswith("Old travellers")
    assert items[-1].passages[-1].text.endswith(f"{items[-1].meta['value']}.")


def test_the_same_seed_gives_the_same_items_and_others_give_other_values_and_hay():
    assert make(seeds=3, depths=[0, 1]) == make(seeds=3, depths=[0, 1])
    items = [*make(seeds=20), *make(seeds=20, seed=1)]
    assert len({i.meta["value"] for i in items}) == 40
    assert len({i.group for i in items}) == 40
    assert len({i.passages[-1].text for i in items}) > 30


def test_items_of_one_seed_read_the_same_hay():
    first, second = make(depths=[0, 1])
    assert first.group == second.group
    hay = [" ".join(p.text for p in i.passages).replace(needle_of(i), "").split() for i in (first, second)]
    assert hay[0] == hay[1]


def test_sentences_are_counted_once():
    calls = []
    make([300, 600], [0, 0.5, 1], 2, count_tokens=lambda text: calls.append(text) or num_words(text))
    assert len(calls) == 4 * 72 + 12  # a needle of one sentence each


def test_a_value_or_city_in_the_text_is_not_taken():
    cities = make(seeds=200, lengths=[100])
    known = " ".join(sorted({i.meta["city"] for i in cities})[1:])
    (item,) = needle_items(
        [f"They saw {known} last year. " + ESSAYS[0]], [300], [0.5], 1, chunk_tokens=50, count_tokens=num_words
    )  # fmt: skip
    assert " ".join(p.text for p in item.passages).count(item.meta["city"]) == 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"lengths": []}, "lengths is"),
        ({"lengths": [0]}, "the least of lengths is 0"),
        ({"lengths": [300, 300]}, "each once"),
        ({"lengths": [10**6]}, "give more text or shorter lengths"),
        ({"lengths": [12]}, "no room for a sentence"),
        ({"depths": [1.5]}, "from 0 to 1"),
        ({"depths": [float("nan")]}, "from 0 to 1"),
        ({"seeds": 0}, "seeds is 0"),
        ({"kinds": ["spilt"]}, "did you mean 'split'"),
        ({"kinds": "one"}, "give a list"),
        ({"places": ["centre"]}, "unknown place in the chunk"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"chunk_tokens": 1}, "which leaves no room for a needle beside it; give at least 3"),
        ({"chunk_tokens": 30}, "chunk_tokens is 30 and a sentence of the essays has 20 tokens"),
        ({"lengths": [30], "places": ["middle"]}, "have a middle"),
        ({"dataset": " "}, "name is blank"),
        ({"kinds": ["split"], "chunk_tokens": 900}, "needs 2 passages"),
        ({"kinds": ["two-chunk"], "chunk_tokens": 900}, "needs 2 passages"),
    ],
)
def test_values_outside_their_range(options, part):
    with pytest.raises(OptionError, match=re.escape(part)):
        make(**options)


def test_no_essays():
    for essays in ([], ["  "], "one text"):
        with pytest.raises(OptionError, match="no essays"):
            needle_items(essays, [300], [0.5], 1, chunk_tokens=50, count_tokens=num_words)


class TestReadEssays:
    def test_texts_by_name(self, tmp_path):
        (tmp_path / "b.txt").write_bytes("\ufeffSecond.\r\nLine.".encode())
        (tmp_path / "a.txt").write_text("First.", encoding="utf-8")
        (tmp_path / "note.md").write_text("not read", encoding="utf-8")
        assert read_essays(tmp_path) == ["First.", "Second.\nLine."]

    @pytest.mark.parametrize(
        ("name", "data", "part"), [("a.txt", b"caf\xe9", "not UTF-8"), ("a.txt", b" \n", "has no text"),
                                   ("a.md", b"text", "holds no .txt file")],
    )  # fmt: skip
    def test_files_that_are_no_text(self, tmp_path, name, data, part):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DocumentError, match=part) as caught:
            read_essays(tmp_path)
        assert str(tmp_path) in str(caught.value)

    def test_no_folder(self, tmp_path):
        with pytest.raises(DocumentError, match="does not exist"):
            read_essays(tmp_path / "none")
        (tmp_path / "file").touch()
        with pytest.raises(DocumentError, match="is a file"):
            read_essays(tmp_path / "file")


@pytest.mark.skipif(not DATA, reason="INFOFLOW_DATA is not set: no real inputs")
def test_real_essays():
    essays = read_essays(Path(DATA, "needle", "essays"))
    assert len(essays) == 21
    items = needle_items(
        essays, [1000, 7500], [0, 0.5, 1], 2, ("one", "split", "two-chunk"),
        places=(None, "middle"), chunk_tokens=512, count_tokens=num_words,
    )  # fmt: skip
    assert len(items) == 2 * 3 * 2 * (2 + 1 + 2)
    for item in items:
        joined = " ".join(p.text for p in item.passages)
        assert joined.count(item.meta["value"]) == joined.count(item.meta["city"]) == 1
        assert item.meta["length"] - 150 < num_words(joined) <= item.meta["length"]

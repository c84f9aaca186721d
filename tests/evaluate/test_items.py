"""Items checked, texts cut into passages, items made shorter and longer: gold passages stay, nothing is lost."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.items import Item, Passage, check_items
from infoflow_kv.evaluate.measures import fields_of
from infoflow_kv.evaluate.passages import marked_passages, pack, pieces, sentences
from infoflow_kv.evaluate.readers import fit, lengthen
from infoflow_kv.evaluate.scoring import POOLED


def item(number_of_passages: int = 4, supporting: tuple[int, ...] = (1,), **fields: object) -> Item:
    passages = tuple(Passage(f"title {i}", f"text number {i}") for i in range(number_of_passages))
    given = {"id": "i", "dataset": "d", "question": "Q?", "answers": ("gold",), **fields}
    return Item(passages=passages, supporting=supporting, **given)


def num_words(given: Item) -> int:
    return sum(len(f"{p.title} {p.text}".split()) for p in given.passages)


class TestCheckItems:
    def test_golds_that_normalise_to_nothing_are_removed(self):
        kept, skipped = check_items([item(answers=("the", "gold")), item(id="j", answers=()), item(id="k")])
        assert [i.answers for i in kept] == [("gold",), ("gold",)]
        assert skipped == {"j": "item 2: no gold answer"}

    def test_one_rule_says_what_is_scored_by_its_letter(self):
        """A field `choices` alone makes no choice item: its "A" would be kept, and F1 would score it as 0 for ever."""
        named, plain, words = {"choices": {"A": "yes"}, "task": "choice"}, {"choices": {"A": "yes"}}, {"task": "choice"}
        kept, skipped = check_items(
            [
                item(answers=("A", "E", "yes"), meta=named),
                item(id="j", answers=("A",), meta=plain),
                item(id="k", answers=("A", "gold"), meta=plain),
                item(id="l", answers=("gold", "BC"), meta=words),
            ]
        )
        assert [(i.id, i.answers) for i in kept] == [("i", ("A",)), ("k", ("gold",))]
        assert re.search('once normalised .*\'A\'.*"task": "choice"', skipped["j"])
        assert "no gold answer is one of the letters A, B, C, D (given: 'gold', 'BC')" in skipped["l"]
        for i in kept:
            row = {"meta": i.meta}
            assert (fields_of(row) == ("choice",)) == (i.id == "i")

    def test_no_data_set_is_named_as_scores_name_all_together(self):
        with pytest.raises(OptionError, match="item 1: a data set is named 'pooled', .*give it another name"):
            check_items([item(dataset=POOLED)])

    def test_both_places_of_a_double_id_are_named(self):
        with pytest.raises(OptionError, match="item 3: the id 'i' is taken by item 1"):
            check_items([item(), item(id="j"), item()])
        with pytest.raises(OptionError, match="2 places were given for 1 items"):
            check_items([item()], ["a", "b"])


class TestTexts:
    def test_a_passage_line_in_a_text_is_no_marker_out_of_turn(self):
        context = "Passage 1:\nA\nsee\nPassage 7:\nmore\nPassage 2:\nB\nend"
        assert marked_passages(context) == [Passage("A", "see\nPassage 7:\nmore"), Passage("B", "end")]

    def test_passages_without_a_text_or_a_title(self):
        assert marked_passages("Passage 1:\nonly line\nPassage 2:\n\nPassage 3:\n\ntext") == [
            Passage("", "only line"), Passage("", "text")
        ]  # fmt: skip
        assert marked_passages("See Passage 1:\nno") is None is marked_passages("Intro\nPassage 1:\nA\nb")

    @given(
        st.lists(st.tuples(st.text("ab .", max_size=8), st.text("xy \n.", min_size=1).filter(str.strip)), min_size=1)
    )
    def test_no_character_of_a_marked_context_is_lost(self, passages):
        context = "\n".join(f"Passage {i}:\n{title}\n{text}" for i, (title, text) in enumerate(passages, start=1))
        assert marked_passages(context) == [Passage(title, text) for title, text in passages]

    @given(st.text("ab. !\n\t\u00e9", max_size=400), st.integers(5, 60))
    def test_pieces_lose_white_space_only_and_keep_the_limit(self, text, limit):
        found = pieces(text, limit)
        assert re.sub(r"\s", "", "".join(p.text for p in found)) == re.sub(r"\s", "", text)
        assert all(p.text.strip() and len(p.text) <= limit and p.title == "" for p in found)

    def test_pieces_are_packed_and_cut_at_the_best_place(self):
        assert [p.text for p in pieces("aa\n\nbb\n\ncc", 8)] == ["aa\n\nbb", "cc"]
        assert [p.text for p in pieces("One two. Three four. Five", 12)] == ["One two.", " Three four.", " Five"]
        assert [p.text for p in pieces("abcdefghij", 4)] == ["abcd", "efgh", "ij"]

    def test_sentences(self):
        text = 'Mr. Smith met J. Doe. "Oh! no," he said. Why? It was 3.5 m.\n\nA title\n\nEnd '
        assert sentences(text) == [
            "Mr. Smith met J. Doe.", ' "Oh! no," he said.', " Why?", " It was 3.5 m.", "\n\nA title", "\n\nEnd "
        ]  # fmt: skip

    @given(st.text("aB. !?\n\u201d", max_size=200))
    def test_sentences_join_to_the_text(self, text):
        assert "".join(sentences(text)) == text

    @given(st.lists(st.integers(0, 9)), st.integers(1, 20))
    def test_packed_ranges_cover_everything_within_the_limit(self, sizes, limit):
        parts = pack(sizes, limit)
        assert [i for part in parts for i in part] == list(range(len(sizes)))
        assert all(len(part) == 1 or sum(sizes[i] for i in part) <= limit for part in parts)


class TestFit:
    def test_what_fits_comes_back_as_it_is(self):
        given_item = item()
        assert fit(given_item, num_words, num_words(given_item)) is given_item

    @given(st.integers(1, 9), st.data())
    def test_gold_passages_stay_and_no_more_is_dropped_than_must_be(self, count, data):
        gold = tuple(data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1)))
        limit = data.draw(st.integers(0, 5 * count))
        before = item(count, gold)
        after = fit(before, num_words, limit)
        if after is None:
            assert 5 * len(gold) > limit
            return
        assert [after.passages[i] for i in after.supporting] == [before.passages[i] for i in gold]
        dropped = after.meta.get("dropped_passages", 0)
        assert len(after.passages) == count - dropped == min(count, limit // 5)
        kept = [p for p in before.passages if p in after.passages]
        assert kept == list(after.passages)
        distractors = [p for i, p in enumerate(before.passages) if i not in gold]
        assert [p for p in distractors if p in kept] == distractors[: len(distractors) - dropped]

    def test_without_known_gold_passages_nothing_is_dropped(self):
        assert fit(item(supporting=()), num_words, 10) is None

    def test_indices_in_meta_move_along_and_drops_add_up(self):
        hops = [{"question": "q", "passage": 3}, {"question": "r", "passage": 1}]
        before = item(5, (3, 1), meta={"hops": hops, "passage_ids": list("abcde"), "needle_passage": 3})
        after = fit(fit(before, num_words, 20), num_words, 10)
        assert after.supporting == (1, 0) and after.meta["dropped_passages"] == 3
        assert [hop["passage"] for hop in after.meta["hops"]] == [1, 0]
        assert after.meta["passage_ids"] == ["b", "d"] and after.meta["needle_passage"] == 1
        assert hops[0]["passage"] == 3, "the item given is not written into"


class TestLengthen:
    POOL = tuple(
        Item(
            id=f"other {i}",
            dataset="d",
            question="Q?",
            answers=("x",),
            passages=(Passage(f"name {i}", f"filler words number {i}"), Passage("TITLE 1", "same title as a gold one")),
        )
        for i in range(40)
    )

    @staticmethod
    def count(passage: Passage) -> int:
        return len(f"{passage.title} {passage.text}".split())

    @given(st.integers(0, 200), st.integers(0, 5))
    def test_length_order_and_gold(self, target, seed):
        before = item(6, (1, 4))
        after = lengthen(before, self.POOL, target, self.count, seed)
        assert after == lengthen(before, self.POOL, target, self.count, seed)
        assert [after.passages[i] for i in after.supporting] == [before.passages[1], before.passages[4]]
        assert [p for p in after.passages if p in before.passages] == list(before.passages)
        assert len(set(after.passages)) == len(after.passages)
        assert after.meta.get("added_passages", 0) == len(after.passages) - 6
        if target < num_words(before) + 6:
            assert after is before
        else:
            assert target - 6 < num_words(after) <= target

    def test_gold_chunks_are_spread(self):
        places = [lengthen(item(4, (0, 3)), self.POOL, 190, self.count, seed).supporting for seed in range(20)]
        assert len(set(places)) > 10
        assert max(last for _, last in places) > 20 and max(first for first, _ in places) > 5

    def test_gold_titles_and_texts_with_an_answer_are_passed_over(self):
        pool = [item(3, id="p", answers=("z",)), *self.POOL]
        after = lengthen(item(2, answers=("The number 7!",)), pool, 10_000, self.count, 0)
        texts = [p.text for p in after.passages]
        assert "filler words number 7" not in texts and "filler words number 8" in texts
        assert "same title as a gold one" not in texts
        assert texts.count("text number 0") == 1

    def test_yes_and_no_bar_nothing_and_the_item_itself_gives_nothing(self):
        pool = [Item("o", "d", "q", ("x",), (Passage("t", "no passage says no"),)), item(9)]
        after = lengthen(item(2, answers=("no",)), pool, 1000, self.count, 0)
        assert len(after.passages) == 3

    def test_other_seeds_give_other_items(self):
        assert len({lengthen(item(), self.POOL, 150, self.count, seed).passages for seed in range(5)}) == 5

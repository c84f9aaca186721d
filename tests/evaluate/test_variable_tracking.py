"""Variable tracking: one assignment a passage, a chain that can be followed, nothing that gives it away."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.items import check_items
from infoflow_kv.evaluate.variable_tracking import count_words, tracking_items

ASSIGNMENT = {"all": r"VAR ([A-Z]{5}) = (\w+)\.", "value": r"(X\d\d) is (\w+)\."}


def make(hops=(2,), orders=("forward",), **options):
    return tracking_items(hops, orders, **{"gap": 1, "count": 1, "chunk_tokens": 40, **options})


@given(
    st.integers(1, 6),
    st.sampled_from(["forward", "shuffled"]),
    st.sampled_from(["all", "value"]),
    st.integers(0, 3),
    st.integers(0, 99),
    st.integers(1, 120),
)
def test_what_holds_for_every_chain(hops, order, form, gap, seed, chunk_tokens):
    (item,) = make([hops], [order], form=form, gap=gap, seed=seed, chunk_tokens=chunk_tokens)
    texts, chain, value = [p.text for p in item.passages], item.meta["chain"], item.meta["value"]

    # every hop in its own passage, and supporting follows the chain
    found = [re.findall(ASSIGNMENT[form], text) for text in texts]
    assert [index for index, pairs in enumerate(found) if pairs] == sorted(item.supporting)
    assert len(set(item.supporting)) == hops + 1 == len(set(chain))
    assert [found[i] for i in item.supporting] == [[pair] for pair in zip(chain, [value, *chain], strict=False)]

    # order and gaps
    assert (list(item.supporting) == sorted(item.supporting)) == (order == "forward")
    places = sorted(item.supporting)
    assert places == [1 + turn * (gap + 1) for turn in range(hops + 1)] and len(texts) == places[-1] + 2

    # the noise names nothing
    noise = re.sub(ASSIGNMENT[form], "", " ".join(texts))
    assert not re.search(r"\d|VAR|[A-Z]{2}", noise) and not any(v.lower() in noise.lower() for v in chain)
    assert all(count_words(text) <= max(chunk_tokens, 20) for text in texts)

    if form == "all":
        assert value in item.question and item.answers == tuple(chain)
        assert not any(variable in item.question for variable in chain)
    else:
        assert item.question == f"What is the value of {chain[-1]}?" and item.answers == (value,)


def test_all_combinations_with_ids_of_their_own():
    items = make([1, 2, 4], ["forward", "shuffled"], count=3)
    assert len(items) == 18
    kept, skipped = check_items(items)
    assert kept == items and not skipped
    facts = [(i.meta["hops"], i.meta["order"], i.meta["gap"], i.meta["form"]) for i in items]
    assert facts[0] == (1, "forward", 1, "all") and len(set(facts)) == 6


@pytest.mark.parametrize("form", ["all", "value"])
def test_the_same_seed_gives_the_same_items_and_names_change_with_every_item(form):
    items = make(count=20, form=form)
    assert items == make(count=20, form=form) != make(count=20, form=form, seed=1)
    assert len({tuple(i.meta["chain"]) for i in items}) == 20
    assert len({i.meta["value"] for i in items}) == 20
    assert len({i.passages for i in items}) == 20


def test_data_sets_of_two_names_share_no_id():
    (usual,), (other,) = make(), make(dataset="vt_far")
    assert (usual.dataset, other.dataset, usual.meta["task"]) == ("variable_tracking", "vt_far", "vt")
    assert usual.id != other.id and usual.passages == other.passages
    with pytest.raises(OptionError, match="name is blank"):
        make(dataset="")


def test_two_statements_shuffled_are_turned_round():
    (item,) = make([1], ["shuffled"])
    assert item.supporting == (3, 1)


def test_passages_are_filled_by_the_counter_given():
    (item,) = make(count_tokens=len, chunk_tokens=400)
    assert all(300 < len(p.text) <= 400 for p in item.passages)
    assert count_words("X1 is 7, no?") == 6


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"hops": []}, "hops is"),
        ({"hops": [0]}, "from 1 to 20"),
        ({"hops": [21]}, "from 1 to 20"),
        ({"hops": [2, 2]}, "each once"),
        ({"orders": ["foward"]}, "did you mean 'forward'"),
        ({"orders": "forward"}, "give a list"),
        ({"form": "values"}, "did you mean 'value'"),
        ({"gap": -1}, "gap is -1"),
        ({"count": 0}, "count is 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ],
)
def test_values_outside_their_range(options, part):
    with pytest.raises(OptionError, match=part):
        make(**options)

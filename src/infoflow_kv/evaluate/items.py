"""The record that every laboratory input becomes, from whatever file or generator, and the checks on a list of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.metrics import normalise


@dataclass(frozen=True, slots=True)
class Passage:
    """One text of an item's context; it becomes one chunk or, if long, several."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its gold answers and its context.

    `id` is unique in a run. `supporting` are the indices of the gold passages; empty means unknown. `group` is the
    cluster for the bootstrap: items that share a document share it; empty means the item alone. `instruction` is the
    record's own, where it has one. `meta` holds facts of the task; nothing in it is shown to the model.
    """

    id: str
    dataset: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    supporting: tuple[int, ...] = ()
    group: str = ""
    instruction: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


def check_items(items: Sequence[Item], places: Sequence[str] = ()) -> tuple[list[Item], dict[str, str]]:
    """Return the items that can be scored, and why each of the others (by id) was left out.

    Golds that normalise to nothing are removed, since no prediction can score on them, and an item without any other
    is left out. The letters of multiple-choice items (`meta["choices"]`) are kept as they are: "A" is an article to
    the normalisation, but letters are compared as letters. `places` says for people where each item stands.

    Raises OptionError for an id that occurs twice and for `supporting` outside the passages.
    """
    if places and len(places) != len(items):
        raise OptionError(f"{len(places)} places were given for {len(items)} items; give one each, or none")
    kept: list[Item] = []
    skipped: dict[str, str] = {}
    first_places: dict[str, str] = {}
    for number, item in enumerate(items, start=1):
        place = places[number - 1] if places else f"item {number}"
        if item.id in first_places:
            raise OptionError(
                f"{place}: the id '{item.id}' is taken by {first_places[item.id]}; every item of a run needs its own"
            )
        first_places[item.id] = place
        outside = [index for index in item.supporting if not 0 <= index < len(item.passages)]
        if outside:
            raise OptionError(
                f"{place}: supporting names passage {outside[0]} of item '{item.id}', which has "
                f"{len(item.passages)}; give indices from 0 to {len(item.passages) - 1}"
            )
        answers = tuple(a for a in item.answers if normalise(a) or (a and "choices" in item.meta))
        if answers:
            kept.append(item if answers == item.answers else replace(item, answers=answers))
        elif item.answers:
            shown = ", ".join(repr(answer) for answer in item.answers[:3])
            skipped[item.id] = f"{place}: no gold answer is left once normalised (given: {shown}); nothing could score"
        else:
            skipped[item.id] = f"{place}: no gold answer"
    return kept, skipped


def with_passages(
    item: Item, passages: Sequence[Passage], sources: Sequence[int | None], meta: Mapping[str, Any]
) -> Item:
    """Return the item over other passages, with every index of a passage, in `meta` too, brought up to date.

    `sources[i]` is the index that passage `i` had in the item, None for one that is new; `meta` is added. A hop
    whose passage is gone has the index None. What names no passage by its index, in a user's `meta`, stays as it is.
    """
    moved = {old: new for new, old in enumerate(sources) if old is not None}

    def place(index: Any) -> Any:
        return moved.get(index) if type(index) is int else index

    facts = dict(item.meta)
    if isinstance(facts.get("hops"), list):
        facts["hops"] = [
            {**hop, "passage": place(hop["passage"])} if isinstance(hop, dict) and "passage" in hop else hop
            for hop in facts["hops"]
        ]
    if isinstance(facts.get("passage_ids"), list) and len(facts["passage_ids"]) == len(item.passages):
        facts["passage_ids"] = [None if old is None else facts["passage_ids"][old] for old in sources]
    if "needle_passage" in facts:
        facts["needle_passage"] = place(facts["needle_passage"])
    return replace(
        item,
        passages=tuple(passages),
        supporting=tuple(moved[index] for index in item.supporting),
        meta={**facts, **meta},
    )

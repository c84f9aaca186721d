"""The record that every laboratory input becomes, from whatever file or generator, and the checks on a list of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.metrics import normalise

POOLED = "pooled"
"""The name of all data sets together in scores; no data set may have it."""

CHOICE = "choice"
"""What `meta["task"]` says of items whose answer is one of LETTERS."""

LETTERS = "ABCD"


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

    Golds that no prediction can score on are removed, and an item without any other is left out: those that normalise
    to nothing and, of items that are scored by the letter (see `is_choice`), all that is none of LETTERS. `places` says
    for people where each item stands.

    Raises OptionError for an id that occurs twice, for `supporting` outside the passages and for a data set that is
    named like all of them together (see `check_dataset`).
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
        check_dataset(item.dataset, place)
        outside = [index for index in item.supporting if not 0 <= index < len(item.passages)]
        if outside:
            raise OptionError(
                f"{place}: supporting names passage {outside[0]} of item '{item.id}', which has "
                f"{len(item.passages)}; give indices from 0 to {len(item.passages) - 1}"
            )
        letters = is_choice(item.meta)
        # "A" is an article to the normalisation, but letters are compared as letters.
        answers = tuple(a for a in item.answers if (a in tuple(LETTERS) if letters else normalise(a)))
        if answers:
            kept.append(item if answers == item.answers else replace(item, answers=answers))
        elif item.answers:
            shown = ", ".join(repr(answer) for answer in item.answers[:3])
            if letters:
                why = f"no gold answer is one of the letters {', '.join(LETTERS)}"
            else:
                why = "no gold answer is left once normalised"
            hint = '; write "task": "choice" for letters' if not letters and set(item.answers) & set(LETTERS) else ""
            skipped[item.id] = f"{place}: {why} (given: {shown}); nothing could score{hint}"
        else:
            skipped[item.id] = f"{place}: no gold answer"
    return kept, skipped


def is_choice(meta: Mapping[str, Any]) -> bool:
    """True for what is scored by the letter that the prediction gives, by nothing else."""
    return bool(meta.get("task") == CHOICE)


def check_dataset(name: str, place: str) -> None:
    """Nothing; OptionError for the name that scores give all data sets together."""
    if name == POOLED:
        raise OptionError(
            f"{place}: a data set is named '{POOLED}', as scores name all data sets together; give it another name"
        )


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


def facts(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What of an item's meta belongs into a row: numbers and short words to group by, no copy of the data set."""
    return {
        key: value
        for key, value in meta.items()
        if isinstance(value, int)
        or (isinstance(value, float) and math.isfinite(value))
        or (isinstance(value, str) and len(value) <= 40)
    }

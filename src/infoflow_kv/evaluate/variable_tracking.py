"""Variable tracking after RULER's `vt`: one assignment a passage, so that every hop needs attention across chunks."""

import itertools
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.evaluate.items import Item, Passage

Order = Literal["forward", "shuffled"]
Form = Literal["all", "value"]

TASK = "vt"
"""What `meta["task"]` says of these items."""

_WORD = re.compile(r"\w+|[^\w\s]")
# Noise: 12 x 12 x 12 sentences without digits and without words that could be taken for a variable.
_WHO = """
    the old gardener|a patient clerk|the miller's daughter|our neighbour|the ferry pilot|a travelling painter|
    the village doctor|a quiet student|the night watchman|the baker's son|a retired sailor|the station keeper
"""
_DID = """
    mended a wooden chair|counted the passing carts|wrote a long letter|swept the stone steps|fed the grey pigeons|
    watched the slow rain|folded the clean linen|tuned a small harp|carried water|sorted the winter apples|
    read an old almanac|polished the brass lamp
"""
_WHERE = """
    behind the chapel|near the harbour wall|under the chestnut tree|beside the mill pond|in the upper room|
    at the edge of the market|before the evening bell|after the morning frost|by the open window|
    along the narrow lane|on the wide porch|outside the schoolhouse
"""


def count_words(text: str) -> int:
    """Return the number of words and punctuation marks: a tokenizer-free estimate of tokens."""
    return len(_WORD.findall(text))


def tracking_items(
    hops: Sequence[int],
    orders: Sequence[Order] = ("forward", "shuffled"),
    *,
    gap: int,
    count: int,
    chunk_tokens: int,
    seed: int = 0,
    form: Form = "all",
    count_tokens: Callable[[str], int] = count_words,
    dataset: str = "variable_tracking",
) -> list[Item]:
    """Return `count` items for each number of hops and order: a value goes from variable to variable, a passage each.

    `hops` h gives h + 1 variables in h + 1 passages, `gap` passages of noise between two and one at either end. In
    order `forward` each is assigned before it is used; `shuffled` is any other order. Names, values and noise are new
    in every item. `supporting` follows the chain, not the place.

    Form `all` (RULER's) asks for all variables with the value: the answers are all names, and all must be found.
    Form `value`, for small models, asks for the last variable's value: one answer. No worked example is given.
    A passage has at most `chunk_tokens` tokens, or its one sentence. `dataset` names the items' data set and
    begins their ids. Raises OptionError for values outside their range.
    """
    _check(hops, orders, gap, count, chunk_tokens, form)
    if not dataset.strip():
        raise OptionError("the data set's name is blank; give it a name")
    return [
        _item(num_hops, order, gap, number, chunk_tokens, seed, form, count_tokens, dataset)
        for num_hops, order, number in itertools.product(hops, orders, range(count))
    ]


def _item(
    hops: int,
    order: Order,
    gap: int,
    number: int,
    chunk_tokens: int,
    seed: int,
    form: Form,
    count_tokens: Callable[[str], int],
    dataset: str,
) -> Item:
    name = f"{form}-{hops}hop-{order}-gap{gap}-s{seed}.{number}"
    rng = random.Random(f"vt-{name}")
    chain = _names(rng, hops + 1, form)
    value = str(rng.randrange(10_000, 100_000))
    sources = [value, *chain[:-1]]
    if form == "all":
        statements = [f"VAR {variable} = {source}." for variable, source in zip(chain, sources, strict=True)]
        question = f"Which variables have the value {value}? Name all of them."
        answers = tuple(chain)
    else:
        statements = [f"{variable} is {source}." for variable, source in zip(chain, sources, strict=True)]
        question = f"What is the value of {chain[-1]}?"
        answers = (value,)
    turns = list(range(len(chain)))
    while order == "shuffled" and turns == sorted(turns):
        rng.shuffle(turns)
    texts = [_text("", rng, chunk_tokens, count_tokens)]
    places = [0] * len(chain)
    for turn, hop in enumerate(turns):
        texts += [_text("", rng, chunk_tokens, count_tokens) for _ in range(gap if turn else 0)]
        places[hop] = len(texts)
        texts.append(_text(statements[hop], rng, chunk_tokens, count_tokens))
    texts.append(_text("", rng, chunk_tokens, count_tokens))
    return Item(
        id=f"{dataset}-{name}",
        dataset=dataset,
        question=question,
        answers=answers,
        passages=tuple(Passage("", text) for text in texts),
        supporting=tuple(places),
        meta={
            "task": TASK,
            "hops": hops,
            "order": order,
            "gap": gap,
            "form": form,
            "chain": chain,
            "value": value,
        },
    )


def _names(rng: random.Random, count: int, form: Form) -> list[str]:
    """Return different names: five capitals, or X and a number, of which none begins another."""
    if form == "value":
        return [f"X{number}" for number in rng.sample(range(10, 100), count)]
    names: set[str] = set()
    while len(names) < count:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name.lower() not in _WHO + _DID + _WHERE:  # scoring by containment ignores case
            names.add(name)
    return rng.sample(sorted(names), count)


def _text(statement: str, rng: random.Random, chunk_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return noise up to the number of tokens, with the statement at a random sentence end in it."""
    sentences: list[str] = []
    room = chunk_tokens - (count_tokens(" " + statement) if statement else 0)
    while True:
        sentence = _noise(rng)
        room -= count_tokens(" " + sentence)
        if room < 0 and (sentences or statement):
            break
        sentences.append(sentence)
    if statement:
        sentences.insert(rng.randrange(len(sentences) + 1), statement)
    return " ".join(sentences)


def _noise(rng: random.Random) -> str:
    who, did, where = (rng.choice([part.strip() for part in words.split("|")]) for words in (_WHO, _DID, _WHERE))
    return f"{who[0].upper()}{who[1:]} {did} {where}."


def _check(hops: Sequence[int], orders: Sequence[Order], gap: int, count: int, chunk_tokens: int, form: Form) -> None:
    for name, values in {"hops": hops, "orders": orders}.items():
        if isinstance(values, str) or not values or len(set(values)) != len(values):
            raise OptionError(f"{name} is {values!r}; give a list of at least one value, each once")
    for order in orders:
        if order not in get_args(Order):
            raise unknown_name("order", order, get_args(Order))
    if form not in get_args(Form):
        raise unknown_name("form", form, get_args(Form))
    if min(hops) < 1 or max(hops) > 20:
        raise OptionError(f"hops is {list(hops)}; each must be from 1 to 20")
    if gap < 0:
        raise OptionError(f"gap is {gap}; give the number of noise passages between two hops, 0 or more")
    for name, number in {"count": count, "chunk_tokens": chunk_tokens}.items():
        if number < 1:
            raise OptionError(f"{name} is {number}; a whole number of at least 1 is needed")

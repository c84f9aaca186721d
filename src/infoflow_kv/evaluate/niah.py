"""Needle in a haystack: a random fact put into real prose, with the place inside the chunk under control.

Everything is decided on sentence ends of the text; passages are tokenised once, by whoever runs them.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from infoflow_kv.errors import DocumentError, OptionError, unknown_name
from infoflow_kv.evaluate.items import Item, Passage
from infoflow_kv.evaluate.passages import pack, sentences

Kind = Literal["one", "split", "two-chunk"]
Place = Literal["start", "middle", "end"]

TASK = "niah"
"""What `meta["task"]` says of these items."""

# Kept free in a passage: a chunk ends in a blank line, and where sentences join, a token more may come out.
_MARGIN_TOKENS = 4

_CITY_WORDS = """
    Aberdeen Adelaide Bergen Bilbao Bologna Bristol Calgary Cardiff Cordoba Dakar Darwin Denver Dresden Dublin Durban
    Galway Geneva Genoa Halifax Hamburg Havana Helsinki Hobart Jakarta Krakow Lagos Leipzig Lima Lyon Malaga Manila
    Marseille Montreal Nairobi Nantes Osaka Oslo Ottawa Perth Porto Quito Riga Rotterdam Seville Stockholm Sydney
    Tampere Toronto Trieste Tunis Turin Utrecht Valencia Vilnius Warsaw Zagreb
"""
_NAME_WORDS = """
    Agnes Albert Beatrice Clara Edgar Edith Elsie Ernest Felix Florence Gilbert Hector Hilda Hugo Ivor Josephine Leonard
    Lydia Mabel Marion Maurice Nora Oscar Philippa Quentin Ralph Rosalind Rupert Sybil Theodore Ursula Winifred
"""
_CITIES = _CITY_WORDS.split()
_NAMES = _NAME_WORDS.split()


@dataclass(frozen=True, slots=True)
class _Hay:
    """Whole sentences and their tokens; `before[i]` tokens stand before sentence `i`."""

    sentences: tuple[str, ...]
    before: tuple[int, ...]
    parts: tuple[range, ...]

    @property
    def tokens(self) -> int:
        return self.before[-1]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A gap between two sentences: before sentence `index`, counted to passage `part`."""

    part: int
    index: int


@dataclass(frozen=True, slots=True)
class _Cell:
    """One combination of what is varied."""

    length: int
    round: int
    kind: Kind
    place: Place | None
    depth: float


def read_essays(folder: str | Path) -> list[str]:
    """Return the texts of the folder's `.txt` files, by name. Raises DocumentError, in one line, for what is no text.

    >>> read_essays("needle/essays")  # doctest: +SKIP
    """
    folder = Path(folder)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise DocumentError(f"'{folder}' {state}; give a folder of .txt files to make haystacks of")
    texts = []
    for path in sorted(folder.glob("*.txt")):
        try:
            text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise DocumentError(f"'{path}' is not UTF-8 text; convert it to UTF-8 or take it out") from error
        except OSError as error:
            raise DocumentError(f"'{path}' cannot be read: {error.strerror or error}") from error
        if not text.strip():
            raise DocumentError(f"'{path}' has no text; fill it or take it out")
        texts.append(text)
    if not texts:
        raise DocumentError(f"'{folder}' holds no .txt file; give a folder of .txt files to make haystacks of")
    return texts


def needle_items(
    essays: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: int,
    kinds: Sequence[Kind] = ("one",),
    *,
    chunk_tokens: int,
    count_tokens: Callable[[str], int],
    places: Sequence[Place | None] = (None,),
    seed: int = 0,
    dataset: str = TASK,
) -> list[Item]:
    """Return one item for each length, seed, kind, place and depth: hay in passages, and a random value to find.

    - `one`: a sentence with city and value; `split`: that sentence cut by a passage boundary, the city before, the
      value after; `two-chunk`: who keeps the city in one passage, that person's value in another.
    - The hay starts at a random sentence of the essays and runs on in order; with the needle it has at most `length`
      tokens, and one more sentence would exceed them. All items of a seed read the same hay, which is their group.
    - The needle stands at the sentence end nearest to `depth` (0..1 of the tokens) among those that `places` allows:
      start, middle or end of a passage, None for any. `split` has a place of its own. Of `two-chunk`, the value stands
      there; the other sentence is at such a place of another passage, drawn at random.
    - Passages have at most `chunk_tokens` tokens with their needle and the blank line that ends a chunk, and no titles;
      sentences are never cut. So a passage is one chunk in every run whose chunks are as large or larger.

    `count_tokens` is called once for each sentence of the essays and of the needles. `supporting` is in the order of
    the fact (city first). `dataset` names the items' data set and begins their ids.
    Raises OptionError for values outside their range, for essays too short, passages too few and chunks too small.
    """
    _check(essays, lengths, depths, seeds, kinds, places, chunk_tokens)
    if not dataset.strip():
        raise OptionError("the data set's name is blank; give it a name")
    pool = [sentence for essay in essays for sentence in _essay_sentences(essay)]
    counts = [count_tokens(sentence) for sentence in pool]
    if sum(counts) < max(lengths):
        raise OptionError(
            f"the essays have {sum(counts):,} tokens and a haystack of {max(lengths):,} was asked for; "
            "give more text or shorter lengths"
        )
    items = []
    for cell in _cells(lengths, depths, seeds, kinds, places):
        start = random.Random(f"hay/{seed}/{cell.round}").randrange(len(pool))
        items.append(_item(cell, seed, pool, counts, start, chunk_tokens, count_tokens, dataset))
    return items


def _cells(
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: int,
    kinds: Sequence[Kind],
    places: Sequence[Place | None],
) -> Iterator[_Cell]:
    # Seeds outermost: a run cut short, or limited, has whole grids of lengths and depths.
    for number, length, kind in itertools.product(range(seeds), lengths, kinds):
        for place, depth in itertools.product((None,) if kind == "split" else places, depths):
            yield _Cell(int(length), number, kind, place, float(depth))


def _item(
    cell: _Cell,
    seed: int,
    pool: Sequence[str],
    counts: Sequence[int],
    start: int,
    chunk_tokens: int,
    count_tokens: Callable[[str], int],
    dataset: str,
) -> Item:
    name = f"{cell.kind}-{cell.length}-{cell.place or 'any'}-d{cell.depth}-s{seed}.{cell.round}"
    rng = random.Random(f"niah-{name}")
    most = _window(pool, counts, start, cell.length, chunk_tokens)
    city, person, value = _fact(rng, "".join(most.sentences))
    needles: tuple[str, ...]
    question = f"What is the special magic {city} number?"
    if cell.kind == "two-chunk":
        question = f"What is the special magic number of the keeper of {city}?"
        needles = (f"The keeper of {city} is {person}.", f"{person}'s special magic number is {value}.")
    else:
        told = f"Old travellers report that the special magic {city} number"
        needles = (told, f"is {value}.") if cell.kind == "split" else (f"{told} is {value}.",)
    sizes = [count_tokens(" " + needle) for needle in needles]
    added = sum(sizes)
    room = chunk_tokens - max(sizes) - _MARGIN_TOKENS
    hay = _window(pool, counts, start, cell.length - added, room)
    if not hay.sentences:
        raise OptionError(f"a length of {cell.length} tokens leaves no room for a sentence of hay; ask for more")
    longest = max(after - before for before, after in itertools.pairwise(hay.before))
    if longest > room:
        raise OptionError(
            f"chunk_tokens is {chunk_tokens} and a sentence of the essays has {longest} tokens, which leaves no room "
            f"for a needle beside it; give at least {longest + chunk_tokens - room}"
        )
    slots = _slots_of(cell, hay, rng)
    texts = _texts(hay, dict(zip(slots, needles, strict=True)))
    # The needle's place is that of the sentence with the value; of a split one, that of its beginning.
    main, needle = (slots[0], needles[0]) if cell.kind == "split" else (slots[-1], needles[-1])
    text = texts[main.part]
    offset = text.index(needle)
    meta: dict[str, Any] = {
        "task": TASK,
        "kind": cell.kind,
        "length": cell.length,
        "depth": cell.depth,
        "place": cell.place,
        "measured_depth": hay.before[main.index] / hay.tokens,
        "tokens": hay.tokens + added,
        "needle_passage": main.part,
        "offset_characters": offset,
        "passage_characters": len(text),
        "boundary_distance_characters": min(offset, len(text) - offset - len(needle)),
        "city": city,
        "value": value,
    }
    return Item(
        id=f"{dataset}-{name}",
        dataset=dataset,
        question=question,
        answers=(value,),
        passages=tuple(Passage("", text) for text in texts),
        supporting=tuple(slot.part for slot in slots),
        group=f"hay-s{seed}.{cell.round}",
        meta=meta | ({"person": person} if cell.kind == "two-chunk" else {}),
    )


def _essay_sentences(essay: str) -> list[str]:
    """Return the sentences, each with white space before it, so that they join in any order of essays."""
    found = sentences(essay.strip())
    return ["\n\n" + found[0], *found[1:]] if found else []


def _window(pool: Sequence[str], counts: Sequence[int], start: int, budget: int, room: int) -> _Hay:
    """Return as many sentences from `start` on as fit into the budget; after the last one the first follows.

    `room`: tokens of hay for which a passage has room beside a needle.
    """
    before = [0]
    indices = [*range(start, len(pool)), *range(start)]
    for index in indices:
        if before[-1] + counts[index] > budget:
            break
        before.append(before[-1] + counts[index])
    indices = indices[: len(before) - 1]
    parts = pack([counts[index] for index in indices], room)
    return _Hay(tuple(pool[index] for index in indices), tuple(before), tuple(parts))


def _fact(rng: random.Random, hay: str) -> tuple[str, str, str]:
    """Return a city, a person and a value of 7 digits, none of which the hay speaks of."""
    cities = [city for city in _CITIES if city not in hay]
    people = [person for person in _NAMES if person not in hay]
    if not cities or not people:
        raise OptionError("the essays speak of every city or name that needles are made of; give other texts")
    city, person = rng.choice(cities), rng.choice(people)
    while (value := str(rng.randrange(1_000_000, 10_000_000))) in hay:
        pass
    return city, person, value


def _slots_of(cell: _Cell, hay: _Hay, rng: random.Random) -> tuple[_Slot, ...]:
    if cell.kind != "one" and len(hay.parts) < 2:
        raise OptionError(
            f"a '{cell.kind}' needle needs 2 passages and {cell.length} tokens are only one; "
            "ask for more tokens or for smaller chunks"
        )
    if cell.kind == "split":
        ends = [_Slot(part, indices.stop) for part, indices in enumerate(hay.parts[:-1])]
        end = _nearest(ends, cell, hay, cell.depth)
        return end, _Slot(end.part + 1, end.index)
    allowed = [slot for part in range(len(hay.parts)) for slot in _slots_in(part, cell.place, hay)]
    slot = _nearest(allowed, cell, hay, cell.depth)
    if cell.kind == "one":
        return (slot,)
    others = [other for other in allowed if other.part != slot.part]
    return _nearest(others, cell, hay, rng.random()), slot


def _slots_in(part: int, place: Place | None, hay: _Hay) -> list[_Slot]:
    indices = hay.parts[part]
    if place == "start":
        return [_Slot(part, indices.start)]
    if place == "end":
        return [_Slot(part, indices.stop)]
    if place is None:
        return [_Slot(part, index) for index in range(indices.start, indices.stop + 1)]
    half = (hay.before[indices.start] + hay.before[indices.stop]) / 2
    inner = range(indices.start + 1, indices.stop)
    return [_Slot(part, min(inner, key=lambda index: abs(hay.before[index] - half)))] if inner else []


def _nearest(slots: Sequence[_Slot], cell: _Cell, hay: _Hay, depth: float) -> _Slot:
    if not slots:
        raise OptionError(
            f"too few passages have a {cell.place} for the '{cell.kind}' needle at {cell.length} tokens: it takes two "
            "sentences of hay in each; ask for more tokens or for chunks of another size"
        )
    return min(slots, key=lambda slot: abs(hay.before[slot.index] - depth * hay.tokens))


def _texts(hay: _Hay, inserted: dict[_Slot, str]) -> list[str]:
    texts = []
    for part, indices in enumerate(hay.parts):
        words = []
        for index in range(indices.start, indices.stop + 1):
            if needle := inserted.get(_Slot(part, index)):
                words.append(" " + needle)
            if index < indices.stop:
                words.append(hay.sentences[index])
        texts.append("".join(words).strip())
    return texts


def _check(
    essays: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: int,
    kinds: Sequence[Kind],
    places: Sequence[Place | None],
    chunk_tokens: int,
) -> None:
    if isinstance(essays, str) or not any(essay.strip() for essay in essays):
        raise OptionError("no essays with text were given; give a list of texts to make haystacks of")
    for name, values in {"lengths": lengths, "depths": depths, "kinds": kinds, "places": places}.items():
        if isinstance(values, str) or not values or len(set(values)) != len(values):
            raise OptionError(f"{name} is {values!r}; give a list of at least one value, each once")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise OptionError(f"a depth of {depth} was given; depths are shares from 0 to 1")
    for kind in kinds:
        if kind not in get_args(Kind):
            raise unknown_name("kind of needle", kind, get_args(Kind))
    for place in places:
        if place is not None and place not in get_args(Place):
            raise unknown_name("place in the chunk", place, get_args(Place))
    for name, number in {"seeds": seeds, "chunk_tokens": chunk_tokens, "the least of lengths": min(lengths)}.items():
        if number < 1:
            raise OptionError(f"{name} is {number}; a whole number of at least 1 is needed")

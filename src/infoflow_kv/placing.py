"""Where a request's KV comes to lie: all of it in this process, or (spreading.py) over several ranks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from infoflow_kv.decoding import Sampler
from infoflow_kv.models import LanguageModel, RotaryTables
from infoflow_kv.positions import assemble_one_by_one, cells_of, reserve
from infoflow_kv.recipes import Recipe
from infoflow_kv.records import Context, Prompt, Selection
from infoflow_kv.supply import Parts, Supply


class Place(Protocol):
    """The steps of a request that depend on where its KV lies. The engine alone knows their order."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What the steps inside are called in errors and counts."""
        ...

    def begin(self, prompt: Prompt, recipe: Recipe, num_new: int, seed: int, *, in_laboratory: bool) -> None:
        """Nothing; ParallelError where the ranks that share the request were given different ones, OptionError where
        they cannot answer it (what only the laboratory asks for)."""
        ...

    def parts(self, prompt: Prompt, needs_movement: bool) -> Parts:
        """The KV of the request's head and chunks, from the store or prefilled."""
        ...

    def assemble(
        self, prompt: Prompt, given: list[Parts], tables: RotaryTables, num_slots: int, exact_tokens: int, *, last: bool
    ) -> tuple[Context, Parts]:
        """The parts at the tables' positions as one context, and the parts. They are taken out of the list `given`.
        `last`: nobody needs them again, so that their KV may be let go on the way."""
        ...

    def reserve(self, prompt: Prompt, num_slots: int) -> Context:
        """An unfilled context for an ordinary prefill of the prompt."""
        ...

    def request(self, told: object) -> AbstractContextManager[None]:
        """Lasts from a request's beginning to its last token; `told`: what else all ranks must have been given alike.
        Left with an error in the middle, it ends the other ranks too."""
        ...

    def same(self, selection: Selection) -> None:
        """Nothing; ParallelError where the ranks chose differently, as they might on unlike hardware."""
        ...

    def decoding(self, tokens: Iterator[int]) -> Iterator[int]:
        """The tokens, made in a phase of that name."""
        ...

    def picks(self, pick: Sampler) -> Sampler:
        """How the next token is chosen, the same on all ranks. May be given no logits where other ranks have them."""
        ...


class Here:
    """All in this process."""

    def __init__(self, model: LanguageModel, supply: Supply) -> None:
        self._model, self._supply = model, supply

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, prompt: Prompt, recipe: Recipe, num_new: int, seed: int, *, in_laboratory: bool) -> None:
        return None

    def parts(self, prompt: Prompt, needs_movement: bool) -> Parts:
        parts = self._supply.parts(prompt)
        return self._supply.with_movement(parts) if needs_movement else parts

    def assemble(
        self, prompt: Prompt, given: list[Parts], tables: RotaryTables, num_slots: int, exact_tokens: int, *, last: bool
    ) -> tuple[Context, Parts]:
        parts = given.pop()
        identities, taken = parts.identities, iter(parts.all)
        if last:
            taken, parts = parts.hand_over()
        context = assemble_one_by_one(self._model, identities, taken, tables, num_slots, exact_tokens)
        return replace(context, cells=cells_of(prompt)), parts

    def reserve(self, prompt: Prompt, num_slots: int) -> Context:
        return reserve(self._model, prompt, num_slots, self._supply.inputs(prompt))

    def request(self, told: object) -> AbstractContextManager[None]:
        return nullcontext()

    def same(self, selection: Selection) -> None:
        return None

    def decoding(self, tokens: Iterator[int]) -> Iterator[int]:
        return tokens

    def picks(self, pick: Sampler) -> Sampler:
        return pick

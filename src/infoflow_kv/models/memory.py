"""Where a request's keys and values lie, as the forward of rows sees it.

Here: in one process, slot by slot. Ranks that share a request give a `Memory` of their own (`parallel/`): the forward,
the selectors, repair and decoding are the same for both.
"""

from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import torch

from infoflow_kv.models.hooks import AttentionInput
from infoflow_kv.ops import Staircase, attention_mass
from infoflow_kv.ops.mass import Reduction
from infoflow_kv.records import Context
from infoflow_kv.shapes import Bool, Float, Int, Tensor

Spreading = Literal["even", "owner", "repeat"]
"""Who runs the rows of a forward where several ranks share a request: each rank as many as the others; each the rows of
its own slots; every rank all of them. One process runs all rows anyway."""

Measure = Literal["V", "K"]


@runtime_checkable
class Rows(Protocol):
    """The rows of one forward, ascending by rank, and how they read and write the memory."""

    @property
    def ranks(self) -> Int[Tensor, " rows"]:
        """Of all rows of the request, wherever they run."""
        ...

    @property
    def here(self) -> Int[Tensor, " here"] | None:
        """Indices of the rows that run in this process; None for all."""
        ...

    def write(self, given: AttentionInput, which: Bool[Tensor, " rows"] | None = None) -> None:
        """The rows' keys and values go into their slots; of `which` rows, where given."""
        ...

    def attend(self, given: AttentionInput) -> Float[Tensor, "heads here head_dim"]:
        """The output of the rows that run here, over all slots that each of them sees."""
        ...

    def mass(
        self,
        given: AttentionInput,
        num_context: int,
        reduction: Reduction,
        weight: Float[Tensor, "own_kv_heads own_context"] | None,
    ) -> tuple[Float[Tensor, " own_context"], Float[Tensor, "heads here head_dim"]]:
        """The layer's score of the context slots that lie here (`ops.attention_mass`), and the output of `attend`.
        `weight` is that of the K/V heads and slots that lie here. See `Memory.whole`."""
        ...

    def deviation(self, given: AttentionInput, measure: Measure) -> Float[Tensor, " rows"]:
        """Σ (new − stored)² over heads and dimensions of each row's V or K, before it is written."""
        ...

    def keep(self, kept: Int[Tensor, " kept"]) -> "tuple[Rows, Tensor]":
        """The rows that go on (ascending indices of all rows), and indices of those that run here among those that ran
        here so far."""
        ...

    def last(self, count: int) -> "Rows":
        """The last `count` rows alone."""
        ...


@runtime_checkable
class Memory(Protocol):
    """The keys and values of one request."""

    @property
    def num_slots(self) -> int:
        """Slots of the request, wherever they lie."""
        ...

    def rows(self, ranks: Int[Tensor, " rows"], spreading: Spreading = "even") -> Rows:
        """The rows of a forward; `ranks` ascend strictly."""
        ...

    def own_context(self, num_context: int) -> Int[Tensor, " own_context"]:
        """The context slots that lie here, ascending."""
        ...

    def own_values(self, layer: int) -> Float[Tensor, "own_kv_heads own_slots head_dim"]:
        """A layer's values as they lie here; those of `own_context` come first."""
        ...

    def whole(self, scores: Float[Tensor, "some own_context"], num_context: int) -> Float[Tensor, "some context"]:
        """Scores of all context slots, from those that every process has of its own."""
        ...


class LocalRows:
    """Rows of a memory in this process."""

    here = None

    def __init__(self, keys: Tensor, values: Tensor, ranks: Int[Tensor, " rows"]) -> None:
        self.ranks = ranks
        self._keys, self._values = keys, values
        self._stairs = Staircase(ranks)

    def write(self, given: AttentionInput, which: Bool[Tensor, " rows"] | None = None) -> None:
        key, value, slots = given.key, given.value, self.ranks
        if which is not None:
            key, value, slots = key[:, which], value[:, which], slots[which]
        self._keys[given.layer].index_copy_(1, slots, key)
        self._values[given.layer].index_copy_(1, slots, value)

    def attend(self, given: AttentionInput) -> Float[Tensor, "heads here head_dim"]:
        return self._stairs.attend(given.query, self._keys[given.layer], self._values[given.layer], given.spec)

    def mass(
        self,
        given: AttentionInput,
        num_context: int,
        reduction: Reduction,
        weight: Float[Tensor, "own_kv_heads own_context"] | None,
    ) -> tuple[Float[Tensor, " own_context"], Float[Tensor, "heads here head_dim"]]:
        keys, values = self._keys[given.layer], self._values[given.layer]
        return attention_mass(given.query, keys, values, self.ranks, num_context, given.spec, reduction, weight)

    def deviation(self, given: AttentionInput, measure: Measure) -> Float[Tensor, " rows"]:
        new, stored = (given.value, self._values) if measure == "V" else (given.key, self._keys)
        return (new.float() - stored[given.layer][:, self.ranks].float()).square().sum(dim=(0, 2))

    def keep(self, kept: Int[Tensor, " kept"]) -> tuple[Rows, Tensor]:
        return LocalRows(self._keys, self._values, self.ranks[kept]), kept

    def last(self, count: int) -> Rows:
        return LocalRows(self._keys, self._values, self.ranks[-count:])


class LocalMemory:
    """All slots in this process: keys and values `[layers, kv_heads, slots, head_dim]`, slot index == rank."""

    def __init__(
        self,
        keys: Float[Tensor, "layers kv_heads slots head_dim"],
        values: Float[Tensor, "layers kv_heads slots head_dim"],
    ) -> None:
        self.keys, self.values = keys, values
        self.num_slots = int(keys.shape[2])

    def rows(self, ranks: Int[Tensor, " rows"], spreading: Spreading = "even") -> Rows:
        return LocalRows(self.keys, self.values, ranks)

    def own_context(self, num_context: int) -> Int[Tensor, " own_context"]:
        return torch.arange(num_context, device=self.keys.device)

    def own_values(self, layer: int) -> Float[Tensor, "own_kv_heads own_slots head_dim"]:
        return self.values[layer]

    def whole(self, scores: Float[Tensor, "some own_context"], num_context: int) -> Float[Tensor, "some context"]:
        return scores


def memory_of(context: Context) -> Memory:
    """The memory of an assembled context."""
    return context.memory if context.memory is not None else LocalMemory(context.keys, context.values)


def without_rows(given: AttentionInput) -> AttentionInput:
    """A layer's input of no row: who has none still takes part in what the others exchange."""
    none = slice(0, 0)
    return replace(
        given,
        query=given.query[:, none],
        key=given.key[:, none],
        raw_key=given.raw_key[:, none],
        value=given.value[:, none],
    )

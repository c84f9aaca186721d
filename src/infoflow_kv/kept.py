"""Repaired contexts of earlier requests: a follow-up over the same documents repairs only what is new.

Context rows stand before the question, so their repair does not depend on it: rows that one question had repaired serve
the next one too. What is kept is a copy, and every request works on a copy of that.

A follow-up's answer depends on what was asked before: it is scored on, and stands on, more repaired rows than a fresh
request's. Contexts are kept per method, so that no method changes what another one gives.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.models import LanguageModel
from infoflow_kv.records import ChunkIdentity, Context, Selection, Span, VisualRows

if TYPE_CHECKING:
    from torch import Tensor

# What stands where, how RoPE treats a sequence of the request's length, and the method that repaired it.
ContextKey = tuple[tuple[ChunkIdentity, ...], str, str]


@dataclass(frozen=True, slots=True)
class Kept:
    """One repaired context. `repaired`: bool `[context]`, the rows that were recomputed. `exact_tokens`: leading tokens
    whose KV is what full prefill gives; all of them after a request at budget 1. `sensitivity`: see `Parts`."""

    keys: "Tensor"
    values: "Tensor"
    token_ids: "Tensor"
    spans: tuple[Span, ...]
    exact_tokens: int
    repaired: "Tensor"
    sensitivity: "Tensor | None" = None
    visual: VisualRows | None = None
    shift: int = 0
    cells: "tuple[Tensor, ...]" = ()

    @property
    def num_bytes(self) -> int:
        seen = () if self.visual is None else (self.visual.embeddings, self.visual.layer_rows)
        return sum(int(t.nbytes) for t in (self.keys, self.values, self.sensitivity, *seen) if t is not None)

    def without(self, chosen: Selection) -> Selection:
        """Those of the chosen rows that still have to be repaired. All of them where everything was chosen: only then
        is the context what full prefill gives."""
        reusable = int(self.token_ids.shape[0]) - self.exact_tokens
        if chosen.slots.numel() == reusable:
            return chosen
        is_new = ~self.repaired.to(chosen.slots.device)[chosen.slots]
        return replace(chosen, slots=chosen.slots[is_new])

    def context(self, model: LanguageModel, num_slots: int) -> Context:
        """A copy with room for a request of `num_slots`."""
        num_context = int(self.token_ids.shape[0])
        keys, values = model.empty_slots(num_slots)
        keys[:, :, :num_context] = self.keys[:, :, :num_context]
        values[:, :, :num_context] = self.values[:, :, :num_context]
        return Context(keys, values, self.token_ids, self.spans, self.exact_tokens, self.visual, self.shift, self.cells)


class KeptContexts:
    """The contexts of the latest requests, up to `max_bytes` of KV on the model's device; 0 keeps none. Safe to share
    between threads."""

    def __init__(self, max_bytes: int) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise OptionError(f"kept_bytes is {max_bytes!r}; expected a whole number of bytes, 0 to keep nothing")
        self.max_bytes = max_bytes
        self._entries: OrderedDict[ContextKey, Kept] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of KV that are kept now."""
        with self._lock:
            return sum(kept.num_bytes for kept in self._entries.values())

    def find(self, key: ContextKey) -> Kept | None:
        """The context of exactly these chunks in this order, if it is kept."""
        with self._lock:
            kept = self._entries.get(key)
            if kept is not None:
                self._entries.move_to_end(key)
            return kept

    def keep(self, key: ContextKey, kept: Kept) -> None:
        """Keeps a context instead of what was kept of these chunks, if it holds at least the rows of that; drops those
        that were not used for longest until all fit, and those of other weights, which nothing can find any more."""
        if kept.num_bytes > self.max_bytes:
            return
        with self._lock:
            model = key[0][0].model
            for other in [other for other in self._entries if other[0][0].model != model]:
                del self._entries[other]
            before = self._entries.get(key)
            # Two requests at a time: the second to end must not undo the first one's rows.
            if before is not None and not _holds(kept, before):
                return
            self._entries[key] = kept
            self._entries.move_to_end(key)
            total = sum(entry.num_bytes for entry in self._entries.values())
            while total > self.max_bytes:
                _, oldest = self._entries.popitem(last=False)
                total -= oldest.num_bytes

    def take(self, context: Context, trace: "Trace") -> None:
        """Keeps a copy of what a request leaves behind; makes none where it is too large, or where the request repaired
        nothing beside what is kept."""
        size = (context.keys.nbytes + context.values.nbytes) // context.keys.shape[2] * context.num_tokens
        with self._lock:
            is_there = trace.before is not None and self._entries.get(trace.key) is trace.before
        if size <= self.max_bytes and not (is_there and trace.slots.numel() == 0):
            self.keep(trace.key, keep_of(context, trace))

    def forget(self) -> None:
        """Nothing is kept any more."""
        with self._lock:
            self._entries.clear()


@dataclass(frozen=True, slots=True)
class Trace:
    """What a request would leave behind: under which key, on what it stood, and the rows that it repaired."""

    key: ContextKey
    before: Kept | None
    slots: "Tensor"
    sensitivity: "Tensor | None"


def keep_of(context: Context, trace: Trace) -> Kept:
    """A copy of a request's context, with the rows that it repaired beside those that were repaired before."""
    count = context.num_tokens
    if not bool((trace.slots < count).all()):
        raise ComputeError("a repaired row stands behind the context; nothing is kept")
    repaired = torch.zeros(count, dtype=torch.bool)
    if trace.before is not None:
        repaired |= trace.before.repaired
    repaired[trace.slots.cpu()] = True
    # All at once, each row saw the true KV of those before it: what full prefill gives.
    exact = count if trace.slots.numel() == context.reusable_tokens else context.exact_tokens
    keys, values = (x[:, :, :count].clone() for x in (context.keys, context.values))
    return Kept(
        keys, values, context.token_ids, context.spans, exact, repaired,
        trace.sensitivity, context.visual, context.shift, context.cells,
    )  # fmt: skip


def _holds(kept: Kept, before: Kept) -> bool:
    return kept.exact_tokens >= before.exact_tokens and not bool((before.repaired & ~kept.repaired).any())

"""Repaired contexts of earlier requests: a follow-up over the same documents repairs only what is new.

Context rows stand before the question, so their repair does not depend on it: rows that one question had repaired serve
the next one too. A kept context is never written into; every request works on a copy.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.models import LanguageModel
from infoflow_kv.records import ChunkIdentity, Context, Selection, Span

if TYPE_CHECKING:
    from torch import Tensor

# What stands where, and how RoPE treats a sequence of the request's length.
ContextKey = tuple[tuple[ChunkIdentity, ...], str]


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

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers that it keeps alive, slots after the context included."""
        return int(self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes())

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
        return Context(keys, values, self.token_ids, self.spans, self.exact_tokens)


class KeptContexts:
    """The contexts of the latest requests, up to `max_bytes` of KV; 0 keeps none. Safe to share between threads."""

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
        that were not used for longest until all fit. The buffers must not be written into below the context's end."""
        if kept.num_bytes > self.max_bytes:
            return
        with self._lock:
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


def keep_of(context: Context, before: Kept | None, slots: "Tensor", sensitivity: "Tensor | None") -> Kept:
    """What a request leaves behind: its context with the rows `slots` repaired beside those that were before."""
    if not bool((slots < context.num_tokens).all()):
        raise ComputeError("a repaired row stands behind the context; nothing is kept")
    repaired = torch.zeros(context.num_tokens, dtype=torch.bool)
    if before is not None:
        repaired |= before.repaired
    exact = context.exact_tokens
    # All at once, each row saw the true KV of those before it: what full prefill gives.
    if slots.numel() == context.reusable_tokens:
        exact = context.num_tokens
    repaired[slots.cpu()] = True
    return Kept(context.keys, context.values, context.token_ids, context.spans, exact, repaired, sensitivity)


def _holds(kept: Kept, before: Kept) -> bool:
    return kept.exact_tokens >= before.exact_tokens and not bool((before.repaired & ~kept.repaired).any())

"""Decoding token by token on the repaired context, as text that can be streamed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.models import LanguageModel, Rotary, forward_rows, memory_of
from infoflow_kv.records import Context, StopReason
from infoflow_kv.shapes import Float, Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: temperature 0 is greedy; otherwise seeded sampling from the top-p nucleus."""

    temperature: float | int = 0.0
    top_p: float | int = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise OptionError(f"temperature {self.temperature!r} is outside 0..100 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p {self.top_p!r} is outside 0..1 (0 excluded)")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed {self.seed!r} is outside 0..2^63-1")


Sampler = Callable[[Float[Tensor, " vocab"] | None], int]


def sampler(sampling: Sampling) -> Sampler:
    """The function that picks a token id from logits; each call advances its own seeded generator."""
    generator = torch.Generator().manual_seed(sampling.seed)

    def pick(logits: Float[Tensor, " vocab"] | None) -> int:
        if logits is None:
            raise ComputeError("no logits to choose a token from")
        if sampling.temperature == 0:
            return int(logits.argmax())
        shifted = (logits - logits.max()).double().cpu()  # at most 0: no temperature can make it overflow to NaN
        probabilities = torch.softmax(shifted / sampling.temperature, dim=-1)
        ordered, ids = torch.sort(probabilities, descending=True, stable=True)
        # A token stays in the nucleus while the mass before it is below top_p, so the first one always stays.
        ordered[ordered.cumsum(0) - ordered >= sampling.top_p] = 0
        return int(ids[torch.multinomial(ordered, 1, generator=generator)])

    return pick


def decode(
    model: LanguageModel,
    context: Context,
    rotary: Rotary,
    num_filled: int,
    first_logits: Float[Tensor, " vocab"] | None,
    pick: Sampler,
    max_new_tokens: int,
) -> Iterator[int]:
    """The new token ids one after the other, the end token included; ends after it or after `max_new_tokens`.

    `num_filled`: slots filled so far (context + prompt). Each new token is written into the next slot, at the next
    position, which is not the slot's number where images stand before it. `first_logits`: None where several ranks
    share the request and another one has them.
    """
    logits, memory = first_logits, memory_of(context)
    for step in range(max_new_tokens):
        token = pick(logits)
        yield token
        if token in model.stop_ids or step + 1 == max_new_tokens:
            return
        rank = torch.tensor([num_filled + step], device=model.device)
        if int(rank) >= memory.num_slots:
            raise ComputeError(f"no slot left for new token {step + 1}: the context has {memory.num_slots} slots")
        new = torch.tensor([token], device=model.device)
        tables = rotary.tables(rank + context.shift)
        out = forward_rows(model, new, rank, tables, memory, num_logits=1, spreading="repeat")
        if out is None:
            raise ComputeError("the decode forward ended early")
        logits = out[-1]


class TextAssembler:
    """Turns token ids into text pieces: holds back incomplete characters and possible beginnings of stop strings."""

    def __init__(self, to_text: Callable[[list[int]], str], stop_ids: frozenset[int], stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            raise OptionError(f"stop is the string {stop!r}; expected a list of strings")
        if any(not s for s in stop):
            raise OptionError("a stop string is empty; expected non-empty strings")
        self._to_text = to_text
        self._stop_ids = stop_ids
        self._stop = tuple(stop)
        self.token_ids: list[int] = []
        self._sent = 0
        self.text = ""
        self.reason: StopReason | None = None

    def push(self, token: int) -> str:
        """The text that is certain after this token and was not given before; sets `reason` when a stop is met."""
        self.token_ids.append(token)
        if token in self._stop_ids:
            self.reason = "eos"
            return self.finish()
        whole = self._to_text(self.token_ids)
        found = [at for at in (whole.find(s) for s in self._stop) if at >= 0]
        if found:
            self.reason = "stop"
            self.text = whole[: min(found)]
            return self._emit(len(self.text))
        self.text = whole
        certain = whole.rstrip("\ufffd")  # half of a character decodes to U+FFFD; the next token may still change it
        return self._emit(len(certain) - self._open_stop(certain))

    def finish(self) -> str:
        """Everything held back; the answer is `text`."""
        if self.reason is None:
            self.reason = "length"
        if self.reason == "stop":
            return ""
        ids = self.token_ids[:-1] if self.reason == "eos" else self.token_ids
        self.text = self._to_text(ids)
        return self._emit(len(self.text))

    def _emit(self, upto: int) -> str:
        piece = self.text[self._sent : max(upto, self._sent)]
        self._sent += len(piece)
        return piece

    def _open_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0

"""One request on its way: what is known of it after repair, how long the phases took, what to tell of its chunks."""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from infoflow_kv.decoding import TextAssembler
from infoflow_kv.kept import Trace
from infoflow_kv.methods import Method
from infoflow_kv.models import Rotary
from infoflow_kv.recipes import Recipe
from infoflow_kv.records import Answer, ChunkReport, Context, Prompt, Selection, Span, Timings, Usage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """One request after repair: its context, the logits of the last prompt rows, and what it took.

    `prompt` is as the model read it; `order[place]` is the index that its chunk had in the request. `selection`: the
    rows that this request recomputed. `logits`: none where several ranks share the request and another one has them.
    """

    prompt: Prompt
    recipe: Recipe
    order: tuple[int, ...]
    context: Context
    rotary: Rotary
    selection: Selection
    logits: "Tensor"
    usage: Usage
    timings: Timings
    unstored: int  # new chunks that the store did not take
    trace: Trace | None = None  # what `Engine.keep` needs; None where nothing is to be kept

    @property
    def method(self) -> Method:
        return self.recipe.method

    @property
    def chunk_spans(self) -> tuple[Span, ...]:
        """The slots of each chunk in the order of the prompt, the head left out."""
        return self.context.spans[1:] if self.prompt.head_ids else self.context.spans


class Clock:
    """Seconds between marks of work on `device`; what a GPU has only been told to do counts where it was told."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._seconds[phase] = now - self._last
        self._last = now

    def timings(self, predicted: tuple[float, float]) -> Timings:
        """The stages of a request. `predicted`: seconds of this request and of full prefill, 0 where nothing was."""
        seconds = self._seconds
        return Timings(
            load_seconds=seconds["load"],
            assemble_seconds=seconds["assemble"],
            score_seconds=seconds["reorder"] + seconds["score"],
            repair_seconds=seconds["repair"],
            predicted_seconds=predicted[0],
            predicted_full_seconds=predicted[1],
        )


def answer_of(run: Run, model_name: str, assembler: TextAssembler, timings: Timings) -> Answer:
    """What a finished run says, with all that is told of it."""
    assert assembler.reason is not None
    unstored = f"{run.unstored} chunks could not be stored; see the log" if run.unstored else ""
    notices = tuple(notice for notice in (unstored, run.selection.reason) if notice)
    return Answer(
        text=assembler.text.strip(),
        method=run.method.name,
        model=model_name,
        stop_reason=assembler.reason,
        usage=replace(run.usage, new_tokens=len(assembler.token_ids)),
        timings=timings,
        chunks=chunk_reports(run),
        token_ids=tuple(assembler.token_ids),
        selection=run.selection,
        notices=notices,
    )


def chunk_reports(run: Run) -> tuple[ChunkReport, ...]:
    """Per chunk, in the request's own order: recomputed tokens, share of all chunks' scores, place in the prompt."""
    spans = run.chunk_spans
    selected = run.selection.slots.cpu()
    scores = run.selection.scores
    masses = [max(0.0, float(scores[s.start : s.stop].sum())) if scores is not None else 0.0 for s in spans]
    total = sum(masses) or 1.0
    reports = [
        ChunkReport(
            id=chunk.id,
            title=chunk.title,
            tokens=chunk.num_tokens,
            recomputed=int(((selected >= span.start) & (selected < span.stop)).sum()) if run.method.reuse else 0,
            mass=mass / total,
            order=place,
        )
        for place, (chunk, span, mass) in enumerate(zip(run.prompt.chunks, spans, masses, strict=True))
    ]
    return tuple(reports[place] for place in sorted(range(len(reports)), key=lambda place: run.order[place]))

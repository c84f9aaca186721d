"""The method's claims as functions: run by the tests on tiny models and by `check` on the user's own.

Every reference is the same weights as a plain Transformers model (`LanguageModel.plain`), never this engine.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infoflow_kv.engine import Engine
from infoflow_kv.evaluate.vision_reference import inputs_of
from infoflow_kv.models import LanguageModel
from infoflow_kv.positions import request_positions
from infoflow_kv.prefilling import prefill
from infoflow_kv.records import Document, Prompt, Selection
from infoflow_kv.repairing import repair
from infoflow_kv.store import ChunkStore, DiskStore, MemoryStore

if TYPE_CHECKING:
    from torch import Tensor

# Largest logit error allowed, as a share of the span of the logits (float32: about 5e-4 on a span of 30). The 16-bit
# types carry 8 and 11 bits of fraction through every layer, on both sides of the comparison.
TOLERANCE = {torch.float32: 1.6e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
CONTINUATION = 8


@dataclass(frozen=True, slots=True)
class InvariantResult:
    """One claim and what was measured. `error` and `tolerance` are in the unit that `detail` names."""

    name: str
    claim: str
    error: float
    tolerance: float
    passed: bool
    seconds: float
    detail: str = ""


@dataclass
class Subject:
    """What the invariants are run on: a model, a few documents of more than one chunk in all, and questions.

    Documents may hold images, but for the first and the last. `tiles`: see `Engine`.
    """

    model: LanguageModel
    documents: Sequence[Document]
    questions: Sequence[str]
    folder: Path
    chunk_tokens: int = 512
    tolerance: float | None = None
    tiles: int = 1
    _plain: dict[tuple[tuple[int, ...], tuple[str, ...]], "Tensor"] = field(default_factory=dict)

    def engine(self, store: ChunkStore | None = None, **options: Any) -> Engine:
        return Engine(self.model, store, chunk_tokens=self.chunk_tokens, tiles=self.tiles, **options)

    @cached_property
    def prompt(self) -> Prompt:
        return self.engine().prompt(self.questions[0], self.documents)

    @property
    def continuation(self) -> tuple[int, ...]:
        """Tokens forced on every arm after the prompt, so that later positions are compared too. Any will do."""
        return self.prompt.chunks[0].token_ids[:CONTINUATION]

    def plain_logits(self, prompt: Prompt, forced: tuple[int, ...] = ()) -> "Tensor":
        """float32 logits after the prompt and after each forced token, by an ordinary Transformers forward."""
        ids = prompt.token_ids + forced
        # Two pictures of a size have the same ids.
        key = ids, tuple(chunk.images.key for chunk in prompt.chunks if chunk.images is not None)
        if key not in self._plain:
            plain = self.model.plain("eager" if self.model.needs_eager else "sdpa")
            with torch.inference_mode():
                given = inputs_of(self.model, plain, prompt, forced)
                out = plain(**given, use_cache=False, logits_to_keep=len(forced) + 1)
            self._plain[key] = out.logits[0].float()
        return self._plain[key]

    def allowed(self, reference: "Tensor") -> float:
        share = TOLERANCE[self.model.dtype] if self.tolerance is None else self.tolerance
        return share * float(reference.max() - reference.min())


Check = Callable[[Subject], tuple[float, float, str]]


def full_prefill(subject: Subject) -> tuple[float, float, str]:
    """Our full prefill gives plain Transformers' logits."""
    run = subject.engine().run(subject.prompt, method="full", forced_ids=subject.continuation)
    return compare(subject, run.logits)


def budget_one_cold(subject: Subject) -> tuple[float, float, str]:
    """Budget 1 equals full prefill, nothing stored."""
    return compare(subject, forced_run(subject, None, budget=1.0))


def budget_one_memory(subject: Subject) -> tuple[float, float, str]:
    """Budget 1 equals full prefill, chunks from the memory store."""
    store = MemoryStore()
    forced_run(subject, store, budget=1.0)
    return compare(subject, forced_run(subject, store, budget=1.0, all_cached=True))


def budget_one_disk(subject: Subject) -> tuple[float, float, str]:
    """Budget 1 equals full prefill, chunks from a disk store opened anew."""
    forced_run(subject, DiskStore(subject.folder / "budget-one"), budget=1.0)
    return compare(subject, forced_run(subject, DiskStore(subject.folder / "budget-one"), budget=1.0, all_cached=True))


def one_chunk(subject: Subject) -> tuple[float, float, str]:
    """One chunk, budget 0, equals full prefill."""
    engine = subject.engine(method="none")
    text = subject.documents[0].text[: subject.chunk_tokens * 2]
    prompt = engine.prompt(subject.questions[0], [Document(text=text)])
    if len(prompt.chunks) != 1:
        first = prompt.chunks[0]
        prompt = Prompt(prompt.head_ids, (first,), prompt.suffix_ids)
    if subject.model.rope_regime(prompt.num_tokens) != subject.model.rope_regime(1):
        return 0.0, 0.0, "does not apply: the rotary regime changes with the length"
    reference = subject.plain_logits(prompt)
    run = engine.run(prompt)
    return difference(run.logits, reference), subject.allowed(reference), "max |Δ logit|"


def store_round_trip(subject: Subject) -> tuple[float, float, str]:
    """A chunk read from memory and from disk is bit for bit the one that was computed."""
    engine = subject.engine()
    head = prefill(subject.model, engine.identify_head()) if engine.head_ids else None
    chunk = prefill(subject.model, engine.identify(subject.prompt.chunks[-1]), head)
    differing = 0
    for store, reopened in (
        (memory := MemoryStore(), memory),
        (DiskStore(subject.folder / "round-trip"), DiskStore(subject.folder / "round-trip")),
    ):
        store.put(chunk)
        found = reopened.get(chunk.identity)
        if found is None:
            return float("inf"), 0.0, "a stored chunk was not found again"
        differing += int(
            (bits(found.keys) != bits(chunk.keys)).sum() + (bits(found.values) != bits(chunk.values)).sum()
        )
    return float(differing), 0.0, "differing elements"


def true_kv_is_a_fixed_point(subject: Subject) -> tuple[float, float, str]:
    """Any subset recomputed from true KV changes nothing."""
    engine = subject.engine()
    reference = subject.plain_logits(subject.prompt)
    worst = 0.0
    for seed in range(3):
        run = engine.run(subject.prompt, method="full")
        count = max(1, run.context.num_tokens // 4)
        slots = torch.randperm(run.context.num_tokens, generator=torch.Generator().manual_seed(seed))[:count]
        worst = max(worst, difference(repaired(subject, run, slots.sort().values), reference))
    return worst, subject.allowed(reference), "max |Δ logit|, 3 random quarters"


def row_order(subject: Subject) -> tuple[float, float, str]:
    """The order in which selected rows are passed does not matter."""
    engine = subject.engine()
    logits = []
    for shuffled in (False, True):
        run = engine.run(subject.prompt, method="none")
        slots = torch.arange(run.context.exact_tokens, run.context.num_tokens, 3)
        if shuffled:
            slots = slots[torch.randperm(slots.numel(), generator=torch.Generator().manual_seed(0))]
        logits.append(repaired(subject, run, slots))
    return difference(logits[0], logits[1]), subject.allowed(logits[0]), "max |Δ logit|"


def error_falls(subject: Subject) -> tuple[float, float, str]:
    """The distance to full prefill falls on average as the budget rises."""
    engine = subject.engine(MemoryStore())
    budgets = (0.0, 0.15, 0.5, 1.0)
    means = []
    for budget in budgets:
        total = 0.0
        for question in subject.questions:
            prompt = engine.prompt(question, subject.documents)
            run = engine.run(prompt, method="infoflow", budget=budget)
            total += float((run.logits[-1] - subject.plain_logits(prompt)[-1]).norm())
        means.append(total / len(subject.questions))
    rises = [max(0.0, later - earlier) for earlier, later in itertools.pairwise(means)]
    shown = ", ".join(f"{b:g}: {m:.3g}" for b, m in zip(budgets, means, strict=True))
    floor = subject.allowed(run.logits)  # a model that cannot see across chunks has only rounding errors to rank
    return max(rises), 0.05 * means[0] + floor, f"largest rise of the mean ‖Δ logits‖ ({shown})"


def decode_follows(subject: Subject) -> tuple[float, float, str]:
    """Every greedy token decoded at budget 1 is plain Transformers' own choice."""
    engine = subject.engine()
    answer = engine.answer(subject.questions[0], subject.documents, max_new_tokens=16, budget=1.0)
    reference = subject.plain_logits(subject.prompt, answer.token_ids[:-1])
    chosen = reference.gather(1, torch.tensor(answer.token_ids, device=reference.device)[:, None])[:, 0]
    worst = float((reference.max(dim=1).values - chosen).max())
    return worst, subject.allowed(reference), f"largest logit lead of another token, {len(answer.token_ids)} tokens"


CHECKS: dict[str, Check] = {
    "full-prefill": full_prefill,
    "budget-1-cold": budget_one_cold,
    "budget-1-memory": budget_one_memory,
    "budget-1-disk": budget_one_disk,
    "one-chunk": one_chunk,
    "store-round-trip": store_round_trip,
    "true-kv": true_kv_is_a_fixed_point,
    "row-order": row_order,
    "error-falls": error_falls,
    "decode": decode_follows,
}


def check_model(
    model: LanguageModel,
    documents: Sequence[Document],
    questions: Sequence[str],
    folder: Path,
    chunk_tokens: int = 512,
    tolerance: float | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[InvariantResult]:
    """The result of each invariant (or of those named), one after the other. `folder` is used for disk stores.

    `tolerance`: largest error as a share of the logits' span, instead of the dtype's.
    """
    subject = Subject(model, documents, questions, folder, chunk_tokens, tolerance)
    for name in CHECKS if names is None else names:
        yield check(subject, name)


def check(subject: Subject, name: str) -> InvariantResult:
    """The result of one invariant."""
    function = CHECKS[name]
    start = time.perf_counter()
    error, tolerance, detail = function(subject)
    claim = (function.__doc__ or "").strip()
    passed = error <= tolerance
    return InvariantResult(name, claim, error, tolerance, passed, time.perf_counter() - start, detail)


def forced_run(subject: Subject, store: ChunkStore | None, budget: float, all_cached: bool = False) -> "Tensor":
    """Logits over the forced continuation at a budget; checks that the store was used where it should be."""
    run = subject.engine(store).run(subject.prompt, method="infoflow", budget=budget, forced_ids=subject.continuation)
    if all_cached and run.usage.cached_chunks != run.usage.chunks:
        raise AssertionError(f"only {run.usage.cached_chunks} of {run.usage.chunks} chunks came from the store")
    return run.logits


def repaired(subject: Subject, run: Any, slots: "Tensor") -> "Tensor":
    """Logits of the last prompt row after recomputing these slots on a run's context."""
    prompt = subject.prompt
    suffix = torch.tensor(prompt.suffix_ids, device=subject.model.device)
    tables = run.rotary.tables(request_positions(prompt, len(prompt.suffix_ids)))
    logits = repair(subject.model, run.context, Selection(slots.to(subject.model.device)), suffix, tables)
    assert logits is not None
    return logits


def compare(subject: Subject, logits: "Tensor") -> tuple[float, float, str]:
    reference = subject.plain_logits(subject.prompt, subject.continuation)
    return (
        difference(logits, reference),
        subject.allowed(reference),
        f"max |Δ logit|, {len(subject.continuation) + 1} places",
    )


def difference(ours: "Tensor", theirs: "Tensor") -> float:
    return float((ours - theirs).abs().max())


def bits(tensor: "Tensor") -> "Tensor":
    """The raw bytes, so that NaN equals NaN and -0 differs from 0."""
    return tensor.cpu().contiguous().view(torch.uint8)

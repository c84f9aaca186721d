"""The arms of a race to the first token: plain Transformers, full prefill, reuse without repair, methods × budgets.

Each arm is a function without arguments that runs one whole request and says how long its first token took.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from infoflow_kv.benchmark.context import Request, Setting
from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.methods import Method, find_method
from infoflow_kv.models import LanguageModel
from infoflow_kv.records import Selection, Timings, Usage
from infoflow_kv.select import check_budget
from infoflow_kv.store import ChunkStore, DiskStore, MemoryStore

State = Literal["warm-disk", "warm-memory", "cold"]
STATES: tuple[State, ...] = ("warm-disk", "warm-memory", "cold")


@dataclass(frozen=True, slots=True)
class Arm:
    """What runs. `state`: where the chunks' KV is when the request comes, None for arms that reuse nothing."""

    method: str
    budget: float | None = None
    state: State | None = None

    @property
    def name(self) -> str:
        budget = "" if self.budget is None else f"@{self.budget:g}"
        return f"{self.method}{budget}" + (f" ({self.state})" if self.state is not None else "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of an arm. Only arms of the engine know more than how long it took."""

    ttft_seconds: float
    first_token: int
    timings: Timings | None = None
    usage: Usage | None = None
    selection: Selection | None = None


PLAIN, FULL = Arm("plain"), Arm("full")


def make_arms(methods: Sequence[str], budgets: Sequence[float], states: Sequence[str]) -> list[Arm]:
    """Plain and full prefill, then the methods, each at every budget that matters to it and in every state.

    OptionError for unknown names, budgets outside 0..1, and methods that need the full prefill that they are to save.
    """
    for state in states:
        if state not in STATES:
            raise unknown_name("state", state, STATES)
    arms = [PLAIN, FULL]
    for name in methods:
        method = find_method(name)
        if method.in_laboratory_only:
            raise OptionError(f"{name} needs the full prefill that it is to save; it is for `eval predict` only")
        wanted: Sequence[float | None] = [check_budget(b).share for b in budgets] if takes_budget(method) else [None]
        arms += [Arm(name, b, s) for s in STATES for b in wanted if method.reuse and s in states]
    return list(dict.fromkeys(arms))


def takes_budget(method: Method) -> bool:
    """Whether a budget changes what the method does."""
    return method.count is None and (method.selector is not None or method.narrowing is not None)


@contextmanager
def prepared(
    setting: Setting, request: Request, arms: Sequence[Arm], scratch: Path | None = None
) -> Iterator[dict[str, Callable[[], Outcome]]]:
    """The arms of one request, ready to run, by name; chunks are stored beforehand for those that start warm.

    `scratch`: folder under which the stores are made and removed; the system's own by default.
    """
    with tempfile.TemporaryDirectory(prefix="infoflow-bench-", dir=scratch) as name:
        folder, memory = Path(name) / "warm", MemoryStore()
        states = {arm.state for arm in arms}
        # A method that needs more than KV of each chunk finds that stored too.
        needs = [arm.method for arm in arms if arm != PLAIN and find_method(arm.method).needs]
        for state, store in (("warm-disk", lambda: DiskStore(folder)), ("warm-memory", lambda: memory)):
            if state in states:
                setting.engine(store(), (needs or ["infoflow"])[0]).add(request.documents)
        plain = plain_of(setting.model) if PLAIN in arms else None
        runs: dict[str, Callable[[], Outcome]] = {}
        for arm in arms:
            if arm == PLAIN:
                runs[arm.name] = lambda: run_plain(plain, request.prompt.token_ids)
            else:
                runs[arm.name] = _runner(setting, request, arm, folder, memory, Path(name))
        yield runs


def _runner(
    setting: Setting, request: Request, arm: Arm, folder: Path, memory: MemoryStore, scratch: Path
) -> Callable[[], Outcome]:
    def run() -> Outcome:
        if arm.state == "cold":
            empty = Path(tempfile.mkdtemp(prefix="cold-", dir=scratch))
            try:
                return run_engine(setting, request, arm, DiskStore(empty))
            finally:
                shutil.rmtree(empty, ignore_errors=True)
        if arm.state == "warm-disk":
            return run_engine(setting, request, arm, DiskStore(folder))
        return run_engine(setting, request, arm, memory if arm.state == "warm-memory" else None)

    return run


def plain_of(model: LanguageModel) -> Any:
    """The same weights as ordinary Transformers, in SDPA where that is exact."""
    return model.plain("eager" if model.needs_eager else "sdpa")


def run_plain(plain: Any, token_ids: Sequence[int]) -> Outcome:
    """An ordinary prefill by Transformers, its cache kept, logits of the last row only; from ids to the first token."""
    ids = torch.tensor([list(token_ids)], device=plain.device)
    start = time.perf_counter()
    with torch.inference_mode():
        out = plain(input_ids=ids, use_cache=True, logits_to_keep=1)
        token = int(out.logits[0, -1].argmax())
    return Outcome(time.perf_counter() - start, token)


def run_engine(setting: Setting, request: Request, arm: Arm, store: ChunkStore | None) -> Outcome:
    """A request as users make it, from texts to the first token: tokenising and loading count."""
    engine = setting.engine(store, arm.method, 1.0 if arm.budget is None else arm.budget)
    answer = engine.answer(setting.question, request.documents, max_new_tokens=1)
    return Outcome(answer.timings.ttft_seconds, answer.token_ids[0], answer.timings, answer.usage, answer.selection)

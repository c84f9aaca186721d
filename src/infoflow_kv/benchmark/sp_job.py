"""What the ranks of a sequence-parallel measurement are told, as JSON. No torch here."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.parallel.cost import LAYOUTS

BASELINES = ("ring", "gather")


@dataclass(frozen=True, slots=True)
class SpArm:
    """One way to answer the request: `ring` or `gather` (full prefill), or `infoflow` in a layout, with its chunks in a
    store that every rank reads (`cached`) or in none."""

    name: str
    layout: str = "auto"
    budget: float = 0.15
    cached: bool = False

    @property
    def label(self) -> str:
        """As the tables call it."""
        if self.name in BASELINES:
            return self.name
        return f"{self.name}@{self.budget:g} {self.layout}{', cached' if self.cached else ''}"


@dataclass(frozen=True, slots=True)
class SpJob:
    """One set of ranks, a request, and the arms that take turns on it. `counts`: also count payload bytes, in a pass of
    its own. `interface`: whose sent bytes are read, where the ranks have one each."""

    model: str
    dtype: str
    device: str  # cpu or cuda: each rank has its own
    documents: tuple[tuple[str, str], ...]  # title and text
    question: str
    tokens: int
    chunk_tokens: int
    joined: bool  # the documents of a request are one: chunks are that long, however short the documents
    arms: tuple[SpArm, ...]
    repeats: int
    threads: int
    folder: str  # where the ranks write; also holds the store
    counts: bool = True
    warmup_tokens: int = 300
    timeout_seconds: float = 3600.0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_job(path: Path) -> SpJob:
    """The job that was written there."""
    given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    documents = tuple((title, text) for title, text in given["documents"])
    return SpJob(**(given | {"arms": tuple(SpArm(**arm) for arm in given["arms"]), "documents": documents}))


def make_arms(names: list[str], layouts: list[str], budgets: list[float], cached: list[bool]) -> tuple[SpArm, ...]:
    """Every baseline once, and `infoflow` with each layout, budget and state; OptionError for another name."""
    arms: list[SpArm] = []
    for name in names:
        if name in BASELINES:
            arms.append(SpArm(name))
        elif name == "infoflow":
            arms += [SpArm(name, layout, budget, c) for c in cached for budget in budgets for layout in layouts]
        else:
            raise unknown_name("arm", name, (*BASELINES, "infoflow"))
    for arm in arms:
        if arm.layout not in LAYOUTS:
            raise unknown_name("layout", arm.layout, LAYOUTS)
    if not arms:
        raise OptionError(f"no arms; give some of {', '.join((*BASELINES, 'infoflow'))}")
    return tuple(dict.fromkeys(arms))

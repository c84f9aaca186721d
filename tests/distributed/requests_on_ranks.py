"""Requests over several ranks: what each rank of a test runs, and the same in one process."""

from typing import Any

import torch

import tiny
from infoflow_kv.decoding import Sampling, decode, sampler
from infoflow_kv.engine import Engine
from infoflow_kv.models import LanguageModel, wrap
from infoflow_kv.parallel.cost import Layout
from infoflow_kv.parallel.counting import ByteCounter
from infoflow_kv.parallel.group import Group
from infoflow_kv.runs import Run
from infoflow_kv.store import DiskStore

NEW_TOKENS = 6
QUESTION = "Who keeps the lighthouse of Saltmere?"
PLACES = ("Saltmere", "Norrholm", "Tallis", "Vesper Bay", "Old Quay", "Hollow Reef", "Grey Point")
DOCUMENTS = [
    f"Note {number}. The lighthouse of {place} was built in {1800 + 7 * number}. "
    + f"Boats of {place} come in. " * words
    for number, (place, words) in enumerate(zip(PLACES, (3, 9, 5, 1, 7, 12, 4), strict=True))
]


def tiny_model(name: str, **sizes: int) -> LanguageModel:
    """The tiny model of that name, the same in every process."""
    return wrap(tiny.hf_model(name, **sizes), tiny.tokenizer(), name)


def engine_of(model: LanguageModel, settings: dict[str, Any], group: Group | None = None) -> Engine:
    """An engine; `store` among the settings is a folder, `layout` may be [head shards, sequence shards]."""
    settings = dict(settings)
    folder = settings.pop("store", None)
    if isinstance(settings.get("layout"), list):
        settings["layout"] = Layout(*settings["layout"])
    return Engine(model, None if folder is None else DiskStore(folder), chunk_tokens=64, group=group, **settings)


def results(engine: Engine, run: Run, num_prompt: int, num_new: int = NEW_TOKENS) -> dict[str, torch.Tensor]:
    """Selection, logits (none where another rank has them), and the greedy answer with the logits behind each token."""
    steps: list[torch.Tensor] = []
    pick = sampler(Sampling())

    def watched(logits: torch.Tensor | None) -> int:
        assert logits is not None
        steps.append(logits)
        return pick(logits)

    logits = run.logits[-1] if run.logits.numel() else None
    tokens = list(
        engine.place.decoding(
            decode(engine.model, run.context, run.rotary, num_prompt, logits, engine.place.picks(watched), num_new)
        )
    )
    usage = run.usage
    return {
        "selected": run.selection.slots.clone(),
        "steps": torch.stack(steps) if steps else torch.empty(0),
        "tokens": torch.tensor(tokens),
        "usage": torch.tensor([usage.cached_chunks, usage.prefilled_tokens, usage.recomputed_tokens]),
    }


def answered(engine: Engine, num_new: int = NEW_TOKENS) -> dict[str, torch.Tensor]:
    """One request of the engine."""
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    return results(engine, engine.run(prompt, num_new=num_new), prompt.num_tokens)


def on_ranks(group: Group, name: str, settings: dict[str, Any], sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """One request on each rank."""
    return answered(engine_of(tiny_model(name, **sizes), settings, group))


def counted(group: Group, name: str, settings: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Bytes that this rank sends, by phase, in one request."""
    engine = engine_of(tiny_model(name, **sizes), settings, group)
    with ByteCounter(group) as counter:
        answered(engine)
    return counter.by_phase()

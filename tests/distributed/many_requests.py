"""Many requests in one run of the ranks, for a start costs more than a tiny request; and what must come of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from requests_on_ranks import results

import families
import tiny
import tiny_vlm
from infoflow_kv.decoding import Sampling
from infoflow_kv.engine import Engine
from infoflow_kv.models import LanguageModel, wrap
from infoflow_kv.models.plain import greedy
from infoflow_kv.parallel.cost import Layout
from infoflow_kv.parallel.group import Group
from infoflow_kv.records import Document, Image
from infoflow_kv.spreading import Spread
from infoflow_kv.store import DiskStore, MemoryStore
from tolerance import TINY_LOGITS, assert_close

NEW_TOKENS = 4
QUESTION = "Who keeps the lighthouse of Saltmere?"
PLACES = ("Saltmere", "Norrholm", "Tallis", "Vesper Bay", "Old Quay")
# Chunks of several lengths, of which none divides by the number of ranks.
DOCUMENTS = [
    f"The lighthouse of {place} was built in {1800 + 7 * number}. " + f"Boats of {place} come in. " * words
    for number, (place, words) in enumerate(zip(PLACES, (1, 2, 0, 1, 1), strict=True))
]
PICTURES = [[0, "Boats of Saltmere.", (150, 90, 1)], ["The keeper counts them."], [(60, 140, 2), "A map.", (90, 90, 3)]]
# Settings of a request that are none of the engine's.
OTHERS = ("documents", "question", "baseline", "new", "alone", "suffix")


def model_of(source: str, sizes: dict[str, int] | None = None) -> LanguageModel:
    """The tiny model of `kind:name[:dtype]`, the same in every process; kinds: tiny, family, vlm."""
    kind, name, *dtype = source.split(":")
    if kind == "vlm":
        found: LanguageModel = tiny_vlm.model(name)
        return found
    if kind == "family":
        return wrap(families.hf_model(families.FAMILIES[name]), tiny.tokenizer(), name)
    return wrap(
        tiny.hf_model(name, getattr(torch, dtype[0] if dtype else "float32"), **(sizes or {})), tiny.tokenizer(), name
    )


def documents_of(source: str, request: dict[str, Any]) -> list[Any]:
    """The request's documents: for a model that sees, some with pictures."""
    if not source.startswith("vlm"):
        return list(request.get("documents", DOCUMENTS))

    def part(given: Any) -> Any:
        return given if isinstance(given, str) else Image(tiny_vlm.encoded_file(tiny_vlm.image(*given)))

    return [Document(parts=tuple(part(p) for p in parts if p != 0)) for parts in PICTURES]


def engine_of(model: LanguageModel, request: dict[str, Any], store: Any = None, group: Group | None = None) -> Engine:
    """The engine of a request. `layout` may be [head shards, sequence shards]; `store` a folder, or
    one for each rank; without, `store` as given."""
    settings = {key: value for key, value in request.items() if key not in OTHERS}
    folder = settings.pop("store", None)
    if folder is not None:
        folders = folder if isinstance(folder, list) else [folder]
        store = DiskStore(folders[group.rank % len(folders) if group is not None else 0])
    layout = settings.pop("layout", "auto")
    if group is not None:
        settings["layout"] = Layout(*layout) if isinstance(layout, list) else layout
    if request.get("alone"):  # a store of its own, which is empty
        store = None
    engine = Engine(model, store, group=group, **{"chunk_tokens": 48, **settings})
    if group is not None and "baseline" in request:
        place = engine.place
        assert isinstance(place, Spread)
        engine.place = Spread(model, engine._supply, group, place._shard.layout, request["baseline"])
    return engine


def many(
    group: Group | None, source: str, requests: Sequence[dict[str, Any]], sizes: dict[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """The results of all requests, by number: one after the other over one store in memory."""
    # Memory that nothing was written to is NaN: what is read of it shows.
    torch.use_deterministic_algorithms(True)
    try:
        model, store = model_of(source, sizes), MemoryStore()
        found: dict[str, torch.Tensor] = {}
        for number, request in enumerate(requests):
            engine = engine_of(model, request, store, group)
            prompt = prompt_of(engine, source, request)
            new = request.get("new", NEW_TOKENS)
            run = engine.run(prompt, num_new=new)
            one = results(engine, run, prompt.num_tokens, new)
            one["measured"] = torch.tensor([run.usage.measured_tokens, run.usage.chunks, run.unstored])
            one["first"] = torch.tensor([run.logits.shape[0]])
            one["order"] = torch.tensor(run.order)
            scores = run.selection.scores
            one["scores"] = torch.empty(0) if scores is None else scores.clone()
            one["reason"] = torch.tensor(list(run.selection.reason.encode()), dtype=torch.uint8)
            found.update({f"{number}.{key}": value for key, value in one.items()})
        return found
    finally:
        torch.use_deterministic_algorithms(False)


def prompt_of(engine: Engine, source: str, request: dict[str, Any]) -> Any:
    """The request's prompt; `suffix`: only so many of its last tokens behind the documents."""
    prompt = engine.prompt(request.get("question", QUESTION), documents_of(source, request))
    return replace(prompt, suffix_ids=prompt.suffix_ids[-request["suffix"] :]) if "suffix" in request else prompt


def plain_answers(
    source: str, requests: Sequence[dict[str, Any]], sizes: dict[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Greedy tokens of plain Transformers for the same token ids, and the logits behind each."""
    model, found = model_of(source, sizes), {}
    for number, request in enumerate(requests):
        prompt = prompt_of(engine_of(model, request), source, request)
        run = greedy(model.plain("eager"), prompt.token_ids, request.get("new", NEW_TOKENS), model.stop_ids)
        found[f"{number}.steps"] = run.logits
        found[f"{number}.tokens"] = torch.tensor(run.token_ids)
    return found


def assert_same(
    found: Sequence[dict[str, torch.Tensor]],
    expected: dict[str, torch.Tensor],
    requests: Sequence[dict[str, Any]],
    share: float = TINY_LOGITS,
    usage: bool = False,
) -> None:
    """Fails unless every rank has the expected selection and tokens, and rank 0 the expected logits behind these."""
    for number, request in enumerate(requests):
        for rank, one in enumerate(found):
            for key in ("selected", "tokens", "order", *(("usage", "measured") if usage else ())):
                name = f"{number}.{key}"
                if name in expected:
                    assert torch.equal(one[name], expected[name]), (request, rank, key, one[name], expected[name])
            assert torch.equal(one[f"{number}.usage"], found[0][f"{number}.usage"]), (request, rank)
            if f"{number}.scores" in expected and expected[f"{number}.scores"].numel():
                assert_close(one[f"{number}.scores"], expected[f"{number}.scores"], share)
        try:
            assert_close(found[0][f"{number}.steps"], expected[f"{number}.steps"], share)
        except AssertionError as error:
            raise AssertionError(f"{request}: {error}") from None


def sampled(group: Group | None, source: str, requests: Sequence[dict[str, Any]]) -> list[str]:
    """The sampled text of each request."""
    model = model_of(source)
    return [
        engine_of(model, request, None, group)
        .answer(QUESTION, DOCUMENTS, 8, sampling=Sampling(temperature=1.5, top_p=0.95, seed=11))
        .text
        for request in requests
    ]

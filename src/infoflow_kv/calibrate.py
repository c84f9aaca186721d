"""Calibration: which layers' attention scores the tokens best on this model, found on a small sample.

Every candidate set is judged as a method would be: tokens are selected with it, repaired, and the distributions over
full prefill's own greedy continuation are compared with full prefill's (plain Transformers). The scores of all layers
come from one forward, so a candidate costs one repair.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from infoflow_kv.engine import Engine
from infoflow_kv.errors import InputError, OptionError
from infoflow_kv.evaluate.arm_rows import check_fits
from infoflow_kv.evaluate.distances import divergences
from infoflow_kv.evaluate.items import Item
from infoflow_kv.evaluate.measuring import Bench, documents_of
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.statistics import paired_bootstrap
from infoflow_kv.methods import Method, find_method
from infoflow_kv.models import greedy
from infoflow_kv.models.profiles import Profile
from infoflow_kv.recipes import make_recipe
from infoflow_kv.records import Prompt
from infoflow_kv.select import AttentionMass, Scene, Selector, layer_set, layers_text
from infoflow_kv.shapes import Float, Tensor

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel

METHODS = ("infoflow", "influence")
BEST_OF = (2, 4, 8, 16)  # sets of the k layers that are best alone
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One item, ready to be repaired: its engine holds the chunks, `scores` are those of each method and layer."""

    engine: Engine
    prompt: Prompt
    forced: tuple[int, ...]  # full prefill's own greedy continuation, and the logits behind it
    logits: Float[Tensor, "places vocab"]
    scores: Mapping[str, Float[Tensor, "layers context"]]


@dataclass(frozen=True, slots=True)
class Measured:
    """How close a layer set came: KL (nats) and JS (bits) over the continuation, one value an item."""

    method: str
    layers: tuple[int, ...]
    kl: tuple[float, ...]
    js: tuple[float, ...]

    def as_record(self, name: str = "") -> dict[str, Any]:
        """Means with their 95 % intervals, as the profile and the figure take them."""
        interval = paired_bootstrap(self.kl)
        record: dict[str, Any] = {
            "layers": name or layers_text(self.layers),
            "kl_cont": float(np.mean(self.kl)),
            "js_cont": float(np.mean(self.js)),
            "low": interval.low if math.isfinite(interval.low) else None,
            "high": interval.high if math.isfinite(interval.high) else None,
        }
        return record


class Given:
    """A selector of scores that are known already."""

    def __init__(self, scores: Float[Tensor, " context"]) -> None:
        self._scores = scores

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        return self._scores


class Keeper:
    """A selector that keeps the scores of every layer; what it returns selects nothing in particular."""

    def __init__(self, selector: AttentionMass) -> None:
        self._selector = selector
        self.found: Float[Tensor, "layers context"] | None = None

    def score(self, scene: Scene) -> Float[Tensor, " context"]:
        self.found = self._selector.per_layer(scene)
        return self.found.sum(dim=0)


def calibrate(
    model: "LanguageModel",
    items: Sequence[Item],
    budget: float = 0.15,
    options: Options = Options(),  # noqa: B008 - frozen
    on_progress: Progress | None = None,
) -> Profile:
    """The profile of this model: per method the layer set with the smallest mean JS divergence on these items.

    Items that do not fit the window, or are one chunk, are left out. OptionError for a budget of 0 or 1 (nothing to
    choose), InputError if fewer than two items are left.
    """
    if not 0 < budget < 1:
        raise OptionError(
            f"budget {budget!r} leaves nothing to choose; calibrate at a share between 0 and 1, like 0.15"
        )
    bench = Bench(model, options)
    say = on_progress or (lambda done, total, what: None)
    singles = [(layer,) for layer in range(model.num_layers)]
    best_of = sum(k < model.num_layers for k in BEST_OF)
    sets_each = len(METHODS) * (len(fixed_sets(model.num_layers)) + best_of)
    steps = len(items) * (1 + len(singles) + sets_each)
    done = 0
    cases: list[Case] = []
    ids: list[str] = []
    for item in items:
        found = case_of(bench, item)
        if found is not None:
            cases.append(found)
            ids.append(item.id)
        done += 1
        say(done, steps, f"reading {item.id}")
    if len(cases) < 2:
        raise InputError(
            f"{len(cases)} of {len(items)} items fit the model's window with more than one chunk; calibration needs at "
            "least 2"
        )
    steps -= (len(items) - len(cases)) * (len(singles) + sets_each)

    def judge(method: str, layers: tuple[int, ...]) -> Measured:
        nonlocal done
        pairs = [distance(case, method, layers, budget) for case in cases]
        done += len(cases)
        say(done, steps, f"{method}, layers {layers_text(layers)}")
        return Measured(method, layers, tuple(kl for kl, _ in pairs), tuple(js for _, js in pairs))

    curve = [judge("infoflow", layers) for layers in singles]
    ranked = sorted(curve, key=lambda m: float(np.mean(m.js)))
    layers: dict[str, str] = {}
    sets: list[dict[str, Any]] = []
    for method in METHODS:
        candidates = dict(fixed_sets(model.num_layers))
        for k in BEST_OF:
            if k < model.num_layers:
                candidates[f"best {k}"] = tuple(sorted(m.layers[0] for m in ranked[:k]))
        measured = {name: judge(method, chosen) for name, chosen in candidates.items()}
        best = min(measured.values(), key=lambda m: float(np.mean(m.js)))
        layers[method] = "all" if len(best.layers) == model.num_layers else layers_text(best.layers)
        sets += [{"method": method, "set": name, **m.as_record()} for name, m in measured.items()]
    measurements = {
        "budget": budget,
        "items": len(cases),
        "ids": ids,
        "curve": [{"layer": m.layers[0], **m.as_record()} for m in curve],
        "sets": sets,
    }
    identity = model.identity
    return Profile(identity.weights, identity.dtype, model.name, layers, measurements)


def fixed_sets(num_layers: int) -> dict[str, tuple[int, ...]]:
    """The sets that are tried on every model, by what people call them; equal ones only once."""
    texts = {
        "all": "all",
        "relative": "relative",
        "lower half": "0.0-0.49",
        "upper half": "0.5-1.0",
        "middle half": "0.25-0.74",
        "last quarter": "0.75-1.0",
    }
    found: dict[str, tuple[int, ...]] = {}
    for name, text in texts.items():
        layers = layer_set(text, num_layers)
        if layers not in found.values():
            found[name] = layers
    return found


def case_of(bench: Bench, item: Item) -> Case | None:
    """The item with its chunks prefilled, its reference and its scores; None if it does not fit the window, or if it
    is one chunk, of which nothing is ever recomputed."""
    item = bench.worded(item)
    engine, model = bench.engine(item), bench.model
    prompt = engine.prompt(item.question, documents_of(item))
    try:
        check_fits(model, prompt, bench.options.continuation)
    except InputError:
        return None
    if len(prompt.chunks) < 2:
        return None
    reference = greedy(bench.plain, prompt.token_ids, bench.options.continuation, model.stop_ids)
    scores = {}
    for name in METHODS:
        method = find_method(name)
        assert method.selector is not None
        every = tuple(range(model.num_layers))
        selector = method.selector(every)
        assert isinstance(selector, AttentionMass)
        keeper = Keeper(selector)
        engine.run(prompt, recipe=replace(make_recipe(model, name, 0.01), method=with_selector(method, keeper)))
        if keeper.found is None:  # nothing of it is reusable
            return None
        scores[name] = keeper.found
    return Case(engine, prompt, reference.token_ids, reference.logits, scores)


def distance(case: Case, method: str, layers: tuple[int, ...], budget: float) -> tuple[float, float]:
    """Mean KL and JS over the continuation when tokens are selected by the scores of these layers."""
    scores = case.scores[method][list(layers)].sum(dim=0)
    recipe = make_recipe(case.engine.model, "infoflow", budget)
    given = with_selector(find_method("infoflow"), Given(scores))
    run = case.engine.run(case.prompt, recipe=replace(recipe, method=given), forced_ids=case.forced[:-1])
    kl, js = divergences(run.logits, case.logits)
    return sum(kl) / len(kl), sum(js) / len(js)


def with_selector(method: Method, selector: Selector) -> Method:
    """The method with this selector, whatever the layer set."""
    return replace(method, selector=lambda _: selector)

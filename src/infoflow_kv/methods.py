"""Method = how stored chunks are used for one answer; the table of all methods. A new method is a row here."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.records import Context
from infoflow_kv.select import (
    Allocation,
    AttentionMass,
    Budget,
    ChunkStarts,
    Deviation,
    Random,
    Seams,
    Selector,
    constant,
    sensitivity,
    shrinking,
    tokens_at_seams,
    tokens_at_starts,
    true_deviation,
    value_norm,
)

SelectorFactory = Callable[[tuple[int, ...]], Selector]
NarrowingFactory = Callable[[Context, Budget, int, Allocation], Deviation]
Need = Literal["sensitivity", "truth"]


@dataclass(frozen=True, slots=True)
class Method:
    """How stored chunks are used for one answer.

    `reuse` False: ordinary prefill of the same token ids. `selector`: scores the tokens, made for the request's layer
    set; `narrowing`: chooses rows while they run instead; neither: nothing is recomputed. `layers`: the rule's own
    layer set, where it has one; `usual_layers`: what it takes on a model that was not calibrated. `parameter`: k of a
    rule with a fixed number of tokens, written `name:k`, counted by `count`. `sets_by_layer`: the tokens differ from
    layer to layer, so that no one set could cover an adaptive budget. `needs`: what must be measured beside the
    chunk's KV. `source` says where the rule comes from.
    """

    name: str
    rule: str
    source: str
    reuse: bool = True
    selector: SelectorFactory | None = None
    narrowing: NarrowingFactory | None = None
    layers: str | None = None
    usual_layers: str = "relative"
    parameter: int | None = None
    count: Callable[[Context, int], int] | None = None
    sets_by_layer: bool = False
    needs: frozenset[Need] = frozenset()

    @property
    def scores_by_attention(self) -> bool:
        """Whether its scores come from the prompt's attention: then the geometry of the scores matters to it."""
        return self.selector is not None and isinstance(self.selector((0,)), AttentionMass)

    @property
    def scores_by_layers(self) -> bool:
        """Whether the layer set of the request matters to it."""
        return self.layers is None and self.scores_by_attention

    @property
    def in_laboratory_only(self) -> bool:
        return "truth" in self.needs


def _rows() -> tuple[Method, ...]:
    return (
        Method("full", "ordinary prefill of the same token ids; no reuse", "the reference", reuse=False),
        Method("none", "reuse at global positions, nothing recomputed", "the paper's no-recompute baseline"),
        Method("random", "uniform choice over reusable tokens, seeded", "control", selector=lambda layers: Random()),
        Method(
            "first-k",
            "the first k tokens of every chunk but the exact one, whatever the budget (k = 16; `first-k:32` for 32)",
            "EPIC, LegoLink-k",
            selector=lambda layers: ChunkStarts(),
            parameter=16,
            count=tokens_at_starts,
        ),
        Method(
            "epic",
            "LegoLink at the budget: the chunks' first tokens, k = budget × reusable tokens / chunks",
            "EPIC",
            selector=lambda layers: ChunkStarts(),
        ),
        Method(
            "seam",
            "the last k tokens before each boundary between chunks, whatever the budget (k = 16; `seam:32` for 32)",
            "KVBoost",
            selector=lambda layers: Seams(),
            parameter=16,
            count=tokens_at_seams,
        ),
        Method(
            "cacheblend",
            "layers 0 and 1 in full; then the tokens with the largest squared deviation of V at layer 1",
            "CacheBlend, released code",
            narrowing=lambda c, b, n, a: Deviation(c, b, n, constant, "V", a),
        ),
        Method(
            "cacheblend-k",
            "the same with the deviation of K",
            "LMCache",
            narrowing=lambda c, b, n, a: Deviation(c, b, n, constant, "K", a),
        ),
        Method(
            "cacheblend-gradual",
            "layers 0 and 1 in full; then a set that shrinks from 1.5 to 0.5 × budget, ranked anew at each layer",
            "CacheBlend, the paper's gradual filter",
            narrowing=lambda c, b, n, a: Deviation(c, b, n, shrinking, "V", a),
            sets_by_layer=True,
        ),
        Method(
            "infoflow",
            "attention mass of the prompt, summed over rows, heads and the layer set",
            "InfoFlow KV, eq. 7",
            selector=lambda layers: AttentionMass(layers, "sum"),
        ),
        Method(
            "infoflow-l2",
            "L2 over prompt rows of the head-mean attention, summed over the layer set",
            "InfoFlow KV, released code",
            selector=lambda layers: AttentionMass(layers, "l2"),
        ),
        Method(
            "infoflow-vatp",
            "attention mass times ‖v‖₁ of the token, per K/V head",
            "VATP's weight on InfoFlow KV",
            selector=lambda layers: AttentionMass(layers, "sum", value_norm),
        ),
        Method(
            "infoflow-entropy",
            "attention mass in which a head's row counts by 1 − H / log n, so that diffuse heads say little",
            "this project",
            selector=lambda layers: AttentionMass(layers, "entropy"),
        ),
        Method(
            "a3",
            "attention mass at layer 0 only",
            "A³",
            selector=lambda layers: AttentionMass(layers, "sum"),
            layers="0",
        ),
        Method(
            "prophetkv",
            "attention mass at all layers",
            "ProphetKV (which recomputes 20 %)",
            selector=lambda layers: AttentionMass(layers, "sum"),
            layers="all",
        ),
        Method(
            "influence",
            "attention mass times how far the token's value moved behind a neighbour, measured at ingestion",
            "this project",
            selector=lambda layers: AttentionMass(layers, "sum", sensitivity),
            usual_layers="all",
            needs=frozenset({"sensitivity"}),
        ),
        Method(
            "oracle",
            "attention mass times ‖V_full − V_reused‖, all layers; needs the full prefill it is to save",
            "upper reference, laboratory only",
            selector=lambda layers: AttentionMass(layers, "sum", true_deviation),
            layers="all",
            needs=frozenset({"truth"}),
        ),
    )


METHODS: dict[str, Method] = {method.name: method for method in _rows()}


def find_method(name: str) -> Method:
    """The method of this name (`first-k:32` sets its k); OptionError with the nearest known name if there is none."""
    base, colon, text = name.partition(":")
    if base not in METHODS:
        raise unknown_name("method", name, METHODS)
    method = METHODS[base]
    if not colon:
        return method
    if method.parameter is None or not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        allowed = f"write {base}:k, k a whole number of at least 1" if method.parameter else f"{base} takes no number"
        raise OptionError(f"method '{name}' is not understood; {allowed}")
    return replace(method, name=name, parameter=int(text))

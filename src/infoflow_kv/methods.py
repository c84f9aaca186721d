"""Method = selector + whether chunks are reused; the table of all methods. A new method is a row here."""

from collections.abc import Callable
from dataclasses import dataclass

from infoflow_kv.errors import unknown_name
from infoflow_kv.select import AttentionMass, Random, Selector

SelectorFactory = Callable[[tuple[int, ...]], Selector]


@dataclass(frozen=True, slots=True)
class Method:
    """How stored chunks are used for one answer.

    `reuse` False: ordinary prefill of the same token ids. `selector` None: nothing is recomputed. Otherwise it
    is made for the request's layer set. `source` says where the rule comes from.
    """

    name: str
    rule: str
    source: str
    reuse: bool = True
    selector: SelectorFactory | None = None


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("full", "ordinary prefill of the same token ids; no reuse", "the reference", reuse=False),
        Method("none", "reuse at global positions, nothing recomputed", "the paper's no-recompute baseline"),
        Method("random", "uniform choice over reusable tokens, seeded", "control", selector=lambda layers: Random()),
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
    )
}


def find_method(name: str) -> Method:
    """The method of this name; OptionError with the nearest known name if there is none."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]

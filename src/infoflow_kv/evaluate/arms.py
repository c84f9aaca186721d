"""Arms: a method with its budget and what differs from its defaults, read from text and named by text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.methods import Method, find_method
from infoflow_kv.positions import check_geometry
from infoflow_kv.select import AttentionMass, check_budget

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel
    from infoflow_kv.recipes import Recipe

_ARM = re.compile(r"(?P<method>[^\[\]@,\s]+)(?:\[(?P<options>[^\[\]]*)\])?(?:@(?P<budget>[^\[\]@,\s]+))?")
# What may differ, in the order of an arm's name, with what stands in no name. A flag comes first: behind a value it
# would read as that value's continuation (`layers=3,7`).
_DEFAULTS: dict[str, Any] = {
    "reorder": False,
    "layers": "auto",
    "geometry": "GLOBAL",
    "repair_layers": "all",
    "chunk_floor": 0.0,
    "chunk_cap": 1.0,
    "budget_max": None,
}
_NUMBERS = ("chunk_floor", "chunk_cap", "budget_max")
_FLAGS = ("reorder",)


@dataclass(frozen=True, slots=True)
class Arm:
    """`name` is `method[differences]@budget`; `budget` None for methods that have none."""

    name: str
    method: str
    budget: float | str | None
    options: dict[str, Any] = field(default_factory=dict)

    def recipe(self, model: "LanguageModel") -> "Recipe":
        """The recipe for this model; OptionError for what this model has not."""
        from infoflow_kv.recipes import make_recipe

        # A rule with a fixed number of tokens takes it whatever the budget, unless that buys nothing at all.
        return make_recipe(model, self.method, 1.0 if self.budget is None else self.budget, **self.options)


def parse_arms(
    methods: str, budgets: Sequence[float | str], *, geometry: str | None = None, reorder: bool = False
) -> list[Arm]:
    """The arms of a list like `full,none,infoflow[layers=relative],epic@0.3`, each at every budget unless it names one.

    Differences: layers, geometry, repair_layers, reorder, chunk_floor, chunk_cap, budget_max. `geometry` and `reorder`
    are those of all arms that have none of their own and to which they say something. What is the default anyway
    stands in no name. Raises OptionError for anything that is not understood, and for an arm that comes twice.

    >>> [arm.name for arm in parse_arms("none,epic,a3@auto:0.5", (0.05, 0.15))]
    ['none', 'epic@0.05', 'epic@0.15', 'a3@auto:0.5']
    """
    arms: list[Arm] = []
    for text in split_outside_brackets(methods):
        match = _ARM.fullmatch(text.strip())
        if match is None:
            raise OptionError(
                f"arm '{text.strip()}' is not understood; expected a method, with differences in brackets and a budget "
                "behind @ where wanted, as in infoflow[layers=relative,geometry=HL-TP]@0.15"
            )
        method = find_method(match["method"])
        own = parse_options(match["options"] or "", text)
        options = settled(method, {**shared_options(method, geometry, reorder), **own}, text.strip())
        wanted: Sequence[float | str | None] = budgets if match["budget"] is None else [parse_budget(match["budget"])]
        if not has_budget(match["method"]):
            if match["budget"] is not None:
                raise OptionError(f"arm '{text.strip()}': {method.name} takes no budget; write it without @")
            wanted = [None]
        elif not wanted:
            raise OptionError(f"arm '{text.strip()}' needs a budget; give --budget or write {method.name}@0.15")
        arms += [Arm(arm_name(method.name, options, b), method.name, b, options) for b in wanted]
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"arm '{name}' comes twice; name each arm once")
    if not arms:
        raise OptionError("no arm was given; name methods, for example full,none,infoflow")
    return arms


def shared_options(method: Method, geometry: str | None, reorder: bool) -> dict[str, Any]:
    """Those of the options for all arms that say something to this method."""
    found: dict[str, Any] = {}
    if geometry is not None and method.selector is not None and isinstance(method.selector((0,)), AttentionMass):
        found["geometry"] = geometry
    if reorder and method.selector is not None and not method.in_laboratory_only:
        found["reorder"] = True
    return found


def settled(method: Method, options: dict[str, Any], arm: str) -> dict[str, Any]:
    """The options in the order of a name, without defaults: the same arm always has the same name."""
    if "geometry" in options:
        options["geometry"] = check_geometry(options["geometry"])
    if options.get("reorder") and method.in_laboratory_only:
        raise OptionError(
            f"arm '{arm}': {method.name} knows the full prefill of the given order only, so it cannot reorder"
        )
    return {key: options[key] for key, default in _DEFAULTS.items() if options.get(key, default) != default}


def has_budget(method: str) -> bool:
    """Whether a budget says anything to this method."""
    found = find_method(method)
    return found.count is None and (found.selector is not None or found.narrowing is not None)


def arm_name(method: str, options: dict[str, Any], budget: float | str | None) -> str:
    """`infoflow[layers=relative]@0.15`."""
    parts = ",".join(key if value is True else f"{key}={value}" for key, value in options.items())
    shown = "" if budget is None else f"@{budget:g}" if isinstance(budget, float) else f"@{budget}"
    return f"{method}[{parts}]{shown}" if parts else f"{method}{shown}"


def parse_budget(text: str) -> float | str:
    """A number in 0..1, or `auto[:P]` as it is; OptionError for anything else."""
    text = text.strip()
    if text.startswith("auto"):
        check_budget(text)
        return text
    try:
        number = float(text)
    except ValueError:
        raise OptionError(f"budget '{text}' is neither a number in 0..1 nor auto or auto:P") from None
    return check_budget(number).share


def parse_options(text: str, arm: str) -> dict[str, Any]:
    """The differences in an arm's brackets; a part without `=` continues the value before it (`layers=3,7`)."""
    texts: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in _FLAGS and not equals:
            texts[key] = "true"
        elif equals:
            if key not in _DEFAULTS:
                raise unknown_name("difference", key, _DEFAULTS)
            if key in texts:
                raise OptionError(f"arm '{arm.strip()}': {key} comes twice; name it once")
            texts[key] = value
        elif texts:
            last = next(reversed(texts))
            texts[last] += f",{key}"
        else:
            raise OptionError(f"arm '{arm.strip()}': '{key}' is not understood; write name=value or reorder")
    return {key: _value(key, value, arm) for key, value in texts.items()}


def _value(key: str, text: str, arm: str) -> Any:
    if key in _FLAGS:
        if text not in ("true", "false"):
            raise OptionError(f"arm '{arm.strip()}': {key} is '{text}'; expected true or false")
        return text == "true"
    if key in _NUMBERS:
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"arm '{arm.strip()}': {key} is '{text}'; expected a number in 0..1") from None
    return text


def split_outside_brackets(text: str) -> list[str]:
    """The parts of a list at commas that stand in no brackets, blank ones left out."""
    parts, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]

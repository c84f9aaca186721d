"""Arms: a method with its budget and what differs from its defaults, read from text and named by text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.methods import METHODS, Method, find_method
from infoflow_kv.positions import check_geometry
from infoflow_kv.select import AUTO_CEILING, check_budget, layer_set, layers_text

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
    "budget_max": AUTO_CEILING,
    "tiles": 1,
}
_NUMBERS = ("chunk_floor", "chunk_cap", "budget_max")
_FLAGS = ("reorder",)
_OF_ENGINE = ("tiles",)  # how chunks are prefilled, which no recipe says
_LAYERS = ("layers", "repair_layers")
_LAYER_NUMBERS = re.compile(r"[\d\s,-]+")
_MOST_LAYERS = 10**6  # of any model: a set is brought into its one form before the model is known


@dataclass(frozen=True, slots=True)
class Arm:
    """`name` is `method[differences]@budget`; `budget` None for methods that have none."""

    name: str
    method: str
    budget: float | str | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tiles(self) -> int:
        """Along each side of an image; of full prefill, which cuts nothing, 0 as in the paper's Table 4."""
        return int(self.options.get("tiles", 1)) if find_method(self.method).reuse else 0

    def recipe(self, model: "LanguageModel") -> "Recipe":
        """The recipe for this model; OptionError for what this model has not."""
        from infoflow_kv.recipes import make_recipe

        try:
            # A rule with a fixed number of tokens takes it whatever the budget, unless that buys nothing at all.
            given = {key: value for key, value in self.options.items() if key not in _OF_ENGINE}
            return make_recipe(model, self.method, 1.0 if self.budget is None else self.budget, **given)
        except OptionError as error:
            raise OptionError(f"arm '{self.name}': {error}") from None


def parse_arms(
    methods: str, budgets: Sequence[float | str], *, geometry: str | None = None, reorder: bool = False
) -> list[Arm]:
    """The arms of a list like `full,none,infoflow[layers=relative],epic@0.3`, each at every budget unless it names one.

    Differences: layers, geometry, repair_layers, reorder, chunk_floor, chunk_cap, budget_max, tiles. `geometry` and
    `reorder` are those of all arms that have none of their own and to which they say something. What is the default
    anyway stands in no name, and the same arm has the same name however it is written. Raises OptionError for anything
    that is not understood, for a difference that the method does not read, and for an arm that comes twice.

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
        method = usual(find_method(match["method"]))
        own = parse_options(match["options"] or "", text)
        options = settled(method, {**shared_options(method, geometry, reorder), **own}, text.strip())
        given = budgets if match["budget"] is None else [match["budget"]]
        wanted: list[float | str | None] = [parse_budget(b) if isinstance(b, str) else _share(b) for b in given]
        if not has_budget(match["method"]):
            if match["budget"] is not None:
                raise OptionError(f"arm '{text.strip()}': {method.name} takes no budget; write it without @")
            wanted = [None]
        elif not wanted:
            raise OptionError(f"arm '{text.strip()}' needs a budget; give --budget or write {method.name}@0.15")
        if "budget_max" in options and not all(isinstance(b, str) for b in wanted):
            raise OptionError(
                f"arm '{text.strip()}': budget_max is the ceiling of adaptive budgets and says nothing to others; give "
                f"the arm one of its own, as in {method.name}[budget_max={options['budget_max']}]@auto:0.8"
            )
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
    if geometry is not None and method.scores_by_attention:
        found["geometry"] = geometry
    if reorder and method.selector is not None and not method.in_laboratory_only:
        found["reorder"] = True
    return found


def usual(method: Method) -> Method:
    """The method under its shortest name: `first-k:016` is `first-k`, which has 16 anyway."""
    base = METHODS[method.name.partition(":")[0]]
    if method.parameter == base.parameter:
        return base
    return replace(method, name=f"{base.name}:{method.parameter}")


def settled(method: Method, options: dict[str, Any], arm: str) -> dict[str, Any]:
    """The options in the order of a name, without defaults: the same arm always has the same name.

    OptionError for a difference that this method does not read: the arm would be another one by its name only.
    """
    options = {key: _one_form(key, value) for key, value in options.items()}
    if options.get("reorder") and method.in_laboratory_only:
        raise OptionError(
            f"arm '{arm}': {method.name} knows the full prefill of the given order only, so it cannot reorder"
        )
    found = {key: options[key] for key, default in _DEFAULTS.items() if options.get(key, default) != default}
    known = read_by(method)
    for key in found:
        if key not in known:
            raise OptionError(
                f"arm '{arm}': {method.name} does not read {key}, so it would be measured twice under two names; it "
                + (f"reads {', '.join(known)}" if known else "reads no difference")
            )
    return found


def read_by(method: Method) -> list[str]:
    """The differences that change something in this method, in the order of a name."""
    chooses = method.selector is not None or method.narrowing is not None
    reads = {
        "reorder": method.selector is not None and not method.in_laboratory_only,
        "layers": method.scores_by_layers,
        "geometry": method.scores_by_attention,
        "repair_layers": method.selector is not None,
        "chunk_floor": chooses,
        "chunk_cap": chooses,
        "budget_max": has_budget(method.name),
        "tiles": method.reuse,
    }
    return [key for key in _DEFAULTS if reads[key]]


def _one_form(key: str, value: Any) -> Any:
    """The value as it stands in a name; OptionError for one that no model could take."""
    if key == "geometry":
        return check_geometry(value)
    if key in _LAYERS and _LAYER_NUMBERS.fullmatch(value):
        return layers_text(layer_set(value, _MOST_LAYERS))
    if key in _NUMBERS:
        return value + 0.0  # -0 is 0
    return value


def check_distinct(arms: Sequence[Arm], model: "LanguageModel") -> None:
    """Nothing; OptionError where two arms are the same on this model, such as its layers `auto` and by number."""
    seen: dict[tuple[Recipe, int], str] = {}
    for arm in arms:
        recipe = arm.recipe(model)
        key = replace(recipe, budget_max=None), arm.tiles
        if key in seen:
            raise OptionError(
                f"arms '{seen[key]}' and '{arm.name}' are the same on {model.name} (layers "
                f"{layers_text(recipe.layers)}) and would be measured twice; leave one out"
            )
        seen[key] = arm.name


def has_budget(method: str) -> bool:
    """Whether a budget says anything to this method."""
    found = find_method(method)
    return found.count is None and (found.selector is not None or found.narrowing is not None)


def arm_name(method: str, options: dict[str, Any], budget: float | str | None) -> str:
    """`infoflow[layers=relative]@0.15`."""
    parts = ",".join(key if value is True else f"{key}={value}" for key, value in options.items())
    shown = "" if budget is None else f"@{exact(budget)}" if isinstance(budget, float) else f"@{budget}"
    return f"{method}[{parts}]{shown}" if parts else f"{method}{shown}"


def exact(number: float) -> str:
    """The number in as few digits as say it exactly: no two budgets share a name.

    >>> exact(1.0), exact(0.15), exact(0.1500004)
    ('1', '0.15', '0.1500004')
    """
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def parse_budget(text: str) -> float | str:
    """A number in 0..1, or `auto:P` with P written out; OptionError for anything else.

    >>> parse_budget(".150"), parse_budget("auto")
    (0.15, 'auto:0.8')
    """
    text = text.strip()
    if text.startswith("auto"):
        return f"auto:{exact(check_budget(text).cover or 0.0)}"
    try:
        number = float(text)
    except ValueError:
        raise OptionError(f"budget '{text}' is neither a number in 0..1 nor auto or auto:P") from None
    return _share(number)


def _share(number: float) -> float:
    return check_budget(number).share + 0.0  # -0 is 0


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
    if key in _OF_ENGINE:
        return check_tiles(text, f"arm '{arm.strip()}'")
    return text


def check_tiles(text: str, place: str) -> int:
    """The number of tiles along each side of an image; OptionError for what is none."""
    if not re.fullmatch("[0-9]{1,3}", text) or int(text) < 1:
        raise OptionError(f"{place}: tiles is '{text}'; expected a whole number from 1 (1: images are not cut)")
    return int(text)


def with_tiles(arms: Sequence[Arm], tiles: Sequence[int]) -> list[Arm]:
    """The arms at each k of the paper's Table 4, k × k tiles of an image; 0 is full prefill, which the list then has.

    Full prefill, and arms with tiles of their own, stand there once.

    >>> [arm.name for arm in with_tiles(parse_arms("none,epic@.15", ()), (0, 2))]
    ['full', 'none[tiles=2]', 'epic[tiles=2]@0.15']
    """
    found = [arm for arm in arms if not arm.tiles]
    if 0 in tiles and not found:
        found = parse_arms("full", ())
    for k in dict.fromkeys(k for k in tiles if k):
        for arm in arms:
            if arm.tiles and "tiles" not in arm.options:
                options = settled(find_method(arm.method), {**arm.options, "tiles": k}, arm.name)
                found.append(Arm(arm_name(arm.method, options, arm.budget), arm.method, arm.budget, options))
    found += [arm for arm in arms if "tiles" in arm.options]
    names = [arm.name for arm in found]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"arm '{name}' comes twice; name each arm once")
    return found


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

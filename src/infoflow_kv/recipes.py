"""Recipe = a method and everything that can be chosen beside it, checked; what one request is answered by."""

from dataclasses import dataclass, replace
from typing import Any

from infoflow_kv.chunking import MIN_CHUNK_TOKENS
from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.methods import Method, find_method
from infoflow_kv.models import LanguageModel
from infoflow_kv.positions import check_geometry
from infoflow_kv.select import EVEN, Allocation, Budget, check_budget, layer_set

TOKENS = ("all", "visual", "text")


@dataclass(frozen=True, slots=True)
class Recipe:
    """`layers`: layer set of the scores. `geometry`: RoPE positions while scoring. `reorder`: chunks that were selected
    most go next to the prompt. `allocation`: spread of the budget over chunks. `repair_layers`: the first and last
    layer whose stored KV is replaced; None for all. `budget_max`: ceiling of adaptive budgets; None for the usual.
    `repair_tokens`: which tokens may be chosen, and are what a budget is a share of, a name of TOKENS."""

    method: Method
    budget: Budget
    layers: tuple[int, ...]
    geometry: str = "GLOBAL"
    reorder: bool = False
    allocation: Allocation = EVEN
    repair_layers: tuple[int, int] | None = None
    budget_max: float | None = None
    repair_tokens: str = "all"

    def __post_init__(self) -> None:
        if self.repair_tokens not in TOKENS:
            raise unknown_name("repair_tokens", self.repair_tokens, TOKENS)
        if self.repair_tokens != "all" and self.method.narrowing is not None:
            raise OptionError(f"{self.method.name} chooses among all tokens while they run; it takes no repair_tokens")
        if self.repair_tokens != "all" and (self.allocation != EVEN or self.reorder):
            raise OptionError(
                "repair_tokens does not go with chunk_floor, chunk_cap or reorder: these look at all tokens"
            )
        scores = self.method.selector is not None
        if self.reorder and not scores and self.method.reuse:
            raise OptionError(f"reorder needs a method that scores tokens; {self.method.name} does not")
        if self.reorder and self.method.in_laboratory_only:
            raise OptionError(f"{self.method.name} knows the full prefill of the given order only; it takes no reorder")
        if self.repair_layers is not None and self.method.narrowing is not None:
            raise OptionError(f"repair_layers and {self.method.name} both say which layers run; use one of them")
        if self.method.sets_by_layer and self.budget.cover is not None:
            raise OptionError(
                f"budget {self.budget} is adaptive and needs one set of tokens for all layers; {self.method.name} has "
                "another set in each: give it a share, for example 0.15"
            )

    @property
    def repairs_plainly(self) -> bool:
        """Whether the rows chosen run through all layers of the context as it was given: what may be kept of it then
        serves other questions too."""
        return (
            self.method.selector is not None
            and self.method.narrowing is None
            and self.repair_layers is None
            and self.repair_tokens == "all"
            and self.geometry == "GLOBAL"
            and not self.reorder
            and not self.method.in_laboratory_only
            and (self.budget.cover is not None or self.budget.share > 0)
        )


def make_recipe(
    model: LanguageModel,
    method: str,
    budget: Any,
    *,
    budget_max: Any = None,
    layers: str = "auto",
    geometry: str = "GLOBAL",
    reorder: bool = False,
    chunk_floor: float = 0.0,
    chunk_cap: float = 1.0,
    repair_layers: str = "all",
    repair_tokens: str = "all",
) -> Recipe:
    """The recipe of these options for this model; OptionError for anything outside its range."""
    found = find_method(method)
    if layers not in ("auto", "profile"):
        layer_set(layers, model.num_layers)  # a malformed set is refused even where the method has its own
    repaired = layer_set(repair_layers, model.num_layers)
    whole = len(repaired) == model.num_layers
    if repaired[-1] - repaired[0] + 1 != len(repaired):
        raise OptionError(f"repair_layers '{repair_layers}' have a gap; expected one range like 0-14 or 15-29")
    return Recipe(
        method=found,
        budget=check_budget(budget, budget_max),
        layers=method_layers(model, found, layers),
        geometry=check_geometry(geometry),
        reorder=reorder,
        allocation=Allocation(chunk_floor, chunk_cap),
        repair_layers=None if whole else (repaired[0], repaired[-1]),
        budget_max=budget_max,
        repair_tokens=repair_tokens,
    )


def check_tiles(tiles: int) -> int:
    """The number of tiles along each side of an image; OptionError for none."""
    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise OptionError(f"tiles is {tiles!r}; expected a whole number of at least 1 (1: images are not cut)")
    return tiles


def change(recipe: Recipe, model: LanguageModel, method: str | None, budget: Any, layers: str) -> Recipe:
    """The recipe with another method or budget; `layers`: the engine's layer set as it was written."""
    changes: dict[str, Any] = {}
    if method is not None:
        found = find_method(method)
        reorder = recipe.reorder and (found.selector is not None or not found.reuse)
        changes = {"method": found, "layers": method_layers(model, found, layers), "reorder": reorder}
    if budget is not None:
        changes["budget"] = check_budget(budget, recipe.budget_max)
    # At once: a method is checked with the budget that it gets, not with the one before.
    return replace(recipe, **changes)


def method_layers(model: LanguageModel, method: Method, layers: str) -> tuple[int, ...]:
    """The layer set of a method: its own; else, for `auto`, what was measured for this model, or the usual one.

    `profile` insists on a measured set: OptionError where there is none.
    """
    if method.layers is not None:
        return layer_set(method.layers, model.num_layers)
    if layers in ("auto", "profile"):
        measured = model.layer_sets.get(method.name)
        if measured is None and method.usual_layers == "relative":  # InfoFlow's variants share its set
            measured = model.layer_sets.get("infoflow")
        if measured is None and layers == "profile":
            raise OptionError(
                f"model '{model.name}' has no profile for {method.name}; run `infoflow-kv calibrate` or name the layers"
            )
        layers = measured or method.usual_layers
    return layer_set(layers, model.num_layers)


def check_chunk_tokens(chunk_tokens: int, window_tokens: int) -> int:
    """The longest chunk itself; OptionError if no request could ever use a chunk of that length."""
    if type(chunk_tokens) is not int or not MIN_CHUNK_TOKENS <= chunk_tokens < window_tokens:
        wanted = f"at least {MIN_CHUNK_TOKENS} and less than the window of {window_tokens}"
        raise OptionError(f"chunk_tokens is {chunk_tokens!r}; expected {wanted}")
    return chunk_tokens


def check_regime(model: LanguageModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Nothing; OptionError where new tokens would cross from longrope's short to its long frequencies: all keys before
    would have to be rotated anew, as Transformers does by starting over."""
    longest = prompt_tokens + max_new_tokens
    if model.rotates_anew and model.rope_regime(prompt_tokens) != model.rope_regime(longest):
        raise OptionError(
            f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones cross the length at which this model "
            "changes its rotary frequencies (longrope); ask for fewer new tokens, or give more documents"
        )

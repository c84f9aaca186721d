"""From the parts of a request to what is recomputed: order of the chunks, scores, selection or rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from infoflow_kv.models import LanguageModel, RotaryTables
from infoflow_kv.placing import Place
from infoflow_kv.positions import places_of, scoring_positions, visual_slots
from infoflow_kv.recipes import Recipe
from infoflow_kv.records import Context, Prompt, Selection
from infoflow_kv.reorder import chunk_order
from infoflow_kv.repairing import OnlyLayers
from infoflow_kv.select import Deviation, Scene, num_selected, take
from infoflow_kv.supply import Parts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Request:
    """What choosing looks at: one request before repair. `sensitivity`: see `Parts`, for methods that need it. `truth`:
    values of a full prefill, for the oracle."""

    model: LanguageModel
    place: Place
    recipe: Recipe
    prompt: Prompt
    parts: Parts
    suffix: "Tensor"
    seed: int
    sensitivity: "Tensor | None" = None
    truth: "Tensor | None" = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows to run and the rule under which they run."""

    selection: Selection
    rule: Deviation | OnlyLayers | None = None

    def after(self) -> Selection:
        """The selection once the rows have run: a rule that drops rows knows it only then."""
        if isinstance(self.rule, Deviation):
            return self.rule.selection()
        return self.rule.selection(self.selection) if isinstance(self.rule, OnlyLayers) else self.selection


def order_chunks(request: Request) -> tuple[int, ...]:
    """The order of the chunks by local scores (stage 1 of reorder): all chunks compete, under HL-TP positions."""
    recipe = replace(request.recipe, geometry="HL-TP")
    local = replace(request, recipe=recipe)
    head_tokens = request.parts.head.num_tokens if request.parts.head is not None else 0
    context, tables = scoring_context(local, exact_tokens=head_tokens)
    scores = score(local, context, tables)
    selection = take(scores, recipe.budget, context, recipe.allocation, fixed_count(recipe, context))
    return chunk_order(selection, context.spans[1:] if head_tokens else context.spans)


def choose(request: Request, context: Context, tables: RotaryTables) -> Choice:
    """What is recomputed of the assembled context, whose GLOBAL tables are `tables`."""
    recipe, model = request.recipe, request.model
    method = recipe.method
    rule = None
    if recipe.repair_layers is not None:
        rule = OnlyLayers(context.num_tokens, *recipe.repair_layers)
    nothing = Selection(torch.empty(0, dtype=torch.int64, device=model.device))
    everything = Selection(torch.arange(context.exact_tokens, context.num_tokens, device=model.device))
    count = fixed_count(recipe, context)
    if count == 0 or (count < 0 and num_selected(recipe.budget.share, context.reusable_tokens) == 0):
        return Choice(nothing)
    if method.narrowing is not None:
        deviation = method.narrowing(context, recipe.budget, model.num_layers, recipe.allocation)
        return Choice(everything, deviation)
    if method.selector is None:
        return Choice(nothing)
    chosen_among = candidates(context, recipe.repair_tokens, request.prompt)
    if recipe.budget.share == 1 and recipe.budget.cover is None and count < 0:  # everything: no scores needed
        return Choice(everything if chosen_among is None else Selection(chosen_among), rule)
    scored = (context, tables) if recipe.geometry == "GLOBAL" else scoring_context(request, context.exact_tokens)
    scores = score(request, *scored)
    if chosen_among is None:
        return Choice(take(scores, recipe.budget, context, recipe.allocation, count), rule)
    wanted = min(count, chosen_among.numel()) if count >= 0 else recipe.budget.count(scores[chosen_among])
    below = torch.full_like(scores, float(scores.min()) - 1)
    below[chosen_among] = scores[chosen_among]
    selection = take(below, recipe.budget, context, recipe.allocation, wanted)
    reason = f"{wanted} of {chosen_among.numel()} {recipe.repair_tokens} tokens"
    return Choice(replace(selection, scores=scores, reason=reason), rule)


def candidates(context: Context, tokens: str, prompt: Prompt) -> "Tensor | None":
    """The slots that may be chosen of a kind of tokens of the prompt, ascending; None where all may be."""
    if tokens == "all":
        return None
    is_wanted = torch.full((context.num_tokens,), tokens == "text", device=context.keys.device)
    is_wanted[visual_slots(prompt).to(is_wanted.device)] = tokens == "visual"
    is_wanted[: context.exact_tokens] = False
    return torch.nonzero(is_wanted)[:, 0]


def fixed_count(recipe: Recipe, context: Context) -> int:
    """The number of tokens of a rule that fixes it, else -1."""
    method = recipe.method
    if method.count is None or method.parameter is None:
        return -1
    return method.count(context, method.parameter)


def scoring_context(request: Request, exact_tokens: int) -> tuple[Context, RotaryTables]:
    """The parts at the geometry's positions, with their tables: for scoring, never for repair or decoding."""
    model, parts = request.model, request.parts
    head_tokens = parts.head.num_tokens if parts.head is not None else 0
    lengths = places_of(request.prompt.chunks)
    origin = len(parts.chunks[0].identity.head_ids) if parts.chunks else 0
    num_prompt = int(request.suffix.shape[0])
    positions = scoring_positions(request.recipe.geometry, head_tokens, lengths, origin, num_prompt)
    tables = model.rotary().tables(positions)
    context, _ = request.place.assemble(
        request.prompt, [parts], tables, int(positions.shape[-1]), exact_tokens, last=False
    )
    return context, tables


def score(request: Request, context: Context, tables: RotaryTables) -> "Tensor":
    """The scores of the context's tokens."""
    method, sensitivity = request.recipe.method, request.sensitivity
    assert method.selector is not None
    if sensitivity is not None:
        sensitivity = sensitivity.to(request.model.device)
    scene = Scene(request.model, context, request.suffix, tables, request.seed, sensitivity, request.truth)
    return method.selector(request.recipe.layers).score(scene)


def permuted(prompt: Prompt, order: Sequence[int]) -> Prompt:
    """The prompt with its chunks in this order."""
    return replace(prompt, chunks=tuple(prompt.chunks[index] for index in order))

"""Reuse or full prefill? What either would take on this machine, predicted from its measured speeds.

Reuse does not always pay: short contexts, slow disks, large budgets, or chunks that would be stored for nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from infoflow_kv.models import LanguageModel
from infoflow_kv.recipes import Recipe
from infoflow_kv.records import Prompt
from infoflow_kv.select import num_selected
from infoflow_kv.speeds import Speeds
from infoflow_kv.store import MemoryStore
from infoflow_kv.supply import Supply

# Selected rows stand late: questions look at what is near them. Seen on three multi-hop sets: 0.73 to 0.81 of the
# context on average (SmolLM2-135M, `infoflow`).
MEAN_RANK = 0.75
# Full prefill is picked only where it is this much quicker, and by so many seconds: predictions are not exact, and less
# is not noticed.
MARGIN, NOTICED_SECONDS = 0.95, 0.1
USUAL_SHARE = 0.15  # of adaptive budgets, whose size is known only after scoring


@dataclass(frozen=True, slots=True)
class Load:
    """One request as far as its cost is known beforehand.

    `context`, `prompt`: tokens. `missing`: lengths of chunks that must be prefilled. `read_bytes`: KV that comes from a
    disk. `kv_bytes`: KV of the whole context. `chosen`: rows that will be repaired. `scored`: share of the layers that
    the scoring forward runs, 0 for none.
    """

    context: int
    prompt: int
    missing: Sequence[int]
    read_bytes: int
    kv_bytes: int
    chosen: int
    scored: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Predicted seconds to the first token with reuse and with full prefill."""

    reuse_seconds: float
    full_seconds: float

    @property
    def picks_full(self) -> bool:
        saved = self.reuse_seconds - self.full_seconds
        return self.full_seconds < MARGIN * self.reuse_seconds and saved >= NOTICED_SECONDS

    @property
    def seconds(self) -> float:
        """Predicted seconds of the way that is picked."""
        return self.full_seconds if self.picks_full else self.reuse_seconds

    @property
    def reason(self) -> str:
        """What to tell where full prefill was picked."""
        return (
            f"full prefill instead of reuse: predicted {self.full_seconds:.2f} s to the first token against "
            f"{self.reuse_seconds:.2f} s"
        )


def predict(speeds: Speeds, load: Load) -> Plan:
    """What a request takes either way.

    >>> speeds = Speeds(forward=0.1, row=0.001, pair=0.0, load=1e9, assemble=1e9)
    >>> plan = predict(speeds, Load(1000, 20, (), 0, 0, chosen=150, scored=1.0))
    >>> round(plan.full_seconds, 3), round(plan.reuse_seconds, 3)
    (1.12, 0.39)
    """
    total = load.context + load.prompt
    full = speeds.seconds(total, total * (total + 1) / 2)
    prompt_pairs = load.prompt * (load.context + load.prompt / 2)
    reuse = load.read_bytes / speeds.load + load.kv_bytes / speeds.assemble
    reuse += sum(speeds.seconds(length, length * length / 2) for length in load.missing)
    reuse += load.scored * speeds.seconds(load.prompt, prompt_pairs) if load.chosen else 0.0
    repair_pairs = load.chosen * MEAN_RANK * load.context + prompt_pairs
    return Plan(reuse + speeds.seconds(load.chosen + load.prompt, repair_pairs), full)


def plan_request(
    model: LanguageModel, speeds: Speeds, supply: Supply, prompt: Prompt, recipe: Recipe, length: int
) -> Plan | None:
    """The plan of a request of `length` tokens; None where there is nothing to choose.

    That is where nothing is reused anyway, and where chunks are not stored yet but will be on the way: then reuse is
    what their owner asked for, and pays from the next request on.
    """
    if not recipe.method.reuse or not prompt.chunks:
        return None
    if any(chunk.images is not None for chunk in prompt.chunks):
        return None  # full prefill would run the vision tower, whose speed is not measured
    store, lengths = supply.store, [chunk.num_tokens for chunk in prompt.chunks]
    if store is not None and not all(map(store.contains, supply.wanted(prompt, recipe.method))):
        return None
    reusable = sum(lengths) - supply.exact_chunk_tokens(prompt, length)
    chosen = num_selected(USUAL_SHARE if recipe.budget.cover is not None else recipe.budget.share, reusable)
    if recipe.method.narrowing is not None:  # two layers of all rows
        chosen += 2 * (reusable - chosen) // model.num_layers
    elif recipe.method.selector is None:
        chosen = 0
    scores = recipe.method.scores_by_attention and chosen < reusable
    kv_bytes = prompt.context_tokens * model.kv_bytes_per_token
    load = Load(
        context=prompt.context_tokens,
        prompt=len(prompt.suffix_ids),
        missing=lengths if store is None else (),
        read_bytes=0 if store is None or isinstance(store, MemoryStore) else kv_bytes,
        kv_bytes=kv_bytes,
        chosen=chosen,
        scored=(max(recipe.layers) + 1) / model.num_layers if scores else 0.0,
    )
    return predict(speeds, load)

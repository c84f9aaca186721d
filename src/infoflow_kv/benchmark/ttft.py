"""How much sooner does the first token come, and where does the time go?"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infoflow_kv.benchmark.arms import FULL, PLAIN, Arm, Outcome, make_arms, prepared
from infoflow_kv.benchmark.ceilings import Ceilings, measure_ceilings
from infoflow_kv.benchmark.context import Request, Setting
from infoflow_kv.benchmark.timing import OnStep, Timed, measure, tidy
from infoflow_kv.benchmark.work import (
    ModelShape,
    Work,
    chunk_work,
    forward_work,
    narrowing_work,
    scoring_work,
    shape_of,
)
from infoflow_kv.prefilling import NEIGHBOUR
from infoflow_kv.records import Usage

STAGES = ("load", "assemble", "score", "repair")


def measure_ttft(
    setting: Setting,
    tokens: int,
    methods: Sequence[str] = ("infoflow",),
    budgets: Sequence[float] = (0.15,),
    states: Sequence[str] = ("warm-disk", "warm-memory", "cold"),
    *,
    scratch: Path | None = None,
    ceiling_sizes: Mapping[str, int] | None = None,
    on_step: OnStep | None = None,
) -> list[dict[str, Any]]:
    """One record per arm over about `tokens` context tokens: TTFT in seconds, stages, rows, pairs and ideals.

    `warm-disk` opens the store anew before each request (the files are in the system's page cache), `warm-memory` finds
    the chunks in this process, `cold` prefills and stores them on the way. The clock of the engine's arms starts with
    texts in hand, that of plain Transformers with ids. `ceiling_sizes`: as `measure_ceilings` takes them. OptionError
    for unknown names, PromptTooLongError over the window.
    """
    arms = make_arms(methods, budgets, states)
    request, shape = setting.request(tokens), shape_of(setting.model)
    sizes = dict(ceiling_sizes or {})
    before = measure_ceilings(setting.model, shape, **sizes)
    with prepared(setting, request, arms, scratch) as runs:
        timed = measure(
            runs, setting.repeats, setting.warmup, seconds_of=lambda outcome: outcome.ttft_seconds, on_step=on_step
        )
    ceilings = before.higher(measure_ceilings(setting.model, shape, **sizes))
    return [record_of(setting, request, arm, timed, shape, ceilings) for arm in arms]


def record_of(
    setting: Setting,
    request: Request,
    arm: Arm,
    timed: Mapping[str, Timed[Outcome]],
    shape: ModelShape,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """The record of one arm beside the others."""
    own, full, plain = timed[arm.name], timed[FULL.name], timed[PLAIN.name]
    last = own.results[-1]
    work = work_of(setting, request, arm, last, shape)
    full_work = work_of(setting, request, FULL, full.results[-1], shape)
    context_tokens = request.prompt.context_tokens
    kv_bytes = context_tokens * shape.kv_bytes_per_token
    ideal = full.median * work.flops / full_work.flops
    usage = last.usage
    return setting.described("ttft", request) | {
        "arm": arm.method,
        "budget": arm.budget,
        "state": arm.state,
        **own.record("ttft_seconds"),
        "times_sooner_than_full": tidy(full.median / own.median),
        "times_sooner_than_plain": tidy(plain.median / own.median),
        "ideal_times_sooner": tidy(full_work.flops / work.flops),
        "ideal_seconds_at_full_rate": tidy(ideal),
        "ideal_seconds_at_ceilings": tidy(ceilings.seconds(shape, work, kv_bytes if arm.state else 0)),
        "stages": stages(own),
        "plans": setting.plans,
        **planned(own, usage),
        "cached_chunks": usage.cached_chunks if usage else 0,
        "reusable_tokens": usage.reusable_tokens if usage else 0,
        "recomputed_tokens": usage.recomputed_tokens if usage else 0,
        "prefilled_tokens": usage.prefilled_tokens if usage else 0,
        "rows_per_layer": tidy(work.row_layers / shape.num_layers),
        "mean_rank": mean_rank(last, context_tokens),
        "work": work.record(),
        "kv_bytes": kv_bytes,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "ceilings": ceilings.record(),
        "first_token": last.first_token,
        "environment": dict(setting.environment),
    }


def stages(timed: Timed[Outcome]) -> dict[str, float]:
    """Median seconds of each stage; `rest` is what lies between them: tokenising, the choice of the first token."""
    runs = [(outcome.timings, outcome.ttft_seconds) for outcome in timed.results if outcome.timings is not None]
    if not runs:
        return {}
    found = {
        stage: statistics.median(float(getattr(timings, f"{stage}_seconds")) for timings, _ in runs) for stage in STAGES
    }
    rest = statistics.median(
        ttft - sum(float(getattr(timings, f"{stage}_seconds")) for stage in STAGES) for timings, ttft in runs
    )
    return {stage: tidy(seconds) for stage, seconds in (found | {"rest": rest}).items()}


def planned(timed: Timed[Outcome], usage: Usage | None) -> dict[str, Any]:
    """What the planner said of the arm, where it was asked: median predicted seconds, and whether full prefill ran."""
    predictions = [o.timings.predicted_seconds for o in timed.results if o.timings is not None]
    if usage is None or not any(predictions):
        return {}
    return {
        "predicted_seconds": tidy(statistics.median(predictions)),
        "picked_full": usage.prefilled_tokens == usage.context_tokens,
    }


def mean_rank(outcome: Outcome, context_tokens: int) -> float | None:
    """Mean rank of the recomputed tokens as a share of the context's length; None where none was.

    A row late in the context sees more slots: at one budget, attention costs twice as much at 1 as at 0.5.
    """
    if outcome.selection is None or outcome.selection.slots.numel() == 0:
        return None
    return tidy(float(outcome.selection.slots.double().mean()) / context_tokens)


def work_of(setting: Setting, request: Request, arm: Arm, outcome: Outcome, shape: ModelShape) -> Work:
    """What the arm had to do at least for this request, with the rows that it chose."""
    prompt = request.prompt
    if outcome.selection is None or outcome.usage is None:  # plain Transformers computes the last layer in full
        return forward_work(shape, torch.arange(prompt.num_tokens), whole_last=True)
    suffix = torch.arange(prompt.context_tokens, prompt.num_tokens)
    recipe = setting.engine(None, arm.method, 1.0 if arm.budget is None else arm.budget).recipe
    slots, counts = outcome.selection.slots.cpu(), outcome.selection.layer_counts
    if counts:
        exact = prompt.context_tokens - outcome.usage.reusable_tokens
        work = narrowing_work(shape, counts, torch.arange(exact, prompt.context_tokens), slots, suffix)
    else:
        work = forward_work(shape, torch.cat([slots, suffix]))
        chosen = 0 < slots.numel() < outcome.usage.reusable_tokens
        if chosen and (recipe.method.scores_by_layers or recipe.method.layers is not None):
            work += scoring_work(shape, suffix, max(recipe.layers))
    if recipe.method.reuse:
        work += missing_work(setting, request, outcome, shape)
    return work


def missing_work(setting: Setting, request: Request, outcome: Outcome, shape: ModelShape) -> Work:
    """The prefill of what was not stored, and of what had to be measured beside; nothing for a warm store."""
    assert outcome.usage is not None
    head = len(request.prompt.head_ids)
    lengths = [chunk.num_tokens for chunk in request.prompt.chunks]
    work = Work()
    if outcome.usage.prefilled_tokens:
        work += chunk_work(shape, [head] if head else [], 0) + chunk_work(shape, lengths, head)
    if outcome.usage.measured_tokens:
        before = head + len(setting.engine().encoder.content(NEIGHBOUR)[0])
        work += chunk_work(shape, [before], 0) + chunk_work(shape, lengths, before)
    return work

"""What must hold whatever is chosen: budget 1 is full prefill, a rule that narrows equals repair without it, …"""

import itertools

import pytest
import torch

import tiny
from infoflow_kv import Document, Engine
from infoflow_kv.errors import OptionError
from infoflow_kv.methods import METHODS
from infoflow_kv.models import wrap
from infoflow_kv.positions import GEOMETRIES, scoring_positions
from infoflow_kv.recipes import make_recipe
from infoflow_kv.records import Selection, Span
from infoflow_kv.reorder import chunk_order
from infoflow_kv.repairing import repair
from infoflow_kv.select import Budget, Deviation
from infoflow_kv.store import MemoryStore
from tolerance import TINY_LOGITS, assert_close

DOCUMENTS = [
    Document(text=" ".join(f"Boat {i} of quay {j} carries {i * j + 3} nets." for i in range(3)), title=f"Quay {j}")
    for j in range(4)
]
QUESTION = "How many nets does boat 2 of quay 2 carry?"
SELECTING = [name for name, m in METHODS.items() if m.selector is not None or m.narrowing is not None]
BY_BUDGET = [name for name in SELECTING if METHODS[name].count is None]


@pytest.fixture(scope="module", params=["llama", "gemma3", "llama-dynamic"])
def engine(request):
    return Engine(wrap(tiny.hf_model(request.param), tiny.tokenizer(), request.param))


@pytest.fixture(scope="module")
def prompt(engine):
    return engine.prompt(QUESTION, DOCUMENTS)


@pytest.fixture(scope="module")
def full(engine, prompt):
    return engine.run(prompt, method="full")


@pytest.fixture(scope="module")
def reference(engine, prompt):
    plain = engine.model.plain("sdpa")
    with torch.inference_mode():
        return plain(input_ids=torch.tensor([prompt.token_ids]), use_cache=False).logits[0, -1:].float()


def tables(run):
    return run.rotary.tables(torch.arange(run.prompt.num_tokens))


@pytest.mark.parametrize("method", BY_BUDGET)
def test_budget_1_is_full_prefill_for_every_method(engine, prompt, full, reference, method):
    run = engine.run(prompt, method=method, budget=1.0, truth=full.context.values)
    assert_close(run.logits, reference, TINY_LOGITS)
    assert run.usage.recomputed_tokens == run.usage.reusable_tokens


def test_gradual_cacheblend_with_all_rates_1_is_full_prefill(engine, prompt, reference):
    run = engine.run(prompt, method="none")
    rule = Deviation(run.context, Budget(0.5), engine.model.num_layers, lambda share, layers: (1.0,) * layers)
    every = Selection(torch.arange(run.context.exact_tokens, run.context.num_tokens))
    logits = repair(engine.model, run.context, every, torch.tensor(prompt.suffix_ids), tables(run), rule=rule)
    assert_close(logits, reference, TINY_LOGITS)
    assert rule.selection().num_tokens == run.context.reusable_tokens


def test_epic_with_k_as_long_as_the_chunks_recomputes_every_chunk_but_the_first(engine, prompt, reference):
    longest = max(chunk.num_tokens for chunk in prompt.chunks)
    run = engine.run(prompt, method=f"first-k:{longest}")
    assert run.selection.slots.tolist() == list(range(run.context.exact_tokens, run.context.num_tokens))
    assert run.context.exact_tokens == len(prompt.head_ids) + prompt.chunks[0].num_tokens
    assert_close(run.logits, reference, TINY_LOGITS)


@pytest.mark.parametrize("method", ["cacheblend", "cacheblend-k"])
def test_cacheblend_is_true_kv_in_two_layers_and_plain_repair_above(engine, prompt, full, method):
    run = engine.run(prompt, method=method, budget=0.2)
    bare = engine.run(prompt, method="none")
    count = bare.context.num_tokens
    for layer in (0, 1):
        bare.context.keys[layer, :, :count] = full.context.keys[layer, :, :count]
        bare.context.values[layer, :, :count] = full.context.values[layer, :, :count]
    chosen = Selection(run.selection.slots)
    expected = repair(engine.model, bare.context, chosen, torch.tensor(prompt.suffix_ids), tables(bare))
    assert_close(run.logits, expected, TINY_LOGITS)
    rows = run.usage.reusable_tokens
    assert run.selection.layer_counts == (rows, rows, chosen.num_tokens, chosen.num_tokens)
    assert run.usage.recomputed_tokens == chosen.num_tokens


def test_gradual_cacheblend_shrinks_inside_what_it_had_and_writes_only_that(engine, prompt, full):
    run = engine.run(prompt, method="cacheblend-gradual", budget=0.4)
    counts = run.selection.layer_counts
    rows = run.usage.reusable_tokens
    assert counts[0] == counts[1] == rows > counts[2] > counts[3]
    assert run.usage.recomputed_tokens == pytest.approx(0.4 * rows, abs=1)
    stored = engine.run(prompt, method="none").context
    for layer in range(4):
        moved = (run.context.values[layer] != stored.values[layer])[:, : run.context.num_tokens].any(dim=(0, 2))
        # In layer 0 the new value is the stored one, computed in another order.
        assert int(moved.sum()) <= counts[layer]
        kept = torch.nonzero(moved)[:, 0]
        if layer >= 2:
            assert set(kept.tolist()) <= set(run.selection.slots.tolist())


@pytest.mark.parametrize(("layers", "first", "last"), [("0-1", 0, 1), ("2-3", 2, 3), ("1-2", 1, 2)])
def test_partial_layer_repair_replaces_kv_in_these_layers_only(engine, prompt, layers, first, last):
    recipe = make_recipe(engine.model, "random", 0.5, repair_layers=layers)
    run = engine.run(prompt, recipe=recipe)
    stored = engine.run(prompt, method="none").context
    slots = run.selection.slots
    others = torch.tensor([s for s in range(run.context.num_tokens) if s not in set(slots.tolist())])
    for layer in range(4):
        assert torch.equal(run.context.values[layer][:, others], stored.values[layer][:, others])
        same = torch.equal(run.context.values[layer][:, slots], stored.values[layer][:, slots])
        assert same == (not first <= layer <= last) or layer == 0


def test_partial_repair_of_all_layers_is_repair(engine, prompt):
    parts = [
        engine.run(prompt, recipe=make_recipe(engine.model, "infoflow", 0.3, repair_layers=r)) for r in ("all", "0-3")
    ]
    assert torch.equal(parts[0].logits, parts[1].logits)


def test_every_geometry_decodes_at_global_positions(engine, prompt, full):
    """Scores change with the geometry; what repair computes from a fixed selection does not."""
    slots = set()
    for geometry in GEOMETRIES:
        run = engine.run(prompt, recipe=make_recipe(engine.model, "infoflow", 0.2, geometry=geometry))
        slots.add(tuple(run.selection.slots.tolist()))
        bare = engine.run(prompt, method="none")
        again = repair(
            engine.model, bare.context, Selection(run.selection.slots), torch.tensor(prompt.suffix_ids), tables(bare)
        )
        assert_close(run.logits, again, TINY_LOGITS)
    assert len(slots) > 1


@pytest.mark.parametrize(
    ("geometry", "context", "prompt"),
    [
        ("GLOBAL", [0, 1, 2, 3, 4, 5, 6], [7, 8]),
        ("HL-HP", [0, 1, 2, 3, 0, 1, 2], [4, 5]),
        ("HL-TP", [0, 1, 2, 3, 0, 1, 2], [7, 8]),
        ("TL-TP", [3, 4, 5, 6, 4, 5, 6], [7, 8]),
    ],
)
def test_positions_of_chunks_of_4_and_3_tokens_and_a_prompt_of_2(geometry, context, prompt):
    assert scoring_positions(geometry, 0, [4, 3], 0, 2).tolist() == context + prompt
    # Behind a head of 5 tokens a chunk was prefilled at 5.., and that is where "local" is.
    shifted = [p + 5 for p in context + prompt]
    assert scoring_positions(geometry.lower(), 5, [4, 3], 5, 2).tolist() == [0, 1, 2, 3, 4, *shifted]


def test_reorder_moves_the_chunk_with_the_largest_selected_share_next_to_the_prompt(engine, prompt):
    recipe = make_recipe(engine.model, "infoflow", 0.2, reorder=True)
    run = engine.run(prompt, recipe=recipe)
    assert sorted(run.order) == [0, 1, 2, 3]
    assert [c.id for c in run.prompt.chunks] == [prompt.chunks[i].id for i in run.order]
    moved = engine.prompt(QUESTION, [DOCUMENTS[i] for i in run.order])
    assert moved.token_ids == run.prompt.token_ids
    straight = engine.run(moved, recipe=make_recipe(engine.model, "infoflow", 0.2))
    assert torch.equal(run.logits, straight.logits)


def test_chunks_are_ordered_by_their_selected_share_ascending_and_stably():
    selected = Selection(torch.tensor([0, 1, 5]))  # 2 of 4 tokens, 1 of 2, 0 of 3
    assert chunk_order(selected, [Span(0, 4), Span(4, 6), Span(6, 9)]) == (2, 0, 1)


def test_reorder_takes_the_order_of_local_scores_with_a_head_only_exact(engine, prompt):
    """Stage 1 by hand: HL-TP scores, all chunks but the head compete, ascending share of selected tokens."""
    run = engine.run(prompt, recipe=make_recipe(engine.model, "infoflow", 0.2, reorder=True))
    local = engine.run(prompt, recipe=make_recipe(engine.model, "infoflow", 0.2, geometry="HL-TP"))
    head = len(prompt.head_ids)
    scores = local.selection.scores[head:]
    count = int(0.2 * scores.numel() + 0.5)
    best = set(torch.sort(scores, descending=True, stable=True).indices[:count].tolist())
    start, shares = 0, []
    for chunk in prompt.chunks:
        shares.append(len(best & set(range(start, start + chunk.num_tokens))) / chunk.num_tokens)
        start += chunk.num_tokens
    assert run.order == tuple(sorted(range(len(shares)), key=lambda index: shares[index]))


def test_the_movement_goes_with_its_chunk_through_reorder(engine):
    given = [DOCUMENTS[i] for i in (2, 3, 0, 1)]
    recipe = make_recipe(engine.model, "influence", 0.2, reorder=True)
    run = engine.run(engine.prompt(QUESTION, given), recipe=recipe)
    # With windows of 24 tokens nearly all that the question sees is the last chunk, which so stays where it is.
    assert engine.model.name == "gemma3" or run.order != (0, 1, 2, 3)
    moved = engine.prompt(QUESTION, [given[i] for i in run.order])
    straight = engine.run(moved, recipe=make_recipe(engine.model, "influence", 0.2))
    assert torch.equal(run.selection.slots, straight.selection.slots)
    assert torch.equal(run.selection.scores, straight.selection.scores)


def test_reorder_with_equal_scores_is_a_no_op(engine, prompt):
    nothing = Selection(torch.empty(0, dtype=torch.int64))
    assert chunk_order(nothing, [Span(0, 4), Span(4, 6), Span(6, 9)]) == (0, 1, 2)
    everything = engine.run(prompt, recipe=make_recipe(engine.model, "infoflow", 1.0, reorder=True))
    assert everything.order == (0, 1, 2, 3)


def test_answers_say_where_each_chunk_went(engine):
    model = engine.model
    answer = Engine(model, reorder=True, budget=0.2).answer(QUESTION, DOCUMENTS, 2)
    assert [c.title for c in answer.chunks] == [d.title for d in DOCUMENTS]
    assert sorted(c.order for c in answer.chunks) == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["none", "cacheblend", "cacheblend-gradual"])
def test_reorder_needs_scores(engine, method):
    with pytest.raises(OptionError, match="scores tokens"):
        make_recipe(engine.model, method, 0.15, reorder=True)


def test_the_oracle_is_for_the_laboratory(engine):
    with pytest.raises(OptionError, match="laboratory"):
        Engine(engine.model, method="oracle").answer(QUESTION, DOCUMENTS, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"geometry": "LOCAL"}, "unknown geometry"),
        ({"chunk_cap": 0}, "chunk_cap 0"),
        ({"chunk_floor": -0.1}, "chunk_floor"),
        ({"chunk_floor": True}, "chunk_floor"),
        ({"repair_layers": "0,3"}, "gap"),
        ({"repair_layers": "9"}, "outside"),
        ({"layers": "9"}, "outside"),
        ({"budget_max": 2.0, "budget": "auto"}, "budget_max"),
        ({"method": "cacheblend", "repair_layers": "0-1"}, "repair_layers and cacheblend"),
    ],
)
def test_options_outside_their_range(engine, options, message):
    given = {"method": "infoflow", "budget": 0.15, **options}
    with pytest.raises(OptionError, match=message):
        make_recipe(engine.model, **given)


@pytest.fixture(scope="module")
def warm(engine):
    """The same model, over a store: for tests of many requests."""
    return Engine(engine.model, MemoryStore())


@pytest.fixture(scope="module")
def full_prefills(engine):
    """Twelve questions, each with the logits of its full prefill and, for the oracle, the values."""
    questions = [f"How many nets does boat {i} of quay {j} carry?" for i in range(3) for j in range(4)]
    prompts = [engine.prompt(question, DOCUMENTS) for question in questions]
    runs = [engine.run(prompt, method="full") for prompt in prompts]
    return [(prompt, run.logits, run.context.values) for prompt, run in zip(prompts, runs, strict=True)]


@pytest.mark.parametrize("method", SELECTING)
def test_error_falls_with_the_budget_on_average(warm, full_prefills, method):
    """Mean over questions of the distance to full prefill; rounding is all there is at 1."""
    if METHODS[method].count is not None:
        pytest.skip("its number of tokens is fixed")
    means = []
    for budget in (0.0, 0.3, 0.7, 1.0):
        total = 0.0
        for prompt, logits, values in full_prefills:
            run = warm.run(prompt, method=method, budget=budget, truth=values)
            total += float((run.logits - logits).norm())
        means.append(total / len(full_prefills))
    assert all(later <= 1.02 * earlier + 1e-3 for earlier, later in itertools.pairwise(means)), means
    assert means[-1] < 0.01 * means[0] + 1e-3


def test_truth_without_enough_slots_is_not_silent(engine, prompt):
    with pytest.raises((OptionError, RuntimeError, ValueError)):
        engine.run(prompt, method="oracle", truth=torch.zeros(4, 2, 3, 16))


def test_rows_computed_are_counted_layer_by_layer(engine, prompt):
    lower = engine.run(prompt, recipe=make_recipe(engine.model, "infoflow", 0.4, repair_layers="0-1")).selection
    whole = engine.run(prompt, recipe=make_recipe(engine.model, "infoflow", 0.4)).selection
    assert lower.num_tokens == whole.num_tokens == whole.mean_rows
    assert lower.mean_rows == whole.num_tokens * 2 / 4


def test_rules_of_a_fixed_number_of_tokens_ignore_the_budget(engine, prompt):
    chosen = [engine.run(prompt, method="first-k:3", budget=b).selection.slots.tolist() for b in (0.0, 0.15, 1.0)]
    assert chosen[0] == chosen[1] == chosen[2] != []


def test_the_ceiling_of_the_engine_holds_for_a_later_adaptive_budget(engine, prompt):
    low = Engine(engine.model, budget=0.15, budget_max=0.05).run(prompt, budget="auto:0.99")
    assert low.usage.recomputed_tokens == round(0.05 * low.usage.reusable_tokens)
    assert "ceiling of 0.05" in low.selection.reason


def test_cacheblend_takes_an_adaptive_budget_whatever_its_ceiling(engine, prompt):
    recipe = make_recipe(engine.model, "cacheblend", "auto:0.5", budget_max=1.0)
    selection = engine.run(prompt, recipe=recipe).selection
    reusable = selection.scores[engine.run(prompt, method="none").context.exact_tokens :]
    assert 0 < selection.num_tokens < reusable.numel()
    assert float(selection.scores[selection.slots].sum() / reusable.sum()) >= 0.5
    assert selection.reason.startswith("auto:0.5")


def test_the_gradual_filter_takes_no_adaptive_budget(engine, prompt):
    with pytest.raises(OptionError, match="one set of tokens for all layers; cacheblend-gradual has another"):
        make_recipe(engine.model, "cacheblend-gradual", "auto:0.5")
    adaptive = Engine(engine.model, budget="auto:0.5")
    with pytest.raises(OptionError, match="cacheblend-gradual has another set"):
        adaptive.run(prompt, method="cacheblend-gradual")
    # With a share of its own it is no concern of the request what the engine's budget is.
    assert adaptive.run(prompt, method="cacheblend-gradual", budget=0.5).selection.num_tokens > 0

"""Every method of the table on one small example; the expected tokens come from plain Transformers or by hand."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from infoflow_kv import Document, Engine
from infoflow_kv.chunking import TextEncoder
from infoflow_kv.errors import ComputeError
from infoflow_kv.methods import find_method
from infoflow_kv.models import wrap
from infoflow_kv.prefilling import NEIGHBOUR, identify, measure_movement, movement_of, prefill
from infoflow_kv.recipes import make_recipe
from infoflow_kv.records import Prompt, Selection
from infoflow_kv.repairing import repair
from infoflow_kv.select import num_selected
from reference.stitched import Stitched, block_mask, run_plain
from tolerance import TINY_LOGITS, assert_close

DOCUMENTS = [
    Document(text=" ".join(f"Boat {i} of quay {j} carries {i * j + 3} nets." for i in range(3)), title=f"Quay {j}")
    for j in range(4)
]
QUESTION = "How many nets does boat 2 of quay 2 carry?"
BUDGET = 0.2


@dataclass
class Example:
    """A tiny model, its request under head policy `none`, and what plain Transformers says about it."""

    model: object
    engine: Engine
    prompt: Prompt
    lengths: list[int]
    stitched: Stitched
    full: Stitched

    @property
    def exact(self) -> int:
        return len(self.prompt.head_ids)

    def best(self, scores: torch.Tensor, count: int | None = None) -> list[int]:
        count = num_selected(BUDGET, scores.shape[0] - self.exact) if count is None else count
        order = sorted(range(self.exact, scores.shape[0]), key=lambda slot: (-float(scores[slot]), slot))
        return sorted(order[:count])

    def grouped(self, attention: torch.Tensor) -> torch.Tensor:
        """`[layers, heads, prompt, context]` summed to `[layers, kv_heads, context]`."""
        kv_heads = self.stitched.values.shape[1]
        layers, heads, rows, context = attention.shape
        return attention.reshape(layers, kv_heads, heads // kv_heads, rows, context).sum(dim=(2, 3))


@cache
def example(family: str) -> Example:
    model = wrap(tiny.hf_model(family), tiny.tokenizer(), family)
    engine = Engine(model, head_policy="none", layers="1-2", budget=BUDGET)
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    lengths = [len(prompt.head_ids)] + [chunk.num_tokens for chunk in prompt.chunks]
    rows = len(prompt.suffix_ids)
    stitched = run_plain(model, prompt.token_ids, rows, block_mask(lengths, rows))
    return Example(model, engine, prompt, lengths, stitched, run_plain(model, prompt.token_ids, rows))


@pytest.fixture(params=["llama", "qwen3"])
def case(request) -> Example:
    return example(request.param)


def slots(case: Example, method: str, **options) -> list[int]:
    return case.engine.run(case.prompt, method=method, truth=case.full.values, **options).selection.slots.tolist()


def context(case: Example) -> int:
    return sum(case.lengths)


def test_reuse_alone_gives_the_logits_of_the_block_mask(case):
    run = case.engine.run(case.prompt, method="none", num_new=1)
    assert_close(run.logits[-1], case.stitched.logits[-1], 2 * TINY_LOGITS)


def test_full_and_none(case):
    assert slots(case, "full") == list(range(context(case)))
    assert slots(case, "none") == []


def test_random_is_seeded_and_within_the_budget(case):
    first, again = slots(case, "random", seed=3), slots(case, "random", seed=3)
    assert first == again != slots(case, "random", seed=4)
    assert len(set(first)) == num_selected(BUDGET, context(case) - case.exact)
    assert min(first) >= case.exact


def starts(case: Example) -> list[int]:
    return [sum(case.lengths[:index]) for index in range(1, len(case.lengths))]


def test_first_k_takes_the_first_k_of_every_chunk(case):
    assert slots(case, "first-k:3") == [start + i for start in starts(case) for i in range(3)]
    assert slots(case, "first-k", budget=0.01) == [start + i for start in starts(case) for i in range(16)]


def test_epic_spreads_the_budget_over_chunk_starts(case):
    chosen = slots(case, "epic")
    count = num_selected(BUDGET, context(case) - case.exact)
    depth, rest = divmod(count, len(case.lengths) - 1)
    expected = [start + i for n, start in enumerate(starts(case)) for i in range(depth + (n < rest))]
    assert chosen == expected


def test_seam_takes_the_last_k_before_each_boundary_between_chunks(case):
    assert slots(case, "seam:2") == [start - 2 + i for start in starts(case)[1:] for i in range(2)]


def test_infoflow_sums_attention_over_rows_heads_and_the_layer_set(case):
    assert slots(case, "infoflow") == case.best(case.stitched.attention[1:3].sum(dim=(0, 1, 2)))


def test_infoflow_l2(case):
    scores = case.stitched.attention[1:3].mean(dim=1).square().sum(dim=1).sqrt().sum(dim=0)
    assert slots(case, "infoflow-l2") == case.best(scores)


def test_infoflow_vatp_weighs_by_the_l1_norm_of_the_value(case):
    norm = case.stitched.values[:, :, : context(case)].abs().sum(dim=-1)
    scores = (case.grouped(case.stitched.attention) * norm)[1:3].sum(dim=(0, 1))
    assert slots(case, "infoflow-vatp") == case.best(scores)


def test_infoflow_entropy_discounts_heads_that_look_everywhere(case):
    rows = len(case.prompt.suffix_ids)
    plain = case.model.plain("eager")
    total = context(case) + rows
    mask = block_mask(case.lengths, rows)
    additive = torch.zeros(1, 1, total, total).masked_fill(~mask[None, None], torch.finfo(torch.float32).min)
    with torch.inference_mode():
        out = plain(
            input_ids=torch.tensor([case.prompt.token_ids]),
            attention_mask=additive,
            position_ids=torch.arange(total)[None],
            output_attentions=True,
        )
    weights = torch.stack([a[0, :, context(case) :] for a in out.attentions]).double()
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(dim=-1)
    seen = torch.arange(context(case) + 1, total + 1).double().log()
    scores = (weights * (1 - entropy / seen)[..., None])[1:3, :, :, : context(case)].sum(dim=(0, 1, 2))
    assert slots(case, "infoflow-entropy") == case.best(scores)


def test_a3_and_prophetkv_have_layer_sets_of_their_own(case):
    assert slots(case, "a3") == case.best(case.stitched.attention[:1].sum(dim=(0, 1, 2)))
    assert slots(case, "prophetkv") == case.best(case.stitched.attention.sum(dim=(0, 1, 2)))


@pytest.mark.parametrize(("method", "measured"), [("cacheblend", "values"), ("cacheblend-k", "keys")])
def test_cacheblend_takes_the_largest_deviation_at_layer_1(case, method, measured):
    new, old = getattr(case.full, measured)[1], getattr(case.stitched, measured)[1]
    scores = (new - old)[:, : context(case)].square().sum(dim=(0, 2))
    assert slots(case, method) == case.best(scores)


def test_gradual_cacheblend_ranks_anew_at_each_layer(case):
    """Layer by layer with what the layer above would see: a slow repair of the shrinking sets, by plain repair."""
    run = case.engine.run(case.prompt, method="cacheblend-gradual", budget=0.4)
    scores = (case.full.values[1] - case.stitched.values[1])[:, : context(case)].square().sum(dim=(0, 2))
    first = run.selection.layer_counts[2]
    assert run.selection.slots.tolist() == case.best(scores, first)
    # The second ranking: V at layer 2 of the rows still there, over true KV below, against the stored V.
    bare = case.engine.run(case.prompt, method="none")
    for layer in (0, 1):
        bare.context.keys[layer, :, : context(case)] = case.full.keys[layer, :, : context(case)]
        bare.context.values[layer, :, : context(case)] = case.full.values[layer, :, : context(case)]
    stored = bare.context.values[2].clone()
    tables = bare.rotary.tables(torch.arange(case.prompt.num_tokens))
    chosen = Selection(torch.tensor(case.best(scores, first)))
    repair(case.model, bare.context, chosen, torch.tensor(case.prompt.suffix_ids), tables)
    moved = torch.full((context(case),), -1.0)
    rows = chosen.slots
    moved[rows] = (bare.context.values[2] - stored)[:, rows].square().sum(dim=(0, 2))
    second = set(case.best(moved, run.selection.layer_counts[3]))
    none = case.engine.run(case.prompt, method="none").context
    written = (run.context.values[3] != none.values[3])[:, : context(case)].any(dim=(0, 2))
    assert set(torch.nonzero(written)[:, 0].tolist()) == second


def test_oracle_weighs_attention_by_the_true_movement_of_v(case):
    moved = (case.full.values - case.stitched.values)[:, :, : context(case)].norm(dim=-1)
    scores = (case.grouped(case.stitched.attention) * moved).sum(dim=(0, 1))
    assert slots(case, "oracle") == case.best(scores)


def test_influence_weighs_attention_by_the_movement_behind_a_neighbour(case):
    neighbour = list(TextEncoder(case.model.tokenizer).content(NEIGHBOUR)[0])
    pieces = [torch.zeros(case.stitched.values.shape[0], 1, case.exact)]
    for chunk in case.prompt.chunks:
        ids = list(chunk.token_ids)
        alone = run_plain(case.model, ids, 1).values
        behind = run_plain(case.model, neighbour + ids, 1).values[:, :, len(neighbour) :]
        pieces.append((behind - alone).norm(dim=(1, 3))[:, None])  # over all heads
    scores = (case.grouped(case.stitched.attention) * torch.cat(pieces, dim=2))[1:3].sum(dim=(0, 1))
    chosen, expected = slots(case, "influence"), case.best(scores)
    # The record is kept in float16, so two tokens of nearly equal score may change places.
    assert len(set(chosen) ^ set(expected)) <= 2


@pytest.mark.parametrize("geometry", ["HL-HP", "HL-TP", "TL-TP"])
def test_scores_under_each_geometry_are_plain_transformers_at_its_positions(case, geometry):
    """Written out by hand: where each chunk stands, and where the prompt does."""
    head, *chunks = case.lengths
    total = sum(case.lengths)
    positions = list(range(head))
    for length in chunks:
        first = total - length if geometry == "TL-TP" else 0  # prefilled alone: its local positions start at 0
        positions += range(first, first + length)
    start = max(chunks) if geometry == "HL-HP" else total
    rows = len(case.prompt.suffix_ids)
    positions += range(start, start + rows)
    placed = run_plain(case.model, case.prompt.token_ids, rows, block_mask(case.lengths, rows), positions)
    recipe = make_recipe(case.model, "infoflow", BUDGET, layers="1-2", geometry=geometry)
    run = case.engine.run(case.prompt, recipe=recipe)
    assert_close(run.selection.scores, placed.attention[1:3].sum(dim=(0, 1, 2)), 1e-4)
    assert run.selection.slots.tolist() == case.best(placed.attention[1:3].sum(dim=(0, 1, 2)))


@pytest.mark.parametrize("policy", ["head", "none"])
def test_the_movement_record_is_what_plain_transformers_says(case, policy):
    engine = Engine(case.model, head_policy=policy)
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    head = list(prompt.head_ids) if policy == "head" else []
    neighbour = list(engine.encoder.content(NEIGHBOUR)[0])
    found = engine._supply.with_movement(engine._supply.parts(prompt))
    for chunk, record in zip(prompt.chunks, found.movement, strict=True):
        ids = list(chunk.token_ids)
        alone = run_plain(case.model, head + ids, 1).values[:, :, len(head) :]
        behind = run_plain(case.model, head + neighbour + ids, 1).values[:, :, len(head + neighbour) :]
        expected = (behind - alone).transpose(1, 2).flatten(2).norm(dim=-1)
        assert_close(movement_of(record, case.model.num_layers).float(), expected, 1e-3)  # float16 keeps 11 bits
    assert found.measured_tokens == sum(c.num_tokens for c in prompt.chunks)
    assert not found.sensitivity()[:, : len(prompt.head_ids)].any()


@pytest.mark.parametrize("num_layers", [3, 4])
def test_a_record_of_any_number_of_layers_takes_two_bytes_a_layer(num_layers):
    torch.manual_seed(0)
    config = LlamaConfig(**{**tiny.SIZES, "num_hidden_layers": num_layers})
    model = wrap(LlamaForCausalLM(config).eval(), tiny.tokenizer(), "tiny")
    chunk = prefill(model, identify(model, tuple(range(5, 25))))
    before = prefill(model, identify(model, (7, 8, 9)))
    record = measure_movement(model, chunk, before)
    moved = prefill(model, identify(model, chunk.identity.token_ids, (7, 8, 9)), before)
    expected = (moved.values - chunk.values).transpose(1, 2).flatten(2).norm(dim=-1)
    assert_close(movement_of(record, num_layers).float(), expected, 1e-3)
    assert record.num_bytes == 2 * 2 * -(-num_layers // 2) * 20
    with pytest.raises(ComputeError, match="no record"):
        movement_of(record, num_layers + 2)
    with pytest.raises(ComputeError, match="no record"):
        movement_of(chunk, num_layers)


@pytest.mark.parametrize("name", ["first-k:0", "first-k:", "first-k:x", "first-k:1.5", "infoflow:3", "first-k:-1"])
def test_malformed_parameters_are_refused(name):
    with pytest.raises(ValueError, match="not understood"):
        find_method(name)

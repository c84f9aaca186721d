"""Every family and RoPE type of the table: budget 1 is full prefill, and a moved chunk is its own prefill elsewhere.

The reference is an independent copy of the model in plain, eager Transformers, taken before the product held it.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import families
import tiny
from infoflow_kv import DiskStore, Engine, MemoryStore, assemble, prefill
from infoflow_kv.models import LanguageModel, wrap
from infoflow_kv.models.traits import find_traits
from infoflow_kv.positions import request_tables
from infoflow_kv.prefilling import identify
from infoflow_kv.records import Chunk, Prompt
from tolerance import TINY_LOGITS, assert_close

HEAD, FILLER, CHUNK = 7, 17, 30  # a chunk is longer than the windows, and all three are shorter than any RoPE regime
CONTINUATION = 3


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, tiny.SIZES["vocab_size"], (count,), generator=generator).tolist())


@dataclass
class Case:
    """One family: the product's model, and the untouched copy of the same weights."""

    family: families.Family
    model: LanguageModel
    reference: Any
    forced: tuple[int, ...] = field(default_factory=lambda: random_ids(CONTINUATION, 9))

    def engine(self, store: Any = None) -> Engine:
        return Engine(self.model, store, chunk_tokens=64, instruction="Answer.", system="", labels=False)

    @property
    def prompt(self) -> Prompt:
        """Head, three chunks and a question of random ids: more than 128 tokens, where the shortest regimes end."""
        chunks = tuple(Chunk(random_ids(36 - number, number), f"document {number}") for number in range(3))
        return Prompt(self.engine().head_ids, chunks, random_ids(10, 8))

    def reference_logits(self) -> torch.Tensor:
        logits, _, _ = families.plain_prefill(self.reference, self.prompt.token_ids + self.forced)
        return logits[-CONTINUATION - 1 :]

    def logits(self, engine: Engine, cached: int, **options: Any) -> torch.Tensor:
        run = engine.run(self.prompt, method="infoflow", forced_ids=self.forced, **options)
        assert run.usage.cached_chunks == cached
        return run.logits


@pytest.fixture(scope="module", params=families.FAMILIES)
def case(request):
    family = families.FAMILIES[request.param]
    if family.missing:
        pytest.skip(family.missing)
    hf = families.hf_model(family)
    reference = copy.deepcopy(hf)
    return Case(family, wrap(hf, tiny.tokenizer(), request.param), reference)


def test_the_probe_accepts_it_and_finds_its_traits(case):
    traits = find_traits(case.model)
    assert traits.max_error <= TINY_LOGITS
    assert traits.words == case.family.words
    assert traits.rope_types == (case.family.rope,)
    assert case.model.stop_ids == {2}


def test_budget_1_is_full_prefill_and_budget_0_is_not(case, tmp_path):
    expected = case.reference_logits()
    assert case.prompt.num_tokens > 128
    assert_close(case.logits(case.engine(), 0, budget=1.0), expected, TINY_LOGITS)
    stores = [MemoryStore(), DiskStore(tmp_path)]
    for store in stores:
        assert_close(case.logits(case.engine(store), 0, budget=1.0), expected, TINY_LOGITS)
    for store in (stores[0], DiskStore(tmp_path)):
        assert_close(case.logits(case.engine(store), 3, budget=1.0), expected, TINY_LOGITS)
    # What repair mends is there to be mended: the comparisons above can fail.
    reused = case.logits(case.engine(stores[0]), 3, budget=0.0)
    assert float((reused - expected).abs().max() / expected.abs().max()) > 100 * TINY_LOGITS


@pytest.mark.parametrize("head", [0, HEAD])
def test_a_moved_chunk_is_its_own_prefill_at_the_other_place(case, head):
    """Stored behind nothing or behind a head; found behind other tokens, with the head still before it."""
    model = case.model
    before, head_ids, chunk_ids = random_ids(FILLER, 5), random_ids(head, 6), random_ids(CHUNK, 7)
    parts = [prefill(model, identify(model, before))]
    if head:
        parts.append(prefill(model, identify(model, head_ids)))
    parts.append(prefill(model, identify(model, chunk_ids, head_ids), parts[1] if head else None))
    total = FILLER + head + CHUNK
    context = assemble(model, parts, request_tables(model.rotary(), total, 0), total, 0)

    _, keys, values = families.plain_prefill(case.reference, head_ids + chunk_ids, start=FILLER)
    assert_close(context.keys[:, :, FILLER:], keys, TINY_LOGITS)
    assert_close(context.values[:, :, FILLER:], values, TINY_LOGITS)
    # Keys that were left where they were computed would be noticed.
    _, unmoved, _ = families.plain_prefill(case.reference, head_ids + chunk_ids)
    for layer in (layer for layer, is_rotated in enumerate(model._support.rotated_layers) if is_rotated):
        assert float((unmoved[layer] - keys[layer]).abs().max() / keys[layer].abs().max()) > 0.1


def test_the_exact_part_of_a_context_is_exact(case):
    """The head and the first chunk behind it need no repair, unless the longer request has other frequencies."""
    prompt, model = case.prompt, case.model
    context = case.engine().run(prompt, method="none").context
    num_context, exact = context.num_tokens, context.exact_tokens
    changes = model.rope_regime(prompt.num_tokens) != model.rope_regime(1)
    assert not changes or case.family.rope in ("dynamic", "longrope")
    assert exact == (0 if changes else len(prompt.head_ids) + prompt.chunks[0].num_tokens)
    _, keys, values = families.plain_prefill(case.reference, prompt.token_ids)
    if exact:
        assert_close(context.keys[:, :, :exact], keys[:, :, :exact], TINY_LOGITS)
        assert_close(context.values[:, :, :exact], values[:, :, :exact], TINY_LOGITS)
    # In the first layer keys and values depend on no other token: there even other frequencies change nothing.
    assert_close(context.keys[0][:, :num_context], keys[0][:, :num_context], TINY_LOGITS)
    assert_close(context.values[0][:, :num_context], values[0][:, :num_context], TINY_LOGITS)

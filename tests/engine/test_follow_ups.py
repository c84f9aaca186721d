"""Follow-up questions over the same documents: what was repaired is kept, what is new is repaired, no more."""

import threading

import pytest
import torch

import tiny
from infoflow_kv import Engine, MemoryStore
from infoflow_kv.errors import OptionError
from infoflow_kv.models import greedy, wrap

TEXTS = [" ".join(f"Boat {n} of row {r} carries {n * r + 3} nets." for r in range(9)) for n in range(5)]
QUESTIONS = [f"How many nets does boat {n} of row {n + 2} carry?" for n in range(4)]
ROOM = 1 << 30


class CountingStore(MemoryStore):
    """A store that counts what is read from it."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def get(self, identity):
        self.reads += 1
        return super().get(identity)


@pytest.fixture(scope="module", params=["llama", "gemma3", "llama-dynamic"])
def model(request):
    return wrap(tiny.hf_model(request.param), tiny.tokenizer(), request.param)


def engine_of(model, kept_bytes=ROOM, **options):
    return Engine(model, options.pop("store", MemoryStore()), chunk_tokens=64, kept_bytes=kept_bytes, **options)


def ask(engine, question, budget=0.15, texts=TEXTS, **options):
    return engine.run(engine.prompt(question, texts), budget=budget, **options)


def truth(model, prompt):
    """Plain Transformers' logits after the prompt."""
    return greedy(model.plain("eager" if model.needs_eager else "sdpa"), prompt.token_ids, 1, model.stop_ids).logits[0]


def test_rows_that_were_repaired_are_not_repaired_again(model):
    store = CountingStore()
    engine = engine_of(model, store=store)
    first = ask(engine, QUESTIONS[0])
    reads = store.reads
    second = ask(engine, QUESTIONS[1])
    assert store.reads == reads  # nothing was loaded
    chosen, before = set(second.selection.slots.tolist()), set(first.selection.slots.tolist())
    assert second.usage.kept_tokens == len(before) == first.usage.recomputed_tokens
    assert second.usage.recomputed_tokens == len(chosen - before) < len(chosen)
    third = ask(engine, QUESTIONS[1])
    assert third.usage.kept_tokens == len(chosen | before)
    again = ask(engine, QUESTIONS[0])
    assert again.usage.recomputed_tokens <= first.usage.recomputed_tokens


def test_kept_rows_keep_their_values_and_new_ones_are_written(model):
    engine = engine_of(model)
    first = ask(engine, QUESTIONS[0])
    count = first.context.num_tokens
    held = first.context.keys[:, :, :count].clone(), first.context.values[:, :, :count].clone()
    second = ask(engine, QUESTIONS[1])
    new = sorted(set(second.selection.slots.tolist()) - set(first.selection.slots.tolist()))
    others = torch.tensor(sorted(set(range(count)) - set(new)))
    assert torch.equal(second.context.keys[:, :, others], held[0][:, :, others])
    assert torch.equal(second.context.values[:, :, others], held[1][:, :, others])
    assert not torch.equal(second.context.values[:, :, new], held[1][:, :, new])
    # The first request's own context is not written into: it may still be decoding.
    assert torch.equal(first.context.keys[:, :, :count], held[0])


def test_budget_one_is_full_prefill_whatever_was_kept(model):
    engine = engine_of(model)
    ask(engine, QUESTIONS[0])
    run = ask(engine, QUESTIONS[1], 1.0)
    assert run.usage.recomputed_tokens == run.context.reusable_tokens
    assert torch.allclose(run.logits[-1], truth(model, run.prompt), atol=1e-4)
    # From then on the context is exact, so that a small budget has nothing left to repair and gives the same.
    after = ask(engine, QUESTIONS[2], 0.15)
    assert (after.usage.reusable_tokens, after.usage.recomputed_tokens) == (0, 0)
    assert torch.allclose(after.logits[-1], truth(model, after.prompt), atol=1e-4)


def test_a_follow_up_is_on_average_as_close_to_full_prefill_as_a_fresh_request(model):
    fresh, follow = [], []
    for question in QUESTIONS[1:]:
        engine = engine_of(model)
        ask(engine, QUESTIONS[0], 0.3)
        kept = ask(engine, question, 0.3)
        alone = ask(engine_of(model), question, 0.3)
        expected = truth(model, alone.prompt)
        follow.append(float((kept.logits[-1] - expected).norm()))
        fresh.append(float((alone.logits[-1] - expected).norm()))
    assert sum(follow) <= sum(fresh) * 1.02


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (TEXTS[::-1], {}),
        (TEXTS[:-1], {}),
        ([*TEXTS[:-1], "Another text about nets."], {}),
        (TEXTS, {"method": "cacheblend"}),
        (TEXTS, {"method": "none"}),
    ],
)
def test_only_the_same_documents_in_the_same_order_are_a_follow_up(model, texts, options):
    engine = engine_of(model)
    ask(engine, QUESTIONS[0])
    run = ask(engine, QUESTIONS[1], texts=texts, **options)
    alone = ask(engine_of(model), QUESTIONS[1], texts=texts, **options)
    assert run.usage.kept_tokens == 0
    assert torch.equal(run.logits, alone.logits)


def test_influence_keeps_its_record_too(model):
    engine = engine_of(model, method="influence")
    first = ask(engine, QUESTIONS[0])
    second = ask(engine, QUESTIONS[1])
    assert second.usage.kept_tokens == first.usage.recomputed_tokens
    # Kept by a method without the record: it is loaded anew.
    other = engine_of(model, method="infoflow")
    ask(other, QUESTIONS[0])
    run = ask(other, QUESTIONS[1], method="influence")
    assert run.usage.kept_tokens == 0


def test_nothing_is_kept_by_default_and_never_more_than_the_bound(model):
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    ask(engine, QUESTIONS[0])
    assert ask(engine, QUESTIONS[0]).usage.kept_tokens == 0
    one = ask(engine_of(model), QUESTIONS[0])
    size = one.context.keys.nbytes + one.context.values.nbytes
    tight = engine_of(model, kept_bytes=size - 1)
    ask(tight, QUESTIONS[0])
    assert tight._kept.num_bytes == 0
    engine = engine_of(model, kept_bytes=size + size // 2)
    for texts in (TEXTS, TEXTS[1:], TEXTS[2:]):
        ask(engine, QUESTIONS[0], texts=texts)
        assert 0 < engine._kept.num_bytes <= size + size // 2
    assert ask(engine, QUESTIONS[0], texts=TEXTS).usage.kept_tokens == 0  # the oldest one went first
    with pytest.raises(OptionError, match="kept_bytes is -1"):
        engine_of(model, kept_bytes=-1)


def test_questions_at_the_same_time(model):
    engine = engine_of(model)
    ask(engine, QUESTIONS[0])
    results, errors = {}, []

    def work(index):
        try:
            results[index] = ask(engine, QUESTIONS[index]).logits
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 4
    assert all(bool(torch.isfinite(logits).all()) for logits in results.values())
    kept = ask(engine, QUESTIONS[1])
    assert kept.usage.kept_tokens >= 0

"""Follow-up questions over the same documents: what was repaired is kept, what is new is repaired, no more."""

import itertools
import threading

import pytest
import torch

import tiny
from infoflow_kv import Engine, MemoryStore
from infoflow_kv.errors import OptionError
from infoflow_kv.kept import Kept, KeptContexts
from infoflow_kv.models import greedy, wrap
from infoflow_kv.records import ChunkIdentity, ModelIdentity, Span
from infoflow_kv.runs import chunk_reports

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
    run = engine.run(engine.prompt(question, texts), budget=budget, **options)
    engine.keep(run)
    return run


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
    new, before = set(second.selection.slots.tolist()), set(first.selection.slots.tolist())
    assert second.usage.kept_tokens == len(before) == first.usage.recomputed_tokens
    assert not new & before
    assert second.usage.recomputed_tokens == len(new) < len(before)
    assert sum(report.recomputed for report in chunk_reports(second)) == len(new)
    third = ask(engine, QUESTIONS[1])
    assert third.usage.kept_tokens == len(new | before)
    again = ask(engine, QUESTIONS[0])
    assert again.usage.recomputed_tokens <= first.usage.recomputed_tokens


def test_kept_rows_keep_their_values_and_new_ones_are_written(model):
    engine = engine_of(model)
    first = ask(engine, QUESTIONS[0])
    count = first.context.num_tokens
    held = first.context.keys[:, :, :count].clone(), first.context.values[:, :, :count].clone()
    second = ask(engine, QUESTIONS[1])
    new = second.selection.slots.tolist()
    others = torch.tensor(sorted(set(range(count)) - set(new)))
    assert torch.equal(second.context.keys[:, :, others], held[0][:, :, others])
    assert torch.equal(second.context.values[:, :, others], held[1][:, :, others])
    assert not torch.equal(second.context.values[:, :, new], held[1][:, :, new])
    # The first request's own context is not written into: it may still be decoding. Nor does it own what is kept.
    assert torch.equal(first.context.keys[:, :, :count], held[0])
    first.context.values.fill_(7)
    second.context.values.fill_(7)
    third = ask(engine, QUESTIONS[1])
    assert float(third.context.values[:, :, others].float().max()) < 7


def test_budget_one_is_full_prefill_whatever_was_kept(model):
    engine = engine_of(model)
    ask(engine, QUESTIONS[0])
    run = ask(engine, QUESTIONS[1], 1.0)
    assert run.usage.recomputed_tokens == run.context.reusable_tokens
    assert torch.allclose(run.logits[-1], truth(model, run.prompt), atol=1e-4)
    # From then on the context is exact, so that a small budget has nothing left to repair and gives the same.
    after = ask(engine, QUESTIONS[2], 0.15)
    assert (after.usage.reusable_tokens, after.usage.recomputed_tokens, after.usage.kept_tokens) == (0, 0, 0)
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
        (TEXTS, {"method": "infoflow-l2"}),
        (TEXTS, {"budget": 0.0}),
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
    engine = engine_of(model)
    ask(engine, QUESTIONS[0])  # another method's rows do not get in its way
    first = ask(engine, QUESTIONS[0], method="influence")
    second = ask(engine, QUESTIONS[1], method="influence")
    assert first.usage.kept_tokens == 0
    assert second.usage.kept_tokens == first.usage.recomputed_tokens
    assert second.usage.measured_tokens == 0


def test_the_same_question_again_settles(model):
    engine = engine_of(model)
    counts = [ask(engine, QUESTIONS[0]).usage.recomputed_tokens for _ in range(12)]
    assert counts[0] > 0 and counts[-1] == 0
    assert all(b <= a for a, b in itertools.pairwise(counts[1:]))


def test_nothing_is_copied_where_nothing_is_new(model):
    engine = engine_of(model)
    for _ in range(12):
        ask(engine, QUESTIONS[0])
    kept = next(iter(engine._kept._entries.values()))
    run = ask(engine, QUESTIONS[0])
    assert run.usage.recomputed_tokens == 0
    assert next(iter(engine._kept._entries.values())) is kept
    engine.forget()
    engine.keep(run)  # no longer there: kept again
    assert engine._kept.num_bytes == kept.num_bytes


def test_streams_keep_their_context_and_forget_drops_it(model):
    engine = engine_of(model)
    engine.answer(QUESTIONS[0], TEXTS, 2)
    assert engine.answer(QUESTIONS[1], TEXTS, 2).usage.kept_tokens > 0
    engine.forget()
    assert engine.answer(QUESTIONS[1], TEXTS, 2).usage.kept_tokens == 0


def test_new_weights_find_nothing_and_drop_the_old(model):
    fresh = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "llama")
    engine = engine_of(fresh)
    ask(engine, QUESTIONS[0])
    held = engine._kept.num_bytes
    with torch.no_grad():
        fresh._hf.get_decoder().layers[1].self_attn.v_proj.weight.mul_(1.5)
    run = ask(engine, QUESTIONS[0])
    assert run.usage.kept_tokens == 0
    assert engine._kept.num_bytes == held  # one context: the old one went


def test_a_length_with_frequencies_of_its_own_is_not_kept():
    short = wrap(tiny.hf_model("llama-dynamic-short"), tiny.tokenizer(), "dynamic")
    engine = engine_of(short)
    for question in QUESTIONS[:2]:
        run = ask(engine, question, texts=[text[:90] for text in TEXTS[:2]])
        assert run.prompt.num_tokens > 128 and run.usage.kept_tokens == 0
    assert engine._kept.num_bytes == 0


def test_keeping_never_loses_rows():
    """Two requests at a time: whichever ends last, what the other one had repaired is not undone."""
    identity = ChunkIdentity(ModelIdentity("w", "t", 1, 1, 4, "float32"), "rope", (), (1, 2, 3))
    key = (identity,), "rope", "infoflow"

    def kept(rows, exact=0):
        repaired = torch.zeros(3, dtype=torch.bool)
        repaired[rows] = True
        return Kept(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), torch.arange(3), (Span(0, 3),), exact, repaired)

    contexts = KeptContexts(1 << 20)
    contexts.keep(key, kept([0, 1]))
    for other in (kept([2]), kept([1]), kept([])):
        contexts.keep(key, other)
        assert contexts.find(key).repaired.tolist() == [True, True, False]
    contexts.keep(key, kept([0, 1, 2], exact=3))
    contexts.keep(key, kept([0, 1, 2]))
    assert contexts.find(key).exact_tokens == 3


def test_nothing_is_kept_by_default_and_never_more_than_the_bound(model):
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    ask(engine, QUESTIONS[0])
    assert ask(engine, QUESTIONS[0]).usage.kept_tokens == 0
    one = ask(engine_of(model), QUESTIONS[0])
    size = one.context.num_tokens * model.kv_bytes_per_token
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
    # Every answer stands on what was kept at its beginning, and is one of a fresh engine's by its distance.
    alone = {index: ask(engine_of(model), QUESTIONS[index]).logits for index in range(4)}
    expected = {index: truth(model, engine.prompt(QUESTIONS[index], TEXTS)) for index in range(4)}
    far = {index: float((alone[index][-1] - expected[index]).norm()) for index in range(4)}
    assert all(float((results[i][-1] - expected[i]).norm()) <= 2 * max(far.values()) + 1e-3 for i in range(4))

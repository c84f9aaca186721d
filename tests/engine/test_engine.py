"""The engine from question to answer on a tiny model: counts, reuse, isolation, limits."""

import threading

import pytest
import torch

import tiny
from infoflow_kv import DiskStore, Document, Engine, MemoryStore, Sampling
from infoflow_kv.errors import OptionError, PromptTooLongError, StoreError
from infoflow_kv.models import wrap
from infoflow_kv.store import key

DOCUMENTS = [
    Document(text=" ".join(f"Boat {i} of quay {j} carries {i * j + 3} nets." for i in range(6)), title=f"Quay {j}")
    for j in range(4)
]
QUESTION = "How many nets does boat 3 of quay 2 carry?"


@pytest.fixture(scope="module")
def model():
    return wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")


def test_counts_of_a_cold_and_a_warm_request(model):
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    cold = engine.answer(QUESTION, DOCUMENTS, 4).usage
    warm = engine.answer(QUESTION, DOCUMENTS, 4).usage
    document_tokens = sum(c.num_tokens for d in DOCUMENTS for c in engine.split(d))
    assert cold.cached_chunks == 0
    assert cold.prefilled_tokens == document_tokens + len(engine.head_ids)
    assert warm.cached_chunks == warm.chunks == cold.chunks
    assert warm.prefilled_tokens == 0
    first = engine.split(DOCUMENTS[0])[0].num_tokens
    assert warm.context_tokens == document_tokens + len(engine.head_ids)
    assert warm.reusable_tokens == document_tokens - first
    assert warm.recomputed_tokens == int(0.15 * warm.reusable_tokens + 0.5)


def test_the_answer_does_not_depend_on_where_the_kv_came_from(model, tmp_path):
    def ask(store):
        return Engine(model, store, chunk_tokens=64).answer(QUESTION, DOCUMENTS, 12)

    without = ask(None)
    memory = MemoryStore()
    answers = [without, ask(memory), ask(memory), ask(DiskStore(tmp_path)), ask(DiskStore(tmp_path))]
    assert {a.token_ids for a in answers} == {without.token_ids}
    assert len({tuple(a.selection.slots.tolist()) for a in answers}) == 1


def test_other_order_other_company_all_chunks_cached(model, tmp_path):
    Engine(model, DiskStore(tmp_path), chunk_tokens=64).add(DOCUMENTS)
    engine = Engine(model, DiskStore(tmp_path), chunk_tokens=64)
    for documents in (DOCUMENTS[::-1], DOCUMENTS[1:3], [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[2]]):
        usage = engine.answer(QUESTION, documents, 1).usage
        assert usage.cached_chunks == usage.chunks
        assert usage.prefilled_tokens == 0


def test_a_document_given_twice_is_prefilled_once_and_placed_twice(model):
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    answer = engine.answer(QUESTION, [DOCUMENTS[0], DOCUMENTS[0]], 1, budget=1.0)
    once = sum(c.num_tokens for c in engine.split(DOCUMENTS[0]))
    assert answer.usage.prefilled_tokens == once + len(engine.head_ids)
    assert answer.usage.context_tokens == 2 * once + len(engine.head_ids)
    full = engine.run(engine.prompt(QUESTION, [DOCUMENTS[0], DOCUMENTS[0]]), method="full")
    again = engine.run(engine.prompt(QUESTION, [DOCUMENTS[0], DOCUMENTS[0]]), budget=1.0)
    assert torch.allclose(full.logits, again.logits, atol=1e-4)


def test_stored_kv_is_never_written_into(model):
    store = MemoryStore()
    engine = Engine(model, store, chunk_tokens=64)
    engine.add(DOCUMENTS)
    identity = engine.identify(engine.split(DOCUMENTS[1])[0])
    before = store.get(identity).keys.clone()
    for budget in (0.0, 0.5, 1.0):
        engine.answer(QUESTION, DOCUMENTS, 8, budget=budget)
    assert torch.equal(store.get(identity).keys, before)


def test_add_is_idempotent_and_resumable(model, tmp_path):
    engine = Engine(model, DiskStore(tmp_path), chunk_tokens=64)
    seen = []

    def stop_after_two(done, total):
        seen.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.add(DOCUMENTS, stop_after_two)
    report = engine.add(DOCUMENTS)
    assert report.cached_chunks == 2
    assert engine.add(DOCUMENTS).prefilled_tokens == 0


def test_namespaces_share_nothing(model, tmp_path):
    Engine(model, DiskStore(tmp_path), chunk_tokens=64, namespace="a").add(DOCUMENTS)
    usage = Engine(model, DiskStore(tmp_path), chunk_tokens=64, namespace="b").answer(QUESTION, DOCUMENTS, 1).usage
    assert usage.cached_chunks == 0


def test_other_weights_same_everything_else_miss(model, tmp_path):
    Engine(model, DiskStore(tmp_path), chunk_tokens=64).add(DOCUMENTS)
    hf = tiny.hf_model("llama")
    with torch.no_grad():
        hf.get_decoder().layers[2].self_attn.v_proj.weight[3, 5] += 1e-2
    other = wrap(hf, tiny.tokenizer(), "tiny")
    engine = Engine(other, DiskStore(tmp_path), chunk_tokens=64)
    answer = engine.answer(QUESTION, DOCUMENTS, 8)
    assert answer.usage.cached_chunks == 0
    assert answer.token_ids == Engine(other, chunk_tokens=64).answer(QUESTION, DOCUMENTS, 8).token_ids


def test_other_dtype_misses(model, tmp_path):
    Engine(model, DiskStore(tmp_path), chunk_tokens=64).add(DOCUMENTS)
    half = wrap(tiny.hf_model("llama", torch.bfloat16), tiny.tokenizer(), "tiny")
    assert Engine(half, DiskStore(tmp_path), chunk_tokens=64).answer(QUESTION, DOCUMENTS, 1).usage.cached_chunks == 0


def test_a_store_that_cannot_be_written_is_reported_and_does_not_fail_the_request(model, caplog):
    class Full(MemoryStore):
        def put(self, chunk):
            raise StoreError("no space left on device")

    engine = Engine(model, Full(), chunk_tokens=64)
    answer = engine.answer(QUESTION, DOCUMENTS, 4)
    assert answer.token_ids == Engine(model, chunk_tokens=64).answer(QUESTION, DOCUMENTS, 4).token_ids
    assert answer.notices
    assert [r.message.count("no space left") for r in caplog.records] == [1]


def test_a_damaged_chunk_is_recomputed(model, tmp_path):
    engine = Engine(model, DiskStore(tmp_path), chunk_tokens=64)
    expected = engine.answer(QUESTION, DOCUMENTS, 8).token_ids
    path = next(p for p in tmp_path.rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-7] ^= 16
    path.write_bytes(data)
    answer = Engine(model, DiskStore(tmp_path), chunk_tokens=64).answer(QUESTION, DOCUMENTS, 8)
    assert answer.token_ids == expected


def test_the_window_is_a_closed_limit_with_three_numbers(model):
    engine = Engine(model, chunk_tokens=64)
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    room = model.window_tokens - prompt.num_tokens
    engine.run(prompt, method="none", num_new=room)
    with pytest.raises(PromptTooLongError) as caught:
        engine.run(prompt, method="none", num_new=room + 1)
    for number in (prompt.num_tokens, room + 1, model.window_tokens):
        assert str(number) in str(caught.value)


def test_no_documents_is_a_plain_question(model):
    engine = Engine(model)
    answer = engine.answer(QUESTION, [], 6)
    assert answer.usage.chunks == answer.usage.reusable_tokens == 0
    assert answer.token_ids == engine.answer(QUESTION, [], 6, method="full").token_ids


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_max_new_tokens_must_be_a_positive_whole_number(model, value):
    with pytest.raises(OptionError, match="max_new_tokens"):
        Engine(model).answer(QUESTION, DOCUMENTS, value)


def test_an_unknown_method_names_the_nearest(model):
    with pytest.raises(OptionError, match="did you mean 'infoflow'"):
        Engine(model, method="infoflw")


def test_a_bare_string_is_never_taken_apart(model):
    engine = Engine(model, MemoryStore())
    for one in ("Ada keeps it.", DOCUMENTS[0]):
        with pytest.raises(OptionError, match="expected a list"):
            engine.answer(QUESTION, one, 2)
        with pytest.raises(OptionError, match="expected a list"):
            engine.add(one)
    with pytest.raises(OptionError, match="expected a list"):
        engine.answer(QUESTION, DOCUMENTS, 2, stop="END")


def test_a_prompt_of_another_engine_is_refused(model):
    prompt = Engine(model, instruction="Be brief.").prompt(QUESTION, DOCUMENTS)
    with pytest.raises(OptionError, match="another chat header"):
        Engine(model).run(prompt)


@pytest.mark.parametrize("value", [0, 7, 2048, 10**9, 64.0, True])
def test_chunks_that_no_request_could_use_are_refused(model, value):
    with pytest.raises(OptionError, match="chunk_tokens"):
        Engine(model, chunk_tokens=value)


def test_the_notice_of_a_failed_write_belongs_to_its_request(model):
    class FailsOnce(MemoryStore):
        failed = False

        def put(self, chunk):
            if not self.failed and chunk.identity.head_ids:
                self.failed = True
                raise StoreError("no space left on device")
            super().put(chunk)

    engine = Engine(model, FailsOnce(), chunk_tokens=64)
    assert engine.answer(QUESTION, DOCUMENTS, 1).notices
    assert not engine.answer(QUESTION, DOCUMENTS, 1).notices


def test_longrope_never_decodes_across_its_change_of_frequencies():
    longrope = wrap(tiny.hf_model("phi3-longrope"), tiny.tokenizer(), "tiny")
    engine = Engine(longrope, chunk_tokens=64)
    short = [Document(text="Boat 1 carries 4 nets.")]
    tokens = engine.prompt("Boats?", short).num_tokens
    assert tokens < 120
    engine.answer("Boats?", short, 120 - tokens)
    with pytest.raises(OptionError, match="longrope"):
        engine.answer("Boats?", short, 300)


def test_streamed_pieces_join_to_the_answer_and_stop_strings_end_it(model):
    engine = Engine(model, chunk_tokens=64)
    pieces = list(engine.stream(QUESTION, DOCUMENTS, 24))
    answer = pieces[-1].answer
    assert "".join(p.text for p in pieces).strip() == answer.text
    stop = answer.text[5:8]
    stopped = engine.answer(QUESTION, DOCUMENTS, 24, stop=[stop])
    assert stopped.stop_reason == "stop"
    assert stopped.text == answer.text[: answer.text.find(stop)].strip()


def test_sampling_is_seeded(model):
    engine = Engine(model, chunk_tokens=64)
    draw = lambda seed: engine.answer(QUESTION, DOCUMENTS, 12, sampling=Sampling(1.0, 0.9, seed)).token_ids  # noqa: E731
    assert draw(3) == draw(3) != draw(4)


def test_chunk_reports_add_up(model):
    answer = Engine(model, chunk_tokens=64).answer(QUESTION, DOCUMENTS, 2)
    assert sum(c.recomputed for c in answer.chunks) == answer.usage.recomputed_tokens
    assert sum(c.mass for c in answer.chunks) == pytest.approx(1.0, abs=1e-5)
    assert [c.order for c in answer.chunks] == list(range(len(answer.chunks)))
    assert answer.chunks[0].recomputed == 0


def test_head_policy_none_repairs_the_first_chunk_too(model):
    engine = Engine(model, MemoryStore(), chunk_tokens=64, head_policy="none")
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    run = engine.run(prompt, budget=1.0)
    assert run.context.exact_tokens == len(engine.head_ids)
    full = engine.run(prompt, method="full")
    assert torch.allclose(run.logits, full.logits, atol=1e-4)


def test_forced_tokens_do_not_change_the_selection(model):
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    plain, forced = engine.run(prompt), engine.run(prompt, forced_ids=(5, 6, 7))
    assert torch.equal(plain.selection.slots, forced.selection.slots)
    assert forced.logits.shape[0] == 4
    assert torch.allclose(plain.logits[0], forced.logits[0], atol=1e-4)


def test_threads_do_not_disturb_each_other(model):
    engine = Engine(model, MemoryStore(), chunk_tokens=64)
    questions = [f"What does boat {i} carry?" for i in range(4)]
    alone = [engine.answer(q, DOCUMENTS, 6).token_ids for q in questions]
    found: dict[int, tuple[int, ...]] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.__setitem__(i, engine.answer(questions[i], DOCUMENTS, 6).token_ids))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == alone


def test_identity_separates_what_changes_kv(model):
    engine = Engine(model, chunk_tokens=64)
    chunk = engine.split(DOCUMENTS[0])[0]
    base = key(engine.identify(chunk))
    others = {
        "head policy": Engine(model, chunk_tokens=64, head_policy="none"),
        "instruction": Engine(model, chunk_tokens=64, instruction="Be brief."),
        "system": Engine(model, chunk_tokens=64, system="You are a sailor."),
        "namespace": Engine(model, chunk_tokens=64, namespace="b"),
    }
    keys = {name: key(e.identify(chunk)) for name, e in others.items()}
    assert len({base, *keys.values()}) == 1 + len(others)

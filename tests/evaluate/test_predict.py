"""`eval predict` on a tiny model: every number of a row against plain Transformers or worked out another way."""

import hashlib
import json
import re
import resource
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from infoflow_kv import Engine, MemoryStore
from infoflow_kv.errors import InfoFlowError, InputError, OptionError, PromptTooLongError
from infoflow_kv.evaluate.arm_rows import ids_read
from infoflow_kv.evaluate.arms import parse_arms
from infoflow_kv.evaluate.environment import code_digest, environment, without_folders
from infoflow_kv.evaluate.items import Item, Passage
from infoflow_kv.evaluate.measuring import Bench, documents_of
from infoflow_kv.evaluate.niah import needle_items
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.predict import fitted_item, lengthened, predict, writer
from infoflow_kv.evaluate.results import commands_of, environments_of, read_rows, read_runs
from infoflow_kv.evaluate.run_records import check_folder, settle
from infoflow_kv.evaluate.windows import keeps_whole, smallest_window
from infoflow_kv.models import greedy, wrap

KL_EXACT = 1e-5  # nats between two exact ways to the same distribution
NLL_EXACT = 1e-4
TIMES = ("ttft_seconds", "timings")
OPTIONS = Options(max_new_tokens=20, continuation=12, chunk_tokens=64)
METHODS = "full,none,random,epic,cacheblend,infoflow,influence"


def lively(seed: int = 2):
    """A tiny model whose greedy answers wander: tokens weigh much, attention is sharp, and reuse changes the answer."""
    hf = tiny.hf_model("llama", seed=seed)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if "embed" in name:
                parameter.mul_(30)
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(3)
            if "v_proj" in name or "o_proj" in name:
                parameter.mul_(2)
    return wrap(hf, tiny.tokenizer(), "tiny")


@pytest.fixture(scope="module")
def model():
    return lively()


def question(number: int, passages: int = 4, **fields) -> Item:
    texts = [" ".join(f"Boat {b} of quay {j} carries {(b * j + 3) * (number + 7) % 91} nets." for b in range(3))
             for j in range(passages)]  # fmt: skip
    given = {"supporting": (2,) if passages > 2 else (), "group": f"harbour {number // 2}", **fields}
    return Item(
        id=f"q{number}",
        dataset="boats",
        question=f"How many nets does boat {number} of quay 2 carry?",
        answers=(f"{number * 2 + 3} nets",),
        passages=tuple(Passage(f"Quay {j}", text) for j, text in enumerate(texts)),
        **given,
    )


ITEMS = [question(number) for number in range(3)]


def rows_of(model, item, methods=METHODS, budgets=(0.15, 0.5), options=OPTIONS):
    return {row["arm"]: row for row in Bench(model, options).rows(item, parse_arms(methods, budgets))}


@pytest.fixture(scope="module")
def rows(model):
    """Rows by item and arm."""
    return [rows_of(model, item) for item in ITEMS]


def engine_of(model, **settings) -> Engine:
    options = Options()
    return Engine(model, MemoryStore(), chunk_tokens=OPTIONS.chunk_tokens, instruction=options.instruction, **settings)


def prompt_of(model, item):
    return engine_of(model).prompt(item.question, documents_of(item))


def ask(model, item, arm: str, tokens: int = 20, **settings):
    method, _, budget = arm.partition("@")
    given = {"method": method, **({"budget": float(budget)} if budget else {})}
    return engine_of(model, **settings).answer(item.question, documents_of(item), tokens, **given)


def plain_nll(model, prompt_ids, gold_ids) -> float:
    """By one ordinary forward over prompt and gold answer."""
    ids = torch.tensor([[*prompt_ids, *gold_ids]])
    with torch.inference_mode():
        logits = model.plain()(ids).logits[0, len(prompt_ids) - 1 : -1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(gold_ids)))


def gold_ids_of(model, item) -> list[int]:
    return model.tokenizer(item.answers[0], add_special_tokens=False)["input_ids"]


def without_times(row) -> str:
    return json.dumps({key: value for key, value in row.items() if key not in TIMES}, sort_keys=True)


class TestExactness:
    def test_full_is_at_no_distance_from_itself(self, rows):
        for found in rows:
            row = found["full"]
            assert [row[f] for f in ("kl_first", "kl_cont", "js_first", "js_cont")] == [0.0] * 4
            assert (row["top1"], row["prefix"], row["prefix_of"]) == (True, 12, 12)
            assert row["gold_nll"] == row["full_gold_nll"]
            assert (row["recomputed_share"], row["computed_share"]) == (1.0, 1.0)

    @pytest.mark.parametrize("arm", ["infoflow@1", "random@1", "cacheblend@1", "infoflow[geometry=HL-TP]@1"])
    def test_at_budget_1_every_method_is_full_prefill(self, model, arm):
        for item in ITEMS:
            found = rows_of(model, item, f"full,{arm}", ())
            full, ours = found["full"], found[arm]
            assert 0 <= ours["kl_cont"] < KL_EXACT and ours["kl_first"] < KL_EXACT and ours["js_cont"] < KL_EXACT
            assert (ours["prediction"], ours["stop_reason"]) == (full["prediction"], full["stop_reason"])
            assert (ours["prefix"], ours["top1"]) == (12, True)
            assert ours["gold_nll"] == pytest.approx(full["gold_nll"], abs=NLL_EXACT)
            assert ours["recomputed_tokens"] == ours["reusable_tokens"] > 0
            assert ours["recomputed_share"] == 1.0 > ours["recomputed_share_all"]

    def test_one_passage_needs_no_recomputation(self, model):
        item = question(0, passages=1)
        found = rows_of(model, item, "full,none,infoflow@0.15", (), replace(OPTIONS, chunk_tokens=512))
        assert found["none"]["chunks"] == 1
        for arm in ("none", "infoflow@0.15"):
            assert found[arm]["kl_cont"] < KL_EXACT
            assert found[arm]["prediction"] == found["full"]["prediction"]
            assert found[arm]["gold_nll"] == pytest.approx(found["full"]["gold_nll"], abs=NLL_EXACT)
            assert (found[arm]["reusable_tokens"], found[arm]["recomputed_share"]) == (0, 0.0)

    def test_reuse_is_no_full_prefill(self, rows):
        """The comparisons above can fail: distances of partly repaired arms lie far over their tolerances."""
        for found in rows:
            for arm in ("none", "epic@0.15", "cacheblend@0.15", "infoflow@0.15"):
                assert found[arm]["kl_cont"] > 5 * KL_EXACT
            assert found["none"]["kl_cont"] > found["infoflow@0.5"]["kl_cont"]
        assert max(abs(found["none"]["gold_nll"] - found["full"]["gold_nll"]) for found in rows) > 2 * NLL_EXACT


class TestReference:
    def test_all_arms_read_the_ids_of_the_prompt(self, model, rows):
        for item, found in zip(ITEMS, rows, strict=True):
            prompt = prompt_of(model, item)
            digest = hashlib.sha256(np.array(prompt.token_ids, dtype="<i8").tobytes()).hexdigest()
            assert {row["token_ids_sha256"] for row in found.values()} == {digest}
            assert {(r["context_tokens"], r["prompt_tokens"], r["chunks"]) for r in found.values()} == {
                (prompt.context_tokens, len(prompt.suffix_ids), len(prompt.chunks))
            }

    def test_gold_nll_is_plain_transformers(self, model, rows):
        for item, found in zip(ITEMS, rows, strict=True):
            gold, prompt = gold_ids_of(model, item), prompt_of(model, item)
            alone = engine_of(model).prompt(item.question, [])
            expected, closed = plain_nll(model, prompt.token_ids, gold), plain_nll(model, alone.token_ids, gold)
            assert found["full"]["gold_nll"] == pytest.approx(expected, abs=NLL_EXACT)
            assert found["full"]["closed_gold_nll"] == pytest.approx(closed, abs=NLL_EXACT)
            assert {row["full_gold_nll"] for row in found.values()} == {found["full"]["gold_nll"]}
            assert found["none"]["closed_gold_nll"] is None and found["none"]["closed_prediction"] is None
            assert abs(expected - closed) > 10 * NLL_EXACT

    def test_gold_nll_where_the_cache_keeps_a_window_only(self):
        model = wrap(tiny.hf_model("mistral-window"), tiny.tokenizer(), "tiny")
        item = ITEMS[0]
        row = rows_of(model, item, "full,none", ())["full"]
        gold, prompt = gold_ids_of(model, item), prompt_of(model, item)
        assert row["gold_nll"] == pytest.approx(plain_nll(model, prompt.token_ids, gold), abs=NLL_EXACT)

    def test_a_sliding_window_leaves_nothing_to_compare_with_and_it_is_said(self, tmp_path, caplog):
        model = wrap(tiny.hf_model("mistral-window"), tiny.tokenizer(), "tiny")
        tokens = prompt_of(model, ITEMS[0]).num_tokens
        assert tokens > Bench(model, OPTIONS).window == 96
        run(model, tmp_path / "run", "full,none,epic", ITEMS[:2], replace(OPTIONS, kv_error=True))
        assert caplog.text.count("no delta_k and delta_v") == 1
        assert all(row["delta_k"] is None for row in read_rows([tmp_path / "run"]))
        arms = parse_arms("none,oracle", (0.15,))
        with pytest.raises(OptionError, match=rf"arm 'oracle@0.15' needs .* item 'q0' \({tokens} tokens .* has 96"):
            predict(model, ITEMS[:1], arms, tmp_path / "other", OPTIONS)
        assert not (tmp_path / "other").exists()
        with pytest.raises(OptionError, match="arm 'oracle@0.15' needs"):
            next(Bench(model, OPTIONS).rows(ITEMS[0], arms))

    @pytest.mark.parametrize("name", ["mistral-window", "gemma3", "llama"])
    def test_where_a_cache_is_said_to_be_whole_it_is(self, name):
        """By Transformers' own cache: the first token's key is the one of the shorter prompt."""
        model = wrap(tiny.hf_model(name), tiny.tokenizer(), "tiny")
        window = smallest_window(model.plain().config)
        for length in (15, 40):
            ids = torch.arange(length)[None] % 300 + 3
            for end in (window - length, window - length + 1) if window and window > length else (5,):
                out = model.plain().generate(
                    ids, max_new_tokens=end, min_new_tokens=end, do_sample=False, return_dict_in_generate=True
                )
                kept = min(layer.keys.shape[2] for layer in out.past_key_values.layers)
                assert keeps_whole(window, length, end) == (kept == length + end - 1)

    def test_a_gold_answer_of_one_token(self, model):
        item = replace(ITEMS[0], answers=("7",))
        assert len(gold_ids_of(model, item)) == 1
        found = rows_of(model, item, "full,infoflow@1", ())
        expected = plain_nll(model, prompt_of(model, item).token_ids, gold_ids_of(model, item))
        for row in found.values():
            assert row["gold_nll"] == pytest.approx(expected, abs=NLL_EXACT)

    def test_gold_nll_of_an_arm_is_that_of_the_gold_answer_forced_on_it(self, model, rows):
        """Here the gold tokens are prompt rows of the repair itself; in the row they are decoded behind it."""
        engine = engine_of(model)
        for item, found in zip(ITEMS, rows, strict=True):
            gold = gold_ids_of(model, item)
            for arm in ("none", "epic@0.15", "cacheblend@0.15", "infoflow@0.5"):
                method, _, budget = arm.partition("@")
                run = engine.run(prompt_of(model, item), method=method, budget=float(budget or 0), forced_ids=gold[:-1])
                expected = torch.nn.functional.cross_entropy(run.logits.double(), torch.tensor(gold))
                assert found[arm]["gold_nll"] == pytest.approx(float(expected), abs=NLL_EXACT)

    def test_the_closed_book_answer(self, model, rows):
        for item, found in zip(ITEMS, rows, strict=True):
            alone = engine_of(model).prompt(item.question, [])
            run = greedy(model.plain(), alone.token_ids, 20, model.stop_ids)
            assert found["full"]["closed_prediction"] == model.text(list(run.token_ids)).strip()


class TestPredictions:
    @pytest.mark.parametrize("budget", [0.15, 0.5])
    @pytest.mark.parametrize("method", METHODS.split(","))
    def test_they_are_the_engines_answers(self, model, rows, method, budget):
        arm = method if method in ("full", "none") else f"{method}@{budget}"
        for item, found in zip(ITEMS, rows, strict=True):
            answer = ask(model, item, arm)
            assert found[arm]["prediction"] == answer.text
            assert found[arm]["stop_reason"] == answer.stop_reason
            full = greedy(model.plain(), prompt_of(model, item).token_ids, 12, model.stop_ids).token_ids
            common = next((n for n, (a, b) in enumerate(zip(answer.token_ids, full, strict=False)) if a != b), 12)
            assert found[arm]["prefix"] == common
            assert found[arm]["top1"] == (common > 0)

    def test_among_them_are_early_late_and_no_divergence(self, rows):
        prefixes = {row["prefix"] for found in rows for row in found.values()}
        assert min(prefixes) <= 2 and prefixes & set(range(6, 12)) and 12 in prefixes
        # Some agree over the whole continuation and leave full prefill's answer later.
        assert any(
            row["prefix"] == 12 and row["prediction"] != found["full"]["prediction"]
            for found in rows
            for row in found.values()
        )

    @pytest.mark.parametrize(("tokens", "continuation"), [(1, 12), (3, 12), (12, 12), (13, 12), (9, 1)])
    def test_whatever_the_limits(self, model, tokens, continuation):
        options = replace(OPTIONS, max_new_tokens=tokens, continuation=continuation)
        for item in ITEMS:
            found = rows_of(model, item, "full,none,epic", (0.15,), options)
            for arm, row in found.items():
                assert row["prediction"] == ask(model, item, arm, tokens).text
                assert row["prefix_of"] == min(tokens, continuation)

    def test_an_end_token_ends_them(self, rows):
        """The model is told that a token of full prefill's answer ends answers: some end in the forced part."""
        ended = 0
        for item, before in zip(ITEMS, rows, strict=True):
            ids = greedy(lively().plain(), prompt_of(lively(), item).token_ids, 12, frozenset()).token_ids
            for stop in (ids[0], ids[7]):
                model = lively()
                model.stop_ids = frozenset({stop})
                found = rows_of(model, item, "full,none,cacheblend", (0.15, 0.5))
                for arm, row in found.items():
                    answer = ask(model, item, arm)
                    assert (row["prediction"], row["stop_reason"]) == (answer.text, answer.stop_reason)
                    ended += row["stop_reason"] == "eos"
                assert found["full"]["prefix_of"] == ids.index(stop) + 1
                assert found["full"]["prediction"] != before["full"]["prediction"]
        assert ended > 6

    def test_only_the_budgets_that_are_asked_for(self, model, rows):
        options = replace(OPTIONS, generate=(0.15,))
        found = rows_of(model, ITEMS[0], "full,none,infoflow", (0.15, 0.5), options)
        assert (found["infoflow@0.5"]["prediction"], found["infoflow@0.5"]["stop_reason"]) == (None, None)
        for arm in ("full", "none", "infoflow@0.15"):
            assert found[arm]["prediction"] == rows[0][arm]["prediction"]
        assert found["infoflow@0.5"]["kl_cont"] == rows[0]["infoflow@0.5"]["kl_cont"]


class TestArms:
    def test_a_fixed_number_of_tokens_is_recomputed(self, model):
        row = rows_of(model, ITEMS[0], "none,first-k:4", ())["first-k:4"]
        assert row["budget"] is None
        assert row["recomputed_tokens"] == 4 * (row["chunks"] - 1)  # all chunks but the exact first one
        assert row["recomputed_share"] == pytest.approx(row["recomputed_tokens"] / row["reusable_tokens"])

    def test_counts_are_the_engines(self, model, rows):
        for arm in ("epic@0.15", "cacheblend@0.5", "infoflow@0.5"):
            usage = ask(model, ITEMS[0], arm).usage
            row = rows[0][arm]
            assert (row["recomputed_tokens"], row["reusable_tokens"]) == (
                usage.recomputed_tokens,
                usage.reusable_tokens,
            )
            assert row["recomputed_share_all"] == pytest.approx(usage.recomputed_tokens / usage.context_tokens)
        # CacheBlend ran its first layers in full: that is in the share that was computed.
        row = rows[0]["cacheblend@0.5"]
        assert row["computed_share"] == pytest.approx((2 + 2 * row["recomputed_share"]) / 4, abs=0.01)
        assert rows[0]["infoflow@0.5"]["computed_share"] == rows[0]["infoflow@0.5"]["recomputed_share"]

    def test_reorder_reads_the_same_chunks_in_another_order(self, model):
        moved = 0
        for item in ITEMS:
            row = rows_of(model, item, "infoflow[reorder]@0.3", ())["infoflow[reorder]@0.3"]
            engine, prompt = engine_of(model, reorder=True, budget=0.3), prompt_of(model, item)
            run = engine.run(prompt)
            chunks = [prompt.chunks[index].token_ids for index in run.order]
            ids = [*prompt.head_ids, *(t for chunk in chunks for t in chunk), *prompt.suffix_ids]
            assert row["token_ids_sha256"] == hashlib.sha256(np.array(ids, dtype="<i8").tobytes()).hexdigest()
            assert row["reorder"] is True
            given = hashlib.sha256(np.array(prompt.token_ids, dtype="<i8").tobytes()).hexdigest()
            assert row["prompt_ids_sha256"] == given
            assert row["prediction"] == engine.answer(item.question, documents_of(item), 20).text
            moved += run.order != tuple(range(len(prompt.chunks)))
        assert moved

    def test_other_ids_are_refused(self, model):
        engine, prompt = engine_of(model), prompt_of(model, ITEMS[0])
        run = engine.run(prompt)
        assert ids_read(run, prompt) == prompt.token_ids
        for other in (prompt_of(model, ITEMS[1]), replace(prompt, chunks=prompt.chunks[::-1])):
            with pytest.raises(RuntimeError, match="other token ids"):
                ids_read(run, other)

    def test_oracle_knows_what_repair_changes(self, model):
        found = [rows_of(model, item, "random,oracle", (0.15, 0.3)) for item in ITEMS]
        for budget in (0.15, 0.3):
            kl = {m: np.mean([f[f"{m}@{budget}"]["kl_cont"] for f in found]) for m in ("random", "oracle")}
            assert kl["oracle"] < kl["random"]

    def test_selection_lift_is_counted_on_the_selection(self, model, rows):
        for item, found in zip(ITEMS, rows, strict=True):
            answer, prompt = ask(model, item, "infoflow@0.5"), prompt_of(model, item)
            starts = np.cumsum([len(prompt.head_ids), *(c.num_tokens for c in prompt.chunks)])
            gold = [i for i, c in enumerate(prompt.chunks) if c.document_id == "p2"]
            spans = [range(starts[i], starts[i + 1]) for i in gold]
            slots = answer.selection.slots.tolist()
            selected = np.mean([any(s in span for span in spans) for s in slots])
            share = sum(len(span) for span in spans) / answer.usage.reusable_tokens
            assert found["infoflow@0.5"]["selection_lift"] == pytest.approx(selected / share)
            assert found["none"]["selection_lift"] is None

    def test_kv_error_per_layer(self, model):
        item, options = ITEMS[0], replace(OPTIONS, kv_error=True)
        found = rows_of(model, item, "full,none,infoflow[layers=0],infoflow@1,infoflow[reorder]", (0.3,), options)
        prompt = prompt_of(model, item)
        full = greedy(model.plain(), prompt.token_ids, 1, model.stop_ids)
        run = engine_of(model).run(prompt, method="none")
        span = slice(run.context.exact_tokens, run.context.num_tokens)
        for name, ours, theirs in (
            ("delta_k", run.context.keys, full.keys),
            ("delta_v", run.context.values, full.values),
        ):
            a, b = ours[:, :, span].numpy(), theirs[:, :, span].numpy()
            expected = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]
            assert found["none"][name] == {"reused": [pytest.approx(x, abs=2e-5) for x in expected]}
            assert expected[0] < 1e-5 < 0.01 < min(expected[2:])
            assert set(found["infoflow@1"][name]) == {"repaired"}
            assert max(found["infoflow@1"][name]["repaired"]) < 1e-4
            part = found["infoflow[layers=0]@0.3"][name]
            assert max(part["repaired"]) < max(part["reused"])
            # Reordered chunks stand where full prefill has others; of full itself there is nothing to say.
            assert name not in found["infoflow[reorder]@0.3"] and name not in found["full"]

    def test_an_items_own_instruction_is_used(self, model):
        item = replace(ITEMS[0], instruction="Count the nets.")
        row = rows_of(model, item, "full,none", ())["full"]
        engine = Engine(model, chunk_tokens=64, instruction="Count the nets.")
        ids = engine.prompt(item.question, documents_of(item)).token_ids
        assert row["token_ids_sha256"] == hashlib.sha256(np.array(ids, dtype="<i8").tobytes()).hexdigest()

    def test_arms_do_not_depend_on_the_arms_before_them(self, model, rows):
        for arm in ("none", "influence@0.15", "cacheblend@0.5"):
            assert without_times(rows_of(model, ITEMS[0], arm, (0.15,))[arm]) == without_times(rows[0][arm])


class TestFitting:
    def test_whole_distractors_are_dropped_and_it_is_said(self, model, tmp_path, caplog):
        long = replace(question(3, passages=4), passages=ITEMS[0].passages * 8, supporting=(2,))
        done = predict(model, [long], parse_arms("full,none", ()), tmp_path / "run", OPTIONS)
        [full, none] = read_rows([tmp_path / "run"])
        dropped = done.dropped["q3"]
        assert 0 < dropped < 31 and full["meta"]["dropped_passages"] == dropped
        assert full["token_ids_sha256"] == none["token_ids_sha256"]
        assert full["context_tokens"] + full["prompt_tokens"] + 21 <= 2048
        assert f"item 'q3' is over the window: {dropped} distractor passages dropped" in caplog.text
        item, _ = fitted_item(Bench(model, OPTIONS), long)
        assert item.passages[item.supporting[0]] == long.passages[2]
        one_more = replace(item, passages=(*item.passages, long.passages[-1]))
        tokens = prompt_of(model, one_more).num_tokens
        assert tokens + 21 > 2048  # not one passage too many was dropped

    def test_an_item_whose_golds_are_unknown_or_too_long_is_left_out(self, model, tmp_path, caplog):
        unknown = replace(question(3), passages=ITEMS[0].passages * 8, supporting=())
        gold = replace(question(4), passages=(Passage("", "nets and boats " * 900),), supporting=(0,))
        done = predict(model, [unknown, ITEMS[0], gold], parse_arms("none", ()), tmp_path / "run", OPTIONS)
        assert set(done.skipped) == {"q3", "q4"} and done.written == 1
        for reason in done.skipped.values():
            assert "the model's window of 2048" in reason
        assert caplog.text.count("is left out") == 2
        assert [row["_id"] for row in read_rows([tmp_path / "run"])] == ["q0"]

    def test_one_that_would_not_fit_is_refused_by_the_bench_itself(self, model):
        long = replace(question(3), passages=ITEMS[0].passages * 8)
        with pytest.raises(PromptTooLongError):
            next(Bench(model, OPTIONS).rows(long, parse_arms("full", ())))

    def test_items_that_nothing_can_score_are_left_out(self, model, tmp_path, caplog):
        blank = replace(question(3), answers=("the", "..."))
        partly = replace(question(4), answers=("...", "nine nets"))
        done = predict(model, [blank, partly], parse_arms("full", ()), tmp_path / "run", OPTIONS)
        assert set(done.skipped) == {"q3"} and "once normalised" in caplog.text
        [row] = read_rows([tmp_path / "run"])
        assert row["answers"] == ["nine nets"]
        with pytest.raises(OptionError, match="no item is left to measure; item 1: no gold answer"):
            predict(model, [blank], parse_arms("full", ()), tmp_path / "other", OPTIONS)
        assert not (tmp_path / "other").exists()

    def test_lengthened_items_hold_their_passages_and_others(self, model):
        options = replace(OPTIONS, lengthen=900, seed=4)
        pool = [question(n) for n in range(8)]
        [longer] = lengthened(model, pool[:1], pool, 900, options)
        engine = engine_of(model)
        tokens = sum(c.num_tokens for d in documents_of(longer) for c in engine.split(d))
        own = sum(c.num_tokens for d in documents_of(pool[0]) for c in engine.split(d))
        assert own + 100 < tokens <= 900
        assert [p for p in longer.passages if p in pool[0].passages] == list(pool[0].passages)
        assert longer.passages[longer.supporting[0]] == pool[0].passages[2]
        assert lengthened(model, pool[:1], pool, 900, options) == [longer]
        assert lengthened(model, pool[:1], pool, 900, replace(options, seed=5)) != [longer]


def run(model, out: Path, methods="full,none,infoflow,influence", items=ITEMS, options=OPTIONS, **given):
    return predict(model, items, parse_arms(methods, (0.15,)), out, options, **given)


def lines(out: Path) -> list[str]:
    return [without_times(json.loads(line)) for line in (out / "rows.jsonl").read_text().splitlines()]


class TestResuming:
    @pytest.mark.parametrize("after", [1, 7])
    def test_an_interrupted_run_gives_the_rows_of_a_whole_one(self, model, tmp_path, after):
        run(model, tmp_path / "whole")

        def stop(done, total, what):
            assert total == 12
            if done == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path / "cut", on_progress=stop)
        file = tmp_path / "cut" / "rows.jsonl"
        before = file.read_bytes()
        assert before.count(b"\n") == after
        file.write_bytes(before + b'{"format": 1, "_id": "q0", "arm": "no')  # killed while it wrote
        steps = []
        done = run(model, tmp_path / "cut", on_progress=lambda *step: steps.append(step))
        assert (done.found, done.written) == (after, 12 - after)
        assert [step[0] for step in steps] == list(range(after + 1, 13))
        assert file.read_bytes().startswith(before)
        assert sorted(lines(tmp_path / "cut")) == sorted(lines(tmp_path / "whole"))
        assert len(read_rows([tmp_path / "cut"])) == 12

    def test_a_line_that_lacks_its_end_only_is_computed_again(self, model, tmp_path):
        run(model, tmp_path, "full,none")
        file = tmp_path / "rows.jsonl"
        whole = lines(tmp_path)
        file.write_bytes(file.read_bytes()[:-1])
        assert run(model, tmp_path, "full,none").written == 1
        assert lines(tmp_path) == whole

    def test_a_finished_run_computes_nothing(self, model, tmp_path):
        run(model, tmp_path)
        before = (tmp_path / "rows.jsonl").read_bytes()

        def fail(*step):
            raise AssertionError(step)

        done = run(model, tmp_path, on_progress=fail)
        assert (done.written, done.found) == (0, 12)
        assert (tmp_path / "rows.jsonl").read_bytes() == before

    def test_arms_and_items_can_be_added_later(self, model, tmp_path):
        run(model, tmp_path / "parts", "full,none", ITEMS[:2])
        done = run(model, tmp_path / "parts", "infoflow,none,influence,full")
        assert (done.found, done.written) == (4, 8)
        run(model, tmp_path / "whole")
        assert sorted(lines(tmp_path / "parts")) == sorted(lines(tmp_path / "whole"))
        [record] = read_runs([tmp_path / "parts"])
        assert record["arms"] == ["full", "none", "infoflow@0.15", "influence@0.15"]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"options": replace(OPTIONS, continuation=8)}, "other options"),
            ({"options": replace(OPTIONS, lengthen=900)}, "other options"),
            ({"data": [{"file": "b.jsonl", "sha256": "1"}]}, "other data"),
        ],
    )
    def test_another_run_is_not_mixed_in(self, model, tmp_path, change, words):
        given = {"data": [{"file": "a.jsonl", "sha256": "0"}]}
        run(model, tmp_path, "full", ITEMS[:1], **given)
        before = (tmp_path / "rows.jsonl").read_bytes(), (tmp_path / "run.json").read_bytes()
        with pytest.raises(OptionError, match=f"holds a run with {words} .*give another --out"):
            run(model, tmp_path, "full", **{**given, **change})
        assert before == ((tmp_path / "rows.jsonl").read_bytes(), (tmp_path / "run.json").read_bytes())

    def test_another_model_is_not_mixed_in(self, model, tmp_path):
        run(model, tmp_path, "full", ITEMS[:1])
        with pytest.raises(OptionError, match="other weights"):
            run(lively(seed=3), tmp_path, "full", ITEMS[:1])

    def test_a_calibration_in_between_is_not_mixed_in(self, tmp_path):
        """`infoflow@0.15` would mean other layers in the second half of the rows."""
        model = lively()
        run(model, tmp_path, "full,infoflow", ITEMS[:1])
        model.layer_sets = {"infoflow": "2"}
        with pytest.raises(OptionError, match="other layer_sets"):
            run(model, tmp_path, "full,infoflow", ITEMS[:2])

    def test_an_option_that_an_older_run_did_not_know_had_its_default(self, model, tmp_path):
        run(model, tmp_path, "full", ITEMS[:1])
        file = tmp_path / "run.json"
        record = json.loads(file.read_text())
        del record["options"]["lengthen"]
        file.write_text(json.dumps(record))
        assert run(model, tmp_path, "full", ITEMS[:1]).found == 1
        file.write_text(json.dumps(record))
        with pytest.raises(OptionError, match="other options"):
            run(model, tmp_path, "full", ITEMS[:1], options=replace(OPTIONS, lengthen=900))

    def test_rows_without_a_record_are_not_claimed(self, model, tmp_path):
        """They may be another model's: appending to them would write a record that says they are this one's."""
        run(model, tmp_path, "full", ITEMS[:1])
        (tmp_path / "run.json").unlink()
        before = (tmp_path / "rows.jsonl").read_bytes()
        with pytest.raises(InputError, match=r"rows.jsonl holds rows, and no run.json beside it says what made them"):
            run(lively(seed=3), tmp_path, "full", ITEMS[:2])
        assert (tmp_path / "rows.jsonl").read_bytes() == before and not (tmp_path / "run.json").exists()
        with pytest.raises(InputError, match="no run.json beside it"):
            check_folder(tmp_path, OPTIONS, [])

    def test_what_differs_is_said_and_before_a_model_is_there(self, tmp_path):
        data = [{"file": "a.jsonl", "sha256": "0" * 64}]
        options = {**asdict(OPTIONS), "generate": None}
        del options["prompts"]  # as older records: it was not known yet
        record = {"format": 1, "weights": "w", "dtype": "float32", "options": options, "data": data, "arms": ["full"]}
        settle(tmp_path / "run.json", record | {"options": options | {"generate": "all", "prompts": None}})
        (tmp_path / "run.json").write_text(json.dumps(record))
        check_folder(tmp_path, OPTIONS, data)
        long = {"boats": "Read all of this and answer briefly, please, as you can. {context}\n\n{input}"}
        for change, words in (
            ({"seed": 3, "prompts": long}, '(seed: 0, now 3; prompts: none, now {"boats": "Read all'),
            ({"instruction": OPTIONS.instruction + " Be brief."}, '…in a few words.", now …in a few words. Be brief."'),
            ({"generate": ()}, '(generate: "all", now "none")'),
        ):
            with pytest.raises(OptionError, match="holds a run with other options") as refused:
                check_folder(tmp_path, replace(OPTIONS, **change), data)
            assert words in str(refused.value) and "\n" not in str(refused.value)
        with pytest.raises(OptionError, match=r"other data \(.*a.jsonl \(0{12}\).*, now .*b.jsonl \(1{12}\)"):
            check_folder(tmp_path, OPTIONS, [{"file": "b.jsonl", "sha256": "1" * 64}])

    def test_who_writes_answers_is_recorded_in_words_and_older_records_go_on(self, model, tmp_path):
        for generate, words in ((None, "all"), ((), "none"), ((0.15, "full"), [0.15, "full"])):
            options, out = replace(OPTIONS, generate=generate), tmp_path / str(words)[:4]
            run(model, out, "full", ITEMS[:1], options)
            record = json.loads((out / "run.json").read_text())
            assert record["options"]["generate"] == words
            record["options"]["generate"] = None if generate is None else list(generate)
            (out / "run.json").write_text(json.dumps(record))
            assert run(model, out, "full", ITEMS[:1], options).found == 1

    def test_texts_that_are_no_unicode_reach_the_record(self, model, tmp_path):
        bad = "bad \udcff byte"
        options = replace(OPTIONS, instruction=bad, prompts={"boats": f"{bad} {{context}} {{input}}"})
        given = {"data": [{"file": "n\udcff.jsonl", "sha256": "0"}], "environment": HERE | {"command": f"--out {bad}"}}
        for found in (0, 1):
            assert run(model, tmp_path, "full", ITEMS[:1], options, **given).found == found
        record = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
        assert record["options"]["instruction"] == "bad \ufffd byte" and record["data"][0]["file"] == "n\ufffd.jsonl"
        assert record["environments"][0]["command"] == "--out bad \ufffd byte"

    def test_two_names_of_one_arm_are_refused_before_anything_is_written(self, model, tmp_path):
        with pytest.raises(OptionError, match="are the same on tiny"):
            run(model, tmp_path / "run", "infoflow,infoflow[layers=relative]")
        with pytest.raises(OptionError, match=r"arm 'cacheblend-gradual@auto:0.8': .*has another set"):
            run(model, tmp_path / "run", "cacheblend-gradual@auto")
        assert not (tmp_path / "run").exists()

    def test_a_full_disk_ends_it_in_words_and_it_goes_on_later(self, model, tmp_path):
        run(model, tmp_path / "whole")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # in the middle of a row, as on a full disk
        try:
            with pytest.raises(InfoFlowError, match=r"rows.jsonl cannot be written: .*the same command goes on"):
                run(model, tmp_path / "cut")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not (tmp_path / "cut" / "rows.jsonl").read_bytes().endswith(b"\n")
        done = run(model, tmp_path / "cut")
        assert 0 < done.found < 12 and done.found + done.written == 12
        assert sorted(lines(tmp_path / "cut")) == sorted(lines(tmp_path / "whole"))

    def test_rows_that_cannot_be_read(self, model, tmp_path):
        (tmp_path / "rows.jsonl").mkdir()
        with pytest.raises(InputError, match=r"rows.jsonl cannot be read: .*give another --out"):
            run(model, tmp_path, "full", ITEMS[:1])

    def test_two_writers(self, model, tmp_path):
        with writer(tmp_path, {"format": 1}), pytest.raises(OptionError, match="another run writes to .*wait for it"):
            run(model, tmp_path, "full", ITEMS[:1])
        assert not (tmp_path / "rows.jsonl").exists()

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("rows.jsonl", '{"format": 2, "_id": "q0", "arm": "full"}\n', r"line 1: format 2, this version writes 1"),
            ("rows.jsonl", '{"_id": "q0", "arm": "full"}\n', r"line 1: not a row of `eval predict`"),
            ("rows.jsonl", "\nnonsense\n", r"line 2: not a row"),
            ("run.json", '{"format": 7}', "has format 7, this version writes 1"),
            ("run.json", "[]", "no record of a run"),
            ("run.json", "{", "no record of a run"),
            ("run.json", "[" * 200_000, "no record of a run"),
            ("rows.jsonl", "[" * 200_000 + "\n", r"line 1: not a row of `eval predict` .nested too deep"),
        ],
    )
    def test_files_of_others_stay_as_they_are(self, model, tmp_path, name, content, words):
        if name == "rows.jsonl":
            run(model, tmp_path, "full", ITEMS[:1])
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=words):
            run(model, tmp_path, "full", ITEMS[:1])
        assert (tmp_path / name).read_text() == content

    def test_nothing_is_written_where_an_arm_cannot_run(self, model, tmp_path):
        for methods, options in (("infoflow[layers=9]", OPTIONS), ("full", replace(OPTIONS, head_policy="neck"))):
            with pytest.raises(OptionError):
                run(model, tmp_path / "run", methods, options=options)
        assert not (tmp_path / "run").exists()

    def test_a_record_is_replaced_whole(self, tmp_path):
        record = {"format": 1, "weights": "w", "dtype": "float32", "options": {}, "data": [], "arms": ["full"]}
        settle(tmp_path / "run.json", record)
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


HERE = {"code": "a" * 64, "torch": "2.1", "threads": 2, "load_average": 0.5, "date": "d", "command": "c"}


class TestEnvironments:
    def record(self, out: Path) -> dict:
        return json.loads((out / "run.json").read_text())

    def test_the_same_one_is_kept_once(self, model, tmp_path, caplog):
        run(model, tmp_path, "full", ITEMS[:1], environment=HERE)
        run(model, tmp_path, "full", ITEMS[:2], environment={**HERE, "load_average": 9.0, "date": "e"})
        assert (self.record(tmp_path)["environment"], self.record(tmp_path)["environments"]) == (HERE, [HERE])
        assert "holds rows made with" not in caplog.text

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"code": "b" * 64}, f"other code of infoflow-kv ({'a' * 16}, now {'b' * 16})"),
            ({"torch": "2.2"}, "other torch (2.1, now 2.2)"),
            ({"threads": 1}, "other thread count (2, now 1)"),
        ],
    )
    def test_another_one_is_added_and_said(self, model, tmp_path, caplog, change, words):
        run(model, tmp_path, "full", ITEMS[:1], environment=HERE)
        other = {**HERE, **change}
        run(model, tmp_path, "full", ITEMS[:2], environment=other)
        assert caplog.text.count("holds rows made with other") == 1 and words in caplog.text
        assert (self.record(tmp_path)["environment"], self.record(tmp_path)["environments"]) == (HERE, [HERE, other])
        assert len(read_rows([tmp_path])) == 2

    def test_every_command_that_wrote_rows_is_kept(self, model, tmp_path):
        for number, (methods, command) in enumerate((("full", "c"), ("none", "d"), ("epic", "d"), ("infoflow", "e"))):
            run(model, tmp_path, methods, ITEMS[:1], environment={**HERE, "command": command, "date": str(number)})
        run(model, tmp_path, "full", ITEMS[:1], environment={**HERE, "command": "wrote nothing"})
        [kept] = environments_of(self.record(tmp_path))
        assert commands_of(kept) == ["c", "d", "e"] and kept["command"] == "c"
        assert commands_of(HERE) == ["c"] and commands_of({}) == []

    def test_one_that_wrote_no_row_is_not_named(self, model, tmp_path, caplog):
        run(model, tmp_path, "full", ITEMS[:1], environment=HERE)
        run(model, tmp_path, "full", ITEMS[:1], environment={**HERE, "threads": 1})
        assert self.record(tmp_path)["environments"] == [HERE] and "holds rows" not in caplog.text

    def test_a_record_from_before_they_were_listed(self, model, tmp_path, caplog):
        run(model, tmp_path, "full", ITEMS[:1], environment=HERE)
        old = self.record(tmp_path)
        del old["environments"], old["environment"]["code"]
        (tmp_path / "run.json").write_text(json.dumps(old))
        [read] = read_runs([tmp_path])
        assert environments_of(read) == [old["environment"]]
        run(model, tmp_path, "full,none", ITEMS[:2], environment=HERE)
        assert self.record(tmp_path)["environments"] == [old["environment"], HERE]
        assert "other code of infoflow-kv (not recorded, now" in caplog.text
        assert len(read_rows([tmp_path])) == 4

    def test_the_code_is_digested_by_name_and_content(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x.py").write_text("1")
        (tmp_path / "b.py").write_text("2")
        expected = hashlib.sha256(b"a/x.py\x001\x001" + b"b.py\x001\x002").hexdigest()
        assert code_digest(tmp_path) == expected
        (tmp_path / "note.txt").write_text("no code")
        assert code_digest(tmp_path) == expected
        (tmp_path / "b.py").write_text("3")
        assert code_digest(tmp_path) != expected
        assert environment(command=[])["code"] == code_digest()


class TestNeedles:
    ESSAY = " ".join(f"Line {n} tells of {'boats and ' * (n % 7)}nets at quay {n % 5}." for n in range(300))

    def items(self, chunk_tokens: int):
        encoder = engine_of(lively()).encoder
        return needle_items(
            [self.ESSAY], [1500], [0, 0.5, 1], 1, ("one", "split", "two-chunk"), chunk_tokens=chunk_tokens,
            count_tokens=lambda text: len(encoder.content(text)[0]), places=(None, "start", "middle", "end"),
        )  # fmt: skip

    def test_a_passage_is_one_chunk_of_the_size_it_was_made_for(self, model):
        options = replace(OPTIONS, chunk_tokens=240)
        bench = Bench(model, options)
        for item in self.items(240):
            bench.check_passages(item)
            chunks = bench.engine().prompt(item.question, documents_of(item)).chunks
            assert len(chunks) == len(item.passages)
            assert max(chunk.num_tokens for chunk in chunks) > 160  # and not much smaller

    def test_passages_of_two_chunks_are_refused_before_anything_is_written(self, model, tmp_path):
        items = self.items(240)
        with pytest.raises(OptionError, match=r"passage \d+ of (\d+) tokens makes \d chunks at .* 64; use") as refused:
            predict(model, items, parse_arms("full", ()), tmp_path / "run", OPTIONS)
        assert not (tmp_path / "run").exists()
        with pytest.raises(OptionError, match="chunk_tokens 64; use chunk_tokens"):
            next(Bench(model, OPTIONS).rows(items[0], parse_arms("full", ())))
        # The size that is named is enough for that passage.
        size, number = map(int, re.search(r"passage (\d+) of (\d+)", str(refused.value)).groups()[::-1])
        document = documents_of(items[0])[number]
        assert len(engine_of(model).split(document)) > 1
        assert len(Bench(model, replace(OPTIONS, chunk_tokens=size)).engine().split(document)) == 1

    def test_other_items_may_have_passages_of_several_chunks(self, model):
        item = replace(ITEMS[0], passages=(Passage("", self.ESSAY[:900]),), supporting=(), meta={"task": "mine"})
        assert rows_of(model, item, "full", ())["full"]["chunks"] > 1


def test_whatever_stands_in_meta(model, tmp_path):
    meta = {
        "nan": float("nan"),
        "inf": -float("inf"),
        "big": 10**400,
        "list": [1],
        "none": None,
        "hops": [{"passage": []}],
    }
    run(model, tmp_path, "full", [replace(ITEMS[0], meta=meta)])
    [row] = read_rows([tmp_path])
    assert row["meta"] == {"big": 10**400}


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": 0}, {"continuation": 0}, {"lengthen": 0}, {"seed": -1}, {"max_new_tokens": True}],
)
def test_options_outside_their_range(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Options(**wrong)


def test_a_record_names_no_folder_of_this_machine():
    given = ["eval", "--data", "/home/me/a.jsonl", "--out=/tmp/x/run", "gguf:/models/m.gguf", "data/a.jsonl", "a[b=/c]"]
    assert without_folders(given) == [
        "eval", "--data", "a.jsonl", "--out=run", "gguf:m.gguf", "data/a.jsonl", "a[b=/c]"
    ]  # fmt: skip
    record = environment(command=given)
    assert record["command"] == "eval --data a.jsonl --out=run gguf:m.gguf data/a.jsonl a[b=/c]"
    assert record["threads"] == torch.get_num_threads() and record["torch"] == torch.__version__

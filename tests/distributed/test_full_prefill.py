"""Budget 1 and full prefill on several ranks are plain Transformers' full prefill, its logits and its greedy tokens."""

from functools import cache
from typing import Any

import pytest
import torch
from many_requests import DOCUMENTS, assert_same, many, model_of, plain_answers
from ranks import run_ranks, thorough

import tiny
from infoflow_kv.decoding import Sampling, decode, sampler
from infoflow_kv.engine import Engine
from infoflow_kv.models.plain import greedy
from infoflow_kv.parallel.cost import query_layout
from infoflow_kv.parallel.group import Group
from infoflow_kv.records import Prompt, Selection
from infoflow_kv.repairing import repair
from infoflow_kv.spreading import Spread
from tolerance import assert_close

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}
# Sinks, and a softcap with windows, are in none of the others.
SOURCES = [*(f"tiny:{name}" for name in tiny.CONFIGS), "family:gpt-oss", "family:gemma2"]
ON_FOUR = ["tiny:gemma3", "tiny:phi3-longrope", "family:gpt-oss", "family:gemma2"]
EVERY_TIME = ("tiny:qwen3", "tiny:gemma3", "tiny:phi3-longrope", "family:gpt-oss")
BASELINES: list[dict[str, Any]] = [
    {"method": "full", "baseline": "ring"},
    {"method": "full", "baseline": "gather"},
    # Other numbers of tokens, which divide by no number of ranks.
    {"method": "full", "baseline": "ring", "documents": DOCUMENTS[:1]},
    {"method": "full", "baseline": "gather", "documents": [*DOCUMENTS[1:2], "."]},
    {"method": "full", "baseline": "ring", "documents": [], "question": "Who?"},
]


def at_budgets(layouts: list[Any]) -> list[dict[str, Any]]:
    return [{"budget": 1.0, "layout": layout} for layout in layouts] + [
        {"budget": 0.3, "layout": layout} for layout in layouts
    ]


def assert_right(source: str, size: int, layouts: list[Any], sizes: dict[str, int] | None = None) -> None:
    """Full prefill and budget 1 against plain Transformers, budget 0.3 against one process."""
    whole, part = [{**BASELINES[0]}, {**BASELINES[1]}], at_budgets(layouts)
    requests = [*whole, *part]
    found = run_ranks(many, size, source, requests, sizes, timeout=240.0)
    full = whole + part[: len(layouts)]
    # The prompt is one and the same.
    expected = plain_answers(source, full[:1], sizes)
    assert_same(found, {f"{n}.{key[2:]}": v for n in range(len(full)) for key, v in expected.items()}, full)
    one = many(None, source, [{"budget": 0.3}], sizes)
    assert one["0.selected"].numel() > 0
    behind = [{k[len(str(n)) + 1 :]: v for k, v in rank.items() if k.startswith(f"{n}.")} for rank in found
              for n in range(len(full), len(requests))]  # fmt: skip
    for got in behind:
        assert torch.equal(got["selected"], one["0.selected"]), source
        assert torch.equal(got["tokens"], one["0.tokens"]), source
        if got["steps"].shape[0]:
            assert_close(got["steps"], one["0.steps"], 1e-5)


@pytest.mark.parametrize("source", [s if s in EVERY_TIME else thorough(s) for s in SOURCES])
def test_every_family_on_two_ranks(source):
    assert_right(source, 2, ["Q", "H"])


@pytest.mark.parametrize("source", [ON_FOUR[0], *map(thorough, ON_FOUR[1:])])
def test_windows_long_positions_sinks_and_softcap_on_four_ranks(source):
    assert_right(source, 4, ["Q", [2, 2]])


@pytest.mark.parametrize(("source", "heads"), [("tiny:qwen3", 8), thorough("tiny:llama", 4)])
def test_heads_that_four_ranks_share(source, heads):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 4}
    assert_right(source, 4, ["Q", "H", [2, 2]], sizes)


def test_one_rank_is_full_prefill_in_every_layout():
    requests = [*BASELINES, *at_budgets(["Q", "H", "auto", [1, 1]])[:4]]
    with Group.alone() as group:
        found = many(group, "tiny:qwen3", requests, SIZES)
    assert_same([found], plain_answers("tiny:qwen3", requests, SIZES), requests)


@pytest.mark.parametrize(
    ("source", "size"),
    [("tiny:gemma3", 3), *(thorough(s, n) for s, n in (("tiny:qwen3", 2), ("tiny:qwen3", 4), ("tiny:gemma3", 4)))],
)
def test_the_baselines_are_full_prefill_for_odd_numbers_of_tokens(size, source):
    found = run_ranks(many, size, source, [{**one, "layout": "Q"} for one in BASELINES], None, timeout=240.0)
    assert_same(found, plain_answers(source, BASELINES), BASELINES)


def few_tokens(group: Group, source: str, counts: list[int]) -> dict[str, torch.Tensor]:
    """Full prefill of so few tokens that ranks have none, and three decoded: the logits behind each, on rank 0."""
    torch.use_deterministic_algorithms(True)  # unwritten memory is NaN
    model = model_of(source)
    engine = Engine(model, None, group=group, layout="Q")
    found: dict[str, torch.Tensor] = {}
    for baseline in ("ring", "gather"):
        place = Spread(model, engine._supply, group, query_layout(group.size), baseline)
        for count in counts:
            ids = tuple(range(7, 7 + count))
            prompt = Prompt((), (), ids)
            context = place.reserve(prompt, count + 3)
            tables = model.rotary().tables(torch.arange(count))
            logits = repair(model, context, Selection(torch.arange(0)), torch.tensor(ids), tables)
            assert (logits is None) == (group.rank != 0)
            steps = []
            pick = sampler(Sampling())

            def watched(given: torch.Tensor, steps: Any = steps, pick: Any = pick) -> int:
                steps.append(given)
                return int(pick(given))

            first = None if logits is None else logits[-1]
            tokens = list(decode(model, context, model.rotary(), count, first, place.picks(watched), 3))
            found[f"{baseline}.{count}.tokens"] = torch.tensor(tokens)
            found[f"{baseline}.{count}.steps"] = torch.stack(steps) if steps else torch.empty(0)
    return found


@pytest.mark.parametrize("source", ["tiny:qwen3", "tiny:gemma3"])
def test_fewer_tokens_than_the_ranks_have_parts(source):
    counts = [1, 2, 3, 5, 7, 8, 9]
    found = run_ranks(few_tokens, 4, source, counts, timeout=120.0)
    model = model_of(source)
    for count in counts:
        expected = greedy(model.plain("eager"), tuple(range(7, 7 + count)), 3, model.stop_ids)
        for baseline in ("ring", "gather"):
            for one in found:
                assert one[f"{baseline}.{count}.tokens"].tolist() == list(expected.token_ids)
            assert_close(found[0][f"{baseline}.{count}.steps"], expected.logits, 1e-5)


BF16 = "tiny:qwen3:bfloat16"


@cache
def in_bfloat16() -> dict[str, torch.Tensor]:
    return many(None, BF16, [{"budget": 1.0}, {"budget": 0.0, "method": "none"}], SIZES)


@pytest.mark.parametrize(("size", "layout"), [thorough(2, "Q"), thorough(2, "H"), (4, [2, 2])])
def test_bfloat16_is_as_far_from_one_process_as_its_rounding(size, layout):
    """Distance to float32 on several ranks is not above twice that of one process, and reuse alone is further off."""
    requests = [{"budget": 1.0, "layout": layout}, {"method": "full", "baseline": "ring", "layout": "Q"}]
    found = run_ranks(many, size, BF16, requests, SIZES, timeout=120.0)[0]
    one = in_bfloat16()
    exact = plain_answers("tiny:qwen3", [{}], SIZES)["0.steps"][0]
    rounding = float((one["0.steps"][0] - exact).abs().max())
    assert rounding > 0
    for number in (0, 1):
        error = float((found[f"{number}.steps"][0] - exact).abs().max())
        assert error < 2 * rounding
    assert float((one["1.steps"][0] - exact).abs().max()) > 2 * rounding

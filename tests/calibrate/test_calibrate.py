"""Calibration on a tiny model: what it measures is what the method would give, and the profile is used afterwards."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from infoflow_kv import Engine, MemoryStore
from infoflow_kv.calibrate import METHODS, calibrate, case_of, distance, fixed_sets
from infoflow_kv.errors import InputError, OptionError
from infoflow_kv.evaluate.distances import divergences
from infoflow_kv.evaluate.items import Item, Passage
from infoflow_kv.evaluate.measuring import Bench, documents_of
from infoflow_kv.evaluate.options import Options
from infoflow_kv.methods import find_method
from infoflow_kv.models import wrap
from infoflow_kv.models.profiles import Profile, find_profile, profile_file, read_profile, write_profile
from infoflow_kv.recipes import make_recipe, method_layers
from infoflow_kv.select import layer_set

OPTIONS = Options(max_new_tokens=4, continuation=4)


def item(number: int) -> Item:
    passages = tuple(
        Passage(f"Quay {j}", " ".join(f"Boat {i} of quay {j} carries {i * j + number} nets." for i in range(3)))
        for j in range(3)
    )
    return Item(f"item-{number}", "boats", f"How many nets does boat 2 of quay {number} carry?", ("4",), passages)


@pytest.fixture(scope="module")
def model():
    return wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")


@pytest.fixture(scope="module")
def profile(model):
    return calibrate(model, [item(1), item(2), item(3)], 0.2, OPTIONS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layers", ["all", "1-2", "3"])
def test_a_candidate_is_judged_as_the_method_itself_would_be(model, method, layers):
    bench = Bench(model, OPTIONS)
    case = case_of(bench, item(1))
    chosen = layer_set(layers, model.num_layers)
    kl, js = distance(case, method, chosen, 0.2)
    engine = Engine(model, MemoryStore(), instruction=OPTIONS.instruction)
    prompt = engine.prompt(item(1).question, documents_of(item(1)))
    run = engine.run(prompt, recipe=make_recipe(model, method, 0.2, layers=layers), forced_ids=case.forced[:-1])
    expected_kl, expected_js = divergences(run.logits, case.logits)
    assert kl == pytest.approx(np.mean(expected_kl), rel=1e-4)
    assert js == pytest.approx(np.mean(expected_js), rel=1e-4)


def test_an_item_is_calibrated_in_the_words_in_which_it_is_measured(model):
    bench, given = Bench(model, OPTIONS), replace(item(1), instruction="Read it twice.")
    text = model.tokenizer.decode(case_of(bench, given).prompt.token_ids)
    assert "Read it twice." in text and OPTIONS.instruction not in text
    prompts = replace(OPTIONS, prompts={"boats": "First.\n{context}\nThen: {input}"})
    text = model.tokenizer.decode(case_of(Bench(model, prompts), given).prompt.token_ids)
    assert "Then: How many nets" in text and "Read it twice." not in text


def test_the_chosen_set_has_the_smallest_mean_divergence(profile):
    for method in METHODS:
        sets = [s for s in profile.measurements["sets"] if s["method"] == method]
        best = min(sets, key=lambda s: s["js_cont"])
        assert layer_set(profile.layers[method], 4) == layer_set(best["layers"], 4)
    assert [c["layer"] for c in profile.measurements["curve"]] == [0, 1, 2, 3]
    assert profile.measurements["items"] == 3


def test_progress_ends_at_its_total(model):
    seen = []
    calibrate(model, [item(1), item(2)], 0.2, OPTIONS, on_progress=lambda done, total, what: seen.append((done, total)))
    assert seen[0] == (1, seen[0][1])
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(seen))
    assert seen[-1][0] == seen[-1][1]


def test_items_that_are_left_out_shorten_the_progress(model):
    one = Item("one", "boats", "How many?", ("4",), (Passage("", "A boat carries four nets."),))
    seen = []
    profile = calibrate(
        model,
        [item(1), one, item(2)],
        0.2,
        OPTIONS,
        on_progress=lambda done, total, what: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]
    assert profile.measurements["ids"] == ["item-1", "item-2"]


def test_a_profile_is_found_by_weights_and_used_by_auto(model, profile, tmp_path, monkeypatch):
    monkeypatch.setenv("INFOFLOW_CACHE", str(tmp_path))
    file = profile_file(model.identity)
    assert read_profile(file) is None
    write_profile(profile, file)
    again = read_profile(file)
    assert again == profile or json.loads(json.dumps(again.measurements)) == json.loads(
        json.dumps(dict(profile.measurements))
    )
    fresh = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")
    fresh.layer_sets = {"infoflow": "0,3", "influence": "2"}
    assert make_recipe(fresh, "infoflow", 0.15).layers == (0, 3)
    assert make_recipe(fresh, "infoflow-l2", 0.15).layers == (0, 3)
    assert make_recipe(fresh, "influence", 0.15, layers="profile").layers == (2,)
    assert make_recipe(fresh, "prophetkv", 0.15).layers == (0, 1, 2, 3)
    assert make_recipe(fresh, "infoflow", 0.15, layers="1").layers == (1,)


def test_without_a_profile_auto_takes_the_usual_sets_and_profile_refuses(model):
    assert method_layers(model, find_method("infoflow"), "auto") == layer_set("relative", 4)
    assert method_layers(model, find_method("influence"), "auto") == (0, 1, 2, 3)
    with pytest.raises(OptionError, match="calibrate"):
        make_recipe(model, "infoflow", 0.15, layers="profile")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": 2}', '{"format": 1, "layers": {"infoflow": "rm -rf /"}}', '{"format": 1, "layers": 3}'],
)
def test_a_profile_that_cannot_be_read_is_said_and_not_used(tmp_path, caplog, content):
    file = tmp_path / "profile.json"
    file.write_text(content)
    with caplog.at_level("WARNING", "infoflow_kv"):
        assert read_profile(file) is None
    assert "is not used" in caplog.text


@pytest.mark.parametrize("budget", [0, 1, -0.1, 1.5])
def test_budgets_that_leave_nothing_to_choose(model, budget):
    with pytest.raises(OptionError, match="nothing to choose"):
        calibrate(model, [item(1), item(2)], budget, OPTIONS)


def test_items_over_the_window_leave_too_few(model):
    long = Item("long", "boats", "How many?", ("4",), (Passage("", "net " * 4000),))
    with pytest.raises(InputError, match="1 of 2 items fit"):
        calibrate(model, [item(1), long], 0.2, OPTIONS)


def test_fixed_sets_are_distinct_and_inside_the_model():
    for layers in (1, 2, 4, 30, 32):
        found = fixed_sets(layers)
        assert len(set(found.values())) == len(found)
        assert all(0 <= min(s) <= max(s) < layers for s in found.values())


def test_a_profile_is_a_plain_file(profile, tmp_path):
    file = tmp_path / "deep" / "profile.json"
    write_profile(profile, file)
    assert isinstance(read_profile(file), Profile)
    assert torch.isfinite(torch.tensor([s["kl_cont"] for s in profile.measurements["sets"]])).all()


def test_a_profile_of_other_weights_is_not_used(model, profile, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("INFOFLOW_CACHE", str(tmp_path))
    other = Profile("f" * 64, profile.dtype, profile.model, profile.layers)
    write_profile(other, profile_file(model.identity))
    with caplog.at_level("WARNING", "infoflow_kv"):
        assert find_profile(model.identity) is None
    assert "other weights" in caplog.text

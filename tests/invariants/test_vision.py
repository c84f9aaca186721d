"""Images: full recomputation from the store alone is what plain Transformers gives for pixels; reuse runs no tower.

The reference is another copy of the model in plain Transformers, with the pictures' pixels.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import tiny_vlm
from infoflow_kv import DiskStore, Engine, MemoryStore
from infoflow_kv.errors import ComputeError, DocumentError, OptionError
from infoflow_kv.models import LanguageModel, hooks
from infoflow_kv.positions import request_positions
from infoflow_kv.records import Document, Image, Prompt, Selection
from infoflow_kv.repairing import repair
from infoflow_kv.select import num_selected
from infoflow_kv.supply import Supply
from tolerance import TINY_LOGITS, assert_close

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "idefics3")
QUESTION = "Who counts the boats?"


def drawn(width: int, height: int, seed: int) -> Image:
    return Image(tiny_vlm.encoded_file(tiny_vlm.image(width, height, seed)))


HARBOUR, TOWER, MAP = drawn(150, 90, 1), drawn(60, 140, 2), drawn(90, 90, 3)
DOCUMENTS = (
    Document(parts=("The boats of Saltmere.", HARBOUR, "Left: the keeper."), title="Harbour"),
    Document("The keeper counts the boats every evening, and the lamp is lit when he is done."),
    Document(parts=(TOWER,)),
    Document(parts=("A map.", MAP, "Some words.", TOWER)),
)


@dataclass
class Case:
    family: str
    model: LanguageModel
    reference: Any

    def engine(self, store: Any = None, budget: float = 1.0, **options: Any) -> Engine:
        method = options.pop("method", "infoflow")
        return Engine(self.model, store, method=method, budget=budget, layers="all", **options)

    def expected(self, prompt: Prompt, more: tuple[int, ...] = ()) -> torch.Tensor:
        """The logits behind the prompt (and `more`) of plain Transformers, with pixels."""
        pictures = [one.picture for chunk in prompt.chunks if chunk.images for one in chunk.images.prepared]
        given = tiny_vlm.reference_inputs(self.family, prompt.token_ids + more, pictures)
        with torch.no_grad():
            logits = self.reference(**given, use_cache=False).logits[0].float()
        self.reference.model.rope_deltas = None
        return logits[-1 - len(more) :]

    @property
    def runs(self) -> int:
        return int(self.model.vision.towers.runs)

    def forget(self) -> None:
        """No picture was seen by the tower before."""
        self.model.vision.towers.__init__(self.model.vision.towers.max_bytes)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    if tiny_vlm.OLD and request.param != "qwen3_vl":
        pytest.skip(tiny_vlm.TOO_OLD)
    reference = tiny_vlm.hf_model(request.param)
    return Case(request.param, tiny_vlm.model(request.param), reference)


@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1)], ids=["given", "moved"])
def test_full_recomputation_from_the_store_alone_is_full_prefill(case, tiles, order, tmp_path, monkeypatch):
    documents = [DOCUMENTS[place] for place in order]
    forced = (7, 11, 13)
    engine = case.engine(DiskStore(tmp_path), tiles=tiles)
    prompt = engine.prompt(QUESTION, documents)
    expected = case.expected(prompt, forced)
    cold = engine.run(prompt, forced_ids=forced)
    assert cold.usage.cached_chunks == 0
    assert_close(cold.logits, expected, TINY_LOGITS)
    # From here on the tower must not run: what the layers read has to come from the store.
    monkeypatch.setattr(Supply, "_inputs", lambda self, chunk: pytest.fail("an image was looked at again"))
    warm = case.engine(DiskStore(tmp_path), tiles=tiles).run(prompt, forced_ids=forced)
    assert warm.usage.cached_chunks == len(prompt.chunks)
    assert warm.usage.prefilled_tokens == 0
    assert torch.equal(warm.logits, cold.logits)


def test_full_prefill_by_the_engine_is_that_of_transformers(case):
    engine = case.engine(method="full")
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    assert_close(engine.run(prompt).logits, case.expected(prompt), TINY_LOGITS)


def test_an_image_is_reused_in_another_request_at_another_place(case):
    case.forget()
    store = MemoryStore()
    case.engine(store).run(case.engine(store).prompt(QUESTION, DOCUMENTS))
    runs = case.runs
    assert runs == 3  # the tower stands in two documents
    engine = case.engine(store)
    prompt = engine.prompt("What is on the map?", [DOCUMENTS[2], Document("Other words stand here."), DOCUMENTS[0]])
    run = engine.run(prompt)
    assert case.runs == runs
    assert run.usage.cached_chunks == 2
    assert run.usage.prefilled_tokens == sum(c.num_tokens for c in prompt.chunks if c.images is None)
    assert_close(run.logits, case.expected(prompt), TINY_LOGITS)


def test_the_error_of_partial_recomputation_falls_with_the_budget(case):
    store = MemoryStore()
    prompt = case.engine(store).prompt(QUESTION, DOCUMENTS)
    expected = case.expected(prompt)
    errors = [
        float((case.engine(store, budget=budget, tiles=2).run(prompt).logits - expected).abs().max())
        for budget in (0.0, 0.5, 1.0)
    ]
    assert errors[0] > errors[2]
    assert errors[1] > errors[2]
    assert errors[0] > 100 * TINY_LOGITS * float(expected.abs().max())  # else nothing here could fail


@pytest.mark.parametrize("method", ["none", "infoflow", "cacheblend", "epic", "influence"])
def test_every_method_takes_images(case, method):
    engine = case.engine(MemoryStore(), budget=0.3, method=method, tiles=2)
    run = engine.run(engine.prompt(QUESTION, DOCUMENTS))
    assert bool(torch.isfinite(run.logits).all())
    assert (run.usage.recomputed_tokens > 0) == (method != "none")


@pytest.mark.parametrize("geometry", ["HL-HP", "HL-TP", "TL-TP"])
def test_geometry_and_reorder_keep_full_recomputation_exact(case, geometry):
    engine = case.engine(MemoryStore(), geometry=geometry, reorder=True, budget=0.4)
    run = engine.run(engine.prompt(QUESTION, DOCUMENTS))
    assert sorted(run.order) == list(range(len(run.prompt.chunks)))
    # What reorder gives is what the same chunks give in that order: positions follow the images to their new places.
    assert run.order != tuple(sorted(run.order))
    given = case.engine(MemoryStore(), geometry=geometry, budget=0.4).run(run.prompt)
    assert_close(run.logits, given.logits, TINY_LOGITS)
    whole = engine.run(run.prompt, budget=1.0)
    assert_close(whole.logits, case.expected(whole.prompt), TINY_LOGITS)


def test_decoding_goes_on_at_the_position_behind_the_images(case):
    """Eight greedy tokens, each against a full forward over all before it; by slot numbers they would differ."""
    engine = case.engine(MemoryStore())
    answer = engine.answer(QUESTION, DOCUMENTS, max_new_tokens=8)
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    logits = case.expected(prompt, answer.token_ids[:-1])
    assert logits.argmax(dim=-1).tolist() == list(answer.token_ids)
    run = engine.run(prompt, forced_ids=answer.token_ids[:-1])
    assert_close(run.logits, logits, TINY_LOGITS)
    assert (run.context.shift < 0) == (case.model.vision.adapter.num_axes == 3)


def test_without_the_early_layers_rows_it_is_not_full_prefill(case, monkeypatch):
    """The ablation: features of the tower that are added behind the first layers, left out as in released code."""
    if not case.model.vision.adapter.num_early:
        pytest.skip("this family adds no rows to early layers")
    engine = case.engine(MemoryStore())
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    expected = case.expected(prompt)
    right = engine.run(prompt).logits
    monkeypatch.setattr(hooks, "_rows_of", lambda call, layer: None)
    wrong = engine.run(prompt).logits
    assert_close(right, expected, TINY_LOGITS)
    assert float((wrong - expected).abs().max()) > 1000 * float((right - expected).abs().max())


def test_nothing_is_left_on_the_model(case):
    engine = case.engine(MemoryStore())
    engine.answer(QUESTION, DOCUMENTS, max_new_tokens=2)
    text = engine.answer(QUESTION, ["The keeper counts the boats."], max_new_tokens=4)
    again = case.engine(MemoryStore()).answer(QUESTION, ["The keeper counts the boats."], max_new_tokens=4)
    assert text.token_ids == again.token_ids
    assert getattr(case.model.vision.adapter._model, "rope_deltas", None) is None


class DropsEverySecond:
    """Half of the context's rows leave after layer 0, another half after layer 1."""

    def __init__(self, num_context: int) -> None:
        self.num_context = num_context

    def writes(self, layer: int, ranks: torch.Tensor) -> None:
        return None

    def kept(self, layer: int, ranks: torch.Tensor, deviate: Any) -> torch.Tensor | None:
        if layer > 1:
            return None
        index = torch.arange(ranks.numel())
        return index[(index % 2 == 0) | (ranks >= self.num_context)]


def test_rows_that_leave_early_take_their_early_rows_with_them(case):
    """From true KV, whatever rows run and wherever they leave, the prompt's logits are those of full prefill."""
    engine = case.engine(method="full")
    prompt = engine.prompt(QUESTION, DOCUMENTS)
    run = engine.run(prompt)
    suffix = torch.tensor(prompt.suffix_ids)
    tables = run.rotary.tables(request_positions(prompt, suffix.numel()))
    for first in (0, 1, 5):
        rows = Selection(torch.arange(first, run.context.num_tokens))
        logits = repair(case.model, run.context, rows, suffix, tables, rule=DropsEverySecond(run.context.num_tokens))
        assert_close(logits, case.expected(prompt), TINY_LOGITS)


@pytest.mark.parametrize("kind", ["visual", "text"])
def test_only_tokens_of_a_kind_are_recomputed(case, kind):
    store = MemoryStore()
    for budget in (0.5, 1.0):
        engine = case.engine(store, budget=budget, repair_tokens=kind)
        run = engine.run(engine.prompt(QUESTION, DOCUMENTS))
        is_visual = torch.zeros(run.context.num_tokens, dtype=torch.bool)
        is_visual[run.context.visual.slots] = True
        wanted = is_visual if kind == "visual" else ~is_visual
        open_slots = torch.nonzero(wanted)[:, 0]
        open_slots = open_slots[open_slots >= run.context.exact_tokens]
        chosen = run.selection.slots
        assert bool(wanted[chosen].all())
        assert chosen.numel() == num_selected(budget, open_slots.numel())


def test_epic_takes_the_first_tokens_of_every_tile(case):
    engine = case.engine(MemoryStore(), method="epic", budget=0.3, tiles=2)
    run = engine.run(engine.prompt(QUESTION, DOCUMENTS))
    cells = [cell for cell in run.context.cells if int(cell[0]) >= run.context.exact_tokens]
    assert len(cells) > len(run.context.spans)
    assert {int(cell[0]) for cell in cells} <= set(run.selection.slots.tolist())


def test_one_picture_under_two_names_is_one_and_two_of_a_size_are_two(case, tmp_path):
    case.forget()
    same = tiny_vlm.encoded_file(tiny_vlm.image(80, 60, 5))
    for name in ("a.png", "b.dat"):
        (tmp_path / name).write_bytes(same)
    other = tiny_vlm.encoded_file(tiny_vlm.image(80, 60, 6))
    engine = case.engine(MemoryStore())
    twice = [Document(parts=(Image(tmp_path / name),)) for name in ("a.png", "b.dat")]
    prompt = engine.prompt(QUESTION, [*twice, Document(parts=(Image(other),))])
    first, second, third = (engine.identify(chunk) for chunk in prompt.chunks)
    assert first == second
    assert first.token_ids == third.token_ids
    assert first != third
    run = engine.run(prompt)
    assert case.runs == 2
    assert_close(run.logits, case.expected(prompt), TINY_LOGITS)


def test_follow_ups_keep_images_exact(case):
    engine = case.engine(MemoryStore(), budget=0.3, kept_bytes=2**24)
    engine.answer(QUESTION, DOCUMENTS, max_new_tokens=1)
    prompt = engine.prompt("What is on the map?", DOCUMENTS)
    run = engine.run(prompt, budget=1.0)
    assert run.usage.kept_tokens > 0
    assert_close(run.logits, case.expected(prompt), TINY_LOGITS)


def test_an_image_larger_than_the_window_is_refused_before_it_is_stored(case, monkeypatch):
    engine = case.engine(MemoryStore())
    monkeypatch.setattr(case.model.vision, "window_tokens", 20)
    with pytest.raises(DocumentError, match="window is 20"):
        engine.add([DOCUMENTS[0]])


@pytest.mark.parametrize("source", ["missing.png", "x" * 5000, None, bytearray(b"1"), b"", "a\0b"])
def test_what_is_no_picture_is_refused(case, source):
    with pytest.raises(DocumentError):
        case.engine().prompt(QUESTION, [Document(parts=(Image(source),))])


def test_a_prompt_made_before_the_tower_changed_is_refused(case):
    engine = case.engine(MemoryStore())
    prompt = engine.prompt(QUESTION, [Document(parts=(drawn(70, 50, 9),))])
    [chunk] = prompt.chunks
    stale = replace(chunk.images.prepared[0], key="0" * 64)
    with pytest.raises(ComputeError, match="has changed"):
        case.model.vision.inputs(replace(chunk.images, prepared=(stale,)))


@pytest.mark.parametrize("options", [{"chunk_cap": 0.5}, {"chunk_floor": 0.5}, {"reorder": True}])
def test_kinds_of_tokens_go_with_no_rule_over_all_tokens(case, options):
    with pytest.raises(OptionError, match="repair_tokens does not go with"):
        case.engine(budget=0.3, repair_tokens="visual", **options)


@pytest.mark.parametrize("tiles", [0, -1, True, "2"])
def test_tiles_are_checked_at_once(case, tiles):
    with pytest.raises(OptionError, match="at least 1"):
        case.engine(tiles=tiles)

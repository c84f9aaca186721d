"""From picture files to a scored table on tiny models: rows against plain Transformers, the command line."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_vlm
from infoflow_kv import Engine, MemoryStore
from infoflow_kv.cli import main
from infoflow_kv.errors import InputError, OptionError
from infoflow_kv.evaluate.arms import parse_arms, with_tiles
from infoflow_kv.evaluate.predict import predict
from infoflow_kv.evaluate.results import read_rows
from infoflow_kv.evaluate.vision_items import VisionItem
from infoflow_kv.evaluate.vision_measuring import VisionBench, VisionOptions, document_of
from infoflow_kv.evaluate.vision_predict import predict_vision
from infoflow_kv.evaluate.vision_scoring import compare_vision
from tolerance import TINY_LOGITS, assert_close

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "idefics3")
KL_EXACT = 1e-5
OPTIONS = VisionOptions(max_new_tokens=6, continuation=4)
METHODS = "none,infoflow,cacheblend,epic,influence,oracle"


def drawn(width: int, height: int, seed: int) -> bytes:
    return tiny_vlm.encoded_file(tiny_vlm.image(width, height, seed))


ITEM = VisionItem(
    "q", "charts", "How many boats?", ("12 boats", "twelve"), (drawn(150, 90, 1), drawn(90, 90, 2)), "relaxed",
    suffix="One word.", max_new_tokens=5, group="harbour",
)  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def case(request) -> tuple[str, Any]:
    return request.param, tiny_vlm.model(request.param)


@pytest.fixture(scope="module")
def rows(case) -> dict[str, dict[str, Any]]:
    arms = with_tiles(parse_arms(METHODS, (0.3, 1.0)), (0, 2, 4))
    return {row["arm"]: row for row in VisionBench(case[1], OPTIONS).rows(ITEM, arms)}


def plain_logits(family: str, prompt, more: tuple[int, ...]) -> torch.Tensor:
    """Of the whole model's own forward over pixels, in another copy of the model."""
    reference = tiny_vlm.hf_model(family)
    pictures = [one.picture for chunk in prompt.chunks for one in chunk.images.prepared]
    with torch.no_grad():
        given = tiny_vlm.reference_inputs(family, prompt.token_ids + more, pictures)
        logits = reference(**given, use_cache=False).logits[0].float()
    return logits[-1 - len(more) :]


def test_the_reference_is_the_whole_model_with_pixels(case):
    family, model = case
    bench = VisionBench(model, OPTIONS)
    engine = bench.engine()
    prompt, gold = engine.prompt(ITEM.text, [document_of(ITEM)]), engine.encoder.content(ITEM.answers[0])[0]
    found = bench.reference(prompt, engine.prompt(ITEM.text, []), gold)
    ids = found.plain.token_ids
    assert_close(found.plain.logits, plain_logits(family, prompt, ids[:-1]), TINY_LOGITS)
    assert ids == tuple(plain_logits(family, prompt, ids[:-1]).argmax(-1).tolist())
    expected = torch.nn.functional.cross_entropy(plain_logits(family, prompt, gold)[:-1].double(), torch.tensor(gold))
    assert found.gold_nll == pytest.approx(float(expected), abs=1e-4)
    assert_close(bench._plain_logits(prompt, gold), plain_logits(family, prompt, gold)[:-1], TINY_LOGITS)
    assert len(gold) > 1  # else no position behind the images was looked at
    full = Engine(model, MemoryStore(), method="full", instruction="", labels=False).run(prompt)
    assert_close(full.logits, found.plain.logits[:1], TINY_LOGITS)


def test_budget_one_is_full_prefill_whatever_the_tiles(rows):
    for arm, row in rows.items():
        assert row["full_gold_nll"] == rows["full"]["gold_nll"]
        if row["budget"] == 1.0 or arm == "full":
            assert max(row["kl_first"], row["kl_cont"]) < KL_EXACT, arm
            assert row["prediction"] == rows["full"]["prediction"]
            assert row["gold_nll"] == pytest.approx(row["full_gold_nll"], abs=1e-4)
        elif row["method"] == "none":
            assert row["kl_first"] > 100 * KL_EXACT  # else nothing here could fail


def test_what_a_row_says_of_item_and_pictures(rows, case):
    names = [f"{m}[tiles={k}]@{b}" for k in (2, 4) for m in ("infoflow", "cacheblend") for b in ("0.3", "1")]
    assert {"full", "none[tiles=2]", "none[tiles=4]", *names} <= set(rows)
    assert {row["tiles"] for row in rows.values()} == {0, 2, 4}
    for row in rows.values():
        assert row.items() >= {**ITEM.row_fields, "images": 2, "reference": "transformers"}.items()
        assert row["image_tokens"] < row["context_tokens"]
    assert len({row["token_ids_sha256"] for row in rows.values()}) == 1
    assert len({row["images_sha256"] for row in rows.values()}) == 1
    swapped = replace(ITEM, images=(drawn(150, 90, 9), ITEM.images[1]))
    [full] = VisionBench(case[1], OPTIONS).rows(swapped, parse_arms("full", ()))
    assert full["token_ids_sha256"] == rows["full"]["token_ids_sha256"]  # of one size: nothing else tells them apart
    assert full["images_sha256"] != rows["full"]["images_sha256"]


class TestRefusals:
    def test_a_text_model(self, tmp_path):
        import tiny
        from infoflow_kv.models import wrap

        model = wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")
        with pytest.raises(OptionError, match="tiny reads text only"):
            predict_vision(model, [ITEM], parse_arms("full", ()), tmp_path, OPTIONS)
        from infoflow_kv.evaluate.items import Item, Passage

        item = Item("a", "d", "Who?", ("Ada",), (Passage("", "Ada keeps it."),))
        with pytest.raises(OptionError, match=r"arm 'none\[tiles=2\]' cuts images"):
            predict(model, [item], parse_arms("none[tiles=2]", ()), tmp_path, OPTIONS)

    @pytest.mark.parametrize("text", ["none[tiles=0]", "none[tiles=x]", "epic[tiles=1.5]@.1"])
    def test_tiles_that_are_none(self, text):
        with pytest.raises(OptionError, match="expected a whole number from 1"):
            parse_arms(text, ())

    def test_an_arm_twice(self):
        with pytest.raises(OptionError, match="comes twice"):
            with_tiles(parse_arms("none,none[tiles=2]", ()), (2,))
        with pytest.raises(OptionError, match="full does not read tiles"):
            parse_arms("full[tiles=2]", ())

    def test_rows_about_other_pictures(self, rows, tmp_path):
        made = [rows["full"], {**rows["none[tiles=2]"], "images_sha256": "0" * 64}]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
        with pytest.raises(InputError, match="saw other pictures than arm 'full'"):
            read_rows([tmp_path])

    def test_a_picture_that_cannot_be_read_and_one_over_the_window(self, tmp_path):
        broken = replace(ITEM, id="broken", images=(drawn(90, 90, 1)[:60],))
        many = replace(ITEM, id="many", images=ITEM.images[1:] * 9)
        model = tiny_vlm.model("qwen3_vl")
        model.window_tokens = 110
        done = predict_vision(
            model, [broken, many, ITEM], parse_arms("full", ()), tmp_path, replace(OPTIONS, chunk_tokens=16)
        )
        assert set(done.skipped) == {"broken", "many"} and done.written == 1
        assert "smaller pictures have fewer tokens" in done.skipped["many"]


def test_arms_are_held_against_those_that_cut_images_alike():
    said = {"full": "12", "none[tiles=2]": "11", "none[tiles=4]": "90", "epic[tiles=2]@0.1": "12"}
    tiles = {"full": 0, "none[tiles=2]": 2, "none[tiles=4]": 4, "epic[tiles=2]@0.1": 2}
    rows = [
        {**ITEM.row_fields, "answers": ["12"], "arm": a, "tiles": tiles[a], "prediction": p} for a, p in said.items()
    ]
    pairs = {(c.arm, c.reference) for c in compare_vision(rows) if c.field == "relaxed"}
    assert pairs == {
        ("full", "none[tiles=2]"), ("epic[tiles=2]@0.1", "none[tiles=2]"), ("full", "none[tiles=4]"),
        ("none[tiles=2]", "full"), ("none[tiles=4]", "full"), ("epic[tiles=2]@0.1", "full"),
    }  # fmt: skip


# ---- the command line, from files to tables ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model folder and a file in ChartQA's layout with three items about two pictures."""
    root = tmp_path_factory.mktemp("vision")
    hf = tiny_vlm.hf_model("qwen3_vl")
    hf.save_pretrained(root / "model")
    tiny_vlm.tokenizer("qwen3_vl").save_pretrained(root / "model")
    config = {"image_processor_type": "Qwen2VLImageProcessor", **tiny_vlm.processor_config("qwen3_vl")}
    (root / "model" / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    charts = root / "chartqa" / "test"
    (charts / "png").mkdir(parents=True)
    for number in (1, 2):
        (charts / "png" / f"{number}.png").write_bytes(drawn(150, 90, number))
    records = [
        {"imgname": "1.png", "query": "How many boats in 2010?", "label": "12"},
        {"imgname": "1.png", "query": "In which year are there most?", "label": "2012"},
        {"imgname": "2.png", "query": "Which harbour has fewest?", "label": "Saltmere"},
    ]
    (charts / "test_human.json").write_text(json.dumps(records), encoding="utf-8")
    return root


def cli(capsys, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(a) for a in arguments])
    sys.stdout.flush()
    found = capsys.readouterr()
    return code, found.out, found.err


def test_from_picture_files_to_a_scored_table(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = folder / "run"
    command = (
        "eval", "predict", "--data", folder / "chartqa/test/test_human.json", "--rules", "chartqa", "--tiles", "0,2,4",
        "--methods", "none,infoflow,cacheblend,epic,influence", "--budget", ".15", "--model", folder / "model",
        "--out", out,
    )  # fmt: skip
    code, said, error = cli(capsys, *command, "--limit", 2, "--json")
    assert code == 0, error
    told = json.loads(said)
    assert (told["items"], told["written"], len(told["arms"])) == (2, 22, 11)
    assert "11 rows written" in cli(capsys, *command)[1]  # the third item
    rows = read_rows([out])
    assert len(rows) == 33 and all(isinstance(row["prediction"], str) for row in rows)
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["options"]["max_new_tokens"] is None and record["options"]["rules"] == "chartqa"
    assert record["datasets"] == ["test-test_human"]

    code, said, error = cli(capsys, "eval", "score", out)
    assert code == 0, error
    assert "scores by each set's published rule" in said
    assert re.search(r"test-test_human +relaxed accuracy +infoflow\[tiles=4\]@0.15 +3 +\d", said)
    assert re.search(r"epic\[tiles=2\]@0.15 +none\[tiles=2\] +3 .*mcnemar +\d/\d/\d", said)
    code, said, _ = cli(capsys, "eval", "score", out, "--json")
    pictures = json.loads(said)["pictures"]
    assert {s["field"] for s in pictures["scores"]} == {"relaxed", "strict"}
    assert {d["test"] for d in pictures["differences"]} == {"mcnemar"}

    code, _, error = cli(capsys, "eval", "report", out, "--out", folder / "report")
    assert code == 0, error
    text = (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert "## Questions about pictures" in text and "`none[tiles=4]`" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--rules", "chartqu"), "chartqa"),
        (("--tiles", "2,x"), "--tiles: tiles is 'x'"),
        (("--tiles", ","), "give a list like 0,2,4"),
        (("--rules", "chartqa", "--lengthen", "100"), "are for texts"),
        (("--rules", "chartqa", "--skip", "3"), "passes over every item"),
    ],
)
def test_options_that_are_refused_before_a_model_is_loaded(folder, capsys, more, words):
    data = folder / "chartqa/test/test_human.json"
    code, _, error = cli(capsys, "eval", "predict", "--data", data, "--out", folder / "no", *more, "--model", "nowhere")
    assert code == 2 and words in error

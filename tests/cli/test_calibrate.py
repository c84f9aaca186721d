"""`calibrate` through the command line: the profile is written, used by `auto`, and bad input is refused."""

import json
from pathlib import Path

import pytest

from infoflow_kv.models import load


@pytest.fixture
def data(tmp_path) -> Path:
    file = tmp_path / "boats.chunks.jsonl"
    records = [
        {
            "_id": f"q{n}",
            "dataset": "boats",
            "question": f"How many nets does boat 2 of quay {n} carry?",
            "answers": [str(2 * n + 3)],
            "passages": [
                {"title": f"Quay {j}", "text": " ".join(f"Boat {i} of quay {j} carries {i * j + 3}." for i in range(4))}
                for j in range(3)
            ],
            "supporting": [n % 3],
        }
        for n in range(4)
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return file


def test_the_profile_is_kept_by_weights_and_used_by_auto(cli, tiny_model, data, tmp_path):
    out = tmp_path / "figures"
    done = cli("calibrate", "--data", data, "--model", tiny_model, "--limit", 3, "--out", out, "--json")
    assert done.code == 0, done.err
    record = done.record
    assert record["items"] == 3
    assert set(record["layers"]) == {"infoflow", "influence"}
    assert {Path(f).name for f in record["files"]} >= {"profile.json", "layers.png", "layers.svg"}
    assert all(Path(f).is_file() for f in record["files"])
    assert load(tiny_model).layer_sets == record["layers"]

    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a.txt").write_text("Boat 1 carries 4 nets. " * 30, encoding="utf-8")
    explained = cli(
        "explain", "How many nets?", documents, "--model", tiny_model, "--methods", "infoflow", "--json", "--no-store"
    )
    assert explained.code == 0, explained.err
    from infoflow_kv.select import layer_set, layers_text

    expected = layers_text(layer_set(record["layers"]["infoflow"], 4))
    assert explained.record["methods"][0]["layers"] == expected


def test_a_dry_run_leaves_no_profile(cli, tiny_model, data):
    done = cli("calibrate", "--data", data, "--model", tiny_model, "--limit", 2, "--dry-run")
    assert done.code == 0, done.err
    assert "chosen: infoflow:" in done.out and "by the smallest mean JS over 2 items" in done.out
    assert "--dry-run: the model's profile in the cache is as it was" in done.err
    assert "2 items do not tell the leading sets apart; give at least 8" in done.err
    assert load(tiny_model).layer_sets == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--limit", 0), "at least 1"),
        (("--skip", -1), "at least 0"),
        (("--skip", 3), "1 items are left"),
        (("--budget", 1), "nothing to choose"),
        (("--budget", "nan"), "nothing to choose"),
        (("--model", "nowhere"), "unknown model"),
        (("--out", __file__), "cannot be written"),
    ],
)
def test_bad_options(cli, tiny_model, data, options, message):
    given = ["calibrate", "--data", data, "--limit", 3, *options]
    done = cli(*given) if "--model" in options else cli(*given, "--model", tiny_model)
    assert done.code == 2
    assert message in done.err
    assert not done.out


@pytest.mark.parametrize("kind", ["folder", "missing", "malformed"])
def test_bad_data(cli, tiny_model, tmp_path, kind):
    path = {"folder": tmp_path, "missing": tmp_path / "no.jsonl", "malformed": tmp_path / "bad.jsonl"}[kind]
    if kind == "malformed":
        path.write_text('{"_id": 1\n', encoding="utf-8")
    done = cli("calibrate", "--data", path, "--model", tiny_model)
    assert done.code == 2
    assert str(path) in done.err

"""Every documented verb, from the arguments to what stands on stdout and stderr."""

import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
from cli_runs import HARBOUR, KEEPER, Cli, chunk_files, write_documents

import infoflow_kv
import tiny
from infoflow_kv.chunking import MAX_FILE_BYTES
from infoflow_kv.cli import options
from infoflow_kv.cli.ask import trimmed
from infoflow_kv.cli.output import printable
from infoflow_kv.engine import INSTRUCTION, Engine
from infoflow_kv.methods import METHODS
from infoflow_kv.models.embedded import EMBEDDED
from infoflow_kv.samples import DEMO_QUESTIONS

QUESTION = "Who keeps the lighthouse?"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents", KEEPER, HARBOUR)


# ---- ask ----


def test_json_of_ask_has_the_documented_keys(cli: Cli, tiny_model: Path, documents: Path) -> None:
    result = cli("ask", QUESTION, documents, "--model", tiny_model, "--max-new-tokens", 3, "--json")
    record = result.record
    assert result.code == 0
    assert list(record) == ["answer", "method", "model", "stop_reason", "usage", "timings", "chunks", "notices"]
    assert list(record["usage"]) == [
        "context_tokens", "prompt_tokens", "chunks", "cached_chunks", "reusable_tokens", "recomputed_tokens",
        "prefilled_tokens", "new_tokens", "measured_tokens", "kept_tokens",
    ]  # fmt: skip
    assert list(record["timings"]) == [
        "load_seconds", "assemble_seconds", "score_seconds", "repair_seconds", "ttft_seconds", "decode_seconds",
        "predicted_seconds", "predicted_full_seconds",
    ]  # fmt: skip
    assert [list(c) for c in record["chunks"]] == [["id", "title", "tokens", "recomputed", "mass", "order"]] * 2
    assert record["stop_reason"] in ("eos", "stop", "length")
    assert record["usage"]["recomputed_tokens"] == sum(c["recomputed"] for c in record["chunks"])


def test_ask_follows_the_plan_that_ingest_made_possible(cli: Cli, tiny_model: Path, documents: Path) -> None:
    from infoflow_kv import load
    from infoflow_kv.speeds import Speeds, find_speeds, keep_speeds

    store = documents.parent / "kv"
    assert cli("ingest", documents, "--model", tiny_model, "--store", store).code == 0
    model = load(str(tiny_model))
    measured = find_speeds(model)
    assert measured is not None and measured.row > 0
    again = cli("ingest", documents, "--model", tiny_model, "--store", store)
    assert again.code == 0 and find_speeds(model) == measured  # once
    arguments = ("ask", QUESTION, documents, "--model", tiny_model, "--store", store, "--max-new-tokens", 2, "--json")
    keep_speeds(model, Speeds(forward=1.0, row=1e-9, pair=0.0, load=1e12, assemble=1e12))
    planned = cli(*arguments).record
    assert planned["method"] == "full" and planned["timings"]["predicted_seconds"] == 1.0
    assert planned["notices"][0].startswith("full prefill instead of reuse: predicted 1.00 s")
    assert cli(*arguments, "--no-plan").record["method"] == "infoflow"


def test_answer_on_stdout_and_how_on_stderr(cli: Cli, tiny_model: Path, documents: Path) -> None:
    arguments = ("ask", QUESTION, documents, "--model", tiny_model, "--max-new-tokens", 3)
    first, second = cli(*arguments), cli(*arguments)
    answer = cli(*arguments, "--json").record["answer"]
    assert first.out == second.out == printable(answer) + "\n"
    assert "infoflow: first token after" in first.err
    assert "0 of 2 chunks from the store" in first.err
    assert "2 of 2 chunks from the store" in second.err
    assert "prefilled" not in second.err


def test_default_store_lies_in_the_cache_and_no_store_writes_none(
    cli: Cli, tiny_model: Path, documents: Path, tmp_path: Path
) -> None:
    arguments = ("ask", QUESTION, documents, "--model", tiny_model, "--max-new-tokens", 1)
    assert cli(*arguments, "--no-store").code == 0
    assert not (tmp_path / "cache" / "kv").exists()
    assert cli(*arguments).code == 0
    assert len(chunk_files(tmp_path / "cache" / "kv")) == 3  # two chunks and the chat header


@pytest.mark.parametrize("json_lines", [False, True])
def test_stream_prints_the_same_answer(cli: Cli, tiny_model: Path, documents: Path, json_lines: bool) -> None:
    sampled = ("--temperature", 3, "--seed", 5, "--max-new-tokens", 20)
    arguments = ("ask", QUESTION, documents, "--model", tiny_model, *sampled)
    answer = cli(*arguments, "--json").record["answer"]
    streamed = cli(*arguments, "--stream", *(["--json"] if json_lines else []))
    if json_lines:
        *pieces, last = streamed.records
        assert len(pieces) > 3
        assert "".join(p["piece"] for p in pieces) == last["answer"] == answer
    else:
        assert streamed.out == printable(answer) + "\n"


def test_trimming_a_stream_is_trimming_the_whole() -> None:
    pieces = ["\n", " ", " Ada", " ", "\n", "Brand ", "", " \n"]
    assert list(trimmed(pieces)) == ["Ada", " \nBrand"]
    assert "".join(trimmed(pieces)) == "".join(pieces).strip()
    assert list(trimmed([" ", "\n"])) == []


def test_stop_ends_the_answer(cli: Cli, tiny_model: Path, documents: Path) -> None:
    arguments = ("ask", QUESTION, documents, "--model", tiny_model, "--max-new-tokens", 8, "--json")
    whole = cli(*arguments).record["answer"]
    stopped = cli(*arguments, "--stop", "never there", "--stop", whole[-1]).record
    assert stopped["answer"] == whole[: whole.index(whole[-1])].strip()
    assert stopped["stop_reason"] == "stop"


def test_documents_from_standard_input(cli: Cli, tiny_model: Path) -> None:
    arguments = ("ask", QUESTION, "-", "--model", tiny_model, "--max-new-tokens", 2, "--json")
    assert cli(*arguments, stdin=KEEPER.encode()).record["chunks"][0]["id"] == "-#0"


def test_namespaces_share_nothing(cli: Cli, tiny_model: Path, documents: Path) -> None:
    arguments = ("ask", QUESTION, documents, "--model", tiny_model, "--max-new-tokens", 1, "--json", "--namespace")
    assert cli(*arguments, "a").record["usage"]["cached_chunks"] == 0
    assert cli(*arguments, "b").record["usage"]["cached_chunks"] == 0
    assert cli(*arguments, "a").record["usage"]["cached_chunks"] == 2


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07\r\nb\tc\x9b") == "a\\x1b]0;title\\x07\\x0d\nb\tc\\x9b"


# ---- ingest ----


def test_ingest_then_ask_prefills_nothing(cli: Cli, tiny_model: Path, documents: Path) -> None:
    added = cli("ingest", documents, "--model", tiny_model, "--json")
    record = added.record
    assert (added.code, added.err) == (0, "")
    assert (record["documents"], record["chunks"], record["cached_chunks"], record["skipped"]) == (2, 2, 0, {})
    assert record["prefilled_tokens"] == record["tokens"] > 0
    asked = cli("ask", QUESTION, documents, "--model", tiny_model, "--max-new-tokens", 1, "--json").record["usage"]
    assert (asked["cached_chunks"], asked["prefilled_tokens"]) == (2, 0)
    again = cli("ingest", documents, "--model", tiny_model)
    assert again.code == 0
    assert "2 chunks" in again.out and "2 were there, 0 prefilled" in again.out
    assert again.err == ""


def test_one_bad_file_never_stops_the_others(cli: Cli, tiny_model: Path, documents: Path) -> None:
    """bug_kinds T05: every kind of file that cannot be read, beside good ones."""
    (documents / "bom.txt").write_bytes(b"\xef\xbb\xbf" + KEEPER.upper().encode())
    (documents / "wide.txt").write_bytes(HARBOUR.upper().encode("utf-16"))
    bad = {
        "latin.txt": b"caf\xe9",
        "picture.png": b"\x89PNG\r\n\x1a\n",
        "empty.txt": b"",
        "broken.pdf": b"%PDF-1.7 nothing",
        "lines.jsonl": b"{not json",
    }
    for name, data in bad.items():
        (documents / name).write_bytes(data)
    with (documents / "huge.txt").open("wb") as file:
        file.truncate(200_000_000)
    os.mkfifo(documents / "pipe")
    (documents / "nowhere").symlink_to(documents / "gone")
    bad_names = {*bad, "huge.txt", "pipe", "nowhere"}
    result = cli("ingest", documents, "--model", tiny_model, "--json")
    assert result.code == 1
    assert {Path(p).name for p in result.record["skipped"]} == bad_names
    assert result.record["documents"] == 4
    lines = result.err.splitlines()
    assert len([line for line in lines if line.startswith("skipped '")]) == len(bad_names)
    assert lines[-1] == f"{len(bad_names)} of {len(bad_names) + 4} documents were skipped, see above"


def test_ingest_into_a_store_that_takes_nothing(cli: Cli, tiny_model: Path, documents: Path, tmp_path: Path) -> None:
    assert cli("ingest", documents, "--model", tiny_model, "--store", tmp_path / "kv").code == 0
    for path in [*chunk_files(tmp_path / "kv"), tmp_path / "kv" / "tmp"]:
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "kv" / "tmp").write_bytes(b"")
    result = cli("ingest", documents, "--model", tiny_model, "--store", tmp_path / "kv")
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines()[-1].startswith("error: cannot store chunk")
    assert "Traceback" not in result.err


# ---- check and demo ----


def test_check(cli: Cli, tiny_model: Path) -> None:
    result = cli("check", "--quick", "--model", tiny_model, "--json")
    record = result.record
    assert list(record) == ["model", "dtype", "passed", "invariants"]
    keys = {"name", "claim", "error", "tolerance", "passed", "seconds", "detail"}
    assert all(set(row) == keys for row in record["invariants"])
    assert len(record["invariants"]) >= 8
    assert result.code == 0 and record["passed"], [row for row in record["invariants"] if not row["passed"]]
    assert result.err == ""


def test_check_fails_where_a_claim_does(cli: Cli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infoflow_kv import invariants
    from infoflow_kv.errors import ComputeError

    def holds(subject: object) -> tuple[float, float, str]:
        """Two is two."""
        return 0.0, 0.1, "difference"

    def fails(subject: object) -> tuple[float, float, str]:
        """Two is three."""
        return 1.0, 0.1, "difference"

    def breaks(subject: object) -> tuple[float, float, str]:
        """Two is a number."""
        raise ComputeError("logits are not finite")

    monkeypatch.setattr(invariants, "CHECKS", {"holds": holds, "fails": fails, "breaks": breaks})
    result = cli("check", "--quick", "--model", tiny_model)
    assert result.code == 1
    assert [line.split()[0] for line in result.out.splitlines()[1:4]] == ["pass", "FAIL", "FAIL"]
    assert "not computed: logits are not finite" in result.out
    assert f"2 of 3 invariants FAILED on {tiny_model} in float32" in result.out
    rows = cli("check", "--quick", "--model", tiny_model, "--json").record["invariants"]
    assert [(row["passed"], row["error"]) for row in rows] == [(True, 0.0), (False, 1.0), (False, None)]


def test_demo(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    result = cli("demo", "--model", tiny_model, "--questions", 1, "--budget", 0.3, "--json")
    record = result.record
    assert result.code == 0 and record["proof"]["holds"], record["proof"]
    assert record["proof"]["max_logit_error"] <= record["proof"]["tolerance"]
    assert record["store"] == str(tmp_path / "cache" / "demo")
    assert record["store_bytes"] > 0 and record["threads"] >= 1
    assert [q["question"] for q in record["questions"]] == [q.text for q in DEMO_QUESTIONS[:1]]
    for question in record["questions"]:
        full, none, infoflow = question["answers"]
        assert [a["method"] for a in (full, none, infoflow)] == ["full", "none", "infoflow"]
        assert full["times_less_than_full"] == 1
        assert none["usage"]["cached_chunks"] == infoflow["usage"]["cached_chunks"] == none["usage"]["chunks"] > 1
        assert none["usage"]["recomputed_tokens"] == 0 < infoflow["usage"]["recomputed_tokens"]
    # The window of this model is small; all that is left out is said, and where the rest is kept.
    assert "sample documents are left out: the model's window is too small" in result.err
    assert "0 were there" in result.err and str(tmp_path / "cache" / "demo") in result.err

    # The second time it starts warm; this one is for people.
    result = cli("demo", "--model", tiny_model, "--questions", 1)
    assert result.code == 0
    assert "0 prefilled" in result.err
    lines = result.out.splitlines()
    assert lines[1] == DEMO_QUESTIONS[0].text
    assert [line.split()[0] for line in lines[2:6]] == ["method", "full", "none", "infoflow"]
    assert lines[3].split()[-2:] == ["1.0×", "100.0%"]
    assert lines[4].split()[-1] == "0.0%"
    assert re.search(r"^Proof +at budget 1 the logits equal full prefill's: max .Δ logit. \d", result.out, re.MULTILINE)
    for word in ("Measured", "float32, cpu", "Stored", "Next"):
        assert word in result.out


def test_demo_fails_where_the_logits_differ(cli: Cli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infoflow_kv.invariants.TOLERANCE", {torch.float32: 0.0})
    monkeypatch.setattr("infoflow_kv.cli.demo.METHODS", ("full",))
    result = cli("demo", "--model", tiny_model, "--questions", 1)
    assert result.code == 1
    assert "THE LOGITS ARE NOT FULL PREFILL'S" in result.out


# ---- tables ----


def test_methods(cli: Cli) -> None:
    assert [r["name"] for r in cli("methods", "--json").records] == list(METHODS)
    result = cli("methods")
    assert (result.code, result.err) == (0, "")
    assert [line.split()[0] for line in result.out.splitlines()] == ["method", *METHODS]


def test_models(cli: Cli) -> None:
    records = cli("models", "--json").records
    [record] = [r for r in records if r["kind"] == "built-in"]
    assert record["name"] in EMBEDDED
    assert (record["cached"], record["licence"]) == (False, "Apache-2.0")
    tested = [r for r in records if r["kind"] == "family"]
    assert tested[0] == {
        "kind": "family",
        "name": "Llama",
        "class": "LlamaForCausalLM",
        "rope": ["default"],
        "traits": [],
    }
    result = cli("models")
    assert (result.code, result.err) == (0, "")
    for word in (*EMBEDDED, "fetched at first use", "FOLDER", "OWNER/NAME", "gguf:FILE", "docs/models.md"):
        assert word in result.out
    shown = " ".join(result.out.split())
    assert all(r["name"] in shown for r in tested)
    assert max(len(line) for line in result.out.splitlines()) <= 120


def test_models_of_a_name(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    record = cli("models", tiny_model, "--json").record
    assert (record["class"], record["layers"], record["rope"]) == ("LlamaForCausalLM", 4, ["default"])
    assert (record["traits"], record["windowed_layers"], record["reach_tokens"]) == ([], 0, None)
    assert record["probe_error"] < 1e-5
    shown = cli("models", tiny_model)
    assert shown.code == 0
    assert "none beside Llama's" in shown.out
    assert "windows" not in shown.out
    assert cli("models", tmp_path).code == 2


def test_models_says_what_windows_mean_for_repair(cli: Cli, tmp_path: Path) -> None:
    tiny.hf_model("gemma3").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    advice = "2 of 4 layers see at most 24 tokens: repair there mends only tokens within 24 of a chunk's start"
    record = cli("models", tmp_path, "--json").record
    assert (record["windowed_layers"], record["window_tokens"], record["reach_tokens"]) == (2, 24, None)
    assert record["advice"] == advice
    assert advice in cli("models", tmp_path).out


# ---- store ----


@pytest.fixture
def store(cli: Cli, tiny_model: Path, documents: Path, tmp_path: Path) -> Path:
    assert cli("ingest", documents, "--model", tiny_model, "--store", tmp_path / "kv").code == 0
    return tmp_path / "kv"


def test_store_ls(cli: Cli, store: Path) -> None:
    records = cli("store", "ls", "--store", store, "--json").records
    assert [r["key"] for r in records] == [path.stem for path in chunk_files(store)]
    assert all(r["tokens"] > 0 and r["dtype"] == "float32" and not r["problem"] for r in records)
    shown = cli("store", "ls", "--store", store)
    assert [line.split()[0] for line in shown.out.splitlines()[1:]] == [r["key"][:16] for r in records]


def test_store_stat(cli: Cli, store: Path) -> None:
    record = cli("store", "stat", "--store", store, "--json").record
    assert record["store"] == str(store)
    assert (record["chunks"], record["unreadable"], record["quarantined"]) == (3, 0, 0)
    [model] = record["models"]
    assert model["num_bytes"] <= record["total_bytes"]
    shown = cli("store", "stat", "--store", store)
    assert shown.out.startswith(f"{store}: 3 chunks, {record['tokens']} tokens, ")


def test_exit_codes_of_store_verify(cli: Cli, store: Path, tmp_path: Path) -> None:
    verify = ("store", "verify", "--store", store)
    clean = cli(*verify)
    assert (clean.code, clean.err) == (0, "")
    assert "3 of 3 chunks checked: 3 sound, 0 damaged" in clean.out
    sampled = cli(*verify, "--sample", "0.1", "--json")
    assert (sampled.code, sampled.record["checked"], sampled.record["clean"]) == (0, 1, True)

    victim = chunk_files(store)[0]
    victim.write_bytes(victim.read_bytes()[:-7])
    damaged = cli(*verify)
    assert (damaged.code, damaged.err) == (3, "")
    assert f"damaged {victim.stem}: " in damaged.out
    assert victim.exists()
    moved = cli(*verify, "--quarantine", "--json")
    assert (moved.code, moved.record["quarantined"], moved.record["clean"]) == (3, 1, False)
    assert [d["chunk"] for d in moved.record["damaged"]] == [victim.stem]
    assert not victim.exists()
    assert cli(*verify).code == 0

    missing = cli("store", "verify", "--store", tmp_path / "none", "--json")
    assert (missing.code, missing.out) == (2, "")
    (tmp_path / "other").mkdir()
    assert cli("store", "verify", "--store", tmp_path / "other").code == 2


# ---- the program itself ----


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version").out == f"infoflow-kv {infoflow_kv.__version__}\n"
    top, bare = cli("--help"), cli()
    assert (top.code, bare.code) == (0, 0)
    assert top.out == bare.out
    for verb in ("demo", "ask", "ingest", "check", "methods", "models", "store"):
        assert verb in top.out
        shown = cli(verb, "--help")
        assert (shown.code, shown.err) == (0, "")
        assert verb == "store" or f"infoflow-kv {verb}" in shown.out.split("Examples")[1]
    for verb in ("ls", "stat", "verify"):
        assert f"infoflow-kv store {verb}" in cli("store", verb, "--help").out
    assert cli("store").code == 2


def test_defaults_are_those_of_the_library(cli: Cli) -> None:
    parameters = inspect.signature(Engine).parameters
    for name in ("method", "budget", "layers", "chunk_tokens", "namespace", "tiles"):
        assert getattr(options, name.upper()) == parameters[name].default
    assert options.MAX_FILE_BYTES == MAX_FILE_BYTES
    assert options.INSTRUCTION == INSTRUCTION
    assert options.MODEL in EMBEDDED


def test_bugs_are_one_line_unless_debugged(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ZeroDivisionError("in two\nlines")

    monkeypatch.setattr("infoflow_kv.methods.find_method", broken)
    result = cli("ask", "Who?", "-", stdin=b"x")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "internal error (this is a bug): ZeroDivisionError: in two lines; INFOFLOW_DEBUG=1 shows the traceback\n"
    )
    assert "Traceback" in cli("--debug", "ask", "Who?", "-", stdin=b"x").err
    monkeypatch.setenv("INFOFLOW_DEBUG", "1")
    assert "Traceback" in cli("ask", "Who?", "-", stdin=b"x").err


def test_json_survives_odd_names(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    name = b"odd-\xff\n.txt"
    path = os.path.join(os.fsencode(tmp_path), name)
    with open(path, "wb") as file:
        file.write(KEEPER.encode())
    result = cli("ask", QUESTION, os.fsdecode(path), "--model", tiny_model, "--max-new-tokens", 1, "--json")
    assert result.code == 0
    assert json.loads(result.out)["usage"]["chunks"] == 1
    assert tiny.tokenizer() is not None

"""`infoflow-kv bench …`: from the arguments to records, files and tables, peers that answer, fail or are not there."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import HARBOUR, KEEPER, Cli, Result, write_documents

from infoflow_kv.benchmark import ceilings, memory

QUICK = ("--repeats", 1, "--warmup", 0, "--threads", 1, "--chunk-tokens", 48)
TEXTS = (KEEPER, HARBOUR, "The nets of Saltmere dry on the long wall behind the chapel until the wind turns.")

ANSWERS = """
import json, sys
job = json.load(open(sys.argv[1]))
assert sorted(job["token_ids"]) == sorted(job["earlier_ids"]) and job["token_ids"] != job["earlier_ids"]
assert job["token_ids"] == job["head_ids"] + [t for c in job["chunks"] for t in c] + job["suffix_ids"]
print("loading weights {not json}")
arm = {"ttft_seconds": 0.25, "token_ids": [1, 2, 3], "decode_seconds": 0.5, "cached_tokens": 7}
print(json.dumps({"version": "9.1", "notes": "of straw", "arms": {"prefill": arm, "reordered": arm}}))
print("bye")
"""
FAILS = "import sys; print('the weights are\\ngone', file=sys.stderr); sys.exit(4)"
ODD = 'print(\'{"version": "1", "arms": {"prefill": {"ttft_seconds": 0}}}\')'
SILENT = "print('nothing to say')"
COUNTS = """
import pathlib, sys
path = pathlib.Path(sys.argv[0]).with_suffix(".n")
path.write_text("x" + (path.read_text() if path.exists() else ""))
sys.exit(1)
"""


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings over buffers of real size would be most of the time here."""
    sizes = {"rows": 8, "slots": 16, "buffer_bytes": 2**16, "repeats": 1}
    monkeypatch.setattr(ceilings.measure_ceilings, "__kwdefaults__", sizes)


@pytest.fixture
def bench(cli: Cli, tmp_path: Path, tiny_model: Path) -> Any:
    """Runs `bench VERB` on the tiny model over three short documents."""
    documents = write_documents(tmp_path / "documents", *TEXTS)

    def run(verb: str, *arguments: object, quick: tuple[object, ...] = QUICK) -> Result:
        about = ("--documents", documents, "--question", "Who keeps the lighthouse?", "--tokens", 120)
        given = () if verb == "attention" else (*about, "--model", tiny_model)
        return cli("bench", verb, *given, *quick, *arguments)

    return run


def peers(folder: Path, **scripts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_ttft_prints_a_table_and_appends_records(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "ttft.jsonl"
    for _ in range(2):
        result = bench("ttft", "--states", "warm-disk,warm-memory", "--budgets", ".1,.3", "--out", out)
        assert result.code == 0, result.err
    head, *rows = result.out.splitlines()
    assert re.split(r"\s{2,}", head.strip())[:4] == ["tokens", "arm", "state", "TTFT"]
    assert len(rows) == 2 + 4
    assert any("infoflow@0.1" in row and "warm-memory" in row for row in rows)
    records = lines(out)
    assert len(records) == 2 * 6
    assert {r["benchmark"] for r in records} == {"ttft"}
    assert all(r["environment"]["torch"] and r["threads"] == 1 for r in records)
    assert "ttft of 120 tokens: 0 of" in result.err


def test_json_gives_one_record_a_line_and_no_table(bench: Any) -> None:
    for verb, more in (("ttft", ("--states", "cold")), ("ingest", ()), ("decode", ("--new-tokens", 3))):
        result = bench(verb, *more, "--json")
        assert result.code == 0, result.err
        assert {r["benchmark"] for r in result.records} == {verb}


def test_several_lengths_come_one_after_the_other(bench: Any, tmp_path: Path) -> None:
    result = bench("ttft", "--tokens", "60,120", "--states", "warm-memory", "--json")
    sizes = [r["context_tokens"] for r in result.records]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 2


def test_ingest_and_decode_print_tables(bench: Any) -> None:
    ingest = bench("ingest")
    assert ingest.code == 0, ingest.err
    assert [row.split()[1] for row in ingest.out.splitlines()[1:]] == [
        "plain", "plain-chunks", "memory", "disk", "disk-movement",
    ]  # fmt: skip
    decode = bench("decode", "--new-tokens", 3)
    assert decode.code == 0, decode.err
    assert [row.split()[-1] for row in decode.out.splitlines()[1:]] == ["yes", "yes"]


def test_attention_takes_its_heads_from_numbers_or_a_model(bench: Any, tiny_model: Path) -> None:
    quick = ("--repeats", 1, "--threads", 1)
    shape = ("--heads", 4, "--kv-heads", 1, "--head-dim", 8)
    result = bench("attention", "--tokens", 100, "--rows", ".1,.5", *shape, "--json", quick=quick)
    assert result.code == 0, result.err
    assert [(r["arm"], r["rows"]) for r in result.records if r["arm"] != "causal"][:2] == [
        ("even", 10),
        ("even-anew", 10),
    ]
    assert {r["heads"] for r in result.records} == {4}
    result = bench("attention", "--tokens", 100, "--model", tiny_model, quick=quick)
    assert result.code == 0, result.err
    assert len(result.out.splitlines()) == 1 + 5
    result = bench("attention", "--tokens", 100, "--model", tiny_model, "--json", quick=quick)
    assert {(r["heads"], r["kv_heads"], r["head_dim"]) for r in result.records} == {(4, 2, 16)}


def test_compare_with_a_peer_that_answers(bench: Any, tmp_path: Path) -> None:
    scripts = peers(tmp_path / "peers", straw=ANSWERS)
    out = tmp_path / "compare.jsonl"
    result = bench("compare", "--scripts", scripts, "--peer", f"straw={sys.executable}", "--out", out)
    assert result.code == 0, result.err
    found = {(r["engine"], r["arm"]): r for r in lines(out)}
    straw = found["straw", "reordered"]
    assert (straw["version"], straw["notes"], straw["ttft_seconds"]) == ("9.1", "of straw", [0.25])
    assert (straw["decode_tokens_per_second"], straw["cached_tokens"]) == (4.0, 7)
    assert found["infoflow-kv", "full"]["times_sooner_than_own_full"] == 1
    assert found["infoflow-kv", "full"]["same_first_token_as_full"]
    assert ("infoflow-kv", "infoflow@0.15 (warm-disk)") in found
    # The peers that were not given are records and lines, not gaps.
    for name in ("transformers", "vllm", "llama_cpp", "kvboost"):
        assert found[name, None]["error"].startswith("not given")
        assert f"peer {name} is not in the comparison: not given" in result.err
    assert [row for row in result.out.splitlines() if "straw" in row and "9.1" in row]
    assert "kvboost" not in result.out


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (FAILS, "exit code 4: the weights are gone"),
        (ODD, "its arm 'prefill' has no ttft_seconds above 0"),
        (SILENT, "its output ends in no JSON object: nothing to say"),
        ("import time; time.sleep(60)", "it did not end in 0.5 seconds"),
        ("print('{}')", "it told of no arms"),
        ('print(\'{"error": "no such model"}\')', "no such model"),
    ],
)
def test_compare_with_a_peer_that_fails(bench: Any, tmp_path: Path, script: str, reason: str) -> None:
    scripts = peers(tmp_path / "peers", straw=script)
    timeout = 0.5 if "sleep" in script else 60
    result = bench("compare", "--scripts", scripts, "--peer", f"straw={sys.executable}", "--timeout", timeout, "--json")
    assert result.code == 1
    [record] = [r for r in result.records if r["engine"] == "straw"]
    assert (record["arm"], record["error"]) == (None, reason)
    assert f"peer straw is not in the comparison: {reason}" in result.err
    # The others are measured all the same.
    assert any(r["engine"] == "infoflow-kv" and "error" not in r for r in result.records)


def test_a_peer_that_failed_is_not_tried_again(bench: Any, tmp_path: Path) -> None:
    scripts = peers(tmp_path / "peers", straw=COUNTS)
    bench("compare", "--scripts", scripts, "--peer", f"straw={sys.executable}", "--repeats", 3)
    assert (scripts / "straw.n").read_text() == "x"


@pytest.mark.parametrize(
    ("verb", "arguments", "words"),
    [
        ("ttft", ("--repeats", 0), "--repeats 0: at least 1"),
        ("ttft", ("--warmup", -1), "--warmup -1"),
        ("ttft", ("--threads", 0), "--threads 0: at least 1"),
        ("ttft", ("--tokens", "many"), "--tokens holds 'many', which is not a whole number"),
        ("ttft", ("--tokens", "5"), "--tokens 5: at least 16"),
        ("ttft", ("--tokens", "3000"), "window of 2048"),
        ("ttft", ("--budgets", "1.5"), "1.5"),
        ("ttft", ("--budgets", ""), "give at least one number"),
        ("ttft", ("--methods", "infofow"), "did you mean 'infoflow'"),
        ("ttft", ("--methods", ","), "--methods is ','; give at least one name"),
        ("ttft", ("--methods", "oracle"), "for `eval predict` only"),
        ("ttft", ("--states", "warm"), "unknown state 'warm'"),
        ("ttft", ("--scratch", "nowhere"), "--scratch 'nowhere' is no folder"),
        ("ttft", ("--out", "/dev/null/x"), "--out '/dev/null/x' cannot be written"),
        ("ttft", ("--chunk-tokens", 2), "chunk_tokens"),
        ("ttft", ("--dtype", "float7"), "unknown dtype 'float7'"),
        ("ttft", ("--device", "moon"), "unknown device 'moon'"),
        ("ttft", ("--model", "gpt5"), "unknown model 'gpt5'"),
        ("ttft", ("--question", ""), "--documents without --question"),
        ("ttft", ("--documents", "gone.txt"), "gone.txt"),
        ("decode", ("--new-tokens", 1), "--new-tokens 1: at least 2"),
        ("memory", ("--warmup", 1), "no such option"),
        ("compare", ("--peer", "vllm"), "'vllm' is not NAME=PYTHON"),
        ("compare", ("--peer", "vllm=/no/python"), "no Python at '/no/python'"),
        ("compare", ("--peer", f"a={sys.executable}", "--peer", f"a={sys.executable}"), "names 'a' twice"),
        ("compare", ("--scripts", "nowhere"), "--scripts 'nowhere' does not exist"),
        ("compare", ("--scripts", ".", "--peer", f"nobody={sys.executable}"), "there is no peer 'nobody'"),
        ("compare", ("--timeout", 0), "--timeout 0"),
        ("compare", ("--gguf", "gone.gguf"), "--gguf 'gone.gguf' does not exist"),
        ("compare", ("--model-folder", "gone"), "--model-folder 'gone' does not exist"),
    ],
)
def test_bad_input_is_one_line(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, arguments: tuple[object, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where benchmarks/peers is not
    (tmp_path / "benchmarks" / "peers").mkdir(parents=True)
    quick = ("--repeats", 1) if verb == "memory" else QUICK
    refused(bench(verb, *arguments, quick=quick), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rows", "0"), "a share outside 0..1"),
        (("--heads", 3, "--kv-heads", 2), "multiple of K/V heads"),
        (("--dtype", "int8"), "unknown dtype 'int8'"),
        (("--device", "cuda:99"), "CUDA device"),
    ],
)
def test_bad_attention_input_is_one_line(bench: Any, arguments: tuple[object, ...], words: str) -> None:
    refused(bench("attention", "--tokens", 64, *arguments, quick=()), words)


def refused(result: Result, words: str) -> None:
    assert result.code == 2, result.err + result.out
    assert result.out == ""
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    assert words.casefold() in errors[0].casefold()
    assert "Traceback" not in result.err


@pytest.mark.parametrize("verb", ["ttft", "attention", "ingest", "decode", "memory", "compare"])
def test_help_has_examples(cli: Cli, verb: str) -> None:
    result = cli("bench", verb, "--help")
    assert result.code == 0
    assert f"infoflow-kv bench {verb}" in result.out
    assert "--out" in result.out
    assert f" {verb} " in cli("bench").out + cli("bench", "--help").out


def test_the_peers_scripts_are_there_and_parse() -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
    names = {path.stem for path in folder.glob("[!_]*.py")}
    assert names == {"transformers", "vllm", "llama_cpp", "kvboost"}
    for name in names:
        compile((folder / f"{name}.py").read_text(encoding="utf-8"), name, "exec")


def test_the_transformers_peer_agrees_with_full_prefill(bench: Any) -> None:
    scripts = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
    result = bench(
        "compare", "--scripts", scripts, "--peer", f"transformers={sys.executable}", "--new-tokens", 3, "--json"
    )
    assert result.code == 0, result.err
    [record] = [r for r in result.records if r["engine"] == "transformers"]
    assert record["same_first_token_as_full"]
    assert record["version"]


def test_memory_prints_a_table(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = canned_memory(monkeypatch)
    result = bench("memory", "--methods", "none,infoflow", quick=("--repeats", 2, "--threads", 1, "--chunk-tokens", 48))
    assert result.code == 0, result.err
    head, *rows = result.out.splitlines()
    assert "above weights" in head
    assert [row.split()[1] for row in rows] == ["plain", "full", "none", "infoflow@0.15"]
    assert all("3.0 MB" in row and "9.0 MB" in row for row in rows)
    assert len(jobs) == 2 * 4


def canned_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The children's answers without the children; the jobs' names."""
    jobs: list[str] = []
    found = {"before_bytes": 6e6, "peak_bytes": 9e6, "above_bytes": 3e6, "peak_is_reset": True, "weights_bytes": 5e6}

    def run_child(command: list[str], name: str, timeout_seconds: float) -> dict[str, Any]:
        jobs.append(name)
        assert json.loads(Path(command[-1]).read_text())["documents"]
        return {**found, "request_seconds": 0.1}

    monkeypatch.setattr(memory, "run_child", run_child)
    return jobs


def test_the_page_is_made_of_the_records(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, folder, page = load_tool("write_benchmarks"), tmp_path / "results", tmp_path / "benchmarks.md"
    # Without records there is no page, and nothing to complain of.
    assert tool.main(["--check"], folder, page) == 0
    assert tool.main([], folder, page) == 0
    assert not page.exists()
    canned_memory(monkeypatch)
    quick = ("--repeats", 1, "--threads", 1, "--chunk-tokens", 48)
    straw = ("--scripts", peers(tmp_path / "peers", straw=ANSWERS), "--peer", f"straw={sys.executable}")
    runs: dict[str, tuple[object, ...]] = {
        "ttft": ("--tokens", "60,120", "--budgets", ".1,.3"),
        "attention": ("--tokens", 64),
        "ingest": (),
        "decode": ("--new-tokens", 3),
        "memory": (),
        "compare": straw,
    }
    for verb, more in runs.items():
        given = ("--repeats", 1, "--threads", 1) if verb == "attention" else quick
        result = bench(verb, *more, "--out", folder / f"{verb}.jsonl", quick=given)
        assert result.code == 0, result.err
    assert tool.main(["--check"], folder, page) == 1
    assert tool.main([], folder, page) == 0
    assert tool.main(["--check"], folder, page) == 0
    text = page.read_text(encoding="utf-8")
    for heading in ("Time to first token", "Share of each stage", "Growth with the context", "KV bytes per token"):
        assert f"\n## {heading}\n" in text
    for heading in ("The staircase kernel", "Ingestion", "Decoding", "Peak memory", "Other engines"):
        assert f"\n## {heading}\n" in text
    for words in ("`infoflow@0.3`", "warm-memory", "straw 9.1", "1,024", "tiny, float32, 1 thread, 180 context tokens"):
        assert words in text
    for words in ("- kvboost: not given", "- straw: of straw", "| exponent |", "| tiny, float32, 1 thread |"):
        assert words in text
    # A later record of the same subject takes the place of the earlier one.
    before = len(tool.read(folder))
    bench("attention", "--tokens", 64, "--out", folder / "attention.jsonl", quick=("--repeats", 1, "--threads", 1))
    assert len(tool.read(folder)) == before


def test_the_readmes_numbers_come_from_the_new_records_if_there_are_any(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_tool("write_numbers")
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    assert tool.ttft() == "(not measured yet)"
    records = bench("ttft", "--tokens", "60,120", "--methods", "none,first-k", "--json").records
    (tmp_path / "bench").mkdir()
    text = "".join(json.dumps(record | {"model": "smollm2-135m"}) + "\n" for record in records)
    (tmp_path / "bench" / "ttft.jsonl").write_text(text, encoding="utf-8")
    block = tool.ttft()
    assert len([line for line in block.splitlines() if line.startswith("| float32 |")]) == 4
    assert f"{max(r['context_tokens'] for r in records)} context tokens" in block
    assert "FLOPs of full prefill" in block


def load_tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().parents[2] / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

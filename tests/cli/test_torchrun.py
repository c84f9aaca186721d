"""`torchrun --nproc-per-node 2 -m infoflow_kv …`: the answers of one process, one voice, one message."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli, Result, chunk_files, environment, write_documents

from infoflow_kv.models.embedded import cache_folder, ensure_embedded
from infoflow_kv.parallel.environment import from_environment
from infoflow_kv.samples import documents as sample_documents

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ROOT = Path(__file__).resolve().parents[2]
QUESTION = "Who keeps the lighthouse?"
REST = ("--max-new-tokens", 12)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of these tests' own, with the embedded model in it but nothing stored."""
    ensure_embedded("smollm2-135m")
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").symlink_to(cache_folder() / "models")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few of the sample documents: longer than what stands before them, no chunk twice."""
    return write_documents(tmp_path_factory.mktemp("given") / "docs", *(d.text[:600] for d in sample_documents()[:3]))


def run(command: list[str], *args: object, cache: Path) -> Result:
    done = subprocess.run(
        [*command, *map(str, args)],
        env=environment(cache) | {"TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


def under_torchrun(*args: object, cache: Path) -> Result:
    return run([*TORCHRUN, "-m", "infoflow_kv"], *args, cache=cache)


def alone(*args: object, cache: Path) -> Result:
    return run([sys.executable, "-m", "infoflow_kv"], *args, cache=cache)


def said(result: Result) -> list[str]:
    """The lines on stderr that are ours, not torchrun's."""
    return [line for line in result.err.splitlines() if line.startswith(("error: ", "infoflow: ", "loading "))]


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """What may not differ between one process and several."""
    chunks = [{k: v for k, v in chunk.items() if k != "mass"} for chunk in record["chunks"]]
    return {k: record[k] for k in ("answer", "method", "stop_reason", "usage")} | {"chunks": chunks}


def test_two_ranks_answer_as_one_process(cache: Path, folder: Path, tmp_path: Path) -> None:
    """Cold as JSON, then warm from the same store as a stream."""
    arguments = ("ask", QUESTION, folder, *REST, "--store")
    one = alone(*arguments, tmp_path / "one", "--no-plan", "--json", cache=cache)
    two = under_torchrun(*arguments, tmp_path / "two", "--json", cache=cache)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert comparable(two.record) == comparable(one.record)
    assert two.record["usage"]["recomputed_tokens"] > 0
    for ours, theirs in zip(two.record["chunks"], one.record["chunks"], strict=True):
        assert ours["mass"] == pytest.approx(theirs["mass"], abs=1e-4)
    assert list(two.record) == [*one.record, "parallel"]
    parallel = two.record["parallel"]
    assert (parallel["ranks"], parallel["layout"]) == (2, "Q")
    [summary] = [line for line in said(two) if line.startswith("infoflow: ")]
    assert summary.endswith("2 ranks in layout Q (3 K/V heads and 2 ranks have no common divisor to share heads by)")
    assert len(chunk_files(tmp_path / "two")) == len(chunk_files(tmp_path / "one"))
    warm = under_torchrun(*arguments, tmp_path / "two", "--stream", "--timeout", 120, cache=cache)
    assert warm.code == 0, warm.err
    assert warm.out == one.record["answer"] + "\n"
    assert "3 of 3 chunks from the store" in warm.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ask", QUESTION, "nothing-of-this-name"), "'nothing-of-this-name' does not exist; check the path"),
        (("ask", QUESTION, "--nonsense"), "no such option: --nonsense"),
    ],
)
def test_bad_input_is_one_message(cache: Path, arguments: tuple[str, ...], words: str) -> None:
    """Before the ranks have met, and after."""
    result = under_torchrun(*arguments, cache=cache)
    assert result.code != 0
    assert result.out == ""
    [line] = said(result)
    assert line.startswith(f"error: {words}")
    assert "exitcode  : 2" in result.err  # torchrun's own code is 1, whatever the ranks' are


def test_a_file_that_one_rank_lacks_is_told_by_that_rank(cache: Path, folder: Path, tmp_path: Path) -> None:
    """The script stands for two machines: rank 1 runs in a folder without the documents."""
    script = tmp_path / "elsewhere.py"
    script.write_text(
        "import os, sys\n"
        "from infoflow_kv.cli import program\n"
        f"os.chdir({str(folder.parent)!r} if os.environ['RANK'] == '0' else '/')\n"
        "program()\n"
    )
    result = run([*TORCHRUN, str(script)], "ask", QUESTION, "docs", "--no-store", cache=cache)
    assert result.code != 0 and result.out == ""
    errors = [line for line in said(result) if line.startswith("error: ")]
    assert "error: rank 1 of 2: 'docs' does not exist; check the path" in errors
    assert all(line.startswith(("error: rank 1 of 2: ", "error: rank 0 of 2, phase 'prepare': ")) for line in errors)


def test_the_example(cache: Path) -> None:
    done = run([*TORCHRUN, str(ROOT / "examples" / "several_ranks.py")], cache=cache)
    assert done.code == 0, done.err
    first, answer = done.out.splitlines()
    assert first.startswith("2 ranks, layout Q, ")
    assert answer


# ---- in this process: what is refused before any rank meets another ----


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the variables that torchrun sets, for one of two ranks."""

    def become(rank: int) -> None:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": 1, "MASTER_ADDR": "127.0.0.1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        assert from_environment(os.environ).size == 2

    return become


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ingest", "docs"), "'ingest' does not run on several ranks; under torchrun there are ask and demo: start"),
        (("store", "stat"), "'store' does not run on several ranks"),
        (("bench", "sp", "--model-only"), "'bench' does not run on several ranks"),
        (("ask", QUESTION, "-"), "standard input (-) cannot be read by several ranks; give files or folders"),
        (("ask", QUESTION, "docs", "--device", "cuda:0"), "--device cuda:0 would be every rank's; give cuda"),
        (("ask", QUESTION, "docs", "--timeout", "0"), "--timeout 0 is no time; expected a number of seconds"),
    ],
)
def test_refusals_under_torchrun(cli: Cli, as_rank: Any, arguments: tuple[str, ...], words: str) -> None:
    as_rank(0)
    result = cli(*arguments)
    assert (result.code, result.out) == (2, "")
    [line] = result.err.splitlines()
    assert line.startswith(f"error: {words}")


def test_other_ranks_say_nothing_of_the_same_error(cli: Cli, as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infoflow_kv.cli.ranks._LEAVE_LAST_SECONDS", 0.01)
    as_rank(1)
    assert cli("ingest", "docs") == Result(2, "", "")


def test_help_comes_from_one_rank(cli: Cli, as_rank: Any) -> None:
    as_rank(1)
    assert cli("ask", "--help") == cli("ingest", "--help") == Result(0, "", "")
    as_rank(0)
    assert "--layout" in cli("ask", "--help").out


def test_a_layout_needs_ranks(cli: Cli) -> None:
    result = cli("ask", QUESTION, "docs", "--layout", "H")
    assert result.code == 2
    assert result.err.startswith("error: --layout H says how several ranks share a request, and there is one; start")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "5"}, "RANK is '5'; expected a number from 0 to 1"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"WORLD_SIZE": "1"}, "RANK is '1'; expected a number from 0 to 0"),
    ],
)
def test_a_rank_whose_own_variables_are_wrong_says_so_at_once(
    cli: Cli, as_rank: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], words: str
) -> None:
    """Set by hand, they may be right on rank 0."""
    as_rank(1)
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    start = time.monotonic()
    result = cli("ask", QUESTION, "docs")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {words}")
    assert time.monotonic() - start < 5.0, "it need not leave last"


def test_variables_that_contradict_each_other_are_told(cli: Cli, as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(0)
    monkeypatch.delenv("MASTER_ADDR")
    result = cli("ask", QUESTION, "docs")
    assert result.code == 2
    assert result.err.startswith("error: MASTER_ADDR is not set")

"""What only a process of its own can show: start time, signals, pipes, a second run from the same store."""

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest
from cli_runs import HARBOUR, KEEPER, Cli, chunk_files, environment, write_documents

COMMAND = [sys.executable, "-m", "infoflow_kv"]


def run(*args: object, cache: Path, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        env=environment(cache),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that lists without torch: enough records for a pipe to break."""
    folder = tmp_path_factory.mktemp("stored") / "kv"
    from infoflow_kv.store import DiskStore

    DiskStore(folder)
    for number in range(300):
        key = f"{number:064x}"
        (folder / key[:2]).mkdir(exist_ok=True)
        (folder / key[:2] / f"{key}.safetensors").write_bytes(b"damaged")
    return folder


def test_help_comes_at_once_and_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from infoflow_kv.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(f'{heavy}' if heavy else code)"
    )
    seconds = []
    for _ in range(3):  # processor time, as other work on the machine does not count there
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert (done.returncode, done.stderr) == (0, "")
        assert "infoflow-kv demo" in done.stdout
    assert min(seconds) < 1.0


def test_head_of_a_list(store: Path, tmp_path: Path) -> None:
    """`| head -1` gives one line, and the rest of the program ends without a word."""
    listing = f"{sys.executable} -m infoflow_kv store ls --json --store {store}"
    done = subprocess.run(
        ["bash", "-c", f"{listing} | head -1; exit ${{PIPESTATUS[0]}}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)["key"] == f"{0:064x}"
    assert done.returncode in (0, 141)  # 0 where the pipe took all of it before head left


def test_no_one_reads(store: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "store", "ls", "--json", "--store", str(store)],
        env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141
    process.stderr.close()


def test_full_disk_and_closed_streams(store: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run("store", "ls", "--store", store, cache=tmp_path, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "error: the results cannot be written: No space left on device; check where stdout goes\n"
    for redirection, words in (("<&-", "standard input is not available"), (">&-", "standard output is closed")):
        verb = "ingest -" if redirection == "<&-" else f"store stat --store {store}"
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m infoflow_kv {verb} {redirection}"],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (1, 2)
        [line] = done.stderr.splitlines()
        assert line.startswith("error: ") and words in line


def test_second_process_finds_every_chunk_in_another_order(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents", KEEPER, HARBOUR, KEEPER + HARBOUR)
    paths = sorted(documents.iterdir())
    rest = ("--model", tiny_model, "--store", tmp_path / "kv", "--max-new-tokens", 4, "--json")
    first = cli("ask", "Who keeps it?", *paths, *rest).record
    assert first["usage"]["cached_chunks"] == 0
    second = run("ask", "Who keeps it?", *reversed(paths), *rest, cache=tmp_path)
    assert second.returncode == 0, second.stderr
    record = json.loads(second.stdout)
    assert record["usage"]["cached_chunks"] == record["usage"]["chunks"] == 3
    assert record["usage"]["prefilled_tokens"] == 0
    assert [c["id"] for c in record["chunks"]] == [c["id"] for c in reversed(first["chunks"])]
    assert len(second.stderr.splitlines()) == 1  # the summary: Transformers has not said a word
    # And the result is the one of a process that computed everything itself.
    alone = cli("ask", "Who keeps it?", *reversed(paths), *rest[:2], "--no-store", *rest[4:]).record
    assert alone["answer"] == record["answer"]


def test_interrupted_ingestion_goes_on(cli: Cli, tiny_model: Path, quick_path: Path) -> None:
    documents = write_documents(quick_path / "documents", *(f"{number} boats. " * 40 for number in range(60)))
    arguments = ("ingest", documents, "--model", tiny_model, "--store", quick_path / "kv")
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment(quick_path), stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while len(chunk_files(quick_path / "kv")) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    [line] = err.splitlines()
    assert line.startswith("interrupted: ")
    assert line.endswith(f"chunks are stored in {quick_path / 'kv'}; run the same command again to continue")
    told, total = int(line.split()[1]), int(line.split()[3])
    stored = len(chunk_files(quick_path / "kv")) - 1  # without the chat header
    assert told <= stored <= told + 1  # the one that was on its way may have arrived
    assert stored < total
    record = cli(*arguments, "--json").record
    assert record["chunks"] == total
    assert record["cached_chunks"] == stored
    assert cli("store", "verify", "--store", quick_path / "kv").code == 0

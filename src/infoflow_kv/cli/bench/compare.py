"""`infoflow-kv bench compare`: other engines on the same token ids."""

from pathlib import Path
from typing import Annotated

import typer

from infoflow_kv.cli import options
from infoflow_kv.cli.bench import setting as given
from infoflow_kv.cli.bench.tables import Record, rate, spread, times, took
from infoflow_kv.cli.output import emit_table, note, one_line
from infoflow_kv.errors import OptionError

_PEERS = "Peers"
Peer = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME=PYTHON",
        help="A peer and the Python of the venv that has it: transformers, vllm, llama_cpp, kvboost, or any script in "
        "--scripts; may be given several times.",
        show_default="none",
        rich_help_panel=_PEERS,
    ),
]
Scripts = Annotated[
    str, typer.Option(metavar="DIR", help="Folder of the peers' scripts NAME.py.", rich_help_panel=_PEERS)
]
ModelFolder = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="The model for peers, in safetensors.", show_default="--model's", rich_help_panel=_PEERS
    ),
]
Gguf = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The model for llama.cpp.", show_default="none", rich_help_panel=_PEERS),
]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="Longest run of a peer's process.", rich_help_panel=_PEERS)
]
NewTokens = Annotated[int, typer.Option(metavar="N", help="Tokens to write.", rich_help_panel="Request")]


def compare(
    peer: Peer = None,
    model_folder: ModelFolder = None,
    gguf: Gguf = None,
    scripts: Scripts = "benchmarks/peers",
    timeout: Timeout = 3600.0,
    tokens: given.Tokens = given.TOKENS,
    methods: given.Methods = given.METHODS,
    budgets: given.Budgets = given.BUDGETS,
    new_tokens: NewTokens = 8,
    documents: given.Documents = None,
    question: given.Question = None,
    repeats: given.Repeats = 3,
    warmup: given.Warmup = 1,
    threads: given.Threads = None,
    seed: given.Seed = 0,
    scratch: given.Scratch = None,
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    chunk_tokens: options.ChunkTokens = options.CHUNK_TOKENS,
    out: given.Out = None,
    as_json: options.Json = False,
) -> int:
    """Time to first token of other engines on the same token ids, in turn with ours.

    Each peer runs in a venv of its own, a process for each repeat; starting and loading do not count. Peers that cache
    also answer after a request with the same chunks in another order. A known peer that is not given is said and
    recorded; one that was given and fails too, and the exit code is 1.

    Examples:

    \b
        infoflow-kv bench compare --peer transformers=.venv/bin/python
        infoflow-kv bench compare --peer vllm=/opt/vllm/bin/python --tokens 8000
        infoflow-kv bench compare --peer llama_cpp=/opt/llama/bin/python --gguf model.gguf
    """
    given.check_rounds(repeats, warmup, threads)
    wanted, budget_list, method_list = given.lengths(tokens), given.shares(budgets), given.names(methods, "--methods")
    given.at_least(new_tokens, 1, "--new-tokens")
    if not timeout > 0:
        raise OptionError(f"--timeout {timeout:g}: give a number of seconds above 0")
    for option, path in (("--scripts", scripts), ("--model-folder", model_folder), ("--gguf", gguf)):
        if path is not None and not Path(path).expanduser().exists():
            raise OptionError(f"{option} '{path}' does not exist")
    pythons = peer_pythons(peer or [])
    folder, file = given.scratch_folder(scratch), given.out_file(out)
    read = given.given_documents(documents, question)

    from infoflow_kv.benchmark.arms import make_arms
    from infoflow_kv.benchmark.compare import Peers
    from infoflow_kv.benchmark.compare import compare as measure
    from infoflow_kv.models.loading import find

    make_arms(method_list, budget_list, ("warm-disk",))
    resolved = str(Path(model_folder).expanduser().resolve()) if model_folder is not None else ""
    gguf_file = str(Path(gguf).expanduser().resolve()) if gguf is not None else None
    peers = Peers(pythons, Path(scripts).expanduser().resolve(), resolved, gguf_file, timeout)
    setting = given.open_setting(
        model, dtype, device, read, repeats=repeats, warmup=warmup, chunk_tokens=chunk_tokens, seed=seed
    )
    if not resolved:
        place = find(model, note)
        resolved = str(Path(place).resolve()) if Path(place).exists() else place
        peers = Peers(pythons, peers.scripts, resolved, gguf_file, timeout)
    for length in wanted:
        setting.request(length, new_tokens)
    failed: dict[str, str] = {}
    for number, length in enumerate(wanted):
        with given.steps(f"comparison over {length} tokens") as step:
            records = measure(
                setting, peers, length, method_list, budget_list, new_tokens, scratch=folder, on_step=step
            )
        missing = {r["engine"]: r["error"] for r in records if "error" in r}
        failed |= {name: reason for name, reason in missing.items() if name in pythons}
        for name, reason in missing.items():
            if name in pythons or number == 0:
                note(one_line(f"peer {name} is not in the comparison: {reason}"))
        given.keep(records, file, as_json)
        if not as_json:
            table([r for r in records if "error" not in r])
    return 1 if failed else 0


def peer_pythons(given_peers: list[str]) -> dict[str, str]:
    """The interpreter of each `NAME=PYTHON`; OptionError where it is written otherwise, twice or does not exist."""
    found: dict[str, str] = {}
    for text in given_peers:
        name, equals, python = text.partition("=")
        if not name or not equals or not python:
            raise OptionError(f"--peer '{text}' is not NAME=PYTHON, for example vllm=/opt/vllm/bin/python")
        if name in found:
            raise OptionError(f"--peer names '{name}' twice; give each peer once")
        if not Path(python).expanduser().is_file():
            raise OptionError(f"--peer {name}: there is no Python at '{python}'")
        # Not resolved: a venv's Python is a link, and is known by where the link stands.
        found[name] = str(Path(python).expanduser().absolute())
    return found


def table(records: list[Record]) -> None:
    """Nothing; engines and arms of one length are on stdout."""
    columns = (
        "tokens",
        "engine",
        "version",
        "arm",
        "TTFT",
        "spread",
        "vs own full",
        "cached",
        "decode/s",
        "same token",
    )
    rows = [
        (
            r["context_tokens"],
            r["engine"],
            r["version"],
            r["arm"],
            took(r["ttft_seconds_median"]),
            spread(r),
            times(r["times_sooner_than_own_full"]),
            "-" if r["cached_tokens"] is None else r["cached_tokens"],
            rate(r["decode_tokens_per_second"]),
            "yes" if r["same_first_token_as_full"] else "no",
        )
        for r in records
    ]
    emit_table(columns, rows, right=(0, 4, 5, 6, 7, 8))

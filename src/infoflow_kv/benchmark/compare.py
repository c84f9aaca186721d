"""The same token ids through other engines, each in its own venv, turn by turn with our own arms.

A peer is a script that is run by its venv's Python with the path of a job file, and whose last line on stdout is one
JSON object; `benchmarks/peers/_job.py` says what stands in both. Each repeat is a process of its own, which warms
itself up first: what it takes to start does not count.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from infoflow_kv.benchmark.arms import FULL, Outcome, make_arms, prepared
from infoflow_kv.benchmark.children import last_object, last_words
from infoflow_kv.benchmark.context import Request, Setting
from infoflow_kv.benchmark.timing import OnStep, Timed, measure, tidy
from infoflow_kv.errors import OptionError

KNOWN = ("transformers", "vllm", "llama_cpp", "kvboost")
OWN = "infoflow-kv"


@dataclass(frozen=True, slots=True)
class Peers:
    """Which peers run and on what. `pythons`: the interpreter of each peer's venv, by name; `scripts`: their folder.

    `model_folder`: Hugging Face model in safetensors; `gguf`: the same model as a GGUF file, for peers that read that.
    """

    pythons: Mapping[str, str]
    scripts: Path
    model_folder: str
    gguf: str | None = None
    timeout_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name in self.pythons:
            if name.startswith("_") or not (self.scripts / f"{name}.py").is_file():
                known = sorted(p.stem for p in self.scripts.glob("[!_]*.py"))
                raise OptionError(
                    f"there is no peer '{name}' in '{self.scripts}' (there: {', '.join(known) or 'none'})"
                )


@dataclass(slots=True)
class Runs:
    """What one engine gave, arm by arm, or why it gave nothing."""

    version: str = ""
    notes: str = ""
    error: str = ""
    arms: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def compare(
    setting: Setting,
    peers: Peers,
    tokens: int,
    methods: Sequence[str] = ("infoflow",),
    budgets: Sequence[float] = (0.15,),
    new_tokens: int = 8,
    *,
    scratch: Path | None = None,
    on_step: OnStep | None = None,
) -> list[dict[str, Any]]:
    """One record per engine and arm: TTFT in seconds; a peer that is not there or failed is a record with `error`.

    Our own arms are full prefill and the methods from warm disk. Peers that cache prefixes or chunks also answer after
    an earlier request with the same chunks in another order (`reordered`).
    """
    own_arms = [arm for arm in make_arms(methods, budgets, ("warm-disk",)) if arm.method != "plain"]
    request = setting.request(tokens, new_tokens)
    found: dict[str, Runs] = {OWN: Runs()} | {name: Runs() for name in dict.fromkeys((*KNOWN, *peers.pythons))}
    for name, runs in found.items():
        if name != OWN and name not in peers.pythons:
            runs.error = f"not given; --peer {name}=PYTHON names the Python of a venv that has it"
    with prepared(setting, request, own_arms, scratch) as own, tempfile.TemporaryDirectory(dir=scratch) as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps(make_job(setting, peers, request, new_tokens)), encoding="utf-8")
        turns: dict[str, Callable[[], None]] = {
            f"{OWN} {name}": _own_turn(found[OWN], name, run) for name, run in own.items()
        }
        turns |= {name: _peer_turn(found[name], peers, name, job) for name in peers.pythons}
        for _ in range(setting.warmup):
            for run in own.values():
                run()
        measure(turns, setting.repeats, 0, on_step=on_step)
    return _records(setting, request, found)


def make_job(setting: Setting, peers: Peers, request: Request, new_tokens: int) -> dict[str, Any]:
    """What a peer gets: the ids of the request, of an earlier one with its chunks the other way round, and options."""
    prompt = request.prompt
    chunks = [list(chunk.token_ids) for chunk in prompt.chunks]
    turned = [token for chunk in reversed(chunks) for token in chunk]
    return {
        "token_ids": list(prompt.token_ids),
        "earlier_ids": [*prompt.head_ids, *turned, *prompt.suffix_ids],
        "head_ids": list(prompt.head_ids),
        "chunks": chunks,
        "suffix_ids": list(prompt.suffix_ids),
        "new_tokens": new_tokens,
        "warmup": setting.warmup,
        "dtype": str(setting.model.dtype).removeprefix("torch."),
        "device": setting.model.device.type,
        "threads": torch.get_num_threads(),
        "model_folder": peers.model_folder,
        "gguf": peers.gguf,
    }


def _own_turn(runs: Runs, name: str, run: Callable[[], Outcome]) -> Callable[[], None]:
    def turn() -> None:
        outcome = run()
        runs.arms.setdefault(name, []).append(
            {"ttft_seconds": outcome.ttft_seconds, "token_ids": [outcome.first_token]}
        )

    return turn


def _peer_turn(runs: Runs, peers: Peers, name: str, job: Path) -> Callable[[], None]:
    def turn() -> None:
        if runs.error:  # it would only fail again
            return
        told = run_peer(peers, name, job)
        runs.error = str(told.get("error", ""))
        runs.version, runs.notes = str(told.get("version", "")), str(told.get("notes", ""))
        for arm, values in told.get("arms", {}).items():
            runs.arms.setdefault(arm, []).append(values)

    return turn


def run_peer(peers: Peers, name: str, job: Path) -> dict[str, Any]:
    """What the peer told, checked; an object with `error` in one line where it failed."""
    command = [peers.pythons[name], str(peers.scripts / f"{name}.py"), str(job)]
    # Its venv is its own: nothing of ours may be importable there.
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=peers.timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end in {peers.timeout_seconds:g} seconds"}
    except OSError as error:
        return {"error": f"'{peers.pythons[name]}' cannot be run: {error.strerror or error}"}
    if done.returncode:
        return {"error": f"exit code {done.returncode}: {last_words(done.stderr)}"}
    told = last_object(done.stdout)
    if told is None:
        return {"error": f"its output ends in no JSON object: {' '.join(done.stdout.split())[-200:] or 'nothing'}"}
    return told if told.get("error") else {**told, "error": fault_of(told)}


def fault_of(told: dict[str, Any]) -> str:
    """What is wrong with a peer's object; empty if nothing is."""
    arms = told.get("arms")
    if not isinstance(arms, dict) or not arms:
        return "it told of no arms"
    for name, values in arms.items():
        ttft = values.get("ttft_seconds") if isinstance(values, dict) else None
        if not isinstance(ttft, (int, float)) or isinstance(ttft, bool) or not ttft > 0:
            return f"its arm '{name}' has no ttft_seconds above 0"
        if not isinstance(values.get("token_ids"), list) or not values["token_ids"]:
            return f"its arm '{name}' has no token_ids"
    return ""


def _records(setting: Setting, request: Request, found: Mapping[str, Runs]) -> list[dict[str, Any]]:
    own_full = found[OWN].arms[FULL.name]
    full = Timed(tuple(values["ttft_seconds"] for values in own_full), tuple(own_full)).median
    first = own_full[-1]["token_ids"][0]
    records = []
    for engine, runs in found.items():
        common = setting.described("compare", request) | {"engine": engine}
        environment = {"environment": dict(setting.environment)}
        if runs.error:
            records.append(common | {"arm": None, "error": runs.error} | environment)
            continue
        for arm, values in runs.arms.items():
            timed = Timed(tuple(float(v["ttft_seconds"]) for v in values), tuple(values))
            decode = [float(v["decode_seconds"]) for v in values if v.get("decode_seconds")]
            # A peer counts all tokens that it wrote; the first is not decoded.
            steps = len(values[-1]["token_ids"]) - 1
            records.append(
                common
                | {
                    "arm": arm,
                    "version": runs.version or setting.environment.get("infoflow_kv", ""),
                    "notes": runs.notes,
                    **timed.record("ttft_seconds"),
                    "times_sooner_than_own_full": tidy(full / timed.median),
                    "decode_tokens_per_second": tidy(steps / min(decode)) if decode and steps else None,
                    "cached_tokens": values[-1].get("cached_tokens"),
                    "same_first_token_as_full": values[-1]["token_ids"][0] == first,
                }
                | environment
            )
    return records

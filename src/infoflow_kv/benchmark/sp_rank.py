"""One rank of a sequence-parallel measurement, a program: the path of a job, and torchrun's variables."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infoflow_kv.benchmark.context import Request, Setting
from infoflow_kv.benchmark.sp_job import BASELINES, SpArm, SpJob, read_job
from infoflow_kv.benchmark.timing import rotated, tidy
from infoflow_kv.engine import Engine
from infoflow_kv.errors import OptionError
from infoflow_kv.models import LanguageModel, load, quiet_transformers
from infoflow_kv.models.shaped import PREFIX, shaped
from infoflow_kv.parallel.cost import query_layout
from infoflow_kv.parallel.counting import ByteCounter
from infoflow_kv.parallel.group import REQUEST_PHASES, Group
from infoflow_kv.records import Document
from infoflow_kv.spreading import Spread, find_layout
from infoflow_kv.store import DiskStore


def main(path: Path) -> None:
    """Nothing; what this rank saw is written beside the job."""
    job = read_job(path)
    torch.set_num_threads(job.threads)
    quiet_transformers()
    single = int(os.environ.get("WORLD_SIZE", "1")) == 1
    # A job for CPUs needs no GPU to each rank, where there are some.
    backend = None if job.device == "cuda" else "gloo"
    with Group.alone() if single else Group.join(job.timeout_seconds, backend) as group:
        found = run(job, group)
        (Path(job.folder) / f"rank{group.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def run(job: SpJob, group: Group) -> dict[str, Any]:
    """Per arm: seconds, stages, tokens, bytes that this rank sent; and why which arms were left out."""
    device = f"cuda:{group.local_rank}" if job.device == "cuda" else job.device
    make = shaped if job.model.startswith(PREFIX) else load
    model = make(job.model, dtype=job.dtype, device=device)
    documents = tuple(Document(text=text, title=title) for title, text in job.documents)
    setting = Setting(model, documents, job.question, job.model, chunk_tokens=job.chunk_tokens, joined=job.joined)
    arms, left_out = possible(job.arms, group.size, model)
    request, little = setting.request(job.tokens, 2), setting.request(min(job.tokens, job.warmup_tokens), 2)
    folder = Path(job.folder) / "store"
    if any(arm.cached for arm in arms):
        fill(model, folder, job, (request, little), group)
    found: dict[str, Any] = {"rank": group.rank, "arms": {}, "left_out": left_out, "prompt": describe(request)}
    if not arms:
        return found
    for arm in arms:
        ask(model, arm, job, little, group, folder)  # connections, kernels
        found["arms"][arm.label] = {"rounds": []}
    for turn in range(job.repeats):
        for arm in rotated(arms, turn):
            found["arms"][arm.label]["rounds"].append(ask(model, arm, job, request, group, folder))
            if group.rank == 0:
                seconds = found["arms"][arm.label]["rounds"][-1]["seconds"]
                sys.stderr.write(f"round {turn + 1}, {arm.label}: {seconds} s\n")
    if job.counts:
        for arm in arms:
            with ByteCounter(group) as counter:
                ask(model, arm, job, request, group, folder)
            sent = counter.by_phase()
            found["arms"][arm.label]["sent_bytes"] = {phase: sent[phase] for phase in REQUEST_PHASES if phase in sent}
    return found


def possible(arms: Sequence[SpArm], ranks: int, model: LanguageModel) -> tuple[list[SpArm], dict[str, str]]:
    """The arms that so many ranks and this model allow, and for each other one the reason; the same on all ranks."""
    found: list[SpArm] = []
    left_out: dict[str, str] = {}
    seen: dict[tuple[str, float, bool, str], str] = {}
    for arm in arms:
        layout = ""
        if arm.name not in BASELINES:
            try:
                layout = find_layout(arm.layout, ranks, model, arm.budget, stored=arm.cached)[0].name
            except OptionError as error:
                left_out[arm.label] = str(error)
                continue
        name = "full" if ranks == 1 and arm.name in BASELINES else arm.name
        twin = seen.setdefault((name, arm.budget, arm.cached, layout), arm.label)
        if twin != arm.label:
            left_out[arm.label] = f"with {ranks} rank{'s' * (ranks > 1)} it is the same as {twin}"
        else:
            found.append(arm)
    return found, left_out


def ask(model: LanguageModel, arm: SpArm, job: SpJob, request: Request, group: Group, folder: Path) -> dict[str, Any]:
    """One request up to its first token. The clock starts on all ranks when all are ready."""
    engine = engine_of(model, arm, job, group, folder)
    group.world.agree("ready")
    before, start = interface_bytes(), time.perf_counter()
    answer = engine.answer(job.question, request.documents, max_new_tokens=1)
    seconds = time.perf_counter() - start
    timings = answer.timings
    place = engine.place
    return {
        "seconds": tidy(seconds),
        "interface_bytes": interface_bytes() - before,
        "stages": {
            "load": tidy(timings.load_seconds),
            "assemble": tidy(timings.assemble_seconds),
            "score": tidy(timings.score_seconds),
            "repair": tidy(timings.repair_seconds),
        },
        "layout": place.layout.name if isinstance(place, Spread) else None,
        "first_token": answer.token_ids[0],
        "recomputed_tokens": answer.usage.recomputed_tokens,
        "cached_chunks": answer.usage.cached_chunks,
    }


def engine_of(model: LanguageModel, arm: SpArm, job: SpJob, group: Group, folder: Path) -> Engine:
    store = DiskStore(folder) if arm.cached else None
    if arm.name in BASELINES and group.size == 1:  # plain full prefill: no ring's blocks, no partial attention
        return Engine(model, store, method="full", chunk_tokens=job.chunk_tokens)
    if arm.name in BASELINES:
        layout = query_layout(group.size)
        engine = Engine(model, store, method="full", chunk_tokens=job.chunk_tokens, group=group, layout=layout)
        assert isinstance(engine.place, Spread)
        engine.place.baseline = "ring" if arm.name == "ring" else "gather"
        return engine
    layout, _ = find_layout(arm.layout, group.size, model, arm.budget, stored=arm.cached)
    return Engine(model, store, budget=arm.budget, chunk_tokens=job.chunk_tokens, group=group, layout=layout)


def fill(model: LanguageModel, folder: Path, job: SpJob, requests: Sequence[Request], group: Group) -> None:
    """Nothing; the store holds the chunks of the requests. Each rank prefills its share, outside any clock."""
    engine = Engine(model, DiskStore(folder), chunk_tokens=job.chunk_tokens)
    documents: list[Document] = list(dict.fromkeys(d for request in requests for d in request.documents))
    engine.add(documents[group.rank :: group.size] or documents[:1])
    group.world.agree("filled")


def interface_bytes() -> int:
    """What this rank's interface has sent so far; 0 where it has none of its own."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    path = Path("/sys/class/net") / name / "statistics" / "tx_bytes"
    return int(path.read_text()) if name != "lo" and path.exists() else 0


def describe(request: Request) -> dict[str, Any]:
    prompt = request.prompt
    return {
        "context_tokens": prompt.context_tokens,
        "prompt_tokens": len(prompt.suffix_ids),
        "chunks": len(prompt.chunks),
        "token_ids_sha256": request.token_ids_sha256,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))

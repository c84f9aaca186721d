"""How many tokens a second can be prefilled and stored ahead of the questions?"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infoflow_kv.benchmark.arms import plain_of, run_plain
from infoflow_kv.benchmark.context import Setting
from infoflow_kv.benchmark.timing import OnStep, measure, tidy
from infoflow_kv.benchmark.work import Work, chunk_work, forward_work, shape_of
from infoflow_kv.prefilling import NEIGHBOUR
from infoflow_kv.store import DiskStore, MemoryStore


def measure_ingest(
    setting: Setting, tokens: int, *, scratch: Path | None = None, on_step: OnStep | None = None
) -> list[dict[str, Any]]:
    """One record per arm over about `tokens` tokens of documents, in tokens per second of document text.

    `plain`: one ordinary prefill of all chunks as one sequence by Transformers, `plain-chunks`: each chunk by itself
    behind the header, nothing stored; `memory`, `disk`: `Engine.add` into an empty store; `disk-movement`: with the
    second prefill that method `influence` wants. The ideal of an arm is the time of its FLOPs at `plain`'s rate.
    """
    model, request, shape = setting.model, setting.request(tokens), shape_of(setting.model)
    prompt, plain = request.prompt, plain_of(setting.model)
    lengths, head = [chunk.num_tokens for chunk in prompt.chunks], len(prompt.head_ids)
    stored = sum(lengths)
    context_ids = prompt.token_ids[: prompt.context_tokens]

    def plain_chunks() -> None:
        for chunk in prompt.chunks:
            run_plain(plain, prompt.head_ids + chunk.token_ids)

    def memory() -> None:
        setting.engine(MemoryStore()).add(request.documents)

    def disk(method: str) -> Callable[[], None]:
        def run() -> None:
            folder = tempfile.mkdtemp(prefix="infoflow-bench-", dir=scratch)
            try:
                setting.engine(DiskStore(folder), method).add(request.documents)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return run

    behind = len(setting.engine().encoder.content(NEIGHBOUR)[0]) + head
    once = chunk_work(shape, lengths, head) + chunk_work(shape, [head] if head else [], 0)
    arms: dict[str, tuple[Callable[[], object], Work]] = {
        "plain": (
            lambda: run_plain(plain, context_ids),
            forward_work(shape, torch.arange(len(context_ids)), whole_last=True),
        ),
        "plain-chunks": (plain_chunks, once),
        "memory": (memory, once),
        "disk": (disk("infoflow"), once),
        "disk-movement": (
            disk("influence"),
            once + chunk_work(shape, lengths, behind) + chunk_work(shape, [behind], 0),
        ),
    }
    _ = model.identity  # hashed at first use, which is no part of a chunk
    timed = measure({name: run for name, (run, _) in arms.items()}, setting.repeats, setting.warmup, on_step=on_step)
    rate = arms["plain"][1].flops / timed["plain"].median
    return [
        setting.described("ingest", request)
        | {
            "arm": name,
            "tokens": stored,
            **own.record(),
            "tokens_per_second": tidy(stored / own.median),
            "ideal_tokens_per_second": tidy(stored / (arms[name][1].flops / rate)),
            "share_of_plain_rate": tidy(timed["plain"].median / own.median),
            "stored_bytes": stored * shape.kv_bytes_per_token if name in ("memory", "disk", "disk-movement") else 0,
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "work": arms[name][1].record(),
            "environment": dict(setting.environment),
        }
        for name, own in timed.items()
    ]

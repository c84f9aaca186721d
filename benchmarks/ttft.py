"""How much sooner does the first token come? TTFT from warm disk against full prefill, ours and plain Transformers'.

Control: the same token ids through plain Transformers (sdpa, one row of logits). Treatment: the engine with a disk
store opened anew for every request. All arms are interleaved in one process after a warm-up; medians and spread are
printed and written, and the ideal (full prefill × rows computed ÷ all rows) stands beside each.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from environment import environment

from infoflow_kv import DiskStore, Engine, load, samples
from infoflow_kv.records import Document

QUESTION = samples.QUESTIONS[0].text


def plain_seconds(plain, ids: tuple[int, ...]) -> float:
    row = torch.tensor(ids)[None].to(plain.device)
    start = time.perf_counter()
    with torch.inference_mode():
        out = plain(input_ids=row, use_cache=True, logits_to_keep=1)
    int(out.logits[0, -1].argmax())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budgets", default="0.15", help="comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=7000, help="about this many context tokens (sample documents)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ttft.jsonl")
    args = parser.parse_args()
    model = load(args.model, dtype=args.dtype, device=args.device)
    documents = enough(Engine(model), args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        Engine(model, DiskStore(folder)).add(documents)
        prompt = Engine(model).prompt(QUESTION, documents)
        plain = model.plain()
        budgets = [float(b) for b in args.budgets.split(",")]
        arms = [("plain", 1.0), ("full", 1.0), ("none", 0.0)] + [("infoflow", b) for b in budgets]
        seconds: dict[tuple[str, float], list[float]] = {arm: [] for arm in arms}
        answers = {}
        Engine(model, DiskStore(folder)).answer(QUESTION, documents[:2], max_new_tokens=2)  # warm-up
        plain_seconds(plain, prompt.token_ids[:1000])
        for _ in range(args.repeats):
            for arm in arms:
                if arm[0] == "plain":
                    seconds[arm].append(plain_seconds(plain, prompt.token_ids))
                    continue
                engine = Engine(model, DiskStore(folder), method=arm[0], budget=arm[1])
                answers[arm] = engine.answer(QUESTION, documents, max_new_tokens=1)
                seconds[arm].append(answers[arm].timings.ttft_seconds)
    full = statistics.median(seconds[("full", 1.0)])
    record = environment(args.device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as out:
        for arm in arms:
            usage = answers[arm].usage if arm in answers else None
            rows = prompt.num_tokens
            if usage is not None and arm[0] != "full":
                rows = usage.recomputed_tokens + usage.prefilled_tokens + usage.prompt_tokens
            median = statistics.median(seconds[arm])
            line = {
                "benchmark": "ttft",
                "arm": arm[0],
                "budget": arm[1],
                "model": args.model,
                "dtype": args.dtype,
                "context_tokens": prompt.context_tokens,
                "prompt_tokens": len(prompt.suffix_ids),
                "cached_chunks": usage.cached_chunks if usage else 0,
                "chunks": len(prompt.chunks),
                "ttft_seconds_median": round(median, 4),
                "ttft_seconds": [round(s, 4) for s in seconds[arm]],
                "times_sooner_than_full": round(full / median, 3),
                "ideal_times_sooner": round(prompt.num_tokens / rows, 3),
                "stages": stages(answers[arm]) if arm in answers else {},
                "environment": record,
            }
            out.write(json.dumps(line) + "\n")
            print({k: v for k, v in line.items() if k != "environment"}, flush=True)


def stages(answer) -> dict[str, float]:
    t = answer.timings
    return {
        "load": round(t.load_seconds, 4),
        "assemble": round(t.assemble_seconds, 4),
        "score": round(t.score_seconds, 4),
        "repair": round(t.repair_seconds, 4),
    }


def enough(engine: Engine, tokens: int) -> list[Document]:
    """Sample documents, repeated with another first line where they are not enough, up to about `tokens` tokens."""
    taken: list[Document] = []
    total, copy = 0, 0
    while total < tokens:
        for document in samples.documents():
            again = Document(text=f"Copy {copy}.\n{document.text}" if copy else document.text, title=document.title)
            size = sum(c.num_tokens for c in engine.split(again))
            if total + size > tokens + 250:
                return taken
            taken.append(again)
            total += size
        copy += 1
    return taken


if __name__ == "__main__":
    main()

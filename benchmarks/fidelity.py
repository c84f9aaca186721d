"""How close do the methods come to full prefill? KL and JS on real multi-hop questions, paired over items.

Control: plain Transformers' logits over the same token ids, after the prompt and after each token of the full-prefill
greedy continuation. Treatment: the same places under each method. Input: a `*.chunks.jsonl` file
(`{_id, question, passages: [{title, text}]}`). Writes one JSON line per item and arm, then prints means and the paired
bootstrap interval (10,000 resamples over items) of each difference to `infoflow`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from environment import environment

from infoflow_kv import Document, Engine, MemoryStore, load

ARMS = {
    "none": ("none", "auto"),
    "random": ("random", "auto"),
    "infoflow": ("infoflow", "auto"),
    "infoflow, relative layers": ("infoflow", "relative"),
    "infoflow-l2": ("infoflow-l2", "auto"),
}


def distances(ours: torch.Tensor, full: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """KL(full ‖ ours) in nats and JS in bits at each place, float64 from float32 logits."""
    p, q = torch.log_softmax(full.double(), -1), torch.log_softmax(ours.double(), -1)
    m = torch.logaddexp(p, q) - np.log(2)
    kl = (p.exp() * (p - q)).sum(-1)
    js = 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / np.log(2)
    return kl.numpy(), js.numpy()


def interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean and percentile 95 % interval of a paired bootstrap over items."""
    draws = np.random.default_rng(seed).integers(0, len(differences), (10_000, len(differences)))
    means = differences[draws].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(differences.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--budget", type=float, default=0.15)
    parser.add_argument("--continuation", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fidelity.jsonl")
    args = parser.parse_args()
    model = load(args.model)
    plain = model.plain()
    items = [json.loads(line) for line in args.data.open(encoding="utf-8")][: args.limit]
    rows: dict[str, list[tuple[float, float, float, float]]] = {arm: [] for arm in ARMS}
    record = environment()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as out:
        for number, item in enumerate(items, start=1):
            start = time.perf_counter()
            documents = [Document(text=p["text"], title=p["title"]) for p in item["passages"]]
            store = MemoryStore()
            engines = {arm: Engine(model, store, method=m, layers=layers) for arm, (m, layers) in ARMS.items()}
            full = engines["none"].answer(item["question"], documents, args.continuation, method="full")
            forced = full.token_ids[: args.continuation - 1]
            prompt = engines["none"].prompt(item["question"], documents)
            with torch.inference_mode():
                ids = torch.tensor(prompt.token_ids + forced)[None]
                reference = plain(input_ids=ids, use_cache=False, logits_to_keep=len(forced) + 1).logits[0].float()
            for arm, engine in engines.items():
                run = engine.run(prompt, budget=args.budget, forced_ids=forced)
                kl, js = distances(run.logits, reference)
                rows[arm].append((kl[0], kl.mean(), js[0], js.mean()))
                line = {
                    "_id": item["_id"],
                    "arm": arm,
                    "budget": args.budget if arm != "none" else 0.0,
                    "kl_first": float(kl[0]),
                    "kl_cont": float(kl.mean()),
                    "js_first": float(js[0]),
                    "js_cont": float(js.mean()),
                    "context_tokens": run.usage.context_tokens,
                    "recomputed_tokens": run.usage.recomputed_tokens,
                    "environment": record,
                }
                out.write(json.dumps(line) + "\n")
            out.flush()  # an interrupted run keeps what it has
            seconds = time.perf_counter() - start
            print(f"{number}/{len(items)} N={prompt.context_tokens} {seconds:.1f} s", file=sys.stderr, flush=True)
    names = ("KL first", "KL continued", "JS first", "JS continued")
    values = {arm: np.array(r) for arm, r in rows.items()}
    for column, name in enumerate(names):
        for arm, table in values.items():
            print(f"{name:13s} {arm:26s} mean {table[:, column].mean():.4f} median {np.median(table[:, column]):.4f}")
        for arm in ARMS:
            if arm != "infoflow":
                mean, low, high = interval(values["infoflow"][:, column] - values[arm][:, column])
                print(f"{name:13s} infoflow − {arm:26s} {mean:+.4f} [{low:+.4f}, {high:+.4f}]")


if __name__ == "__main__":
    main()

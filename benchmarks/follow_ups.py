"""Second questions over the same documents: what repair they save, and how close they stay to full prefill.

For each context with several questions the engine answers them one after the other with kept contexts, and each of them
afresh. Same token ids; the reference is plain Transformers over its greedy continuation, as in the laboratory. Writes
one JSON line per question after the first.
"""

import argparse
import json
import sys
from pathlib import Path

from environment import environment

from infoflow_kv import Engine, MemoryStore, load
from infoflow_kv.evaluate.distances import divergences
from infoflow_kv.evaluate.measuring import documents_of
from infoflow_kv.evaluate.options import INSTRUCTION
from infoflow_kv.evaluate.readers import read_items
from infoflow_kv.models import greedy

KEPT_BYTES = 4 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a file of which several items share their passages")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--questions", type=int, default=4, help="of each context")
    parser.add_argument("--budget", type=float, default=0.15)
    parser.add_argument("--continuation", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "follow_ups.jsonl")
    args = parser.parse_args()
    groups: dict[tuple, list] = {}
    for item in read_items(args.data).items:
        groups.setdefault(item.passages, []).append(item)
    chosen = [items[: args.questions] for items in groups.values() if len(items) >= 2][: args.contexts]
    model, record = load(args.model), environment()
    plain = model.plain("eager" if model.needs_eager else "sdpa")
    with args.out.open("w", encoding="utf-8") as out:
        for items in chosen:
            store = MemoryStore()
            keeping = Engine(model, store, instruction=INSTRUCTION, budget=args.budget, kept_bytes=KEPT_BYTES)
            fresh = Engine(model, store, instruction=INSTRUCTION, budget=args.budget)
            fresh.add(documents_of(items[0]))
            for number, item in enumerate(items):
                prompt = fresh.prompt(item.question, documents_of(item))
                if number == 0:
                    keeping.keep(keeping.run(prompt))
                    continue
                full = greedy(plain, prompt.token_ids, args.continuation, model.stop_ids)
                line = {"_id": item.id, "dataset": item.dataset, "number": number, "budget": args.budget}
                line["context_tokens"] = prompt.context_tokens
                for name, engine in (("follow_up", keeping), ("fresh", fresh)):
                    run = engine.run(prompt, forced_ids=full.token_ids[:-1])
                    engine.keep(run)
                    kl, js = divergences(run.logits, full.logits)
                    t = run.timings
                    line[name] = {
                        "kl_cont": sum(kl) / len(kl),
                        "js_cont": sum(js) / len(js),
                        "recomputed_tokens": run.usage.recomputed_tokens,
                        "kept_tokens": run.usage.kept_tokens,
                        "seconds": t.load_seconds + t.assemble_seconds + t.score_seconds + t.repair_seconds,
                    }
                line["environment"] = record
                out.write(json.dumps(line) + "\n")
                out.flush()
                print({k: v for k, v in line.items() if k != "environment"}, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

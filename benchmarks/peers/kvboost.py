"""Peer `kvboost`: its baseline, and its chunk reuse after a request with the same chunks in another order.

KVBoost cuts the ids on a grid of its own (128 tokens), so that a chunk of ours that stands elsewhere is found only
where the grid meets it again. Its `ttft_ms` begins after look-up, assembly and repair; here the whole call counts.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [*(path for path in sys.path if path != HERE), HERE]
import _job  # noqa: E402

sys.path.remove(HERE)  # this file bears the library's name, which must not be found here
import torch  # noqa: E402
from kvboost.engine import GenerationMode, InferenceEngine, RecomputeStrategy  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

CACHE_BYTES = 4 * 2**30


class IdsAsText(InferenceEngine):
    """Takes ids as text, so that it reads the very ids of the others."""

    def _encode(self, text: str) -> list[int]:
        return [int(part) for part in text.split()]


def main() -> None:
    job = _job.read()
    torch.set_num_threads(job["threads"])
    # from_pretrained would load float16 whatever the dtype asked for.
    model = AutoModelForCausalLM.from_pretrained(job["model_folder"], dtype=getattr(torch, job["dtype"])).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["model_folder"])
    arms: dict[str, dict[str, Any]] = {}
    for strategy in (RecomputeStrategy.SELECTIVE, RecomputeStrategy.CACHEBLEND):
        engine = IdsAsText(
            model=model,
            tokenizer=tokenizer,
            max_cache_bytes=CACHE_BYTES,
            max_chunks=4096,
            device=job["device"],
            recompute_strategy=strategy,
        )

        def run(ids: list[int], new_tokens: int, mode: GenerationMode, engine: IdsAsText = engine) -> dict[str, Any]:
            watch = _job.Watch()
            result = engine.generate(
                " ".join(map(str, ids)), max_new_tokens=new_tokens, mode=mode, do_sample=False, on_token=watch.add
            )
            return watch.arm(cached_tokens=result.cached_tokens)

        for _ in range(job["warmup"]):
            run(_job.warm_ids(job), 2, GenerationMode.BASELINE)
        if "prefill" not in arms:
            arms["prefill"] = run(job["token_ids"], job["new_tokens"], GenerationMode.BASELINE)
        engine.reset_cache()
        run(job["earlier_ids"], 1, GenerationMode.CHUNK_KV_REUSE)
        name = f"reordered, {strategy.value}"
        arms[name] = run(job["token_ids"], job["new_tokens"], GenerationMode.CHUNK_KV_REUSE)
    _job.answer(version("kvboost"), arms, "chunks of 128 tokens in memory; a look-up counts")


if __name__ == "__main__":
    main()

"""Peer `vllm`: prefix caching on, as in production; measured empty, and after the same chunks in another order.

One process loads the model, so that the arms share a machine state. TTFT is the time of a request for one token.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [*(path for path in sys.path if path != HERE), HERE]
import _job  # noqa: E402

sys.path.remove(HERE)  # this file bears the library's name, which must not be found here
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# In this process: no second one whose Python would have to be found again.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
import vllm  # noqa: E402


def main() -> None:
    job = _job.read()
    longest = len(job["token_ids"]) + job["new_tokens"] + 1
    engine = vllm.LLM(
        model=job["model_folder"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=longest,
        max_num_batched_tokens=max(longest, 2048),
        max_num_seqs=1,
    )

    def run(ids: list[int], new_tokens: int) -> tuple[Any, float]:
        sampling = vllm.SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        [output] = engine.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return output, time.perf_counter() - start

    def arm() -> dict[str, Any]:
        first, ttft = run(job["token_ids"], 1)
        # The prompt is cached now, so that almost all of this is decoding.
        whole, seconds = run(job["token_ids"], job["new_tokens"])
        again = run(job["token_ids"], 1)[1]
        decode = max(seconds - again, 0.0) if job["new_tokens"] > 1 else None
        return {
            "ttft_seconds": ttft,
            "token_ids": list(whole.outputs[0].token_ids),
            "decode_seconds": decode,
            "cached_tokens": getattr(first, "num_cached_tokens", None),
        }

    for _ in range(job["warmup"]):
        run(_job.warm_ids(job), 2)
    engine.reset_prefix_cache()
    arms = {"prefill": arm()}
    engine.reset_prefix_cache()
    run(job["earlier_ids"], 1)
    arms["reordered"] = arm()
    _job.answer(vllm.__version__, arms, "prefix caching; one request at a time")


if __name__ == "__main__":
    main()

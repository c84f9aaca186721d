"""Peer `llama_cpp`: llama-cpp-python on a GGUF file, with its own reuse of a common prefix.

The file's quantisation is part of what is measured: compare its answers with care.
"""

import sys
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [*(path for path in sys.path if path != HERE), HERE]
import _job  # noqa: E402

sys.path.remove(HERE)  # this file bears the library's name, which must not be found here
import llama_cpp  # noqa: E402


def main() -> None:
    job = _job.read()
    if not job["gguf"]:
        sys.exit("it reads GGUF files only; give --gguf FILE with the same model")
    model = llama_cpp.Llama(
        model_path=job["gguf"],
        n_ctx=len(job["token_ids"]) + job["new_tokens"] + 8,
        n_batch=512,
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        verbose=False,
    )

    def run(ids: list[int], new_tokens: int, keep_prefix: bool = False) -> dict[str, Any]:
        if not keep_prefix:
            model.reset()
        watch = _job.Watch()
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0, reset=True):
            watch.add(token)
            if len(watch.ids) == new_tokens:
                break
        return watch.arm()

    for _ in range(job["warmup"]):
        run(_job.warm_ids(job), 2)
    arms = {"prefill": run(job["token_ids"], job["new_tokens"])}
    run(job["earlier_ids"], 1)
    # generate keeps the longest common prefix with what was evaluated last.
    arms["reordered"] = run(job["token_ids"], job["new_tokens"], keep_prefix=True)
    _job.answer(llama_cpp.__version__, arms, f"GGUF {Path(job['gguf']).name}, KV cache in float16")


if __name__ == "__main__":
    main()

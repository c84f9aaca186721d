"""Peer `transformers`: plain generate with its own cache, greedy, SDPA."""

import sys
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [*(path for path in sys.path if path != HERE), HERE]
import _job  # noqa: E402

sys.path.remove(HERE)  # this file bears the library's name, which must not be found here
import torch  # noqa: E402
import transformers  # noqa: E402


class Streamer:
    """Hands new tokens on; generate gives the prompt first."""

    def __init__(self, watch: _job.Watch) -> None:
        self.watch = watch
        self.has_prompt = False

    def put(self, value: Any) -> None:
        if self.has_prompt:
            self.watch.add(int(value.flatten()[0]))
        self.has_prompt = True

    def end(self) -> None:
        pass


def main() -> None:
    job = _job.read()
    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model_folder"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    ).to(job["device"])

    def run(ids: list[int], new_tokens: int) -> dict[str, Any]:
        row = torch.tensor([ids], device=model.device)
        watch = _job.Watch()
        with torch.inference_mode():
            model.generate(
                row,
                attention_mask=torch.ones_like(row),
                max_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                pad_token_id=0,
                streamer=Streamer(watch),
            )
        return watch.arm()

    for _ in range(job["warmup"]):
        run(_job.warm_ids(job), 2)
    _job.answer(transformers.__version__, {"prefill": run(job["token_ids"], job["new_tokens"])})


if __name__ == "__main__":
    main()

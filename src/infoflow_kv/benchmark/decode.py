"""How many tokens a second come after the first, against Transformers' own generate with its own cache?"""

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from infoflow_kv.benchmark.arms import plain_of
from infoflow_kv.benchmark.ceilings import measure_ceilings
from infoflow_kv.benchmark.context import Request, Setting
from infoflow_kv.benchmark.timing import OnStep, measure, tidy
from infoflow_kv.benchmark.work import shape_of
from infoflow_kv.decoding import Sampling, decode, sampler
from infoflow_kv.errors import ComputeError, OptionError

Ticks = list[tuple[int, float]]  # each new token and when it was known


def measure_decode(
    setting: Setting,
    tokens: int,
    new_tokens: int = 32,
    *,
    ceiling_sizes: Mapping[str, int] | None = None,
    on_step: OnStep | None = None,
) -> list[dict[str, Any]]:
    """One record for `plain` (Transformers' generate) and one for `engine` on a full prefill of the same ids.

    Greedy, end tokens ignored, so that both write `new_tokens` tokens; the first token and all before it do not count.
    How the context came about does not matter to decoding, so one full prefill serves. The ideal reads every weight and
    the whole KV once per token at the best rate of reading that this machine showed.
    """
    if new_tokens < 2:
        raise OptionError(f"{new_tokens} new tokens: at least 2 are needed, as the first is not decoded")
    request, shape = setting.request(tokens, new_tokens), shape_of(setting.model)
    sizes = dict(ceiling_sizes or {})
    before = measure_ceilings(setting.model, shape, **sizes)
    arms = {"plain": by_transformers(setting, request, new_tokens), "engine": by_engine(setting, request, new_tokens)}
    timed = measure(arms, setting.repeats, setting.warmup, seconds_of=after_first, on_step=on_step)
    ceilings = before.higher(measure_ceilings(setting.model, shape, **sizes))
    read = shape.weight_bytes + (request.prompt.num_tokens + new_tokens // 2) * shape.kv_bytes_per_token
    ids = {name: [token for token, _ in own.results[-1]] for name, own in timed.items()}
    steps = new_tokens - 1
    return [
        setting.described("decode", request)
        | {
            "arm": name,
            "new_tokens": new_tokens,
            **own.record(),
            "tokens_per_second": tidy(steps / own.median),
            "ideal_tokens_per_second": tidy(ceilings.read_bytes_per_second / read),
            "share_of_plain_rate": tidy(timed["plain"].median / own.median),
            "same_ids": ids[name] == ids["plain"],
            "read_bytes_per_token": read,
            "ceilings": ceilings.record(),
            "environment": dict(setting.environment),
        }
        for name, own in timed.items()
    ]


def after_first(ticks: Ticks) -> float:
    """Seconds from the first new token to the last."""
    return ticks[-1][1] - ticks[0][1]


def by_transformers(setting: Setting, request: Request, new_tokens: int) -> Callable[[], Ticks]:
    plain = plain_of(setting.model)
    ids = torch.tensor([list(request.prompt.token_ids)], device=plain.device)

    def run() -> Ticks:
        watch = Watch()
        with torch.inference_mode():
            plain.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=None,
                pad_token_id=0,
                streamer=watch,
            )
        if len(watch.ticks) != new_tokens:
            raise ComputeError(f"Transformers wrote {len(watch.ticks)} tokens, {new_tokens} were asked for")
        return watch.ticks

    return run


class Watch:
    """A streamer that notes each new token and when it came; `generate` hands the prompt over first."""

    def __init__(self) -> None:
        self.ticks: Ticks = []
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self.ticks.append((int(value.flatten()[0]), time.perf_counter()))
        self._has_prompt = True

    def end(self) -> None:
        """Nothing to do at the end."""


def by_engine(setting: Setting, request: Request, new_tokens: int) -> Callable[[], Ticks]:
    endless = copy.copy(setting.model)
    endless.stop_ids = frozenset()
    found = setting.engine(None, "full").run(request.prompt, num_new=new_tokens)

    def run() -> Ticks:
        # Slots behind the prompt are written anew each time, so that one prefill serves all repeats.
        tokens = decode(
            endless,
            found.context,
            found.rotary,
            request.prompt.num_tokens,
            found.logits[-1],
            sampler(Sampling()),
            new_tokens,
        )
        return [(token, time.perf_counter()) for token in tokens]

    return run

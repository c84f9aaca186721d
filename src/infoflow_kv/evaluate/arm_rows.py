"""What is measured of one request: its reference by plain Transformers, and an arm's distance to it as a row."""

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from infoflow_kv.choosing import permuted
from infoflow_kv.decoding import Sampling, decode, sampler
from infoflow_kv.engine import Engine
from infoflow_kv.errors import ComputeError, PromptTooLongError
from infoflow_kv.evaluate.arms import Arm
from infoflow_kv.evaluate.distances import agreement, divergences, kv_error, margin, nll
from infoflow_kv.evaluate.items import facts
from infoflow_kv.evaluate.options import MAX_NEW_TOKENS, Options
from infoflow_kv.evaluate.results import FORMAT
from infoflow_kv.evaluate.rotation import rope_similarity
from infoflow_kv.evaluate.windows import smallest_window
from infoflow_kv.models import LocalMemory, PlainRun, forward_rows, greedy
from infoflow_kv.positions import shift_of
from infoflow_kv.records import Prompt
from infoflow_kv.runs import Run
from infoflow_kv.select import layers_text

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel

logger = logging.getLogger(__name__)


class Asked(Protocol):
    """What a row says of its item, be it about texts or about pictures."""

    @property
    def id(self) -> str: ...

    @property
    def dataset(self) -> str: ...

    @property
    def answers(self) -> tuple[str, ...]: ...

    @property
    def group(self) -> str: ...

    @property
    def meta(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain Transformers says about an item: its greedy answer, the gold answer's NLL with and without context.

    `forced`: the part of the answer over which arms are compared.
    """

    plain: PlainRun
    forced: tuple[int, ...]
    gold_ids: tuple[int, ...]
    gold_nll: float
    closed_nll: float
    closed_prediction: str


class ArmRows:
    """A model with its plain twin; whoever asks a kind of items makes their rows with it."""

    def __init__(self, model: "LanguageModel", options: Options) -> None:
        self.model = model
        self.options = options
        self.plain = model.plain("eager" if model.needs_eager else "sdpa")
        self.window = smallest_window(self.plain.config)
        self._told = False  # that a kv_error cannot be measured

    @property
    def max_new_tokens(self) -> int:
        """The longest answer, in tokens."""
        return self.options.max_new_tokens or MAX_NEW_TOKENS

    def with_longest(self, max_new_tokens: int) -> Self:
        """The same for answers of another length; nothing is copied but what is said of it."""
        other = copy.copy(self)
        other.options = replace(self.options, max_new_tokens=max_new_tokens)
        return other

    def reference(self, prompt: Prompt, closed: Prompt, gold_ids: tuple[int, ...]) -> Reference:
        """What every arm of the item is compared with; `closed`: the same question without any context."""
        o = self.options
        run = self._greedy(prompt)
        alone = self._greedy(closed)
        return Reference(
            plain=run,
            forced=run.token_ids[: o.continuation],
            gold_ids=gold_ids,
            gold_nll=self._plain_nll(prompt, gold_ids, run),
            closed_nll=self._plain_nll(closed, gold_ids, alone),
            closed_prediction=self._text(alone.token_ids),
        )

    def _greedy(self, prompt: Prompt) -> PlainRun:
        return greedy(self.plain, prompt.token_ids, self.max_new_tokens, self.model.stop_ids)

    def _plain_nll(self, prompt: Prompt, gold_ids: tuple[int, ...], run: PlainRun) -> float:
        """The gold answer's NLL after plain Transformers' own KV of the prompt; a forward of all where it has none."""
        if run.keys is None or run.values is None:
            return nll(self._plain_logits(prompt, gold_ids), gold_ids)
        keys, values = self.model.empty_slots(prompt.num_tokens + len(gold_ids))
        keys[:, :, : prompt.num_tokens] = run.keys[:, :, : prompt.num_tokens]
        values[:, :, : prompt.num_tokens] = run.values[:, :, : prompt.num_tokens]
        shift = shift_of(prompt.chunks)
        return nll(self._after(keys, values, prompt.num_tokens, run.logits[:1], gold_ids, shift=shift), gold_ids)

    def _plain_logits(self, prompt: Prompt, gold_ids: tuple[int, ...]) -> torch.Tensor:
        """The logits before each gold token by one forward of plain Transformers over all."""
        ids = torch.tensor([prompt.token_ids + gold_ids], device=self.model.device)
        with torch.inference_mode():
            out = self.plain(input_ids=ids, use_cache=False, logits_to_keep=len(gold_ids) + 1)
        logits: torch.Tensor = out.logits[0, :-1].float()
        return logits

    def _after(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        filled: int,
        first: torch.Tensor,
        gold_ids: tuple[int, ...],
        rotary: Any = None,
        shift: int = 0,
    ) -> torch.Tensor:
        """The logits before each gold token; `first` are those before the first one. `shift`: of positions against
        slots, see `Context`."""
        if len(gold_ids) == 1:
            return first
        ranks = torch.arange(filled, filled + len(gold_ids) - 1, device=keys.device)
        ids = torch.tensor(gold_ids[:-1], device=keys.device)
        tables = (rotary or self.model.rotary()).tables(ranks + shift)
        logits = forward_rows(self.model, ids, ranks, tables, LocalMemory(keys, values), num_logits=len(gold_ids) - 1)
        if logits is None:
            raise ComputeError("the forward over the gold answer ended early")
        return torch.cat([first, logits])

    def _full(self, prompt: Prompt, reference: Reference) -> dict[str, Any]:
        """The row of full prefill itself: plain Transformers, no distance to itself."""
        run = reference.plain
        stopped = run.token_ids[-1] in self.model.stop_ids
        return {
            "prediction": self._text(run.token_ids),
            "stop_reason": "eos" if stopped else "length",
            "kl_first": 0.0,
            "kl_cont": 0.0,
            "js_first": 0.0,
            "js_cont": 0.0,
            "top1": True,
            "prefix": len(reference.forced),
            "gold_nll": reference.gold_nll,
            "closed_gold_nll": reference.closed_nll,
            "closed_prediction": reference.closed_prediction,
            "reusable_tokens": 0,
            "recomputed_tokens": 0,
            "recomputed_share": 1.0,
            "recomputed_share_all": 1.0,
            "computed_share": 1.0,
            "selection_lift": None,
            "ttft_seconds": run.ttft_seconds,
            "timings": {},
            "token_ids_sha256": sha256_of_ids(prompt.token_ids),
        }

    def _run(self, engine: Engine, arm: Arm, prompt: Prompt, reference: Reference) -> Run:
        """The arm's request, with full prefill's answer as its continuation; its chunks must be stored."""
        return engine.run(
            prompt,
            recipe=arm.recipe(self.model),
            num_new=max(self.max_new_tokens, len(reference.gold_ids)) + 1,
            forced_ids=reference.forced[:-1],
            seed=self.options.seed,
            truth=reference.plain.values,
        )

    def _measured(self, run: Run, item: Asked, arm: Arm, prompt: Prompt, reference: Reference) -> dict[str, Any]:
        """What a run says beside its item. Its context is written over: look at it before."""
        o = self.options
        forced = reference.forced
        ids = ids_read(run, prompt)
        if run.usage.prefilled_tokens or run.usage.measured_tokens:
            raise ComputeError(f"{arm.name} had to prefill chunks, which its time would hold; they should be stored")
        kl, js = divergences(run.logits, reference.plain.logits[: len(forced)])
        wanted = o.generate is None or arm.budget is None or arm.budget in o.generate or arm.name in o.generate
        prediction, stop = self._continue(run, forced) if wanted else (None, None)
        errors: dict[str, Any] = {}
        full_keys, full_values = reference.plain.keys, reference.plain.values
        if o.kv_error and (full_keys is None or full_values is None):
            self._tell_unkept(item)
        elif o.kv_error and full_keys is not None and full_values is not None and not run.recipe.reorder:
            slots = run.selection.slots
            errors["delta_k"], errors["delta_v"] = kv_error(run.context, slots, full_keys, full_values)
        # Last: the gold answer is written over the forced continuation's slots.
        given = (prompt.num_tokens, run.logits[:1], reference.gold_ids, run.rotary, run.context.shift)
        gold_logits = self._after(run.context.keys, run.context.values, *given)
        similarity = None
        if run.context.visual is None:  # slots are positions; the rotation of images has several axes
            prompt_positions = torch.arange(prompt.context_tokens, prompt.num_tokens)
            similarity = rope_similarity(run.selection.slots.cpu(), prompt_positions, self.model.rotary())
        usage, reusable = run.usage, max(1, run.usage.reusable_tokens)
        return {
            "prediction": prediction,
            "stop_reason": stop,
            "kl_first": kl[0],
            "kl_cont": sum(kl) / len(kl),
            "js_first": js[0],
            "js_cont": sum(js) / len(js),
            "top1": agreement(run.logits[:1], forced[:1]) == 1,
            "prefix": agreement(run.logits, forced),
            "gold_nll": nll(gold_logits, reference.gold_ids),
            "closed_gold_nll": None,
            "closed_prediction": None,
            "reusable_tokens": usage.reusable_tokens,
            "recomputed_tokens": usage.recomputed_tokens,
            "recomputed_share": usage.recomputed_tokens / reusable,
            "recomputed_share_all": usage.recomputed_tokens / usage.context_tokens,
            "computed_share": run.selection.mean_rows / reusable,
            "selection_lift": None,
            "rope_mean_of_max": similarity.mean_of_max if similarity is not None else None,
            "rope_max": similarity.max if similarity is not None else None,
            "ttft_seconds": run.timings.load_seconds
            + run.timings.assemble_seconds
            + run.timings.score_seconds
            + run.timings.repair_seconds,
            "timings": {name: round(value, 5) for name, value in asdict(run.timings).items() if value},
            "token_ids_sha256": sha256_of_ids(ids),
            **errors,
        }

    def _tell_unkept(self, item: Asked) -> None:
        if not self._told:
            logger.warning(
                "plain Transformers keeps no KV of all of item '%s', which is longer than this model's sliding window "
                "of %s tokens: its rows, and those of other such items, have no delta_k and delta_v (--kv-error)",
                item.id,
                self.window,
            )
        self._told = True

    def _continue(self, run: Run, forced: tuple[int, ...]) -> tuple[str, str]:
        """The method's own greedy answer: what it shares with the forced one, then token by token."""
        limit = self.max_new_tokens
        same = agreement(run.logits, forced)
        ids = list(forced[:same])
        if not (ids and ids[-1] in self.model.stop_ids) and len(ids) < limit:
            # The last forced token was never fed: where all were shared, it is chosen once more.
            start = min(same, len(forced) - 1)
            tokens = decode(
                self.model,
                run.context,
                run.rotary,
                run.prompt.num_tokens + start,
                run.logits[start],
                sampler(Sampling()),
                limit - start,
            )
            ids[start:] = tokens
        return self._text(ids), "eos" if ids[-1] in self.model.stop_ids else "length"

    def _text(self, token_ids: Sequence[int]) -> str:
        kept = [t for t in token_ids if t not in self.model.stop_ids]
        return self.model.text(kept).strip()

    def _row(
        self, item: Asked, arm: Arm, prompt: Prompt, reference: Reference, measured: dict[str, Any]
    ) -> dict[str, Any]:
        recipe = arm.recipe(self.model)
        row = {
            "format": FORMAT,
            "_id": item.id,
            "dataset": item.dataset,
            "group": item.group,
            "arm": arm.name,
            "method": arm.method,
            "budget": arm.budget,
            "geometry": recipe.geometry,
            "reorder": recipe.reorder,
            "layers": layers_text(recipe.layers) if recipe.method.selector else None,
            "answers": list(item.answers),
            "prefix_of": len(reference.forced),
            "margin": margin(reference.plain.logits[0]),
            "full_gold_nll": reference.gold_nll,
            "context_tokens": prompt.context_tokens,
            "prompt_tokens": len(prompt.suffix_ids),
            "chunks": len(prompt.chunks),
            "prompt_ids_sha256": sha256_of_ids(prompt.token_ids),
            "meta": facts(item.meta),
            **measured,
        }
        return {key: round(value, 7) if isinstance(value, float) else value for key, value in row.items()}


def ids_read(run: Run, prompt: Prompt) -> tuple[int, ...]:
    """The ids that the model really read, in its order; ComputeError unless they are the item's, chunk by chunk."""
    ids = (*run.context.token_ids.tolist(), *run.prompt.suffix_ids)
    if sorted(run.order) != list(range(len(prompt.chunks))) or ids != permuted(prompt, run.order).token_ids:
        raise ComputeError(f"{run.method.name} read other token ids than the item's; its row would compare nothing")
    return ids


def check_fits(model: "LanguageModel", prompt: Prompt, new_tokens: int) -> None:
    """Nothing; PromptTooLongError where prompt and answer exceed the window."""
    if prompt.num_tokens + new_tokens + 1 > model.window_tokens:
        raise PromptTooLongError(prompt.num_tokens, new_tokens + 1, model.window_tokens)


def sha256_of_ids(token_ids: Sequence[int]) -> str:
    """The digest by which rows show that their arms saw the same ids; reordered ones, ids of the same prompt."""
    return hashlib.sha256(torch.tensor(list(token_ids), dtype=torch.int64).numpy().tobytes()).hexdigest()

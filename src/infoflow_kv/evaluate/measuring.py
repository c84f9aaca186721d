"""One item: the reference by plain Transformers, then one row per arm."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from infoflow_kv.choosing import permuted
from infoflow_kv.decoding import Sampling, decode, sampler
from infoflow_kv.engine import Engine
from infoflow_kv.errors import ComputeError, OptionError, PromptTooLongError
from infoflow_kv.evaluate.arms import Arm
from infoflow_kv.evaluate.distances import agreement, divergences, kv_error, margin, nll, selection_lift
from infoflow_kv.evaluate.items import Item, facts
from infoflow_kv.evaluate.json_text import cleaned
from infoflow_kv.evaluate.niah import TASK as NEEDLES
from infoflow_kv.evaluate.prompts import worded
from infoflow_kv.evaluate.results import FORMAT
from infoflow_kv.evaluate.rotation import rope_similarity
from infoflow_kv.evaluate.variable_tracking import TASK as TRACKING
from infoflow_kv.evaluate.windows import check_truth, smallest_window
from infoflow_kv.methods import find_method
from infoflow_kv.models import PlainRun, forward_rows, greedy
from infoflow_kv.records import Document, Prompt
from infoflow_kv.runs import Run
from infoflow_kv.select import layers_text
from infoflow_kv.store import MemoryStore

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel

logger = logging.getLogger(__name__)

INSTRUCTION = "Answer the question using the documents. Give the answer only, in a few words."


@dataclass(frozen=True, slots=True)
class Options:
    """How items are measured. `continuation`: places over which distances are taken. `generate`: budgets, or names of
    arms, that also write an answer of up to `max_new_tokens` (None: all arms). `kv_error`: ΔK and ΔV per layer.
    `instruction`: for items that have none of their own. `prompts`: instead, a template for each data set (see
    `prompts.worded`). `lengthen`: passage tokens to which items were lengthened, None if they were not. Lone surrogates
    in texts are replaced, as in data files.
    """

    max_new_tokens: int = 32
    continuation: int = 16
    generate: tuple[float | str, ...] | None = None
    kv_error: bool = False
    chunk_tokens: int = 512
    head_policy: str = "head"
    instruction: str = INSTRUCTION
    seed: int = 0
    lengthen: int | None = None
    prompts: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "continuation", "lengthen"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name} is {value!r}; expected a whole number of at least 1")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed {self.seed} is outside 0..2^63-1")
        object.__setattr__(self, "instruction", cleaned(self.instruction))
        object.__setattr__(self, "prompts", None if self.prompts is None else cleaned(dict(self.prompts)))


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


class Bench:
    """A model with its plain twin, ready to measure items one after the other."""

    def __init__(self, model: "LanguageModel", options: Options) -> None:
        self.model = model
        self.options = options
        self.plain = model.plain("eager" if model.needs_eager else "sdpa")
        self.window = smallest_window(self.plain.config)
        self._told = False  # that a kv_error cannot be measured

    def worded(self, item: Item) -> Item:
        """The item as the model reads it; OptionError where the prompts have none for its data set."""
        return item if self.options.prompts is None else worded(item, self.options.prompts)

    def engine(self, item: Item | None = None, method: str = "infoflow") -> Engine:
        """An engine with an empty store of its own: every item starts from nothing.

        `item`: worded; its own instruction counts. `method`: decides what `add` measures beside the KV.
        """
        o = self.options
        own = item is not None and (o.prompts is not None or bool(item.instruction))
        return Engine(
            self.model,
            MemoryStore(),
            method=method,
            chunk_tokens=o.chunk_tokens,
            head_policy=o.head_policy,
            instruction=item.instruction if item is not None and own else o.instruction,
            labels=o.prompts is None,
        )

    def check_passages(self, item: Item) -> None:
        """Nothing; OptionError for a made item of which a passage would be more than one chunk.

        A needle stands at a chosen place of a passage, and each hop in a passage of its own: in another chunking that
        says nothing.
        """
        if item.meta.get("task") not in (NEEDLES, TRACKING):
            return
        item = self.worded(item)
        engine = self.engine(item)
        for index, document in enumerate(documents_of(item)):
            chunks = engine.split(document)
            if len(chunks) != 1:
                tokens = sum(chunk.num_tokens for chunk in chunks)
                raise OptionError(
                    f"item '{item.id}' places its facts by passages, and passage {index} of {tokens} tokens makes "
                    f"{len(chunks)} chunks at chunk_tokens {self.options.chunk_tokens}; use chunk_tokens {tokens} or "
                    "more, or make the items anew with smaller passages"
                )

    def rows(self, item: Item, arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
        """One row per arm, all on the same token ids.

        Raises PromptTooLongError, or OptionError for passages of a made item (see `check_passages`) and for an oracle
        that cannot know the full prefill (see `check_truth`), before anything is computed.

        The chunks are stored before the first arm runs: no arm's time holds their prefill. It does hold the rows of the
        forced continuation, which full prefill's time does not: in rows, times are an upper bound.
        """
        self.check_passages(item)
        item = self.worded(item)
        methods = [find_method(arm.method) for arm in arms]
        measuring = [m.name for m in methods if "sensitivity" in m.needs]
        engine = self.engine(item, measuring[0] if measuring else "infoflow")
        documents = documents_of(item)
        prompt = engine.prompt(item.question, documents)
        gold_ids = engine.encoder.content(item.answers[0])[0]
        check_fits(self.model, prompt, max(self.options.max_new_tokens, len(gold_ids)))
        check_truth(arms, self.window, item.id, prompt.num_tokens, self.options.max_new_tokens)
        reference = self.reference(engine, item, prompt, gold_ids)
        if any(m.reuse for m in methods):
            engine.add(documents)
        for arm in arms:
            if arm.method == "full":
                yield self._row(item, arm, prompt, reference, self._full(engine, prompt, reference))
            else:
                yield self._row(item, arm, prompt, reference, self._measured(engine, item, arm, prompt, reference))

    def reference(self, engine: Engine, item: Item, prompt: Prompt, gold_ids: tuple[int, ...]) -> Reference:
        """What every arm of the item is compared with."""
        o = self.options
        run = self._greedy(prompt)
        closed = engine.prompt(item.question, [])
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
        return greedy(self.plain, prompt.token_ids, self.options.max_new_tokens, self.model.stop_ids)

    def _plain_nll(self, prompt: Prompt, gold_ids: tuple[int, ...], run: PlainRun) -> float:
        """The gold answer's NLL after plain Transformers' own KV of the prompt; a forward of all where it has none."""
        if run.keys is None or run.values is None:
            ids = torch.tensor([prompt.token_ids + gold_ids], device=self.model.device)
            with torch.inference_mode():
                out = self.plain(input_ids=ids, use_cache=False, logits_to_keep=len(gold_ids) + 1)
            return nll(out.logits[0, :-1].float(), gold_ids)
        keys, values = self.model.empty_slots(prompt.num_tokens + len(gold_ids))
        keys[:, :, : prompt.num_tokens] = run.keys[:, :, : prompt.num_tokens]
        values[:, :, : prompt.num_tokens] = run.values[:, :, : prompt.num_tokens]
        return nll(self._after(keys, values, prompt.num_tokens, run.logits[:1], gold_ids), gold_ids)

    def _after(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        filled: int,
        first: torch.Tensor,
        gold_ids: tuple[int, ...],
        rotary: Any = None,
    ) -> torch.Tensor:
        """The logits before each gold token; `first` are those before the first one."""
        if len(gold_ids) == 1:
            return first
        ranks = torch.arange(filled, filled + len(gold_ids) - 1, device=keys.device)
        ids = torch.tensor(gold_ids[:-1], device=keys.device)
        tables = (rotary or self.model.rotary()).tables(ranks)
        logits = forward_rows(self.model, ids, ranks, ranks, tables, keys, values, num_logits=len(gold_ids) - 1)
        if logits is None:
            raise ComputeError("the forward over the gold answer ended early")
        return torch.cat([first, logits])

    def _full(self, engine: Engine, prompt: Prompt, reference: Reference) -> dict[str, Any]:
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

    def _measured(self, engine: Engine, item: Item, arm: Arm, prompt: Prompt, reference: Reference) -> dict[str, Any]:
        o = self.options
        forced = reference.forced
        run = engine.run(
            prompt,
            recipe=arm.recipe(self.model),
            num_new=max(o.max_new_tokens, len(reference.gold_ids)) + 1,
            forced_ids=forced[:-1],
            seed=o.seed,
            truth=reference.plain.values,
        )
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
        gold_logits = self._after(
            run.context.keys, run.context.values, prompt.num_tokens, run.logits[:1], reference.gold_ids, run.rotary
        )
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
            "selection_lift": selection_lift(run, supporting_chunks(item, prompt)),
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

    def _tell_unkept(self, item: Item) -> None:
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
        limit = self.options.max_new_tokens
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
        self, item: Item, arm: Arm, prompt: Prompt, reference: Reference, measured: dict[str, Any]
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


def documents_of(item: Item) -> list[Document]:
    """The passages as documents, named by their index."""
    return [Document(text=p.text, title=p.title, id=f"p{index}") for index, p in enumerate(item.passages)]


def supporting_chunks(item: Item, prompt: Prompt) -> list[int]:
    """Indices of the chunks of supporting passages."""
    wanted = {f"p{index}" for index in item.supporting}
    return [index for index, chunk in enumerate(prompt.chunks) if chunk.document_id in wanted]


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

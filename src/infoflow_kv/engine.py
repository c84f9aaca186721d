"""The engine: the only file that knows the order of the phases.

documents → chunks → (store | prefill) → [reorder] → assemble → choose → repair with the prompt rows → decode
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from infoflow_kv.choosing import Choice, Request, choose, order_chunks, permuted
from infoflow_kv.chunking import Documents, TextEncoder, as_document, chunks_of, listed, render
from infoflow_kv.chunking import layout as lay_out
from infoflow_kv.decoding import Sampling, TextAssembler, decode, sampler
from infoflow_kv.errors import ComputeError, OptionError, PromptTooLongError
from infoflow_kv.kept import ContextKey, Kept, KeptContexts, Trace
from infoflow_kv.models import LanguageModel
from infoflow_kv.parallel.cost import Layout
from infoflow_kv.parallel.group import Group
from infoflow_kv.placing import Here, Place
from infoflow_kv.planning import Plan, plan_request
from infoflow_kv.positions import request_positions
from infoflow_kv.prefilling import NEIGHBOUR
from infoflow_kv.recipes import Recipe, change, check_chunk_tokens, check_regime, check_tiles, make_recipe
from infoflow_kv.records import AddReport, Answer, Chunk, ChunkIdentity, Document, Piece, Prompt, Selection, Usage
from infoflow_kv.repairing import repair
from infoflow_kv.runs import Clock, Run, answer_of
from infoflow_kv.speeds import find_speeds
from infoflow_kv.spreading import spread_over
from infoflow_kv.store import ChunkStore
from infoflow_kv.supply import Parts, Supply

if TYPE_CHECKING:
    from torch import Tensor

INSTRUCTION = "Answer the question using the documents."
HEAD_POLICIES = ("head", "none")


class Engine:
    """Answers questions over documents from stored chunk KV.

    `store`: where chunk KV is kept; None keeps nothing between requests. `method`: a name of `METHODS`. `budget`:
    share (0..1) of the reusable tokens that is recomputed, or `auto[:P]` for as many as cover the share P of the
    predicted influence, `budget_max` of all at most. `layers`: the layer set of the scores (`all`, `relative`,
    `22-25`; `auto` is the one measured for this model, else `relative`). `geometry`: RoPE positions while scoring, a
    name of `GEOMETRIES`. `reorder`: put the chunks that matter most next to the question. `chunk_floor`, `chunk_cap`:
    share of the budget that is spread over all chunks first, and the most that one chunk gets of it. `repair_layers`:
    layers whose stored KV is replaced (an ablation). `chunk_tokens`: longest chunk. `head_policy`: `head` prefills
    chunks behind the chat header, `none` alone. `namespace`: tenant; KV is never reused across namespaces. `labels`:
    put `Question:` before the question; without, it brings all words behind the documents with it. `kept_bytes`: keep
    up to so many bytes of repaired contexts on the model's device, for follow-up questions over the same documents,
    whose answers then depend on what was asked before. `plans`: full prefill where that is predicted to be quicker,
    from the speeds that `infoflow-kv ingest` measured here. `tiles`: images are prefilled in k × k tiles (1: whole).
    `repair_tokens`: recompute among `visual`, `text` or `all` tokens; the budget is a share of these. `group`: the
    ranks that answer each request together, all of which make the same calls; `layout`: `Q`, `H`, `HQ`, or `auto` for
    the one that sends least (docs/parallel.md).

    Raises OptionError for anything outside its range. Safe to share between threads; with a `group` one request at a
    time is answered, and another one is an OptionError.

    >>> engine = Engine(model, store=MemoryStore())  # doctest: +SKIP
    >>> engine.answer("Who keeps the lighthouse?", ["Ada keeps the lighthouse."]).text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: LanguageModel,
        store: ChunkStore | None = None,
        method: str = "infoflow",
        budget: float | str = 0.15,
        layers: str = "auto",
        chunk_tokens: int = 512,
        head_policy: str = "head",
        namespace: str = "public",
        instruction: str = INSTRUCTION,
        system: str | None = None,
        *,
        budget_max: float | None = None,
        geometry: str = "GLOBAL",
        reorder: bool = False,
        chunk_floor: float = 0.0,
        chunk_cap: float = 1.0,
        repair_layers: str = "all",
        labels: bool = True,
        kept_bytes: int = 0,
        plans: bool = False,
        tiles: int = 1,
        repair_tokens: str = "all",
        group: Group | None = None,
        layout: str | Layout = "auto",
    ) -> None:
        self.model = model
        self.tiles = check_tiles(tiles)
        self.plans = plans
        self.store = store
        self.recipe = make_recipe(
            model,
            method,
            budget,
            budget_max=budget_max,
            layers=layers,
            geometry=geometry,
            reorder=reorder,
            chunk_floor=chunk_floor,
            chunk_cap=chunk_cap,
            repair_layers=repair_layers,
            repair_tokens=repair_tokens,
        )
        self._layers = layers
        self.chunk_tokens = check_chunk_tokens(chunk_tokens, model.window_tokens)
        if head_policy not in HEAD_POLICIES:
            raise OptionError(f"head policy '{head_policy}' is not one of {', '.join(HEAD_POLICIES)}")
        self.head_policy = head_policy
        self.namespace = namespace
        self.encoder = TextEncoder(model.tokenizer)
        self.template = render(model.tokenizer, instruction=instruction, system=system, labels=labels)
        # The head depends on neither question nor documents: any prompt shows it.
        self.head_ids = lay_out("?", (), self.template, self.encoder).head_ids
        self._kept = KeptContexts(kept_bytes)
        self._supply = Supply(
            model,
            store,
            namespace,
            self.head_ids,
            behind_head=head_policy == "head",
            neighbour_ids=self.encoder.content(NEIGHBOUR)[0],
        )
        self.place: Place = Here(model, self._supply)
        if group is not None:
            refused = [name for name, given in (("kept_bytes", kept_bytes), ("plans", plans)) if given]
            self.place = spread_over(group, layout, model, self._supply, self.recipe, refused=refused)

    # ---- offline ----

    def add(self, documents: Documents, on_progress: Callable[[int, int], None] | None = None) -> AddReport:
        """Prefills and stores what the store does not hold yet; a chunk that is there costs nothing.

        `on_progress(done, total)` is called after each chunk. May be interrupted at any time and called again: each
        chunk is stored whole or not at all. OptionError without a store, StoreError if it cannot be written.
        """
        if self.store is None:
            raise OptionError("this engine has no store to add documents to; give Engine(store=...)")
        start = time.perf_counter()
        given = listed(documents)
        chunks = [c for d in given for c in self.split(d)]
        cached = prefilled = 0
        measure = "sensitivity" in self.recipe.method.needs
        for done, new in enumerate(self._supply.add(chunks, measure), start=1):
            cached += not new
            prefilled += new
            if on_progress is not None:
                on_progress(done, len(chunks))
        return AddReport(
            documents=len(given),
            chunks=len(chunks),
            cached_chunks=cached,
            tokens=sum(c.num_tokens for c in chunks),
            prefilled_tokens=prefilled,
            seconds=time.perf_counter() - start,
        )

    def split(self, document: Document | str) -> tuple[Chunk, ...]:
        """The chunks of one document."""
        return chunks_of(as_document(document), self.encoder, self.chunk_tokens, self.model.vision, self.tiles)

    def identify(self, chunk: Chunk) -> ChunkIdentity:
        """The identity under which this engine stores and finds a chunk."""
        return self._supply.identify(chunk)

    def identify_head(self) -> ChunkIdentity:
        """The identity of the chat header, which is stored like a chunk of its own."""
        return self._supply.identify_head()

    # ---- online ----

    def answer(
        self,
        question: str,
        documents: Documents,
        max_new_tokens: int = 64,
        *,
        method: str | None = None,
        budget: float | str | None = None,
        stop: Sequence[str] = (),
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    ) -> Answer:
        """The whole answer; see `stream` for the arguments."""
        pieces = self.stream(
            question, documents, max_new_tokens, method=method, budget=budget, stop=stop, sampling=sampling
        )
        for piece in pieces:
            if piece.answer is not None:
                return piece.answer
        raise ComputeError("the stream ended without an answer")

    def stream(
        self,
        question: str,
        documents: Documents,
        max_new_tokens: int = 64,
        *,
        method: str | None = None,
        budget: float | str | None = None,
        stop: Sequence[str] = (),
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    ) -> Iterator[Piece]:
        """Pieces of text as they become certain; the last piece carries the whole answer.

        `documents` in the order in which the model is to read them. `method`, `budget`: this request's, instead of the
        engine's. `stop`: strings that end the answer and are not part of it.

        Raises PromptTooLongError with its three numbers, OptionError, ComputeError; never a wrong answer silently.
        """
        start = time.perf_counter()
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise OptionError(f"max_new_tokens {max_new_tokens!r} is not a whole number of at least 1")
        assembler = TextAssembler(self.model.text, self.model.stop_ids, stop)
        with self.place.request((tuple(stop), sampling)):
            prompt = self.prompt(question, documents)
            recipe = change(self.recipe, self.model, method, budget, self._layers)
            run = self._run(prompt, recipe, max_new_tokens, (), sampling.seed, None)
            first = 0.0
            pick, logits = self.place.picks(sampler(sampling)), run.logits[-1] if run.logits.numel() else None
            tokens = self.place.decoding(
                decode(self.model, run.context, run.rotary, prompt.num_tokens, logits, pick, max_new_tokens)
            )
            for token in tokens:
                first = first or time.perf_counter()
                if piece := assembler.push(token):
                    yield Piece(piece)
                if assembler.reason is not None:
                    break
            rest = "" if assembler.reason is not None else assembler.finish()
            done = time.perf_counter()
            timings = replace(run.timings, ttft_seconds=first - start, decode_seconds=done - first)
        self.keep(run)
        yield Piece(rest, answer_of(run, self.model.name, assembler, timings))

    def prompt(self, question: str, documents: Documents) -> Prompt:
        """The token ids of a request, the same for every method."""
        chunks = [c for d in listed(documents) for c in self.split(d)]
        return lay_out(question, chunks, self.template, self.encoder)

    def run(
        self,
        prompt: Prompt,
        *,
        method: str | None = None,
        budget: float | str | None = None,
        recipe: Recipe | None = None,
        num_new: int = 1,
        forced_ids: Sequence[int] = (),
        seed: int = 0,
        truth: "Tensor | None" = None,
    ) -> Run:
        """One request up to the logits of its first new token.

        `recipe`: instead of the engine's; `method` and `budget` change only these. `forced_ids`: a continuation that is
        fed as further prompt rows *after* selection (teacher forcing); the logits then are those after the prompt and
        after each forced token. `truth`: the values of a full prefill `[layers, kv_heads, context.., head_dim]`, for
        the laboratory's oracle.
        """
        recipe = change(recipe or self.recipe, self.model, method, budget, self._layers)
        with self.place.request(()):
            return self._run(prompt, recipe, num_new, forced_ids, seed, truth)

    def _run(
        self,
        prompt: Prompt,
        recipe: Recipe,
        num_new: int,
        forced_ids: Sequence[int],
        seed: int,
        truth: "Tensor | None",
    ) -> Run:
        """`run`, inside a request of the engine's place."""
        if prompt.head_ids != self.head_ids:
            raise OptionError("the prompt was made by an engine with another chat header; use this engine's prompt()")
        num_new = max(num_new, len(forced_ids) + 1)
        if prompt.num_tokens + num_new > self.model.window_tokens:
            raise PromptTooLongError(prompt.num_tokens, num_new, self.model.window_tokens)
        check_regime(self.model, prompt.num_tokens, num_new)
        reuse = recipe.method.reuse
        rotary = self.model.rotary()
        num_context, forced = prompt.context_tokens, len(forced_ids)
        num_rows = len(prompt.suffix_ids) + forced
        tables = rotary.tables(request_positions(prompt, num_rows))
        num_slots = prompt.num_tokens + num_new
        suffix = torch.tensor(prompt.suffix_ids, device=self.model.device)

        place = self.place
        place.begin(prompt, recipe, num_new, seed, in_laboratory=bool(forced or truth is not None))
        clock = Clock(self.model.device)
        key, kept = self._find_kept(prompt, recipe, num_context + num_rows)
        plan = self._plan(prompt, recipe, num_context + num_rows) if kept is None else None
        if plan is not None and plan.picks_full:
            recipe, reuse, key = change(recipe, self.model, "full", None, self._layers), False, None
        with place.phase("load"):
            parts = self._parts(prompt, recipe, kept)
        clock.mark("load")
        sensitivity = parts.sensitivity() if kept is None else kept.sensitivity
        request = Request(self.model, place, recipe, prompt, parts, suffix, seed, sensitivity, truth)
        order = tuple(range(len(prompt.chunks)))
        if reuse and recipe.reorder and len(order) > 1:
            with place.phase("score"):
                order = order_chunks(request)
            prompt, parts = permuted(prompt, order), parts.reordered(order)
            request = replace(request, prompt=prompt, parts=parts, sensitivity=parts.sensitivity())
            tables = rotary.tables(request_positions(prompt, num_rows))  # images of other sizes now stand before others
        clock.mark("reorder")
        if kept is not None:
            context = kept.context(self.model, num_slots)
        elif reuse:
            exact = self._supply.exact_tokens(parts, num_context + num_rows, prompt.chunks)
            last = recipe.geometry == "GLOBAL"  # no other geometry will assemble them again
            given = [parts]
            if last:  # whoever still named them would keep their KV beside the context's
                parts = replace(parts, chunks=())
                request = replace(request, parts=parts)
            context, parts = place.assemble(prompt, given, tables, num_slots, exact, last=last)
            request = replace(request, parts=parts)
        else:
            context = place.reserve(prompt, num_slots)
        clock.mark("assemble")
        if reuse:
            with place.phase("score"):
                choice = choose(request, context, tables)
                place.same(choice.selection)
        else:
            reason = plan.reason if plan is not None else ""
            choice = Choice(Selection(torch.arange(context.num_tokens, device=self.model.device), reason=reason))
        repaired = choice.selection if kept is None else kept.without(choice.selection)
        clock.mark("score")
        rows = torch.cat([suffix, torch.tensor(forced_ids, dtype=suffix.dtype, device=suffix.device)])
        with place.phase("repair"):
            logits = repair(self.model, context, repaired, rows, tables, 1 + forced, choice.rule)
        clock.mark("repair")
        trace = None if key is None else Trace(key, kept, repaired.slots, sensitivity)
        selection = choice.after() if kept is None else repaired
        usage = Usage(
            context_tokens=num_context,
            prompt_tokens=len(prompt.suffix_ids),
            chunks=len(prompt.chunks),
            cached_chunks=parts.cached_chunks,
            reusable_tokens=context.reusable_tokens if reuse else 0,
            recomputed_tokens=selection.num_tokens if reuse else 0,
            prefilled_tokens=parts.prefilled_tokens,
            new_tokens=0,
            measured_tokens=parts.measured_tokens,
            kept_tokens=0 if kept is None else int(kept.repaired[kept.exact_tokens :].sum()),
        )
        timings = clock.timings((plan.seconds, plan.full_seconds) if plan is not None else (0.0, 0.0))
        logits = torch.empty(0, 0) if logits is None else logits  # another rank ran the prompt's last row
        return Run(prompt, recipe, order, context, rotary, selection, logits, usage, timings, parts.unstored, trace)

    def keep(self, run: Run) -> None:
        """Keeps a copy of the run's context for follow-ups, where this engine keeps any; `stream` ends with it."""
        if run.trace is not None:
            self._kept.take(run.context, run.trace)

    def forget(self) -> None:
        """Drops the kept contexts, for example after documents were deleted."""
        self._kept.forget()

    def _parts(self, prompt: Prompt, recipe: Recipe, kept: Kept | None) -> Parts:
        """The KV of the request's chunks; none where nothing is reused, or where a kept context holds it."""
        if kept is not None:
            return Parts(None, (), len(prompt.chunks), 0, 0)
        if not recipe.method.reuse:
            return Parts(None, (), 0, prompt.context_tokens, 0)
        return self.place.parts(prompt, "sensitivity" in recipe.method.needs)

    def _plan(self, prompt: Prompt, recipe: Recipe, length: int) -> Plan | None:
        """What the request would take either way, where this engine plans and the machine's speeds are known."""
        speeds = find_speeds(self.model) if self.plans else None
        return None if speeds is None else plan_request(self.model, speeds, self._supply, prompt, recipe, length)

    def _find_kept(self, prompt: Prompt, recipe: Recipe, length: int) -> tuple[ContextKey | None, Kept | None]:
        """Under what the request's context is kept (None: not at all), and what is kept there already."""
        if not self._kept.max_bytes or not recipe.repairs_plainly or not prompt.chunks:
            return None, None
        regime = self.model.rope_regime(length)
        if regime not in (self.model.rope_regime(1), self.model.rope_regime(self.model.window_tokens)):
            return None, None  # frequencies of this very length: no other request could use it
        key = self._supply.identities(prompt), regime, recipe.method.name
        return key, self._kept.find(key)

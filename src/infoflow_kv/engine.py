"""The engine: the only file that knows the order of the phases.

documents → chunks → (store | prefill) → assemble → score → take → repair with the prompt rows → decode
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from infoflow_kv.chunking import MIN_CHUNK_TOKENS, TextEncoder, layout, render, split
from infoflow_kv.decoding import Sampling, TextAssembler, decode, sampler
from infoflow_kv.errors import ComputeError, OptionError, PromptTooLongError, StoreError
from infoflow_kv.methods import Method, find_method
from infoflow_kv.models import LanguageModel, RotaryTables
from infoflow_kv.positions import assemble, request_tables, reserve
from infoflow_kv.prefilling import identify, prefill
from infoflow_kv.records import (
    AddReport,
    Answer,
    Chunk,
    ChunkIdentity,
    ChunkKV,
    Context,
    Document,
    Piece,
    Prompt,
    Selection,
    Timings,
    Usage,
)
from infoflow_kv.repairing import repair
from infoflow_kv.runs import Clock, Run, chunk_reports
from infoflow_kv.select import Scene, check_budget, layer_set, num_selected, take
from infoflow_kv.store import ChunkStore, load_many

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

INSTRUCTION = "Answer the question using the documents."
HEAD_POLICIES = ("head", "none")
Documents = Iterable[Document | str]


class Engine:
    """Answers questions over documents from stored chunk KV.

    `store`: where chunk KV is kept; None keeps nothing between requests. `method`: a name of `METHODS`. `budget`:
    share (0..1) of the reusable tokens that is recomputed. `layers`: the layer set of the scores (`all`, `relative`,
    `22-25`; `auto` is the one measured for this model, else `relative`). `chunk_tokens`: longest chunk. `head_policy`:
    `head` prefills chunks behind the chat header, `none` alone. `namespace`: tenant; KV is never reused across
    namespaces.

    Raises OptionError for anything outside its range. Safe to share between threads.

    >>> engine = Engine(model, store=MemoryStore())  # doctest: +SKIP
    >>> engine.answer("Who keeps the lighthouse?", ["Ada keeps the lighthouse."]).text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: LanguageModel,
        store: ChunkStore | None = None,
        method: str = "infoflow",
        budget: float = 0.15,
        layers: str = "auto",
        chunk_tokens: int = 512,
        head_policy: str = "head",
        namespace: str = "public",
        instruction: str = INSTRUCTION,
        system: str | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.method = find_method(method)
        self.budget = check_budget(budget)
        self.layers = layer_set(model.layers or "relative" if layers == "auto" else layers, model.num_layers)
        self.chunk_tokens = check_chunk_tokens(chunk_tokens, model.window_tokens)
        if head_policy not in HEAD_POLICIES:
            raise OptionError(f"head policy '{head_policy}' is not one of {', '.join(HEAD_POLICIES)}")
        self.head_policy = head_policy
        self.namespace = namespace
        self.encoder = TextEncoder(model.tokenizer)
        self.template = render(model.tokenizer, instruction=instruction, system=system)
        # The head depends on neither question nor documents: any prompt shows it.
        self.head_ids = layout("?", (), self.template, self.encoder).head_ids
        self._logged_store_error = False

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
        head: ChunkKV | None = None
        for done, chunk in enumerate(chunks, start=1):
            identity = self.identify(chunk)
            if self.store.contains(identity):  # verified when it is read
                cached += 1
            else:
                head = head or self._head()[0]
                self.store.put(prefill(self.model, identity, self._behind(head)))
                prefilled += chunk.num_tokens
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
        return split(as_document(document), self.encoder, self.chunk_tokens)

    def identify(self, chunk: Chunk) -> ChunkIdentity:
        """The identity under which this engine stores and finds a chunk."""
        head_ids = self.head_ids if self.head_policy == "head" else ()
        return identify(self.model, chunk.token_ids, head_ids, self.namespace)

    def identify_head(self) -> ChunkIdentity:
        """The identity of the chat header, which is stored like a chunk of its own."""
        return identify(self.model, self.head_ids, (), self.namespace)

    # ---- online ----

    def answer(
        self,
        question: str,
        documents: Documents,
        max_new_tokens: int = 64,
        *,
        method: str | None = None,
        budget: float | None = None,
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
        budget: float | None = None,
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
        prompt = self.prompt(question, documents)
        self._check_regime(prompt.num_tokens, max_new_tokens)
        run = self.run(prompt, method=method, budget=budget, num_new=max_new_tokens, seed=sampling.seed)
        first = 0.0
        tokens = decode(
            self.model, run.context, run.rotary, prompt.num_tokens, run.logits[-1], sampler(sampling), max_new_tokens
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
        yield Piece(rest, self._result(run, assembler, timings))

    def prompt(self, question: str, documents: Documents) -> Prompt:
        """The token ids of a request, the same for every method."""
        chunks = [c for d in listed(documents) for c in self.split(d)]
        return layout(question, chunks, self.template, self.encoder)

    def run(
        self,
        prompt: Prompt,
        *,
        method: str | None = None,
        budget: float | None = None,
        num_new: int = 1,
        forced_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> Run:
        """One request up to the logits of its first new token.

        `forced_ids`: a continuation that is fed as further prompt rows *after* selection (teacher forcing); the logits
        then are those after the prompt and after each forced token.
        """
        if prompt.head_ids != self.head_ids:
            raise OptionError("the prompt was made by an engine with another chat header; use this engine's prompt()")
        chosen = self.method if method is None else find_method(method)
        share = self.budget if budget is None else check_budget(budget)
        num_new = max(num_new, len(forced_ids) + 1)
        if prompt.num_tokens + num_new > self.model.window_tokens:
            raise PromptTooLongError(prompt.num_tokens, num_new, self.model.window_tokens)
        rotary = self.model.rotary()
        num_context = prompt.context_tokens
        forced = len(forced_ids)
        num_rows = len(prompt.suffix_ids) + forced
        tables = request_tables(rotary, num_context, num_rows)
        num_slots = prompt.num_tokens + num_new

        clock = Clock()
        parts, cached, prefilled, unstored = self._parts(prompt, chosen)
        clock.mark("load")
        if chosen.reuse:
            context = assemble(
                self.model, parts, tables, num_slots, self._exact_tokens(prompt, parts, num_context + num_rows)
            )
        else:
            context = reserve(self.model, prompt, num_slots)
        clock.mark("assemble")
        suffix = torch.tensor(prompt.suffix_ids, device=self.model.device)
        selection = self._select(chosen, share, context, suffix, tables, seed)
        clock.mark("score")
        rows = torch.cat([suffix, torch.tensor(forced_ids, dtype=suffix.dtype, device=suffix.device)])
        logits = repair(self.model, context, selection, rows, tables, num_logits=1 + forced)
        clock.mark("repair")

        usage = Usage(
            context_tokens=num_context,
            prompt_tokens=len(prompt.suffix_ids),
            chunks=len(prompt.chunks),
            cached_chunks=cached,
            reusable_tokens=context.reusable_tokens if chosen.reuse else 0,
            recomputed_tokens=selection.num_tokens if chosen.reuse else 0,
            prefilled_tokens=prefilled,
            new_tokens=0,
        )
        timings = Timings(
            load_seconds=clock["load"],
            assemble_seconds=clock["assemble"],
            score_seconds=clock["score"],
            repair_seconds=clock["repair"],
        )
        return Run(prompt, chosen, context, rotary, selection, logits, usage, timings, unstored)

    # ---- steps ----

    def _check_regime(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """OptionError where new tokens would cross from longrope's short to its long frequencies: all keys before would
        have to be rotated anew, as Transformers does by starting over."""
        longest = prompt_tokens + max_new_tokens
        if self.model.rotates_anew and self.model.rope_regime(prompt_tokens) != self.model.rope_regime(longest):
            raise OptionError(
                f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones cross the length at which this model "
                "changes its rotary frequencies (longrope); ask for fewer new tokens, or give more documents"
            )

    def _parts(self, prompt: Prompt, chosen: Method) -> tuple[list[ChunkKV], int, int, int]:
        """KV of the head and of every chunk in order; how many chunks were stored; how many tokens had no stored KV;
        how many new chunks the store did not take."""
        if not chosen.reuse:
            return [], 0, prompt.context_tokens, 0
        identities = [self.identify(chunk) for chunk in prompt.chunks]
        wanted = list(dict.fromkeys(identities))
        found: dict[ChunkIdentity, ChunkKV] = {}
        if self.store is not None:
            loaded = load_many(self.store, wanted)
            found = {identity: kv for identity, kv in zip(wanted, loaded, strict=True) if kv is not None}
        stored = set(found)
        head, prefilled = self._head()
        unstored = 0
        for identity in wanted:
            if identity not in found:
                found[identity] = prefill(self.model, identity, self._behind(head))
                unstored += not self._put(found[identity])
        parts = ([head] if head is not None else []) + [found[identity] for identity in identities]
        cached = sum(identity in stored for identity in identities)
        # A chunk that stands in the request twice is prefilled once.
        prefilled += sum(len(identity.token_ids) for identity in wanted if identity not in stored)
        return parts, cached, prefilled, unstored

    def _head(self) -> tuple[ChunkKV | None, int]:
        """The KV of the chat header (None where the template has none), and how many of its tokens were not stored."""
        if not self.head_ids:
            return None, 0
        identity = self.identify_head()
        found = self.store.get(identity) if self.store is not None else None
        if found is not None:
            return found, 0
        found = prefill(self.model, identity)
        self._put(found)
        return found, found.num_tokens

    def _behind(self, head: ChunkKV | None) -> ChunkKV | None:
        return head if self.head_policy == "head" else None

    def _put(self, chunk: ChunkKV) -> bool:
        """Whether the chunk is stored now, where it should be; a store that takes nothing never fails a request."""
        if self.store is None:
            return True
        try:
            self.store.put(chunk)
        except StoreError as error:
            if not self._logged_store_error:
                logger.warning("chunks are used but not stored: %s", error)
            self._logged_store_error = True
            return False
        return True

    def _exact_tokens(self, prompt: Prompt, parts: Sequence[ChunkKV], length: int) -> int:
        """Leading tokens whose KV is what full prefill gives: the head, and the first chunk if it was prefilled behind
        this very head; nothing of both if RoPE treats a sequence of the request's `length` otherwise."""
        exact, before = 0, 0
        regime = self.model.rope_regime(length)
        expected: tuple[tuple[int, ...], ...] = ((), prompt.head_ids) if prompt.head_ids else ((),)
        for part, head_ids in zip(parts, expected, strict=False):
            if part.identity.head_ids != head_ids or part.identity.rope != regime or before != len(head_ids):
                break
            exact += part.num_tokens
            before += part.num_tokens
        return exact

    def _select(
        self, chosen: Method, budget: float, context: Context, suffix: "Tensor", tables: RotaryTables, seed: int
    ) -> Selection:
        if not chosen.reuse:
            return Selection(torch.arange(context.num_tokens, device=self.model.device))
        nothing = Selection(torch.empty(0, dtype=torch.int64, device=self.model.device))
        if chosen.selector is None:
            return nothing
        count = num_selected(budget, context.reusable_tokens)
        if count == 0:
            return nothing
        if count == context.reusable_tokens:  # everything: no scores needed
            return Selection(torch.arange(context.exact_tokens, context.num_tokens, device=self.model.device))
        scene = Scene(self.model, context, suffix, tables, seed)
        return take(chosen.selector(self.layers).score(scene), budget, context)

    def _result(self, run: Run, assembler: TextAssembler, timings: Timings) -> Answer:
        assert assembler.reason is not None
        notices = (f"{run.unstored} chunks could not be stored; see the log",) if run.unstored else ()
        return Answer(
            text=assembler.text.strip(),
            method=run.method.name,
            model=self.model.name,
            stop_reason=assembler.reason,
            usage=replace(run.usage, new_tokens=len(assembler.token_ids)),
            timings=timings,
            chunks=chunk_reports(run),
            token_ids=tuple(assembler.token_ids),
            selection=run.selection,
            notices=notices,
        )


def check_chunk_tokens(chunk_tokens: int, window_tokens: int) -> int:
    """The longest chunk itself; OptionError if no request could ever use a chunk of that length."""
    if type(chunk_tokens) is not int or not MIN_CHUNK_TOKENS <= chunk_tokens < window_tokens:
        wanted = f"at least {MIN_CHUNK_TOKENS} and less than the window of {window_tokens}"
        raise OptionError(f"chunk_tokens is {chunk_tokens!r}; expected {wanted}")
    return chunk_tokens


def listed(documents: Documents) -> list[Document]:
    """The documents as Documents; OptionError for a bare string or Document, which would be taken apart silently."""
    if isinstance(documents, (str, Document)):
        raise OptionError(f"documents is one {type(documents).__name__}; expected a list of them: [document]")
    return [as_document(document) for document in documents]


def as_document(given: Document | str) -> Document:
    """A Document of a plain string; Documents as they are."""
    return Document(text=given) if isinstance(given, str) else given

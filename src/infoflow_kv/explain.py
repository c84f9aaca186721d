"""One question answered by several methods, side by side: the report that `explaining.render_page` draws."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from infoflow_kv import __version__
from infoflow_kv.chunking import Documents, listed
from infoflow_kv.decoding import Sampling, TextAssembler, decode, sampler
from infoflow_kv.engine import Engine
from infoflow_kv.errors import ComputeError, OptionError
from infoflow_kv.evaluate.distances import divergences
from infoflow_kv.explaining import FORMAT
from infoflow_kv.methods import Method, find_method
from infoflow_kv.records import ChunkImages, Document, Timings
from infoflow_kv.runs import Run, chunk_reports
from infoflow_kv.select import layers_text
from infoflow_kv.shapes import Float, Tensor

METHODS = ("infoflow", "influence", "cacheblend", "epic", "none", "full")

# (runs that are done, runs in all, what is done next)
Progress = Callable[[int, int, str], None]


def explain(
    engine: Engine,
    question: str,
    documents: Documents,
    methods: Sequence[str] = METHODS,
    max_new_tokens: int = 64,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """What each method recomputed of these documents, why, and what came of it; a dictionary that JSON can hold.

    Everything but the method is the engine's: budget, layers, geometry, reorder. Answers are greedy. Full prefill runs
    in any case, as what the others are compared with. Where the engine has a store, chunks are stored before anything
    is timed, with what the methods need measured of them: each method then starts from stored chunks.

    Raises OptionError for an unknown method or one of the laboratory, PromptTooLongError, ComputeError.

        report = explain(Engine(model, MemoryStore()), "Who keeps the lighthouse?", documents)
        Path("report.html").write_text(render_page(report), encoding="utf-8")
    """
    chosen = check_methods(methods)
    recipe = engine.recipe
    if recipe.reorder and not any(method.selector for method in chosen):
        raise OptionError(f"reorder needs a method that scores tokens; none of {', '.join(methods)} does")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise OptionError(f"max_new_tokens {max_new_tokens!r} is not a whole number of at least 1")
    given = listed(documents)
    prompt = engine.prompt(question, given)

    warm = _storing(chosen) if engine.store is not None and prompt.chunks else None
    # Full prefill first: the distances need it.
    names = list(dict.fromkeys(["full", *(method.name for method in chosen)]))
    steps = [*([] if warm is None else ["storing chunks"]), *names]
    say = on_progress or (lambda done, total, step: None)
    if warm is not None:
        say(0, len(steps), steps[0])
        engine.run(prompt, method=warm.name, num_new=max_new_tokens)
    parts: dict[str, dict[str, Any]] = {}
    full_answer, full_logits = "", None
    for done, name in enumerate(names, start=len(steps) - len(names)):
        say(done, len(steps), name)
        outcome = _outcome(engine, question, given, name, max_new_tokens)
        if full_logits is None:
            full_answer, full_logits = outcome.answer, outcome.first_logits
        parts[name] = _method(outcome, full_logits)
    return {
        "format": FORMAT,
        "question": question,
        "model": engine.model.name,
        "created": datetime.now(tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        "budget": recipe.budget.share,
        "cover": recipe.budget.cover,
        "full_answer": full_answer,
        "methods": [parts[method.name] for method in chosen],
        "chunks": [
            {
                "id": chunk.id,
                "title": chunk.title,
                "tokens": token_texts(engine.model.tokenizer, chunk.token_ids),
                "images": [] if chunk.images is None else image_spans(chunk.images),
            }
            for chunk in prompt.chunks
        ],
        "prompt_tokens": token_texts(engine.model.tokenizer, prompt.suffix_ids),
    }


def check_methods(names: Sequence[str]) -> tuple[Method, ...]:
    """The methods of these names, each once; OptionError for a name that cannot be explained, or for none."""
    if isinstance(names, str):
        raise OptionError(f"methods is the string '{names}'; expected a list of names")
    if not names:
        raise OptionError("there is no method to explain; give at least one, for example infoflow")
    methods = tuple(find_method(name) for name in dict.fromkeys(names))
    for method in methods:
        if method.in_laboratory_only:
            raise OptionError(
                f"method '{method.name}' needs the full prefill that reuse is to save; it is for the laboratory "
                "(`infoflow-kv eval predict`)"
            )
    return methods


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; together they are the text of all. Special tokens are shown.

    A character that takes several tokens stands whole at the last of them, and the others are empty.
    """

    def text(start: int, stop: int) -> str:
        ids = list(token_ids[start:stop])
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    texts: list[str] = []
    # Some tokenizers drop a blank before the first token of a text: each token is decoded behind the ones before it,
    # from the last whole character but one.
    start, done = 0, 0
    for stop in range(1, len(token_ids) + 1):
        before, now = text(start, done), text(start, stop)
        if now.endswith("\ufffd") and stop < len(token_ids):  # the next token may complete the character
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, done = done, stop
    return texts


def image_spans(images: ChunkImages) -> list[dict[str, int]]:
    """Where each image stands in its chunk, how many of these tokens are parts of it, and in how many tiles."""
    spans = []
    first = 0
    for one in images.prepared:
        own = images.visual[first : first + one.num_visual].tolist()
        first += one.num_visual
        tiles = len({int(cell[0]) for cell in images.cells} & set(own))
        spans.append({"start": own[0], "stop": own[-1] + 1, "tokens": len(own), "tiles": max(1, tiles)})
    return spans


# ---- one method ----


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One method's run and the answer decoded from it."""

    run: Run
    first_logits: Float[Tensor, " vocab"]
    answer: str
    num_new: int
    timings: Timings


def _outcome(engine: Engine, question: str, documents: list[Document], name: str, max_new_tokens: int) -> _Outcome:
    """The greedy answer as `Engine.answer` gives and times it, with the run that it came from."""
    model = engine.model
    start = time.perf_counter()
    prompt = engine.prompt(question, documents)
    run = engine.run(prompt, method=name, num_new=max_new_tokens)
    first_logits = run.logits[-1]
    text = TextAssembler(model.text, model.stop_ids)
    pick = sampler(Sampling())
    first = 0.0
    for token in decode(model, run.context, run.rotary, prompt.num_tokens, first_logits, pick, max_new_tokens):
        first = first or time.perf_counter()
        text.push(token)
    if text.reason is None:
        text.finish()
    timings = replace(run.timings, ttft_seconds=first - start, decode_seconds=time.perf_counter() - first)
    return _Outcome(run, first_logits, text.text.strip(), len(text.token_ids), timings)


def _method(outcome: _Outcome, full_logits: Float[Tensor, " vocab"]) -> dict[str, Any]:
    """One method's part of the report; full prefill itself has no distances."""
    run = outcome.run
    method, recipe = run.method, run.recipe
    is_reference = outcome.first_logits is full_logits
    by_attention = method.scores_by_attention
    kl, js = divergences(outcome.first_logits[None], full_logits[None])
    same = int(outcome.first_logits.argmax()) == int(full_logits.argmax())
    return {
        "name": method.name,
        "rule": method.rule,
        "source": method.source,
        "answer": outcome.answer,
        "kl_first": None if is_reference else kl[0],
        "js_first": None if is_reference else js[0],
        "same_first_token": None if is_reference else same,
        # Only attention depends on them; all else stands at its global positions.
        "geometry": recipe.geometry if by_attention else "GLOBAL",
        "layers": layers_text(recipe.layers) if by_attention else "–",
        "reorder": recipe.reorder and method.reuse,
        "reason": run.selection.reason,
        "usage": {**asdict(run.usage), "new_tokens": outcome.num_new},
        "timings": asdict(outcome.timings),
        "order": list(run.order),
        "chunks": _chunks(run),
    }


def _chunks(run: Run) -> list[dict[str, Any]]:
    """Scores and marks of every chunk, in the request's own order."""
    context = run.context
    marks = torch.zeros(context.num_tokens, dtype=torch.int64)
    if run.method.reuse:
        marks[run.selection.slots.cpu()] = 1
    scores = run.selection.scores
    if scores is not None and not bool(torch.isfinite(scores).all()):
        raise ComputeError(f"the scores of {run.method.name} are not finite")
    values = None if scores is None else scores.double().cpu()
    reports = chunk_reports(run)
    spans = run.chunk_spans
    placed = dict(zip(run.order, spans, strict=True))
    chunks = []
    for index, report in enumerate(reports):
        span = placed[index]
        own = slice(span.start, span.stop)
        chunks.append(
            {
                "scores": None if values is None else values[own].tolist(),
                "recomputed": marks[own].tolist(),
                "exact": span.stop <= context.exact_tokens,
                "mass": report.mass,
            }
        )
    return chunks


def _storing(methods: Sequence[Method]) -> Method | None:
    """The method whose run leaves in the store all that the others need; None where none reuses anything."""
    reusing = [method for method in methods if method.reuse]
    return next((method for method in reusing if "sensitivity" in method.needs), reusing[0] if reusing else None)

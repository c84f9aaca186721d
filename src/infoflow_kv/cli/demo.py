"""`infoflow-kv demo`: what the method does, on this machine, with nothing to prepare."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoflow_kv.cli import ingest, opening, options, ranks
from infoflow_kv.cli.output import emit, emit_json, emit_table, finite, note, seconds, share, size, status
from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from infoflow_kv.engine import Engine
    from infoflow_kv.records import Answer, Document
    from infoflow_kv.samples import SampleQuestion

METHODS = ("full", "none", "infoflow")
ANSWER_TOKENS = 32

Questions = Annotated[int, typer.Option(metavar="N", help="How many of the questions to ask, 1 to 3.")]


@dataclass(frozen=True, slots=True)
class Proof:
    """How far the logits at budget 1 are from full prefill's on the first question, and how far they may be."""

    max_logit_error: float
    tolerance: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """One question and its answer by each method, full prefill first."""

    question: "SampleQuestion"
    answers: tuple["Answer", ...]

    def rows(self) -> list[tuple[str, ...]]:
        """A table row for each method."""
        return [
            (
                answer.method,
                " ".join(answer.text.split()),
                "yes" if self.question.is_answered_by(answer.text) else "no",
                seconds(answer.timings.ttft_seconds),
                f"{self.times_less(answer):.1f}×",
                share(recomputed(answer), answer.usage.context_tokens),
            )
            for answer in self.answers
        ]

    def record(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "question": self.question.text,
            "answers": [
                {
                    **answer.as_json(),
                    "right": self.question.is_answered_by(answer.text),
                    "times_less_than_full": round(self.times_less(answer), 3),
                }
                for answer in self.answers
            ],
        }

    def times_less(self, answer: "Answer") -> float:
        """By how much sooner than full prefill the first token came."""
        return self.answers[0].timings.ttft_seconds / answer.timings.ttft_seconds


def demo(
    model: options.Model = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    budget: options.Budget = options.BUDGET,
    questions: Questions = 3,
    layout: options.Layout = options.LAYOUT,
    timeout: options.Timeout = options.TIMEOUT_SECONDS,
    as_json: options.Json = False,
) -> int:
    """Ask three questions over sample documents: full prefill beside reuse without and with recomputation.

    The documents come with the package; the small built-in model is fetched at the first run. Chunks are kept in the
    cache folder, so a second run starts warm. The exit code is 1 if the logits at budget 1 are not full prefill's.

    Examples:

    \b
        infoflow-kv demo
        infoflow-kv demo --budget 0.3 --questions 1
        torchrun --nproc-per-node 2 -m infoflow_kv demo --questions 1
    """
    from infoflow_kv.samples import DEMO_QUESTIONS

    if not 1 <= questions <= len(DEMO_QUESTIONS):
        raise OptionError(f"questions is {questions}; expected 1 to {len(DEMO_QUESTIONS)}")
    opening.check_choice("infoflow", budget)
    with ranks.shared(device, layout, timeout) as shared:
        folder = str(opening.store_folder(None).with_name("demo"))
        store = opening.open_store(folder)
        loaded = opening.load_model(model, dtype, shared.device)
        shared.ready()  # HQ connects its teams as the engine is made, under the short limit
        engine = opening.make_engine(loaded, store, budget=budget, **shared.settings)
        documents = fitting(engine)
        given = opening.Chunkable(documents, sum(len(engine.split(d)) for d in documents), {})
        report = None
        if shared.is_first:
            report = ingest.add(engine, given, folder, "storing the sample documents")
            note(f"sample documents: {ingest.summary(report, folder)}")
        shared.ready()
        with status("warming up") as say:
            warm_up(engine, documents, shared.settings)
            asked = []
            for number, question in enumerate(DEMO_QUESTIONS[:questions], start=1):
                say(f"asking question {number} of {questions} by each of {', '.join(METHODS)}")
                asked.append(ask(engine, question, documents))
            say("comparing the logits at budget 1 with full prefill's")
            proof = prove(engine, asked[0].question.text, documents)
        if report is None or proof is None:
            return 0  # rank 0 has the logits, and tells all
        parallel = ranks.described(engine, "infoflow")
        facts = surroundings(engine) | {
            "store": folder,
            "store_bytes": stored_bytes(folder),
            "ingest": {k: v for k, v in asdict(report).items() if k != "skipped"},
            **({"parallel": parallel} if parallel else {}),
        }
        if as_json:
            measured = asdict(proof) | {"max_logit_error": finite(proof.max_logit_error)}
            emit_json({**facts, "questions": [a.record() for a in asked], "proof": measured})
        else:
            tell(asked, proof, facts)
    return 0 if proof.holds else 1


def fitting(engine: "Engine") -> tuple["Document", ...]:
    """The sample documents, without the first ones where the model's window is too small for all."""
    from infoflow_kv.samples import DEMO_QUESTIONS, documents

    given = documents()
    for dropped in range(len(given)):
        longest = max(engine.prompt(q.text, given[dropped:]).num_tokens for q in DEMO_QUESTIONS)
        if longest + ANSWER_TOKENS <= engine.model.window_tokens:
            if dropped:
                note(
                    f"{dropped} of {len(given)} sample documents are left out: the model's window is too small for all"
                )
            return given[dropped:]
    raise OptionError(
        f"the model's window of {engine.model.window_tokens} tokens is too small for any sample document; "
        "choose another model"
    )


def warm_up(engine: "Engine", documents: Sequence["Document"], settings: dict[str, Any]) -> None:
    """Nothing; threads and kernels have been used once, so that the first question is not slower for it."""
    cold = opening.make_engine(engine.model, None, **settings)
    for method in METHODS:
        cold.answer("Ready?", [documents[-1].text[:300]] * 2, max_new_tokens=2, method=method)


def ask(engine: "Engine", question: "SampleQuestion", documents: Sequence["Document"]) -> Asked:
    """The question, answered by every method."""
    answers = (engine.answer(question.text, documents, ANSWER_TOKENS, method=name) for name in METHODS)
    return Asked(question, tuple(answers))


def prove(engine: "Engine", question: str, documents: Sequence["Document"]) -> Proof | None:
    """How far `infoflow` at budget 1, from stored chunks, is from full prefill of the same tokens; None where another
    rank has the logits."""
    from infoflow_kv.invariants import TOLERANCE

    prompt = engine.prompt(question, documents)
    full = engine.run(prompt, method="full").logits
    ours = engine.run(prompt, method="infoflow", budget=1.0).logits
    if not full.numel() or not ours.numel():
        return None
    full, ours = full[-1], ours[-1]
    error = float((full - ours).abs().max())
    tolerance = TOLERANCE[engine.model.dtype] * float(full.max() - full.min())
    return Proof(error, tolerance, error <= tolerance)


def recomputed(answer: "Answer") -> int:
    """Context tokens that went through the model for this answer."""
    return answer.usage.recomputed_tokens + answer.usage.prefilled_tokens


def surroundings(engine: "Engine") -> dict[str, Any]:
    """What the times depend on."""
    import torch

    model = engine.model
    return {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "budget": engine.recipe.budget.share,
    }


def stored_bytes(folder: str) -> int:
    """The size of the store."""
    from infoflow_kv.store import stat

    return stat(folder).total_bytes


def tell(asked: Sequence[Asked], proof: Proof, facts: dict[str, Any]) -> None:
    """Nothing; the tables and what they mean are on stdout."""
    columns = ("method", "answer", "right", "first token", "times sooner", "recomputed")
    for one in asked:
        emit(f"\n{one.question.text}")
        emit_table(columns, one.rows(), right=(3, 4, 5))
    usage = asked[0].answers[0].usage
    where = f"{facts['device']}, {facts['threads']} threads" if facts["device"] == "cpu" else facts["device"]
    verdict = "the logits equal full prefill's" if proof.holds else "THE LOGITS ARE NOT FULL PREFILL'S"
    emit(
        f"""
Proof     at budget 1 {verdict}: max |Δ logit| {proof.max_logit_error:.1e}, at most {proof.tolerance:.1e} allowed
Measured  here and now: {facts["model"]} in {facts["dtype"]}, {where}, {usage.context_tokens:,} tokens of context,
          budget {facts["budget"]:g}{ranks.told(facts.get("parallel", {}))};
          a small model answers roughly, and other models and machines have other times
Stored    {size(facts["store_bytes"])} in {facts["store"]}
Next      infoflow-kv ask "…" YOUR-FOLDER     over your own documents
          infoflow-kv check                   every claim, measured on this model"""
    )

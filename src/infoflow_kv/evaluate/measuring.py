"""One item: the reference by plain Transformers, then one row per arm."""

from collections.abc import Iterator, Sequence
from typing import Any

from infoflow_kv.engine import Engine
from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.arm_rows import ArmRows, check_fits
from infoflow_kv.evaluate.arms import Arm
from infoflow_kv.evaluate.distances import selection_lift
from infoflow_kv.evaluate.items import Item
from infoflow_kv.evaluate.niah import TASK as NEEDLES
from infoflow_kv.evaluate.prompts import worded
from infoflow_kv.evaluate.variable_tracking import TASK as TRACKING
from infoflow_kv.evaluate.windows import check_truth
from infoflow_kv.methods import find_method
from infoflow_kv.records import Document, Prompt
from infoflow_kv.store import MemoryStore


class Bench(ArmRows):
    """A model with its plain twin, ready to measure items one after the other."""

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
        check_fits(self.model, prompt, max(self.max_new_tokens, len(gold_ids)))
        check_truth(arms, self.window, item.id, prompt.num_tokens, self.max_new_tokens)
        reference = self.reference(prompt, engine.prompt(item.question, []), gold_ids)
        if any(m.reuse for m in methods):
            engine.add(documents)
        for arm in arms:
            if arm.method == "full":
                yield self._row(item, arm, prompt, reference, self._full(prompt, reference))
            else:
                run = self._run(engine, arm, prompt, reference)
                measured = self._measured(run, item, arm, prompt, reference)
                lift = selection_lift(run, supporting_chunks(item, prompt))
                yield self._row(item, arm, prompt, reference, {**measured, "selection_lift": lift})


def documents_of(item: Item) -> list[Document]:
    """The passages as documents, named by their index."""
    return [Document(text=p.text, title=p.title, id=f"p{index}") for index, p in enumerate(item.passages)]


def supporting_chunks(item: Item, prompt: Prompt) -> list[int]:
    """Indices of the chunks of supporting passages."""
    wanted = {f"p{index}" for index in item.supporting}
    return [index for index, chunk in enumerate(prompt.chunks) if chunk.document_id in wanted]

"""One question about pictures: the reference by plain Transformers with pixels, then one row per arm."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from infoflow_kv.engine import Engine
from infoflow_kv.errors import InfoFlowError, OptionError, PromptTooLongError
from infoflow_kv.evaluate.arm_rows import ArmRows, Asked, Reference, check_fits
from infoflow_kv.evaluate.arms import Arm
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.vision_items import VisionItem
from infoflow_kv.evaluate.vision_reference import REFERENCE, greedy_seeing, logits_seeing
from infoflow_kv.evaluate.windows import check_truth
from infoflow_kv.methods import find_method
from infoflow_kv.models import LanguageModel, PlainRun
from infoflow_kv.records import Document, Image, Prompt
from infoflow_kv.store import MemoryStore


@dataclass(frozen=True, slots=True)
class VisionOptions(Options):
    """As `Options`, for pictures: without a `max_new_tokens` answers are as long as the item's set asks for. Nothing
    stands before the pictures and nothing is put around the question, as published runs ask.

    `rules`: the set by whose rules the files were read (see `read_vision_items`), None where each tells it.
    """

    max_new_tokens: int | None = None
    instruction: str = ""
    rules: str | None = None


class VisionBench(ArmRows):
    """A vision-language model with its plain twin, ready to measure items one after the other."""

    def __init__(self, model: LanguageModel, options: VisionOptions) -> None:
        if model.vision is None:
            raise OptionError(f"{model.name} reads text only; give --model a vision-language model (docs/models.md)")
        super().__init__(model, options)

    def engine(self, tiles: int = 1, method: str = "infoflow") -> Engine:
        """An engine with an empty store of its own that prefills images in tiles × tiles tiles.

        `method`: decides what `add` measures beside the KV.
        """
        o = self.options
        return Engine(
            self.model,
            MemoryStore(),
            method=method,
            chunk_tokens=o.chunk_tokens,
            head_policy=o.head_policy,
            instruction=o.instruction,
            labels=False,
            tiles=tiles,
        )

    def longest(self, item: VisionItem) -> int:
        """The longest answer to the item, in tokens."""
        return self.options.max_new_tokens or item.max_new_tokens

    def check(self, item: VisionItem) -> str:
        """Why the item cannot be measured, "" where it can: its pictures cannot be read, or it is over the window."""
        engine = self.engine()
        try:
            prompt = engine.prompt(item.text, [document_of(item)])
            check_fits(self.model, prompt, max(self.longest(item), len(engine.encoder.content(item.answers[0])[0])))
        except PromptTooLongError as error:
            return f"{error}; smaller pictures have fewer tokens"
        except InfoFlowError as error:
            return str(error)
        return ""

    def rows(self, item: VisionItem, arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
        """One row per arm, all on the same token ids and pictures; arms of one number of tiles must stand together.

        Raises PromptTooLongError, DocumentError for a picture that cannot be read, and OptionError for an oracle that
        cannot know the full prefill (see `check_truth`), before anything is computed. What times hold: see
        `Bench.rows`; that of full prefill holds the vision tower, those of reuse do not.
        """
        longest = self.longest(item)
        bench = self.with_longest(longest)
        plain_engine, documents = bench.engine(), [document_of(item)]
        prompt = plain_engine.prompt(item.text, documents)
        gold_ids = plain_engine.encoder.content(item.answers[0])[0]
        check_fits(self.model, prompt, max(longest, len(gold_ids)))
        check_truth(arms, self.window, item.id, prompt.num_tokens, longest)
        reference = bench.reference(prompt, plain_engine.prompt(item.text, []), gold_ids)
        for tiles, group in groupby(arms, key=lambda arm: arm.tiles):
            own = list(group)
            if not tiles:
                yield from (bench._row(item, arm, prompt, reference, bench._full(prompt, reference)) for arm in own)
                continue
            measuring = [arm.method for arm in own if "sensitivity" in find_method(arm.method).needs]
            engine = bench.engine(tiles, measuring[0] if measuring else "infoflow")
            cut = engine.prompt(item.text, documents)
            engine.add(documents)
            for arm in own:
                run = bench._run(engine, arm, cut, reference)
                yield bench._row(item, arm, cut, reference, bench._measured(run, item, arm, cut, reference))

    def _greedy(self, prompt: Prompt) -> PlainRun:
        if not has_images(prompt):
            return super()._greedy(prompt)
        return greedy_seeing(self.model, self.plain, prompt, self.max_new_tokens)

    def _plain_logits(self, prompt: Prompt, gold_ids: tuple[int, ...]) -> torch.Tensor:
        if not has_images(prompt):
            return super()._plain_logits(prompt, gold_ids)
        return logits_seeing(self.model, self.plain, prompt, gold_ids)

    def _row(
        self, item: Asked, arm: Arm, prompt: Prompt, reference: Reference, measured: dict[str, Any]
    ) -> dict[str, Any]:
        assert isinstance(item, VisionItem)
        pictures = [one for chunk in prompt.chunks if chunk.images is not None for one in chunk.images.prepared]
        return {
            **super()._row(item, arm, prompt, reference, measured),
            **item.row_fields,
            "tiles": arm.tiles,
            "images": len(pictures),
            "image_tokens": sum(one.num_visual for one in pictures),
            "images_sha256": hashlib.sha256("".join(one.key for one in pictures).encode()).hexdigest(),
            "reference": REFERENCE,
        }


def document_of(item: VisionItem) -> Document:
    """The item's pictures as one document; each becomes a chunk."""
    return Document(parts=tuple(Image(picture) for picture in item.images), id="pictures")


def has_images(prompt: Prompt) -> bool:
    """Whether any of the prompt's chunks holds an image."""
    return any(chunk.images is not None for chunk in prompt.chunks)

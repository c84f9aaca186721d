"""What all benchmarks work on: a model, documents of about N tokens, a question; and what each record says of them."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infoflow_kv.engine import Engine
from infoflow_kv.errors import DocumentError, OptionError, PromptTooLongError
from infoflow_kv.evaluate.environment import without_folders
from infoflow_kv.models import LanguageModel
from infoflow_kv.records import Document, Prompt
from infoflow_kv.store import ChunkStore

SMALLEST_PIECE = 16  # tokens; less of a document is not worth a chunk


@dataclass(frozen=True, slots=True)
class Request:
    """One request: documents in their order, and the token ids that all arms read."""

    documents: tuple[Document, ...]
    prompt: Prompt

    @property
    def token_ids_sha256(self) -> str:
        text = ",".join(map(str, self.prompt.token_ids))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured and how often. `documents` are repeated, marked, where they are too few for a length.

    `model_name`: as the model was asked for. `environment`: the record of the machine. `seed` orders the documents.
    `plans`: requests may take full prefill where that is predicted to be quicker. `joined`: the documents of a request
    become one, so that its chunks are as long as asked for, however short the documents are.
    """

    model: LanguageModel
    documents: tuple[Document, ...]
    question: str
    model_name: str = ""
    repeats: int = 5
    warmup: int = 1
    chunk_tokens: int = 512
    seed: int = 0
    plans: bool = False
    joined: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, store: ChunkStore | None = None, method: str = "infoflow", budget: float = 0.15) -> Engine:
        return Engine(self.model, store, method=method, budget=budget, chunk_tokens=self.chunk_tokens, plans=self.plans)

    def request(self, tokens: int, num_new: int = 1) -> Request:
        """The request over about `tokens` context tokens, the same for the same setting.

        OptionError for no tokens at all, PromptTooLongError where it does not fit the model's window.
        """
        engine = self.engine()
        documents = gather(engine, self.documents, tokens, self.seed)
        if self.joined:
            documents = (Document(text="\n\n".join(document.text for document in documents)),)
        prompt = engine.prompt(self.question, documents)
        if prompt.num_tokens + num_new > self.model.window_tokens:
            raise PromptTooLongError(prompt.num_tokens, num_new, self.model.window_tokens)
        return Request(documents, prompt)

    def common(self, benchmark: str) -> dict[str, Any]:
        """The fields with which every record begins."""
        return {
            "benchmark": benchmark,
            "model": without_folders([self.model_name or self.model.name])[0],
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "threads": torch.get_num_threads(),
            "repeats": self.repeats,
        }

    def described(self, benchmark: str, request: Request) -> dict[str, Any]:
        """The same, with the request."""
        prompt = request.prompt
        return self.common(benchmark) | {
            "context_tokens": prompt.context_tokens,
            "prompt_tokens": len(prompt.suffix_ids),
            "chunks": len(prompt.chunks),
            "token_ids_sha256": request.token_ids_sha256,
        }


def gather(engine: Engine, documents: Sequence[Document], tokens: int, seed: int = 0) -> tuple[Document, ...]:
    """Documents of at most and about `tokens` chunk tokens in all, in an order that the seed gives.

    The last one is cut at a word. Where all of them are not enough they come again, each paragraph marked with the
    copy's number, so that no two chunks are the same.
    """
    if tokens < SMALLEST_PIECE:
        raise OptionError(f"{tokens} context tokens are too few; give at least {SMALLEST_PIECE}")
    order = random.Random(seed)
    taken: list[Document] = []
    left, copy = tokens, 0
    while left >= SMALLEST_PIECE:
        round_ = [marked(document, copy) for document in documents]
        if copy or seed:  # the given order is the one that the documents' author meant
            order.shuffle(round_)
        before = left
        for document in round_:
            size = num_tokens(engine, document)
            if size > left:
                taken.extend(cut(engine, document, left))
                return checked(taken, tokens)
            taken.append(document)
            left -= size
        if before == left:
            raise DocumentError("the documents hold no text to measure with")
        copy += 1
    return checked(taken, tokens)


def marked(document: Document, copy: int) -> Document:
    if copy == 0:
        return document
    paragraphs = document.text.split("\n\n")
    return Document(text="\n\n".join(f"({copy}) {text}" for text in paragraphs), title=document.title)


def num_tokens(engine: Engine, document: Document) -> int:
    return sum(chunk.num_tokens for chunk in engine.split(document))


def cut(engine: Engine, document: Document, tokens: int) -> list[Document]:
    """The beginning of the document that has at most `tokens` tokens; nothing where it would be a scrap."""
    words = document.text.strip().split(" ")
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if num_tokens(engine, shortened(document, words[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    piece = shortened(document, words[:low])
    return [piece] if low and num_tokens(engine, piece) >= SMALLEST_PIECE else []


def shortened(document: Document, words: Sequence[str]) -> Document:
    return Document(text=" ".join(words), title=document.title)


def checked(taken: list[Document], tokens: int) -> tuple[Document, ...]:
    if not taken:
        raise OptionError(f"{tokens} context tokens are too few for a piece of these documents; give more")
    return tuple(taken)

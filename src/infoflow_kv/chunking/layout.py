"""Template, chunks and question → the ids of one request, the same for every method."""

from collections.abc import Sequence

from infoflow_kv.chunking.template import Template
from infoflow_kv.chunking.tokens import TextEncoder
from infoflow_kv.errors import OptionError
from infoflow_kv.records import Chunk, Prompt


def layout(question: str, chunks: Sequence[Chunk], template: Template, encoder: TextEncoder) -> Prompt:
    """Return the request's ids: head, the chunks as they are, question. No ids are made anywhere else.

    Chunks may be none. Raises OptionError for a question without text.
    """
    question = question.strip()
    if not question:
        raise OptionError("the question is empty; ask something")
    suffix_ids = (
        encoder.scaffold(template.before_question, continues=True)
        + encoder.content(template.joint + question)[0]
        + encoder.scaffold(template.after_question, continues=True)
    )
    return Prompt(head_ids=_head_ids(template, encoder), chunks=tuple(chunks), suffix_ids=suffix_ids)


def _head_ids(template: Template, encoder: TextEncoder) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    done = 0
    for start, stop in template.content_ranges:
        ids += encoder.scaffold(template.head[done:start], continues=done > 0)
        ids += encoder.content(template.head[start:stop])[0]
        done = stop
    return ids + encoder.scaffold(template.head[done:], continues=done > 0)

"""Reorder: chunks that were selected most stand next to the prompt (docs/method.md, section 8)."""

from collections.abc import Sequence

from infoflow_kv.records import Selection, Span


def chunk_order(selection: Selection, spans: Sequence[Span]) -> tuple[int, ...]:
    """The order of the chunks at `spans`, by the share of their tokens that is selected, ascending; ties stay in place.

    >>> import torch
    >>> chunk_order(Selection(torch.tensor([0, 1, 5])), [Span(0, 4), Span(4, 6), Span(6, 9)])
    (2, 0, 1)
    """
    slots = selection.slots.cpu()
    shares = [int(((slots >= span.start) & (slots < span.stop)).sum()) / span.num_tokens for span in spans]
    return tuple(sorted(range(len(shares)), key=lambda index: shares[index]))

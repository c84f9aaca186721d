"""Which tokens of one request were recomputed: a row a chunk, in it one strip a method, tokens from left to right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.figures import style

_TITLE_LETTERS = 26


def draw_selection(explained: Mapping[str, Any], folder: Path | str, name: str = "selection") -> list[Path]:
    """PNG and SVG of one explained request.

    `explained`: {"methods": [{"name", "chunks": [{"title", "tokens", "scores", "recomputed"}]}]}, chunks in order.
    `recomputed` holds 0 or 1 a token and is drawn in the method's colour; `scores`, one a token or empty, as a grey
    that gets darker with the score's rank inside the method. A method may have `reusable`, the number of tokens that it
    could choose from, for the legend, and a chunk `exact`: nothing of it needs recomputing. Methods that recomputed
    nothing are left out where another did. OptionError where lists and `tokens` disagree, no chunk has tokens, or
    methods have other chunks.
    """
    methods = list(explained.get("methods") or ())
    style.require(methods, "the selection map", ("name", "chunks"))
    titles = [chunk["title"] for chunk in methods[0]["chunks"]]
    longest = _check(methods)
    methods = [m for m in methods if any(any(chunk["recomputed"]) for chunk in m["chunks"])] or methods
    strips, gap = len(methods), 0.55
    with style.drawing(name):
        from matplotlib.colors import to_rgb

        figure = style.new_figure(1.0 + len(titles) * (0.16 * strips + 0.12))
        axes = figure.subplots()
        labels: dict[float, str] = {}
        for number, method in enumerate(methods):
            ranks = _ranks([chunk["scores"] for chunk in method["chunks"]])
            for place, (chunk, rank) in enumerate(zip(method["chunks"], ranks, strict=True)):
                if not chunk["tokens"]:
                    continue
                middle = place * (strips + gap) + number
                grey = 0.93 - 0.4 * rank if len(rank) else np.full(chunk["tokens"], 0.93)
                strip = np.repeat(grey[:, None], 3, axis=1)
                strip[np.asarray(chunk["recomputed"], dtype=bool)] = to_rgb(style.colour(str(method["name"])))
                axes.imshow(
                    strip[None],
                    extent=(0, chunk["tokens"], middle + 0.45, middle - 0.45),
                    aspect="auto",
                    interpolation="nearest" if chunk["tokens"] <= 600 else "antialiased",
                )
                chosen = sum(chunk["recomputed"])
                share = "exact" if chunk.get("exact") and not chosen else str(chosen)
                axes.text(chunk["tokens"] + longest * 0.008, middle, share, va="center", fontsize=7.5)
        for place, title in enumerate(titles):
            labels[place * (strips + gap) + (strips - 1) / 2] = f"{place + 1}  {_short(str(title))}"
        axes.set_yticks(list(labels), list(labels.values()))
        axes.set_ylim(len(titles) * (strips + gap) - gap - 0.3, -0.7)
        exact = any(chunk.get("exact") for method in methods for chunk in method["chunks"])
        axes.set_xlim(0, longest * (1.06 if exact else 1.04))
        axes.grid(False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        end = "at the end: tokens recomputed" + (" (exact: none are needed)" if exact else "")
        axes.set_xlabel(f"token in its chunk; {end}; grey: rank of the score")
        handles = [_patch(style.colour(str(m["name"])), _legend(m)) for m in methods]
        figure.legend(handles=handles, loc="outside upper left", ncols=min(3, strips), handlelength=1.2)
        return style.save(figure, folder, name)


def _check(methods: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of the longest chunk."""
    longest = 0
    shape = [(chunk["title"], chunk["tokens"]) for chunk in methods[0]["chunks"]]
    if not shape:
        raise OptionError("the selection map got no chunks; explain a request with at least one document")
    for method in methods:
        chunks = method["chunks"]
        if sorted(map(repr, shape)) != sorted(repr((chunk["title"], chunk["tokens"])) for chunk in chunks):
            raise OptionError(
                f"method '{method['name']}' has other chunks than '{methods[0]['name']}'; explain one request at a time"
            )
        for chunk in chunks:
            longest = max(longest, chunk["tokens"])
            for field in ("recomputed", "scores"):
                given = len(chunk[field])
                if given != chunk["tokens"] and not (field == "scores" and given == 0):
                    raise OptionError(
                        f"chunk '{chunk['title']}' of method '{method['name']}' has {chunk['tokens']} tokens and "
                        f"{given} {field}; expected one a token"
                    )
    if not longest:
        raise OptionError(f"the selection map got {len(shape)} chunks without a token; at least one must have some")
    return longest


def _ranks(scores: Sequence[Sequence[float]]) -> "list[np.ndarray[tuple[int], np.dtype[np.float64]]]":
    """Per chunk each score's rank among all of the method's, 0 to 1: masses are too uneven to be shown as they are."""
    flat = np.array([score for chunk in scores for score in chunk], dtype=np.float64)
    ranks = np.searchsorted(np.sort(flat), flat) / max(len(flat) - 1, 1)
    ends = np.cumsum([len(chunk) for chunk in scores])
    return [ranks[end - len(chunk) : end] for chunk, end in zip(scores, ends, strict=True)]


def _short(title: str) -> str:
    title = style.words(title)
    return title if len(title) <= _TITLE_LETTERS else title[: _TITLE_LETTERS - 1].rstrip() + "…"


def _legend(method: Mapping[str, Any]) -> str:
    chosen = sum(sum(chunk["recomputed"]) for chunk in method["chunks"])
    # A share of all tokens would not be the budget's: exact chunks are never up for choice.
    of = "" if method.get("reusable") is None else f" of {method['reusable']} reusable"
    label = f"{style.words(method['name'])} ({chosen}{of} tokens)"
    return f" {label}" if label.startswith("_") else label  # matplotlib keeps labels with one in front out of legends


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)

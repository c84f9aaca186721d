"""The page of `explain`: one request, all its methods, in a single HTML file that asks the network for nothing.

What people read without JavaScript (question, answers) is written here; the rest is data that page.js draws.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from infoflow_kv.explaining.reports import FORMAT, check_report

# JSON inside <script> ends at `</script` and changes meaning at `<!--`; U+2028 and U+2029 end lines in old JavaScript.
# A lone surrogate, as a tokenizer's partial character may hold, has no UTF-8. As JSON escapes all of them are harmless.
UNSAFE_IN_SCRIPT = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

NONE = '<span class="muted">–</span>'


def render_page(report: Mapping[str, Any]) -> str:
    """One self-contained HTML file that shows `report`, a request as the engine explains it (format 1).

    OptionError where the report does not hold together: another format, a missing field, unequal lengths, a number
    that is not finite.

        Path("report.html").write_text(render_page(report), encoding="utf-8")
    """
    check_report(report)
    # With the newlines around them, which the policy's hashes cover too.
    style, script = (f"\n{_part(name)}\n" for name in ("page.css", "page.js"))
    first = report["methods"][0]["usage"]
    return Template(_part("page.html")).substitute(
        policy=_policy(style, script),
        style=style,
        script=script,
        data=_in_script(_drawn(report)),
        question=_text(report["question"]),
        model=_text(report["model"]),
        created=_text(report["created"]),
        version=_text(report["version"]),
        budget=_budget(report),
        size=f"{_many(len(report['chunks']), 'chunk')}, {_many(first['context_tokens'], 'context token')}",
        rows="\n".join(_rows(report)),
    )


def _part(name: str) -> str:
    """The text of a file that stands beside this one."""
    return (files(__package__) / name).read_text(encoding="utf-8").strip()


def _policy(style: str, script: str) -> str:
    """A content security policy under which nothing but our own style and script runs, and nothing is fetched."""
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in (style, script)
    ]
    return f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; base-uri 'none'; form-action 'none'"


# ---- what page.js draws ----


def _drawn(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the report that page.js needs, compact: rounded scores, exact ranks, marks as a string of 0 and 1."""
    fields = ("name", "rule", "source", "geometry", "layers", "reorder", "usage", "timings", "order")
    return {
        "format": FORMAT,
        "methods": [
            {name: m[name] for name in fields} | {"reason": m.get("reason", ""), "chunks": _drawn_chunks(m)}
            for m in report["methods"]
        ],
        "chunks": [
            {name: chunk[name] for name in ("id", "title", "tokens")} | _images(chunk) for chunk in report["chunks"]
        ],
        "prompt_tokens": report["prompt_tokens"],
    }


def _images(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """The chunk's images, where it has any."""
    return {"images": chunk["images"]} if chunk.get("images") else {}


def _drawn_chunks(method: Mapping[str, Any]) -> list[dict[str, Any]]:
    ranks = _ranks(method)
    return [
        {
            "scores": None if chunk["scores"] is None else [_rounded(score) for score in chunk["scores"]],
            "ranks": ranks[index],
            "recomputed": "".join("1" if mark else "0" for mark in chunk["recomputed"]),
            "exact": chunk["exact"],
            "mass": _rounded(chunk["mass"]),
        }
        for index, chunk in enumerate(method["chunks"])
    ]


def _ranks(method: Mapping[str, Any]) -> list[list[int] | None]:
    """Per chunk the rank of each token, 1 the highest score; None where tokens were not up for choice.

    Ranks come from the unrounded scores, ties going to the token that stood earlier in this method's order: the rule
    by which tokens are chosen. Scores of exact chunks are ignored, as they are there.
    """
    ranks: list[list[int] | None] = [None] * len(method["chunks"])
    tokens: list[tuple[int, int]] = []
    for index in method["order"]:
        chunk = method["chunks"][index]
        if chunk["scores"] is not None and not chunk["exact"]:
            ranks[index] = [0] * len(chunk["scores"])
            tokens += [(index, position) for position in range(len(chunk["scores"]))]
    tokens.sort(key=lambda token: -method["chunks"][token[0]]["scores"][token[1]])
    for rank, (index, position) in enumerate(tokens, start=1):
        ranked = ranks[index]
        assert ranked is not None
        ranked[position] = rank
    return ranks


def _rounded(number: float) -> float | int:
    """The number to four significant digits; whole ones lose their `.0`, as every byte counts 48,000 times."""
    short = float(f"{number:.3e}")
    return int(short) if short.is_integer() else short


def _in_script(data: Any) -> str:
    """`data` as JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return UNSAFE_IN_SCRIPT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


# ---- what is read without JavaScript ----


def _rows(report: Mapping[str, Any]) -> list[str]:
    """A table row for each method; first the reference, where its answer is known and no method is it."""
    reference = report["full_answer"]
    rows = []
    if reference is not None and all(method["name"] != "full" for method in report["methods"]):
        rows.append(_row("full prefill", "the reference", _text(reference), NONE, NONE, NONE))
    for method in report["methods"]:
        same = reference is not None and method["name"] != "full" and method["answer"] == reference
        rows.append(
            _row(
                method["name"],
                method["rule"],
                _text(method["answer"]) + ('<span class="sub">as full prefill</span>' if same else ""),
                _seconds(method["timings"]["ttft_seconds"]),
                _recomputed(method["usage"]),
                _distance(method),
            )
        )
    return rows


def _row(name: str, rule: str, answer: str, ttft: str, recomputed: str, distance: str) -> str:
    """One `tr`; `name` and `rule` are escaped here, the rest is HTML."""
    cells = (("Answer", "answer", answer), ("TTFT", "num", ttft), ("Recomputed", "num", recomputed))
    data = "".join(
        f'<td role="cell" class="{kind}" data-label="{label}"><div>{cell}</div></td>'
        for label, kind, cell in (*cells, ("Distance to full", "num", distance))
    )
    head = f'<th role="rowheader" scope="row">{_text(name)}<span class="sub">{_text(rule)}</span></th>'
    return f'<tr role="row">{head}{data}</tr>'


def _budget(report: Mapping[str, Any]) -> str:
    """The budget; of an adaptive one what it covers, and its ceiling."""
    share, cover = _percent(report["budget"]), report.get("cover")
    return share if cover is None else f"auto: {_percent(cover)} of the predicted influence, at most {share}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}\u202f%"


def _recomputed(usage: Mapping[str, int]) -> str:
    reusable, again = usage["reusable_tokens"], usage["recomputed_tokens"]
    if reusable == 0:
        return f'{NONE}<span class="sub">nothing reused</span>'
    return f'{100 * again / reusable:.1f}\u202f%<span class="sub">{again:,} of {reusable:,} tokens</span>'


def _distance(method: Mapping[str, Any]) -> str:
    lines = [
        f"{label} {value:.3g}"
        for label, value in (("KL", method["kl_first"]), ("JS", method["js_first"]))
        if value is not None
    ]
    same = method["same_first_token"]
    note = "" if same is None else f'<span class="sub">{"same" if same else "other"} first token</span>'
    return ("<br>".join(lines) or NONE) + note


def _seconds(value: float) -> str:
    return f"{value:.2f}\u202fs" if value >= 0.0995 else f"{1000 * value:.0f}\u202fms"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _text(value: str) -> str:
    """`value` for use as HTML text; a lone surrogate becomes the replacement character."""
    return html.escape(LONE_SURROGATE.sub("\ufffd", value))

"""The page of `explain`: one request, all its methods, in a single HTML file that asks the network for nothing.

What people read without JavaScript (question, answers) is written here; the rest is data that page.js draws.
"""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from infoflow_kv.errors import OptionError

FORMAT = 1

TIMINGS = ("load_seconds", "assemble_seconds", "score_seconds", "repair_seconds", "ttft_seconds", "decode_seconds")
USAGE = (
    "context_tokens",
    "prompt_tokens",
    "reusable_tokens",
    "recomputed_tokens",
    "prefilled_tokens",
    "cached_chunks",
    "chunks",
    "new_tokens",
)

# JSON inside <script> ends at `</script` and changes meaning at `<!--`; U+2028 and U+2029 end lines in old JavaScript.
# A lone surrogate, as a tokenizer's partial character may hold, has no UTF-8. As JSON escapes all of them are harmless.
UNSAFE_IN_SCRIPT = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# What the fields may be, as error messages call it.
NUMBER = int | float
KINDS = {str: "string", bool: "truth value", Sequence: "list", Mapping: "dictionary", NUMBER: "number"}

NONE = '<span class="muted">–</span>'


def render_page(report: Mapping[str, Any]) -> str:
    """One self-contained HTML file that shows `report`, a request as the engine explains it (format 1).

    OptionError where the report does not hold together: another format, a missing field, unequal lengths, a number
    that is not finite.

        Path("report.html").write_text(render_page(report), encoding="utf-8")
    """
    _check(report)
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
        "chunks": [{name: chunk[name] for name in ("id", "title", "tokens")} for chunk in report["chunks"]],
        "prompt_tokens": report["prompt_tokens"],
    }


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


# ---- whether the report holds together ----


def _check(report: Mapping[str, Any]) -> None:
    """OptionError unless the report holds together; afterwards every field that is read is there and of its type."""
    given = report.get("format") if isinstance(report, Mapping) else None
    if type(given) is not int or given != FORMAT:
        raise OptionError(f"the report has format {given!r}, and this version draws format {FORMAT}; make it anew")
    for name in ("question", "model", "created", "version"):
        _field(report, name, str, "the report")
    _number(report, "budget", "the report")
    if report.get("cover") is not None:
        _number(report, "cover", "the report")
    _optional(report, "full_answer", str, "the report")
    for index, token in enumerate(_field(report, "prompt_tokens", Sequence, "the report")):
        _expect(token, str, f"prompt token {index}")
    sizes = []
    for index, chunk in enumerate(_field(report, "chunks", Sequence, "the report")):
        where = f"chunk {index}"
        for name in ("id", "title"):
            _field(chunk, name, str, where)
        tokens = _field(chunk, "tokens", Sequence, where)
        for token in tokens:
            _expect(token, str, f"a token of {where}")
        sizes.append(len(tokens))
    methods = _field(report, "methods", Sequence, "the report")
    if not methods:
        raise OptionError("the report has no methods; it needs at least one")
    for index, method in enumerate(methods):
        _check_method(method, f"method {index}", sizes)


def _check_method(method: Any, where: str, sizes: list[int]) -> None:
    where = f"method '{_field(method, 'name', str, where)}'"
    for name in ("rule", "source", "answer", "geometry", "layers"):
        _field(method, name, str, where)
    _field(method, "reorder", bool, where)
    _expect(method.get("reason", ""), str, f"'reason' of {where}")
    _optional(method, "same_first_token", bool, where)
    for name in ("kl_first", "js_first"):
        if _optional(method, name, NUMBER, where) is not None:
            _number(method, name, where)
    for group, names in (("usage", USAGE), ("timings", TIMINGS)):
        numbers = _field(method, group, Mapping, where)
        for name in names:
            if _number(numbers, name, f"{group} of {where}") < 0:
                raise OptionError(f"{group} of {where}: '{name}' is {numbers[name]!r}; it cannot be below 0")
    order = _field(method, "order", Sequence, where)
    if any(type(index) is not int for index in order) or sorted(order) != list(range(len(sizes))):
        raise OptionError(f"{where}: 'order' must hold each of the {len(sizes)} chunk indices once, got {list(order)}")
    chunks = _field(method, "chunks", Sequence, where)
    if len(chunks) != len(sizes):
        raise OptionError(f"{where} has {len(chunks)} chunks, and the report has {len(sizes)}; they must agree")
    for index, (chunk, size) in enumerate(zip(chunks, sizes, strict=True)):
        _check_chunk(chunk, f"{where}, chunk {index}", size)


def _check_chunk(chunk: Any, where: str, size: int) -> None:
    _field(chunk, "exact", bool, where)
    _number(chunk, "mass", where)
    marks = _field(chunk, "recomputed", Sequence, where)
    scores = _optional(chunk, "scores", Sequence, where)
    for name, values in (("recomputed", marks), ("scores", scores)):
        if values is not None and len(values) != size:
            raise OptionError(f"{where}: {len(values)} '{name}' for {size} tokens; there must be one for each")
    if any(mark not in (0, 1) for mark in marks):
        raise OptionError(f"{where}: 'recomputed' must be 0 or 1 for each token")
    for position, score in enumerate(scores or ()):
        _finite(score, f"{where}: the score of token {position}")


def _field(record: Any, name: str, kind: Any, where: str) -> Any:
    """The field of this name; OptionError if it is missing or of another kind."""
    if not isinstance(record, Mapping) or name not in record:
        raise OptionError(f"{where} lacks '{name}'")
    return _expect(record[name], kind, f"'{name}' of {where}")


def _optional(record: Any, name: str, kind: Any, where: str) -> Any:
    """The field of this name, which may be None but must be there."""
    return None if isinstance(record, Mapping) and record.get(name, 0) is None else _field(record, name, kind, where)


def _expect(value: Any, kind: Any, what: str) -> Any:
    # A string is a sequence too, and True is an int: neither is ever meant.
    wrong = isinstance(value, str) if kind is Sequence else isinstance(value, bool) and kind is not bool
    if wrong or not isinstance(value, kind):
        raise OptionError(f"{what} is a {type(value).__name__}; a {KINDS[kind]} is needed")
    return value


def _number(record: Any, name: str, where: str) -> float:
    """The finite number of this name."""
    return _finite(_field(record, name, NUMBER, where), f"'{name}' of {where}")


def _finite(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise OptionError(f"{what} is {value!r}; a finite number is needed")
    return value

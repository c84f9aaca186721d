"""Writes docs/results*.md and their figures from the laboratory's rows under benchmarks/results.

`--check` compares the pages only: the figures follow from the same rows.
"""

# ruff: noqa: E501 - Markdown

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infoflow_kv.evaluate.figures import draw_calibration
from infoflow_kv.evaluate.figures.series import plates
from infoflow_kv.evaluate.findings import find
from infoflow_kv.evaluate.report import render_markdown
from infoflow_kv.evaluate.results import paired, read_rows, read_runs
from infoflow_kv.evaluate.statistics import paired_bootstrap, ratio_interval

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LAB = RESULTS / "lab"
DOCS = ROOT / "docs"
RESAMPLES = 2_000

Rows = list[dict]
Pairs = Sequence[tuple[str, tuple[str, ...]]]

RIVALS: Pairs = (
    ("infoflow@0.15", ("cacheblend@0.15", "cacheblend-gradual@0.15", "epic@0.15")),
    ("influence@0.15", ("cacheblend@0.15", "cacheblend-gradual@0.15", "epic@0.15", "infoflow@0.15")),
    ("infoflow@0.05", ("cacheblend@0.15",)),
    ("influence@0.05", ("cacheblend@0.15",)),
    ("infoflow[layers=relative]@0.15", ("infoflow@0.15",)),
    ("infoflow[geometry=HL-HP]@0.15", ("infoflow@0.15",)),
    ("infoflow[geometry=HL-TP]@0.15", ("infoflow@0.15",)),
    ("infoflow[geometry=TL-TP]@0.15", ("infoflow@0.15",)),
)
ABLATIONS: Pairs = (
    ("infoflow[repair_layers=0-14]@0.15", ("infoflow@0.15",)),
    ("infoflow[repair_layers=15-29]@0.15", ("infoflow@0.15",)),
    ("influence[repair_layers=0-14]@0.15", ("influence@0.15",)),
    ("infoflow[chunk_floor=0.3]@0.15", ("infoflow@0.15",)),
    ("infoflow[chunk_cap=0.3]@0.15", ("infoflow@0.15",)),
    ("influence[chunk_cap=0.3]@0.15", ("influence@0.15",)),
    ("infoflow-vatp@0.15", ("infoflow@0.15",)),
    ("infoflow-entropy@0.15", ("infoflow@0.15",)),
    ("infoflow@auto:0.8", ("infoflow@0.15",)),
    ("influence@auto:0.8", ("influence@0.15",)),
    ("seam", ("none",)),
)


@dataclass(frozen=True)
class Page:
    """One page: `docs/{name}.md` of the lab's run folders `sets`, its figures under `docs/figures`/`figures`.

    `opening` follows the heading; `parts` make further sections of the page's rows, "" for nothing.
    """

    name: str
    title: str
    sets: tuple[str, ...]
    figures: str = ""
    opening: str = ""
    parts: tuple[Callable[[Rows], str], ...] = ()
    request: str = ""  # the file of one explained request under benchmarks/results, whose selections are drawn

    @property
    def path(self) -> Path:
        return DOCS / f"{self.name}.md"

    def runs(self) -> list[Path]:
        return [LAB / name for name in self.sets if (LAB / name / "rows.jsonl").exists()]

    def text(self) -> str:
        rows, prefix = read_rows(self.runs()), "/".join(filter(None, ("figures", self.figures))) + "/"
        text = render_markdown(
            rows, read_runs(self.runs()), prefix, explained=self.explained(), resamples=RESAMPLES, title=self.title
        )
        heading, _, rest = text.partition("\n\n")
        made = [part(rows) for part in self.parts]
        links = [f"[{p.title}]({p.name}.md)" for p in PAGES if p.runs() and p is not self]
        opening = f"{self.opening} See also: {', '.join(links)}." if links else self.opening
        return "\n\n".join(part.strip() for part in (heading, opening, rest, *made) if part) + "\n"

    def explained(self) -> dict | None:
        return json.loads((RESULTS / self.request).read_text(encoding="utf-8")) if self.request else None

    def draw(self) -> None:
        found = find(read_rows(self.runs()), read_runs(self.runs()), resamples=RESAMPLES)
        for plate in plates(found, self.explained()):
            plate.draw(DOCS / "figures" / self.figures)


def section(title: str, words: str, *lines: str) -> str:
    return "\n".join([f"## {title}", "", words, "", *lines])


def comparison(rows: Rows, ours: str, rival: str) -> str:
    """One line of a table: ratios and differences of both distances, on the items that both arms have."""
    cells = []
    for field in ("kl_cont", "js_cont"):
        p = paired(rows, ours, rival, field)
        labels = (p.clusters, p.datasets, RESAMPLES)
        ratio = ratio_interval(p.a, p.b, *labels)
        difference = paired_bootstrap([a - b for a, b in zip(p.a, p.b, strict=True)], *labels)
        cells += [
            f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]",
        ]
    return f"| `{ours}` | `{rival}` | {len(p.ids)} | {' | '.join(cells)} |"


def comparisons(rows: Rows, pairs: Pairs) -> list[str]:
    arms = {row["arm"] for row in rows}
    known = [(ours, rival) for ours, rivals in pairs for rival in rivals if {ours, rival} <= arms]
    head = ["| arm | against | items | KL ÷ | KL − | JS ÷ | JS − |", "|---|---|---:|---:|---:|---:|---:|"]
    return head + [comparison(rows, *pair) for pair in known]


_COMPARED = (
    "Ratios of means and paired differences, each with its 95 % bootstrap interval; data sets weigh equally. Below 1\n"
    "and below 0: the arm is closer to full prefill."
)


def rivals_part(rows: Rows) -> str:
    """The claims of the method, as paired comparisons."""
    return section("Against the rivals", _COMPARED, *comparisons(rows, RIVALS))


def ablations_part(rows: Rows) -> str:
    return section("Each against its plain arm", _COMPARED, *comparisons(rows, ABLATIONS))


def head_part(rows: Rows) -> str:
    """The same questions with chunks prefilled behind nothing, from a run of its own."""
    if not (LAB / "no_head" / "rows.jsonl").exists():
        return ""
    bare = [row | {"arm": f"{row['arm']} without head"} for row in read_rows([LAB / "no_head"])]
    bases = [row for row in read_rows([LAB / "2wikimqa"]) if row["_id"] in {b["_id"] for b in bare}]
    arms = ("none", "epic@0.15", "cacheblend@0.15", "infoflow@0.15", "influence@0.15")
    return section(
        "Head policy",
        "Chunks prefilled behind nothing, each with a sink of its own, against chunks prefilled behind the prompt's head\n"
        "(the default; the head is then part of a chunk's identity). The prompts are the same.",
        *comparisons(bare + bases, [(f"{arm} without head", (arm,)) for arm in arms]),
    )


def calibration() -> dict:
    return json.loads((RESULTS / "calibration.json").read_text(encoding="utf-8"))["measurements"]


def calibration_part(rows: Rows) -> str:
    """The layer sweep behind the embedded model's layer sets."""
    found = calibration()
    assert not {row["_id"] for row in rows} & set(found["ids"]), "an item was both calibrated on and measured"
    lines = ["| method | set | layers | KL cont. | 95 % interval | JS cont. |", "|---|---|---|---:|---|---:|"]
    for s in sorted(found["sets"], key=lambda s: (s["method"], s["js_cont"])):
        interval = f"[{s['low']:.3f}, {s['high']:.3f}]"
        lines.append(
            f"| {s['method']} | {s['set']} | `{s['layers']}` | {s['kl_cont']:.4f} | {interval} | {s['js_cont']:.4f} |"
        )
    return section(
        "Calibration",
        f"`infoflow-kv calibrate` on {found['items']} questions from the ends of the three files, none of them\n"
        f"among those above, at budget {found['budget']:g}. The set with the smallest mean JS divergence is what `auto`\n"
        "takes for the embedded model. The intervals are wide: so few questions do not tell the leading sets apart.",
        *lines,
        "",
        "![Distance to full prefill by scoring layer](figures/layers.svg)",
    )


def movement_part(rows: Rows) -> str:
    """The forms of the record that `influence` keeps with each chunk; measured on questions of their own."""
    file = RESULTS / "movement_forms.jsonl"
    if not file.exists():
        return ""
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert not {row["_id"] for row in rows} & {line["_id"] for line in found}, "an item was both tried on and measured"
    plain = next(line["form"] for line in found if line["form"].startswith("nothing"))
    base = {line["_id"]: line for line in found if line["form"] == plain}
    lines = ["| form | bytes a token | KL cont. | KL ÷ nothing | JS cont. |", "|---|---:|---:|---:|---:|"]
    for form in dict.fromkeys(line["form"] for line in found):
        of = [line for line in found if line["form"] == form]
        kl, js = ([line[field] for line in of] for field in ("kl_cont", "js_cont"))
        ratio = ratio_interval(
            kl, [base[line["_id"]]["kl_cont"] for line in of], None, [line["dataset"] for line in of], RESAMPLES
        )
        lines.append(
            f"| {form} | {of[0]['bytes_per_token']} | {sum(kl) / len(kl):.4f} | "
            f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] | {sum(js) / len(js):.4f} |"
        )
    return section(
        "The form of the movement record",
        f"Method `influence` weighs attention by how far each token's value moved behind a neighbour. {len(base)} questions from\n"
        f"the ends of the files, budget {found[0]['budget']:g}; `benchmarks/movement_forms.py`. The forms do not differ: what is kept\n"
        "is one number per layer in float16, as coarser forms need a level of the model beside them. The tables above were measured with\n"
        "one per layer and head.",
        *lines,
    )


PAGES = (
    # Only sets on which every arm ran are pooled.
    Page(
        "results",
        "Results of the laboratory",
        ("2wikimqa", "hotpotqa", "musique"),
        opening="Multi-hop questions, every method.",
        parts=(rivals_part, calibration_part, movement_part),
        request="explained.json",
    ),
    Page(
        "results_more",
        "Results on other kinds of data",
        ("fairytaleqa", "nq_multidoc", "product_docs", "kv_retrieval"),
        figures="more",
        opening="Stories, search results, software manuals and key-value pairs; the main methods at one budget.",
        parts=(rivals_part,),
    ),
    Page(
        "results_needles",
        "Needles and variable tracking",
        ("niah", "niah_places", "vt"),
        figures="needles",
        opening="Facts hidden in essays, by depth, length and place in the chunk, and chains of variables, one hop a chunk.",
        parts=(rivals_part,),
    ),
    Page(
        "results_ablations",
        "Ablations",
        ("ablations",),
        figures="ablations",
        opening="Variants on some of 2WikiMQA's questions, with the distance of keys and values to full prefill's.\n"
        "Geometries, layer sets and budgets stand with the multi-hop sets.",
        parts=(ablations_part, head_part),
    ),
)


if __name__ == "__main__":
    made = [page for page in PAGES if page.runs()]
    if "--check" in sys.argv:
        stale = [p for p in made if not p.path.exists() or p.path.read_text(encoding="utf-8") != p.text()]
        for p in stale:
            print(f"{p.path.relative_to(ROOT)} is stale; run `make docs`")
        if not stale:
            print("results: ok")
        sys.exit(bool(stale))
    for p in made:
        p.path.write_text(p.text(), encoding="utf-8")
        p.draw()
    draw_calibration(calibration(), DOCS / "figures")

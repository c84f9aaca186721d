"""The report: every table there, nothing claimed inside an interval, one page that asks the network for nothing."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evaluate.lab_rows import RUN, made_run, row
from infoflow_kv.errors import InputError, OptionError
from infoflow_kv.evaluate import digits
from infoflow_kv.evaluate.findings import find, variant
from infoflow_kv.evaluate.report import render_markdown, write_report
from infoflow_kv.evaluate.statistics import Interval

FEW = 200  # resamples
GATED: dict[str, Any] = {"closed_gold_nll": 3.0, "closed_prediction": "no idea"}
EXPLAINED = {
    "methods": [{"name": "infoflow", "chunks": [{"title": "A", "tokens": 4, "scores": [], "recomputed": [1, 0, 0, 1]}]}]
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("report")
    return folder, write_report(made_run(items=12), [RUN], folder, explained=EXPLAINED, resamples=FEW)


@pytest.fixture(scope="module")
def markdown(written: tuple[Path, list[Path]]) -> str:
    return (written[0] / "report.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(written: tuple[Path, list[Path]]) -> str:
    return (written[0] / "report.html").read_text(encoding="utf-8")


def section(markdown: str, title: str) -> str:
    """The text under the heading that starts with `title`."""
    [found] = [part for part in markdown.split("\n## ") if part.startswith(title)]
    return found


def cells(text: str, arm: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| `{arm}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_all_files_are_written(written: tuple[Path, list[Path]]) -> None:
    folder, files = written
    assert all(file.is_file() for file in files)
    names = [file.relative_to(folder).as_posix() for file in files]
    figures = (
        "budgets-kl",
        "budgets-js",
        "pareto-rows",
        "pareto-ttft",
        "layers-infoflow",
        "needle",
        "hops",
        "selection",
    )
    assert names == ["report.md", "report.html", *(f"figures/{n}.{end}" for n in figures for end in ("png", "svg"))]


def test_sections_come_in_order(markdown: str) -> None:
    titles = re.findall(r"^## (.*)$", markdown, re.MULTILINE)
    assert titles[:13] == [
        "What ran",
        "How to read the tables",
        "What this can show",
        "Distance to full prefill: all data sets, equal weights",
        "Agreement with full prefill: all data sets, equal weights",
        "Recovery",
        "Answers: F1, LongBench (protocol `longbench`), %",
        "Answers: exact match, %",
        "Answers: F1, paper (protocol `paper`), %",
        "Needles: `needle`, found in %",
        "Variable tracking: `vt`, found in %",
        "Gate",
        "Geometry",
    ]
    assert titles[13:16] == ["Layers", "Budgets", "One request"]
    assert "Data set `vt`: agreement" in titles


def test_what_ran_is_told(markdown: str) -> None:
    told = section(markdown, "What ran")
    for words in ("| model | `made-135m` |", "| threads | `2` |", "| host cores | `2` |", "`influence@0.3`"):
        assert words in told
    assert cells(told, "musique") == ["`musique`", "12", "6", "10", "1000", "800"]


def test_numbers_reach_the_tables(markdown: str) -> None:
    budgets = section(markdown, "Budgets")
    assert cells(budgets, "infoflow@0.15")[1:6] == ["15", "15.0", "15.0 to 15.0", "12.0", "19.0"]
    assert cells(budgets, "infoflow@0.15")[6:] == ["0.400", "0.200"]
    assert cells(section(markdown, "Distance"), "full")[2] == "0 / 0 / 0"
    assert cells(section(markdown, "Agreement"), "influence@0.15")[6] == "1.15"


def test_marks_and_bold_only_outside_the_intervals(markdown: str) -> None:
    distance = section(markdown, "Distance")
    assert cells(distance, "random@0.15")[3].endswith("†")
    assert cells(distance, "influence@0.3")[2].startswith("**")
    bold = [line for line in distance.splitlines() if "**" in line]
    assert all(line.startswith("| `influence@") for line in bold)


def test_nothing_is_bold_where_an_interval_holds_zero() -> None:
    rows = []
    for i in range(10):
        rows.append(row(f"q{i}", "infoflow@0.15", kl_cont=0.2))
        rows.append(row(f"q{i}", "epic@0.15", kl_cont=0.2 + (0.05 if i % 2 else -0.06)))
    distance = section(render_markdown(rows, [], resamples=FEW), "Distance")
    assert "**" not in distance
    assert "†" not in cells(distance, "epic@0.15")[3]


def test_bounds_win_nothing() -> None:
    rows = [
        row(f"q{i}", arm, kl_cont=kl) for i in range(10) for arm, kl in (("oracle@0.15", 0.01), ("infoflow@0.15", 0.2))
    ]
    assert "**" not in section(render_markdown(rows, [], resamples=FEW), "Distance")


def test_the_two_f1_protocols_never_share_a_table(markdown: str) -> None:
    longbench, paper = section(markdown, "Answers: F1, LongBench"), section(markdown, "Answers: F1, paper")
    assert cells(longbench, "infoflow@0.15")[:4] == ["`infoflow@0.15`", "12", "100.0", "100.0"]
    assert "paper" not in longbench and cells(paper, "full")[3] == "100.0"
    assert "Left out by the gate: `hotpotqa` (full prefill does not beat the model without context)." in longbench


def test_the_gate_lists_what_the_model_cannot_do(markdown: str) -> None:
    gate = section(markdown, "Gate")
    assert gate.count("**full prefill does not beat the model without context**") == 3
    assert all(line.startswith("| `hotpotqa`") for line in gate.splitlines() if "does not beat" in line)


@pytest.mark.parametrize("clusters", [1, 2, 5])
@pytest.mark.parametrize("closed", [3.0, 0.5])
def test_too_few_documents_are_no_verdict(clusters: int, closed: float) -> None:
    """Whether full prefill leads or trails: one document and five say equally little, and neither counts."""
    rows = [
        row(f"q{i}", arm, group=f"doc{i % clusters}", closed_gold_nll=closed, closed_prediction="no idea")
        for i in range(10) for arm in ("full", "infoflow@0.15")
    ]  # fmt: skip
    told = render_markdown(rows, [RUN], resamples=FEW)
    words = f"too few documents to say ({clusters} of at least 6)"
    assert section(told, "Gate").count(f"{words}, does not count |") == 3
    assert "does not beat" not in told
    assert "Answers: F1" not in told
    assert "F1, LongBench, exact match, F1, paper: no data set passes the gate" in section(told, "Answers that no")


def test_recovery_and_ablations(markdown: str) -> None:
    recovery = section(markdown, "Recovery")
    assert "Not in this table: " in recovery
    shares = [float(cells(recovery, f"{m}@0.3")[1].split()[0]) for m in ("random", "epic", "infoflow", "influence")]
    assert shares == sorted(shares) and 60 < shares[2] < 72  # made: 0.3 × 2.2 = 66 %
    geometry = section(markdown, "Geometry")
    assert [line.split("|")[3].strip() for line in geometry.splitlines() if line.startswith("| `infoflow`")] == [
        "`GLOBAL (default)`",
        "`HL-TP`",
        "`TL-TP`",
    ]
    layers = section(markdown, "Layers")
    assert "`relative`" in layers and "`27`" in layers and "layers-infoflow.svg" in layers
    distance = section(markdown, "Distance")
    assert "| `infoflow[layers=" not in distance and "`infoflow[layers=relative]@0.15` (see Layers)" in distance
    assert "`infoflow[geometry=TL-TP]@0.15` (see Geometry)" in distance


def test_made_tasks_have_a_column_a_kind_and_a_hop(markdown: str) -> None:
    vt = section(markdown, "Variable tracking")
    assert "| hops `1` | hops `2` | hops `3` | hops `4` |" in vt and "hops.svg" in vt
    assert cells(vt.split("| order")[0], "full")[2:] == ["100.0"] * 4
    assert "| order `forward` | order `shuffled` |" in vt
    needles = section(markdown, "Needles")
    assert "| kind `one` | kind `two-chunk` |" in needles and "| place `end` | place `start` |" in needles
    assert needles.count("](figures/needle.svg)") == 1


def test_pages_markdown_and_render_agree(markdown: str) -> None:
    rendered = render_markdown(made_run(items=12), [RUN], "results/", explained=EXPLAINED, resamples=FEW)
    assert rendered == markdown.replace("](figures/", "](results/")


class Page(HTMLParser):
    """Counts tags and collects what could leave the page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [v or "" for k, v in attrs if k in ("href", "src", "xlink:href", "srcset", "data", "action")]
        self.ids += [v or "" for k, v in attrs if k == "id"]


def test_the_page_holds_everything_and_asks_for_nothing(markdown: str, page: str) -> None:
    parsed = Page()
    parsed.feed(page)
    assert parsed.tags.count("table") == len(re.findall(r"^\| ---", markdown, re.MULTILINE)) > 20
    assert parsed.tags.count("svg") == markdown.count("![") == 8
    assert not {"script", "link", "iframe", "img", "object", "form"} & set(parsed.tags)
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in parsed.targets)
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in page and "prefers-color-scheme: dark" in page
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert {target[1:] for target in parsed.targets if target.startswith("#")} <= set(parsed.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(parsed.ids)
    assert "**" not in page and "<strong>full prefill does not beat the model without context</strong>" in page


def test_equal_results_give_equal_files(tmp_path: Path) -> None:
    rows = [r for r in made_run(items=2) if r["dataset"] == "musique"]
    for name in ("a", "b"):
        write_report(rows, [RUN], tmp_path / name, resamples=FEW)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) > 4
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>|`x`"
    rows = [row(f"q{i}", arm, dataset=evil) for i in range(2) for arm in ("full", "none", "infoflow@0.15", "epic@0.15")]
    run = {**RUN, "model": evil, "environment": {"note|d": "a|b\nc", "<i>": None}}
    write_report(rows, [run], tmp_path, resamples=FEW)
    html, text = ((tmp_path / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    assert "<script" not in html and "<i>" not in html
    assert "&lt;script&gt;" in html
    assert "`<script>alert(1)</script>¦'x'`" in text


def test_a_floor_of_nothing_found(tmp_path: Path) -> None:
    rows = [r for r in made_run(items=2, floor=True) if r["dataset"] in ("needle", "vt") and "[" not in r["arm"]]
    write_report(rows, [RUN], tmp_path, resamples=FEW)
    assert "log-probability" in (tmp_path / "figures" / "needle.svg").read_text(encoding="utf-8")
    assert "log-probability" in (tmp_path / "figures" / "hops.svg").read_text(encoding="utf-8")


def test_rows_without_predictions_full_or_reference() -> None:
    rows = [row(f"q{i}", "epic@0.15", prediction=None, budget="auto:0.7") for i in range(3)]
    told = render_markdown(rows, [], resamples=FEW)
    assert "No `run.json` came with these rows" in told and "One data set only" in told
    assert "Answers" not in told and "that takes the arms `none` and `full`" in section(told, "Recovery")
    assert "not measured, does not count" in section(told, "Gate")
    assert cells(section(told, "Budgets"), "epic@0.15")[1] == "`auto:0.7`"


def test_uneven_arms_are_told() -> None:
    rows = [row("q1", "full"), row("q2", "full"), row("q1", "none")]
    assert "Arms cover between 1 and 2 items" in render_markdown(rows, [], resamples=FEW)


def test_one_document_gives_no_interval_and_the_report_says_so() -> None:
    rows = [row(f"q{i}", arm, group="d", kl_cont=i / 9) for i in range(3) for arm in ("infoflow@0.15", "epic@0.15")]
    told = render_markdown(rows, [], resamples=FEW)
    assert "All items of `made` share one document" in told
    assert "[too few documents for an interval]" in cells(section(told, "Distance"), "epic@0.15")[3]


def test_intervals_of_few_clusters_are_marked_and_win_nothing() -> None:
    """One document an item: from 6 on an interval is taken for one of 95 %."""
    for clusters, marked in ((5, True), (6, False)):
        rows = [
            row(f"q{i}", arm, group=f"doc{i % clusters}", kl_cont=kl + i / 1000, **GATED)
            for i in range(12)
            for arm, kl in (("full", 0.0), ("none", 0.5), ("infoflow@0.15", 0.1), ("epic@0.15", 0.3))
        ]
        told = render_markdown(rows, [RUN], resamples=FEW)
        epic = cells(section(told, "Distance"), "epic@0.15")[3]
        recovery = cells(section(told, "Recovery"), "epic@0.15")[1]
        verdict = next(line for line in section(told, "Gate").splitlines() if "NLL" in line)
        assert ("(few clusters: 5)" in epic, "†" in epic) == (marked, not marked)
        assert ("(few clusters: 5)" in recovery) == ("too few documents to say (5" in verdict) == marked
        # Five documents flip to a p of 1/16: bold needs the sixth for that reason too.
        found = find(rows, resamples=FEW)
        assert (found.winner("made", 0.15, "kl_cont") is None) == marked
        assert ("**" in section(told, "Distance")) != marked
        assert found.against("made", "infoflow@0.15", ["epic@0.15"], "kl_cont")["epic@0.15"].difference.excludes_zero


def test_many_items_of_few_documents_win_nothing_by_mcnemar() -> None:
    rows = [
        row(f"q{i}", arm, group=f"d{i % 2}", top1=arm != "epic@0.15")
        for i in range(40) for arm in ("full", "infoflow@0.15", "epic@0.15")
    ]  # fmt: skip
    found = find(rows, resamples=FEW)
    [one] = found.against("made", "epic@0.15", ["infoflow@0.15"], "top1").values()
    assert one.p_holm < 1e-6 and one.difference.excludes_zero
    assert found.winner("made", 0.15, "top1", lower=False) is None


class TestPooling:
    """`wide` has two arms more than `narrow`: no pooled number may mix the two."""

    ARMS = ("full", "none", "infoflow@0.15", "epic@0.15", "a3@0.15", "infoflow[geometry=HL-TP]@0.15")

    def rows(self, narrow: tuple[str, ...] = ARMS[:4], wide: tuple[str, ...] = ARMS) -> list[dict[str, Any]]:
        return [
            row(f"{d}{i}", arm, dataset=d, kl_cont=(arm != "full") * (kl + i / 100), prefix=16,
                recomputed_share=kl / 10, delta_k={"reused": [kl]}, delta_v={"reused": [kl]},
                **{**GATED, "gold_nll": 1.5 + kl})
            for d, arms, kl in (("wide", wide, 0.1), ("narrow", narrow, 5.0))
            for i in range(8) for arm in arms
        ]  # fmt: skip

    def test_pooled_is_what_all_arms_have(self) -> None:
        told = render_markdown(self.rows(), [RUN], resamples=FEW)
        assert "Distance to full prefill: 1 of 2 data sets, equal weights" in told
        assert "Pooled numbers are over `wide`, where every arm ran; left out: `narrow` (without `a3@0.15`, " in told
        for title in ("Distance to full", "Agreement with", "Budgets", "Recovery", "Geometry", "Keys and values"):
            part = section(told, title)
            assert not [line for line in part.splitlines() if re.search(r"(?<![\d.])5\.[01]|(?<!\d)50\.0", line)]
        distance = section(told, "Distance")
        assert {cells(distance, arm)[1] for arm in ("full", "epic@0.15", "a3@0.15")} == {"8"}
        assert cells(distance, "epic@0.15")[2].startswith("0.135 ")
        assert cells(section(told, "Data set `narrow`: distance"), "epic@0.15")[2].startswith("5.0")
        answers = cells(section(told, "Answers: F1, LongBench"), "epic@0.15")
        assert answers[1:5] == ["8", "100.0", "100.0", "100.0"]  # n of the pooled mean; wide, narrow, pooled
        assert cells(section(told, "Answers: F1, LongBench"), "a3@0.15")[1:5] == ["8", "100.0", "–", "100.0"]

    def test_differences_are_pooled_over_the_same(self) -> None:
        found = find(self.rows(), resamples=FEW)
        for c in found.against("pooled", "infoflow@0.15", ["epic@0.15", "a3@0.15"], "kl_cont").values():
            assert c.difference.n == 8
        assert found.core == ["wide"] and found.scopes == ["pooled", "wide", "narrow"]

    def test_all_data_sets_need_no_words(self) -> None:
        told = render_markdown(self.rows(wide=self.ARMS[:4]), [RUN], resamples=FEW)
        assert "Distance to full prefill: all data sets, equal weights" in told
        assert "left out:" not in section(told, "What this can show")

    def test_without_a_common_data_set_nothing_is_pooled(self, tmp_path: Path) -> None:
        rows = self.rows((*self.ARMS[:4], "seam@0.15"))
        told = (write_report(rows, [RUN], tmp_path, resamples=FEW)[0]).read_text(encoding="utf-8")
        assert (
            "Nothing is pooled, for no data set has every arm: the first tables and the figures are of `wide`" in told
        )
        assert "Distance to full prefill: `wide`" in told and "equal weights\n" not in told
        assert cells(section(told, "Data set `narrow`: distance"), "seam@0.15")[1] == "8"
        answers = section(told, "Answers: F1, LongBench")
        assert cells(answers, "seam@0.15")[1:5] == ["–", "–", "100.0", "–"]
        assert cells(answers, "epic@0.15")[4] == "–"


def test_a_task_measure_is_a_dash_where_the_gate_failed(markdown: str) -> None:
    assert cells(section(markdown, "Data set `hotpotqa`: agreement"), "epic@0.15")[5] == "–"
    assert cells(section(markdown, "Data set `musique`: agreement"), "epic@0.15")[5] != "–"
    alone = [r for r in made_run(items=12) if r["dataset"] == "hotpotqa"]
    told = render_markdown(alone, [RUN], resamples=FEW)
    assert cells(section(told, "Agreement"), "epic@0.15")[5] == "–"
    [line] = [line for line in section(told, "Geometry").splitlines() if "`TL-TP`" in line]
    assert line.split("|")[8].strip() == "–"


def test_made_data_sets_have_their_own_figures(tmp_path: Path) -> None:
    rows = [r for r in made_run(items=2) if r["dataset"] in ("needle", "vt") and "[" not in r["arm"]]
    rows += [{**r, "_id": f"far-{r['_id']}", "dataset": f"far_{r['dataset']}"} for r in rows]
    rows = [{**r, "prediction": None} if r["dataset"] == "far_vt" else r for r in rows]
    told = write_report(rows, [RUN], tmp_path, resamples=FEW)[0].read_text(encoding="utf-8")
    for title, name in (
        ("Needles: `needle`", "needle-needle"),
        ("Needles: `far_needle`", "needle-far_needle"),
        ("Variable tracking: `vt`", "hops-vt"),
        ("Variable tracking: `far_vt`", "hops-far_vt"),
    ):
        assert section(told, title).count("![") == 1 and f"figures/{name}.svg" in section(told, title)
        assert (tmp_path / "figures" / f"{name}.svg").is_file()
    assert "log-probability" in (tmp_path / "figures" / "hops-far_vt.svg").read_text(encoding="utf-8")
    assert "found, %" in (tmp_path / "figures" / "hops-vt.svg").read_text(encoding="utf-8").replace(
        "variables found", "found"
    )


def test_choices_have_a_table() -> None:
    said = {"full": "B", "none": "C", "infoflow@0.15": "(B)", "epic@0.15": "The answer is A"}
    fields = {**GATED, "closed_prediction": "C", "answers": ["B"], "meta": {"task": "choice"}}
    rows = [row(f"q{i}", arm, prediction=p, **fields) for i in range(8) for arm, p in said.items()]
    told = render_markdown(rows, [RUN], resamples=FEW)
    answers = section(told, "Answers: right letter, %")
    assert [cells(answers, arm)[2] for arm in said] == ["100.0", "0.0", "100.0", "0.0"]
    assert "Answers: F1" not in told and "| right letter, % |" in section(told, "Gate")


def test_what_the_words_say(markdown: str) -> None:
    reading, limits = section(markdown, "How to read"), section(markdown, "What this can show")
    assert "÷ their share of the reusable tokens" in reading and "mean over up to 16 places" in reading
    assert "Pooled: equal weights over the data sets on which **every** arm" in reading
    assert "fewer than 6 clusters" in reading and "McNemar" in reading
    for words in ("starts with the KV in memory", "up to 15 rows more", "upper bound", "`infoflow-kv bench`"):
        assert words in limits
    assert "upper bound" in section(markdown, "Budgets")
    run = {**RUN, "options": {"continuation": 4}}
    assert "mean over up to 4 places" in render_markdown([row("q1", "full")], [run], resamples=FEW)


def test_every_environment_is_told() -> None:
    here = RUN["environment"]
    run = {**RUN, "environments": [here, {"device": "cpu", "threads": 8}]}
    told = section(render_markdown([row("q1", "full")], [run], resamples=FEW), "What ran")
    assert "| threads | `2` |" in told and "| threads | `8` |" in told


def test_every_command_is_told() -> None:
    place = {"device": "cpu", "command": "first", "commands": ["first", "second"]}
    for environments in ([place], [{**place, "commands": None}, {"device": "cpu", "command": "second"}]):
        run = {**RUN, "environments": environments}
        told = section(render_markdown([row("q1", "full")], [run], resamples=FEW), "What ran")
        assert "| command | `first` |" in told and "| command | `second` |" in told and "commands" not in told


def test_options_are_words_and_say_for_which_data_sets_they_hold() -> None:
    options = {"generate": None, "continuation": 16, "seed": 0, "prompts": None}
    first = {**RUN, "options": options, "data": [{"file": "boats.chunks.jsonl"}]}  # an older record names no data sets
    told = section(render_markdown([row("q1", "full")], [first], resamples=FEW), "What ran")
    assert "| option generate | `all` |" in told and "| option prompts | `none` |" in told and "(" not in told
    second = {**first, "options": options | {"generate": [], "continuation": 3}, "datasets": ["quays", "niah"]}
    rows = [row("q1", "full"), row("q2", "full", dataset="quays")]
    told = section(render_markdown(rows, [first, second], resamples=FEW), "What ran")
    assert "| option continuation | `16` (`boats`) |" in told
    assert "| option continuation | `3` (`quays`, `niah`) |" in told
    assert "| option generate | `none` (`quays`, `niah`) |" in told and "| option seed | `0` |" in told


def test_reusable_tokens_are_those_of_arms_that_reuse_in_order() -> None:
    full, moved = {"reusable_tokens": 0}, {"reusable_tokens": 700, "reorder": True}
    rows = [row("q1", "none"), row("q1", "infoflow[reorder]@0.15", **moved), row("q1", "full", **full)]
    rows += [row("q2", "full", dataset="alone", **full)]
    told = section(render_markdown(rows, [], resamples=FEW), "What ran")
    assert "| `made` | 1 | 1 | 10 | 1000 | 800 |" in told
    assert f"| `alone` | 1 | 1 | 10 | 1000 | {digits.NOTHING} |" in told


def test_keys_and_values_are_averaged_over_layers_and_items() -> None:
    deltas = ({"repaired": [0.1, 0.3], "reused": [0.5, 0.5]}, {"repaired": [0.2, 0.6], "reused": []})
    rows = [row(f"q{i}", "epic@0.15", delta_k=delta) for i, delta in enumerate(deltas)]
    told = section(render_markdown(rows, [], resamples=FEW), "Keys and values")
    assert cells(told, "epic@0.15") == ["`epic@0.15`", "0.300", "0.500", "–", "–"]


def test_times_of_a_gpu_are_told_otherwise() -> None:
    rows = [row("q1", "full"), row("q1", "none")]
    gpu = {**RUN, "environment": {"device": "cuda:0"}}
    assert "Times on a CPU" not in render_markdown(rows, [gpu], resamples=FEW)
    assert "Times on a CPU" in render_markdown(rows, [RUN], resamples=FEW)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows to report; run .infoflow-kv eval predict"):
        write_report([], [], tmp_path)
    with pytest.raises(OptionError, match="unknown reference method 'infolow'; did you mean 'infoflow'"):
        write_report([row("q1", "infoflow@0.15")], [], tmp_path, reference="infolow")
    assert list(tmp_path.iterdir()) == []


def test_the_reference_can_be_chosen() -> None:
    rows = [row(f"q{i}", arm) for i in range(6) for arm in ("full", "epic@0.15", "seam@0.15")]
    assert find(rows, resamples=FEW).reference == "epic"
    told = render_markdown(rows, [], reference="seam", resamples=FEW)
    assert "KL cont. − seam" in told and cells(section(told, "Distance"), "epic@0.15")[3] == "0 [0, 0]"


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ("infoflow@0.15", {}),
        ("infoflow[layers=relative]@0.15", {"layers": "relative"}),
        ("infoflow[layers=22,23]@0.15", {"layers": "22,23"}),
        ("infoflow[layers=22,23,geometry=HL-TP]@0.05", {"layers": "22,23", "geometry": "HL-TP"}),
        ("infoflow[reorder]@0.15", {"reorder": ""}),
    ],
)
def test_variants_are_read_from_the_name(arm: str, says: dict[str, str]) -> None:
    assert variant(arm) == says


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (123.4, "123"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.2596, "0.260"),
        (-0.01234, "−0.0123"),
        (4e-6, "4e-06"),
    ],
)
def test_digits_of_a_number(value: float | None, shown: str) -> None:
    assert digits.plain(value) == shown


@pytest.mark.parametrize(
    ("interval", "options", "shown"),
    [
        (Interval(0.04356, 0.03923, 0.04809, 9), {}, "+0.0436 [+0.0392, +0.0481]"),
        (Interval(-0.2, -0.5, 0.1, 9), {}, "−0.20 [−0.50, +0.10]"),
        (Interval(0.5, 0.25, 0.75, 9), {"scale": 100, "signed": False}, "50 [25, 75]"),
        (Interval(0.25, 0.25, 0.25, 9), {}, "+0.250 [+0.250, +0.250]"),
        (Interval(0.25, float("-inf"), float("inf"), 1), {}, "+0.25 [too few documents for an interval]"),
        (None, {}, "–"),
    ],
)
def test_digits_of_an_interval(interval: Interval | None, options: dict[str, Any], shown: str) -> None:
    assert digits.interval(interval, **options) == shown


class TestFolder:
    def rows(self) -> list[dict[str, Any]]:
        return [row(f"q{i}", arm) for i in range(2) for arm in ("full", "none", "infoflow@0.15")]

    def test_a_report_replaces_a_report_with_all_its_figures(self, tmp_path: Path) -> None:
        write_report(self.rows(), [RUN], tmp_path, explained=EXPLAINED, resamples=FEW)
        assert (tmp_path / "figures" / "selection.png").is_file()
        files = write_report(self.rows(), [RUN], tmp_path, resamples=FEW)
        assert sorted(files) == sorted(p for p in tmp_path.rglob("*") if p.is_file())

    @pytest.mark.parametrize("name", ["notes.txt", "report.md", "report.html", "figures", "figures/own.png"])
    def test_foreign_files_are_left_alone(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine", encoding="utf-8")
        with pytest.raises(OptionError, match=rf"holds files that are no report's \({name}\); give a new folder"):
            write_report(self.rows(), [RUN], tmp_path, resamples=FEW)
        assert [p.read_text(encoding="utf-8") for p in tmp_path.rglob("*") if p.is_file()] == ["mine"]


def test_arms_that_a_table_lacks_are_named_with_the_reason() -> None:
    rows = [row(f"q{i}", arm, rope_mean_of_max=0.5, rope_max=0.6)
            for i in range(2) for arm in ("none", "infoflow@0.15", "infoflow[layers=3,7]@0.15")]  # fmt: skip
    rows += [row(f"q{i}", "first-k:32", budget=None, rope_mean_of_max=0.5, rope_max=0.6) for i in range(2)]
    rows += [row(f"q{i}", "seam@0.15") for i in range(2)]
    told = render_markdown(rows, [RUN], resamples=FEW)
    for title in ("Distance", "Agreement", "Budgets", "RoPE similarity"):
        assert "`infoflow[layers=3,7]@0.15` (see Layers)" in section(told, title)
    rope = section(told, "RoPE similarity")
    assert cells(rope, "first-k:32")[1] == "0.5000 / 0.6000"
    assert "`seam@0.15` (no tokens chosen, or not measured)" in rope
    assert "the arms `none` and `full`" in section(told, "Recovery")


def test_the_heading_of_a_made_set_says_found_only_where_its_picture_does() -> None:
    meta = {"task": "vt", "hops": 1}
    arms = ("full", "none", "infoflow@0.15")
    rows = [row(f"q{i}", arm, answers=["7"], prediction="?", meta=meta) for i in range(2) for arm in arms]
    told = render_markdown(rows, [RUN], resamples=FEW)
    assert "## Variable tracking: `made`\n\nFound in %:\n" in told
    found = render_markdown([{**r, "prediction": "7"} for r in rows], [RUN], resamples=FEW)
    assert "## Variable tracking: `made`, found in %\n" in found


def test_the_explained_request_is_told_as_far_as_its_record_goes() -> None:
    rows = [row("q", "infoflow@0.15")]
    facts = {"question": "Who|?", "model": "m", "created": "2026-11-30", "version": "1", "budget": 0.15, "cover": None}
    told = section(render_markdown(rows, [], explained={**EXPLAINED, **facts}, resamples=FEW), "One request")
    assert "Question: `Who¦?`; model: `m`; day: `2026-11-30`; version: `1`; budget: 15 % of the reusable" in told
    bare = section(render_markdown(rows, [], explained=EXPLAINED, resamples=FEW), "One request")
    assert "Question" not in bare and "selection.svg" in bare

"""`explain` from the arguments to the page in a browser, and the options of `ask` and `ingest` that came with it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import HARBOUR, KEEPER, Cli, Result, chunk_files, write_documents

from explaining.browsing import chromium
from infoflow_kv.cli import explain as verb
from infoflow_kv.explain import METHODS
from infoflow_kv.select import AUTO_CEILING

QUESTION = "Who keeps the lighthouse?"
SALT = "The salt of Saltmere is raked by hand and dried on long tables until the first frost."


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents", KEEPER, HARBOUR, SALT + " Grüße, 漢字.")


@pytest.fixture
def explain(cli: Cli, tiny_model: Path, documents: Path) -> Cli:
    """`explain` of the documents; four new tokens, and whatever is given."""
    return lambda *options: cli(
        "explain", QUESTION, documents, "--model", tiny_model, "--max-new-tokens", 4, *map(str, options)
    )


# ---- explain ----


def test_the_page_in_a_browser(explain: Cli, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    made = explain("--out", out, "--json", "--reorder", "--budget", "0.3")
    assert made.code == 0, made.err
    report = made.record
    assert f"{out}: open it in a browser" in made.err
    with chromium() as browser:
        page = browser.new_page()
        complaints: list[str] = []
        requests: list[str] = []
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(out.as_uri())
        texts = page.eval_on_selector_all(".chunk:not(#prompt) .t", "all => all.map(t => t.textContent)")
        assert texts == [token for chunk in report["chunks"] for token in chunk["tokens"]]
        assert "".join(texts).count("漢字") == 1
        assert page.inner_text("h1") == QUESTION
        for method in report["methods"]:
            page.get_by_role("tab", name=method["name"], exact=True).click()
            marks = page.eval_on_selector_all(
                ".chunk:not(#prompt) .t", "all => all.map(t => Number(t.classList.contains('r')))"
            )
            assert marks == [mark for chunk in method["chunks"] for mark in chunk["recomputed"]]
            if any(chunk["scores"] for chunk in method["chunks"]):
                shares = page.eval_on_selector_all(
                    "#shares tr", "rows => rows.map(r => r.querySelector('.share .num').textContent)"
                )
                assert shares == [f"{100 * chunk['mass']:.1f}\u202f%" for chunk in method["chunks"]]
            assert page.locator("#reordered").is_visible() == (method["order"] != sorted(method["order"]))
        assert complaints == []
        assert requests == [out.as_uri()]


def test_one_line_for_each_method_and_where_the_page_is(explain: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = explain()
    lines = result.out.splitlines()
    assert result.code == 0
    assert [line.split()[0] for line in lines[:-1]] == ["method", *METHODS]
    assert lines[-1] == f"{tmp_path / 'report.html'}: open it in a browser"
    assert "step 1 of 7: storing chunks" in result.err and "step 7 of 7: none" in result.err
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir() if ".part" in path.name] == []


def test_json_writes_no_page_unless_asked_to(explain: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    report = explain("--json", "--methods", "infoflow, first-k:2").record
    assert [m["name"] for m in report["methods"]] == ["infoflow", "first-k:2"]
    assert list(tmp_path.glob("*.html")) == []
    json.dumps(report, allow_nan=False)


def test_methods_are_compared_from_stored_chunks_with_or_without_a_store(explain: Cli, tmp_path: Path) -> None:
    without = explain("--json", "--no-store").record
    assert not (tmp_path / "cache" / "kv").exists()
    stored = explain("--json", "--store", tmp_path / "kv").record
    assert len(chunk_files(tmp_path / "kv")) == 3 + 1 + 3  # chunks, the chat header, their movement
    for report in (without, stored):
        usages = {m["name"]: m["usage"] for m in report["methods"]}
        assert {usages[name]["cached_chunks"] for name in METHODS if name != "full"} == {3}
        assert usages["influence"]["measured_tokens"] == 0
    drop = {"timings"}
    assert [{k: v for k, v in m.items() if k not in drop} for m in without["methods"]] == [
        {k: v for k, v in m.items() if k not in drop} for m in stored["methods"]
    ]


def test_only_own_pages_are_replaced(explain: Cli, tmp_path: Path) -> None:
    out = tmp_path / "mine.html"
    assert explain("--out", out, "--methods", "none").code == 0
    first = out.read_text(encoding="utf-8")
    assert explain("--out", out, "--methods", "infoflow").code == 0
    assert out.read_text(encoding="utf-8") != first
    out.write_text("<!doctype html>precious", encoding="utf-8")
    refused = explain("--out", out, "--methods", "none")
    assert refused.code == 2
    assert "is not a page of infoflow-kv explain; give another name, or --force" in refused.err
    assert out.read_text(encoding="utf-8") == "<!doctype html>precious"
    link = tmp_path / "link.html"
    link.symlink_to(out)
    assert explain("--out", link, "--methods", "none", "--force").code == 0
    assert link.is_symlink() and "infoflow-kv" in out.read_text(encoding="utf-8")
    assert explain("--out", link, "--methods", "none").code == 0


def test_a_page_among_the_documents_is_not_read(explain: Cli, documents: Path) -> None:
    out = documents / "report.html"
    first = explain("--out", out, "--methods", "none", "--json")
    second = explain("--out", out, "--methods", "none", "--json")
    assert len(first.record["chunks"]) == len(second.record["chunks"]) == 3
    assert "skipped" not in first.err
    assert f"skipped '{out}': the page that --out replaces" in second.err


def test_a_page_that_cannot_be_written_at_the_end_is_told(explain: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "there" / "report.html"
    out.parent.mkdir()
    real = verb.write

    def late(path: Path, page: str) -> None:
        path.parent.rmdir()
        real(path, page)

    monkeypatch.setattr(verb, "write", late)
    result = explain("--out", out, "--methods", "none")
    assert (result.code, result.out) == (1, "")
    assert re.search(r"error: the page cannot be written to '.*': No such file", result.err)


BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "unknown method": (("--methods", "infoflow,infoflw"), "unknown method 'infoflw'; did you mean 'infoflow'"),
    "laboratory only": (("--methods", "oracle"), "method 'oracle' needs the full prefill.*laboratory"),
    "no method": (("--methods", " , "), "no method to explain"),
    "out is a folder": (("--out", "."), "--out '.' is a folder; give a file"),
    "out in no folder": (("--out", "nowhere/report.html"), "cannot be written: No such file.*check folder"),
    "out below a file": (("--out", __file__ + "/x.html"), "cannot be written: Not a directory"),
    "out not writable": (("--out", "/proc/report.html"), "cannot be written.*check folder and permissions"),
    "out is a device": (("--out", "/dev/null", "--force"), "--out '/dev/null' is not an ordinary file"),
    "name too long": (("--out", "x" * 300), "cannot be written: File name too long"),
    "budget": (("--budget", "2"), "budget 2.0 is outside 0..1"),
    "budget in words": (("--budget", "some"), "--budget 'some' is neither a number in 0..1 nor auto"),
    "auto of more than all": (("--budget", "auto:2"), "budget 'auto:2' is not understood.*auto:0.8"),
    "ceiling alone": (("--budget-max", "0.2"), "--budget-max bounds an adaptive budget, and --budget is 0.15"),
    "geometry": (("--geometry", "GLOBE"), "unknown geometry 'GLOBE'; did you mean 'GLOBAL'"),
    "layers": (("--layers", "9"), "layers '9' are outside the model's 0-3"),
    "reorder": (("--methods", "none", "--reorder"), "reorder needs a method that scores tokens"),
    "adaptive and gradual": (
        ("--methods", "cacheblend-gradual", "--budget", "auto"),
        "is adaptive and needs one set of tokens for all layers",
    ),
    "both stores": (("--store", "kv", "--no-store"), "--store and --no-store exclude"),
    "no new tokens": (("--max-new-tokens", "0"), "max_new_tokens 0 is not a whole number"),
    "head policy": (("--head-policy", "tail"), "head policy 'tail' is not one of head, none"),
}


def refused(result: Result, words: str) -> None:
    assert (result.code, result.out) == (2, ""), result.err
    error = result.err.splitlines()[-1]
    assert error.startswith("error: ") and re.search(words, error), error


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, explain: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    options, words = BAD[case]
    before = sorted(tmp_path.rglob("*.html"))
    refused(explain(*options), words)
    assert sorted(tmp_path.rglob("*.html")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(explain: Cli, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(explain("--out", tmp_path / "locked" / "report.html"), "cannot be written: Permission denied")


def test_an_empty_question_and_no_documents(cli: Cli, documents: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    refused(cli("explain", " ", documents), "the question is empty")
    refused(cli("explain", QUESTION), "missing argument 'PATH")
    refused(cli("explain", QUESTION, tmp_path / "nowhere.txt"), "does not exist")


def test_help(cli: Cli) -> None:
    shown = cli("explain", "--help")
    assert (shown.code, shown.err) == (0, "")
    assert "infoflow-kv explain" in shown.out.split("Examples")[1]
    assert "explain" in cli("--help").out
    assert tuple(verb.METHODS.split(",")) == METHODS


# ---- the options of ask and ingest ----


@pytest.fixture
def ask(cli: Cli, tiny_model: Path, documents: Path) -> Cli:
    return lambda *options: cli(
        "ask", QUESTION, documents, "--model", tiny_model, "--max-new-tokens", 4, "--json", *map(str, options)
    )


def recomputed(result: Result) -> list[int]:
    assert result.code == 0, result.err
    return [chunk["recomputed"] for chunk in result.record["chunks"]]


def test_reorder_says_where_the_chunks_stood(ask: Cli) -> None:
    plain, reordered = ask(), ask("--reorder")
    assert [chunk["order"] for chunk in plain.record["chunks"]] == [0, 1, 2]
    order = [chunk["order"] for chunk in reordered.record["chunks"]]
    assert sorted(order) == [0, 1, 2] != order
    assert [c["id"] for c in plain.record["chunks"]] == [c["id"] for c in reordered.record["chunks"]]


def test_geometry_is_where_chunks_stand_while_they_are_scored(ask: Cli) -> None:
    masses = {
        name: [chunk["mass"] for chunk in ask("--geometry", name).record["chunks"]]
        for name in ("GLOBAL", "HL-HP", "HL-TP", "TL-TP")
    }
    assert len({tuple(mass) for mass in masses.values()}) == 4
    assert [chunk["mass"] for chunk in ask("--geometry", "hl-tp").record["chunks"]] == masses["HL-TP"]
    assert [chunk["mass"] for chunk in ask().record["chunks"]] == masses["GLOBAL"]


def test_an_adaptive_budget_is_explained_on_stderr(ask: Cli) -> None:
    result = ask("--budget", "auto:0.3", "--budget-max", "0.9")
    [notice] = result.record["notices"]
    assert re.fullmatch(r"auto:0\.3: [\d.]+% of the tokens cover [\d.]+% of the predicted influence", notice)
    assert result.err.splitlines()[-1] == notice
    stopped = ask("--budget", "auto:1", "--budget-max", "0.1")
    assert "stopped by the ceiling of 0.1" in stopped.err
    assert sum(recomputed(stopped)) == sum(recomputed(ask("--budget", "0.1")))
    assert sum(recomputed(ask("--budget", "auto:1"))) == sum(recomputed(ask("--budget", str(AUTO_CEILING))))
    assert ask("--budget", "0.1").record["notices"] == []
    assert "the rule fixes 32 tokens" in ask("--method", "first-k").err  # 16 of both chunks but the exact one


def test_floor_and_cap_spread_the_budget(ask: Cli) -> None:
    plain = recomputed(ask("--budget", "0.3"))
    capped = recomputed(ask("--budget", "0.3", "--chunk-cap", "0.5"))
    floored = recomputed(ask("--budget", "0.3", "--chunk-floor", "1"))
    assert sum(plain) == sum(capped) == sum(floored)
    assert max(capped) <= sum(capped) / 2 + 1 < max(plain)
    assert min(floored[1:]) > 0


def test_head_policy_is_part_of_what_is_stored(cli: Cli, ask: Cli, tiny_model: Path, documents: Path) -> None:
    assert cli("ingest", documents, "--model", tiny_model, "--head-policy", "none").code == 0
    assert ask("--head-policy", "none").record["usage"]["cached_chunks"] == 3
    assert ask().record["usage"]["cached_chunks"] == 0


def test_measuring_ahead_leaves_nothing_to_measure(cli: Cli, ask: Cli, tiny_model: Path, documents: Path) -> None:
    files: Callable[[Path], int] = lambda store: len(chunk_files(store))  # noqa: E731
    plain, measured = documents.with_name("plain"), documents.with_name("measured")
    assert cli("ingest", documents, "--model", tiny_model, "--store", plain).code == 0
    added = cli("ingest", documents, "--model", tiny_model, "--store", measured, "--measure", "--json")
    assert added.record["measured"] is True
    before = files(measured)
    assert (files(plain), before) == (4, 7)
    for store in (plain, measured):
        assert ask("--method", "influence", "--store", store).code == 0
    assert (files(plain), files(measured)) == (7, before)
    again = cli("ingest", documents, "--model", tiny_model, "--store", measured, "--measure")
    assert "0 prefilled" in again.out and "movement measured" in again.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--geometry", "round"), "unknown geometry 'round'"),
        (("--budget", "auto:x"), "budget 'auto:x' is not understood"),
        (("--budget", "autos"), "--budget 'autos' is neither a number"),
        (("--budget", "auto", "--budget-max", "2"), "budget_max 2.0 is outside 0..1"),
        (("--budget", "0.2", "--budget-max", "0.3"), "--budget-max bounds an adaptive budget, and --budget is 0.2"),
        (("--chunk-floor", "-1"), "chunk_floor -1.0 is outside 0..1"),
        (("--chunk-cap", "0"), "chunk_cap 0 would leave nothing"),
        (("--chunk-cap", "nan"), "chunk_cap nan is outside 0..1"),
        (("--method", "none", "--reorder"), "reorder needs a method that scores tokens; none does not"),
        (("--head-policy", "tail"), "head policy 'tail' is not one of"),
        (("--method", "oracle"), "oracle needs the values of a full prefill; it is for the laboratory"),
    ],
)
def test_bad_options_of_ask(ask: Cli, options: tuple[str, ...], words: str) -> None:
    refused(ask(*options), words)

"""`infoflow-kv eval …`: from the arguments to files, stdout and stderr, and everything that can be wrong with them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli, Result, environment

import tiny
from evaluate.lab_rows import RUN, made_run, row, write
from infoflow_kv.chunking import TextEncoder
from infoflow_kv.cli.evaluation.predict import INSTRUCTION
from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.findings import find
from infoflow_kv.evaluate.items import Item, Passage
from infoflow_kv.evaluate.niah import needle_items, read_essays
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.predict import writer
from infoflow_kv.evaluate.readers import read_items
from infoflow_kv.evaluate.results import read_rows
from infoflow_kv.evaluate.variable_tracking import tracking_items
from infoflow_kv.evaluate.writing import write_items

TIMES = ("ttft_seconds", "timings")
SHORT = ("--max-new-tokens", 3, "--continuation", 2, "--chunk-tokens", 64, "--budget", 0.15)
Record = dict[str, Any]


def record(number: int, **fields: Any) -> Record:
    texts = [" ".join(f"Boat {b} of quay {j} carries {b * j + number} nets." for b in range(3)) for j in range(3)]
    return {
        "_id": f"q{number}",
        "dataset": "boats",
        "question": f"How many nets does boat {number} of quay 2 carry?",
        "answers": [f"{number + 2} nets"],
        "passages": [{"title": f"Quay {j}", "text": text} for j, text in enumerate(texts)],
        "supporting": [2],
        **fields,
    }


def save(path: Path, *records: Record | str) -> Path:
    lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Home:
    """Where one case lives: the command line, its folder and the tiny model."""

    cli: Cli
    folder: Path
    model: Path

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def data(self, *records: Record | str, name: str = "boats.chunks.jsonl") -> Path:
        return save(self.folder / name, *(records or (record(0), record(1), record(2))))

    def predict(self, *arguments: object, data: Path | None = None, methods: str = "full,none,infoflow") -> Result:
        given = (data or self.data(), "--out", self.out, "--model", self.model, "--methods", methods, *SHORT)
        return self.cli("eval", "predict", "--data", *given, *arguments)

    def made(self, **run: Any) -> Path:
        return write(self.folder / "made", made_run(items=12), {**RUN, **run})


@pytest.fixture
def home(cli: Cli, tmp_path: Path, tiny_model: Path) -> Home:
    return Home(cli, tmp_path, tiny_model)


def lines(out: Path) -> list[str]:
    """The rows as they stand in the file, without what differs from run to run."""
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    return [json.dumps({k: v for k, v in row.items() if k not in TIMES}) for row in rows]


class TestPredict:
    def test_one_row_per_item_and_arm_and_a_record_of_the_run(self, home: Home) -> None:
        result = home.predict("--budget", ".05,.5", "--json")
        assert result.code == 0, result.err
        told = result.record
        arms = ["full", "none", "infoflow@0.05", "infoflow@0.5"]
        assert (told["items"], told["written"], told["found"], told["arms"]) == (3, 12, 0, arms)
        rows = read_rows([home.out])
        assert [(r["_id"], r["arm"]) for r in rows] == [(f"q{n}", arm) for n in range(3) for arm in arms]
        run = json.loads((home.out / "run.json").read_text())
        data = home.data()
        assert run["data"] == [{"file": "boats.chunks.jsonl", "sha256": read_items(data).sha256}]
        assert run["model"] == home.model.name
        assert {"torch", "transformers", "processor", "threads", "load_average", "date"} <= run["environment"].keys()
        assert run["options"]["chunk_tokens"] == 64 and run["options"]["instruction"] == INSTRUCTION
        # Results are published: where they were made on this machine is in none of the files.
        for file in home.out.iterdir():
            assert str(home.folder) not in file.read_text() and str(home.model) not in file.read_text()

    def test_told_in_one_line(self, home: Home) -> None:
        assert home.predict().out == f"9 rows written to {home.out} (3 arms); next: infoflow-kv eval score {home.out}\n"
        assert home.predict().out.startswith(f"0 rows written to {home.out}, 9 were there (3 arms)")

    def test_some_items_of_each_of_several_files(self, home: Home) -> None:
        other = home.data(*(record(n, dataset="other") for n in range(7, 11)), name="other.jsonl")
        result = home.predict("--data", other, "--skip", 1, "--limit", 2, methods="full")
        assert result.code == 0, result.err
        assert [r["_id"] for r in read_rows([home.out])] == ["q1", "q2", "q8", "q9"]
        more = home.predict("--data", other, "--skip", 1, "--limit", 3, "--json", methods="full").record
        assert (more["found"], more["written"]) == (4, 1)

    def test_shared_differences_and_selected_answers(self, home: Home) -> None:
        arguments = ("--geometry", "hl-tp", "--reorder", "--budget", ".15,.5", "--generate", ".5", "--kv-error")
        assert home.predict(*arguments, methods="none,infoflow,infoflow[geometry=GLOBAL,reorder=false]@.5").code == 0
        rows = {r["arm"]: r for r in read_rows([home.out]) if r["_id"] == "q0"}
        assert list(rows) == [
            "none", "infoflow[reorder,geometry=HL-TP]@0.15", "infoflow[reorder,geometry=HL-TP]@0.5", "infoflow@0.5"
        ]  # fmt: skip
        assert [r["prediction"] is None for r in rows.values()] == [False, True, False, False]
        assert [r["delta_v"] is None for r in rows.values()] == [False, True, True, False]

    def test_arms_that_write_answers_are_named_as_among_the_methods(self, home: Home) -> None:
        arms = "none,epic@.15,infoflow@.15,infoflow@.5"
        assert home.predict("--geometry", "hl-tp", "--generate", "epic@.15,infoflow@.50", methods=arms).code == 0
        rows = {r["arm"]: r["prediction"] is not None for r in read_rows([home.out])}
        assert rows == {
            "none": True, "epic@0.15": True,
            "infoflow[geometry=HL-TP]@0.15": False, "infoflow[geometry=HL-TP]@0.5": True,
        }  # fmt: skip
        result = home.predict("--geometry", "hl-tp", "--generate", "epic,infoflow@.5", methods=arms)
        assert result.code == 0  # `epic` is every arm of epic: the same options as before

    def test_names_and_texts_that_are_no_unicode(self, home: Home) -> None:
        data = home.folder / "n\udcff.jsonl"
        home.data(record(0) | {"_id": "q\ud800"}).rename(data)
        out = home.folder / "o\udcff"
        for found in (0, 1):
            result = home.predict("--instruction", "bad \udcff byte", "--out", out, "--json", data=data, methods="full")
            assert (result.code, result.record["found"]) == (0, found), result.err
        assert home.cli("eval", "score", out).code == 0

    def test_prompts_of_another_evaluation(self, home: Home) -> None:
        prompts = home.folder / "prompts.json"
        prompts.write_text(json.dumps({"boats": "Read the logs.\n{context}\nNow: {input}\nAnswer:", "else": "{input}"}))
        assert home.predict("--prompts", prompts).code == 0
        options = json.loads((home.out / "run.json").read_text())["options"]
        assert options["prompts"] == {"boats": "Read the logs.\n{context}\nNow: {input}\nAnswer:"}
        ours = home.predict(methods="full")
        assert ours.code == 2 and "other options" in ours.err

    def test_lengthened_items(self, home: Home) -> None:
        data = home.data(*(record(n) for n in range(6)))
        assert home.predict("--limit", 1, "--lengthen", 700, data=data, methods="full").code == 0
        [only] = read_rows([home.out])
        assert only["meta"]["added_passages"] > 2 and 500 < only["context_tokens"] < 800
        refused = home.predict("--limit", 1, data=data, methods="full")
        assert (refused.code, len(read_rows([home.out]))) == (2, 1) and "other options" in refused.err

    def test_left_out_items_are_said(self, home: Home) -> None:
        """Golds that normalise to nothing, and items over the window whose gold passages are unknown."""
        passages = record(0)["passages"] * 16
        data = home.data(
            record(0, answers=["the", "..."]),
            record(1),
            record(2, passages=passages, supporting=[]),
            record(3, passages=passages, supporting=[2]),
        )
        result = home.predict("--json", data=data, methods="full")
        assert result.code == 0
        assert set(result.record["skipped"]) == {"q0", "q2"} and result.record["written"] == 2
        assert re.search(r"skipped 'q0': '.*boats.chunks.jsonl', line 1: no gold answer is left once norm", result.err)
        assert re.search(r"warning: item 'q2' is left out: .* window of 2048", result.err)
        [dropped] = result.record["dropped_passages"].values()
        assert f"item 'q3' is over the window: {dropped} distractor passages dropped" in result.err
        text = home.predict(data=data, methods="full").out
        assert "0 rows written" in text and "1 of 3 items left out, see above" in text

    def test_a_torn_line_is_computed_again(self, home: Home) -> None:
        assert home.predict().code == 0
        whole = lines(home.out)
        file = home.out / "rows.jsonl"
        file.write_bytes(file.read_bytes()[:-40])
        result = home.predict("--json")
        assert (result.record["found"], result.record["written"]) == (8, 1)
        assert "ends in the middle of a line" in result.err
        assert lines(home.out) == whole

    def test_interrupted_by_a_signal_it_goes_on(self, home: Home) -> None:
        home.data(*(record(n) for n in range(16)))
        arguments = ("eval", "predict", "--data", home.folder / "boats.chunks.jsonl", "--out", home.out, "--model",
                     home.model, "--methods", "full,none,infoflow", *SHORT)  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "infoflow_kv", *map(str, arguments)],
            env=environment(home.folder), stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        file, deadline = home.out / "rows.jsonl", time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if file.exists() and file.read_bytes().count(b"\n") > 3:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, ""), err
        found = re.fullmatch(
            r"interrupted: (\d+) of 48 rows are in (.*); run the same command again to continue\n", err
        )
        assert found is not None and found[2] == str(home.out), err
        written = file.read_bytes()
        assert int(found[1]) <= written.count(b"\n") <= int(found[1]) + 1
        assert written.count(b"\n") < 48
        resumed = home.cli(*arguments, "--json").record
        assert resumed["found"] == written.count(b"\n") and resumed["found"] + resumed["written"] == 48
        assert file.read_bytes().startswith(written[: written.rfind(b"\n") + 1])
        whole = home.cli(*arguments[:4], "--out", home.folder / "whole", *arguments[6:])
        assert whole.code == 0
        assert sorted(lines(home.out)) == sorted(lines(home.folder / "whole"))

    def test_the_instruction_is_the_laboratorys(self) -> None:
        assert Options().instruction == INSTRUCTION


class TestScore:
    def test_a_table_per_data_set_and_pooled(self, home: Home) -> None:
        result = home.cli("eval", "score", home.made())
        assert result.code == 0, result.err
        headings = re.findall(r"^(\S+):$", result.out, re.MULTILINE)
        assert headings == ["musique", "hotpotqa", "needle", "vt", "pooled"]
        scores = {(s.dataset, s.arm): s for s in find(made_run(items=12)).scores}
        tables = re.split(r"^\S+:$", result.out, flags=re.MULTILINE)[1:]
        for dataset, table in zip(headings, tables, strict=True):
            [line] = [line.split() for line in table.splitlines() if line.startswith("epic@0.15 ")][:1]
            s = scores[dataset, "epic@0.15"]
            assert line[1] == str(s.n)
            kl = s.summaries["kl_cont"]
            assert [float(cell) for cell in line[2:4]] == [pytest.approx(x, rel=0.01) for x in (kl.mean, kl.median)]
            assert float(line[4]) == pytest.approx(s.summaries["js_cont"].mean, rel=0.02)
            assert float(line[5]) == pytest.approx(100 * s.summaries["top1"].mean, abs=0.06)
            assert float(line[-1]) == pytest.approx(15.0, abs=0.06)
            assert ("found %" in table) == (dataset in ("needle", "vt", "pooled"))
            assert ("F1 %" in table) == (dataset in ("musique", "hotpotqa", "pooled"))

    def test_paired_differences_with_intervals(self, home: Home) -> None:
        made = home.made()
        result = home.cli("eval", "score", made, "--reference", "cacheblend", "--json")
        told = result.record
        assert told["reference"] == "cacheblend"
        found = {(d["arm"], d["field"]): d for d in told["differences"]}
        assert found["infoflow@0.15", "kl_cont"]["reference"] == "cacheblend@0.15"
        assert found["epic@0.3", "kl_cont"]["reference"] == "cacheblend@0.3"
        means = {(s["dataset"], s["arm"]): s["summaries"]["kl_cont"]["mean"] for s in told["scores"]}
        one = found["infoflow@0.15", "kl_cont"]["difference"]
        expected = means["pooled", "infoflow@0.15"] - means["pooled", "cacheblend@0.15"]
        assert one["mean"] == pytest.approx(expected)
        assert one["low"] < one["mean"] < one["high"] < 0
        assert found["infoflow@0.15", "kl_cont"]["p_holm"] >= found["infoflow@0.15", "kl_cont"]["p"]
        assert {g["dataset"] for g in told["gates"] if not g["passed"] and g["field"] == "nll_delta"} == {"hotpotqa"}
        text = home.cli("eval", "score", made, "--reference", "cacheblend").out
        assert re.search(r"KL, continuation +infoflow@0.15 +cacheblend@0.15 +\d+ +−0\.\d+ \[−0\.\d+, −0\.\d+\]", text)
        assert "hotpotqa does not count for nll_delta" in text

    def test_against_a_method_without_a_budget(self, home: Home) -> None:
        told = home.cli("eval", "score", home.made(), "--reference", "none", "--json").record
        assert {d["reference"] for d in told["differences"]} == {"none"}
        assert {"infoflow@0.05", "epic@0.3", "full"} <= {d["arm"] for d in told["differences"]}

    def test_one_arm_alone_has_nothing_to_compare(self, home: Home) -> None:
        folder = write(home.folder / "one", [row("a", "full"), row("b", "full")])
        result = home.cli("eval", "score", folder)
        assert result.code == 0 and "nothing to compare" in result.out
        assert home.cli("eval", "score", folder, "--json").record["differences"] == []

    def test_arms_without_a_common_budget_are_sent_to_a_bound(self, home: Home) -> None:
        rows = [row(f"q{i}", arm) for i in range(2) for arm in ("full", "none", "infoflow@0.15")]
        folder = write(home.folder / "made", rows)
        text = home.cli("eval", "score", folder).out
        assert "with infoflow: nothing to compare; `--reference none` compares all arms" in text
        assert "nothing to compare" not in home.cli("eval", "score", folder, "--reference", "none").out
        bare = write(home.folder / "bare", [row("q", "infoflow@0.15"), row("other", "none")])
        assert "--reference" not in home.cli("eval", "score", bare).out

    def test_too_few_documents_are_told_from_a_model_that_does_not_gain(self, home: Home) -> None:
        closed = {"closed_gold_nll": 9.0, "closed_prediction": "no idea"}
        rows = [row(f"q{i}", arm, group="d", **closed) for i in range(3) for arm in ("full", "none")]
        folder = write(home.folder / "made", rows)
        text = home.cli("eval", "score", folder).out
        assert "made does not count for nll_delta: too few documents to say (1 of at least 6)" in text
        assert "does not beat" not in text
        gates = home.cli("eval", "score", folder, "--json").record["gates"]
        assert {(g["passed"], g["why"]) for g in gates} == {(None, "too few documents to say (1 of at least 6)")}

    def test_arms_of_different_data_sets_are_pooled_over_common_ones(self, home: Home) -> None:
        arms = ("full", "none", "infoflow@0.15")
        rows = [row(f"a{i}", arm, dataset="a", kl_cont=0.1) for i in range(3) for arm in (*arms, "epic@0.15")]
        rows += [row(f"b{i}", arm, dataset="b", kl_cont=9.0) for i in range(3) for arm in arms]
        result = home.cli("eval", "score", write(home.folder / "made", rows, RUN))
        assert "pooled: a (the data sets on which every arm ran)" in result.out
        assert "(few clusters: 3)" in result.out
        pooled = result.out.partition("pooled:\n")[2].partition("\n\n")[0]
        assert "9.00" not in pooled and "0.100" in pooled

    def test_rows_that_predict_wrote(self, home: Home) -> None:
        assert home.predict().code == 0
        told = home.cli("eval", "score", home.out, "--json").record
        assert [s["arm"] for s in told["scores"] if s["dataset"] == "boats"] == ["full", "none", "infoflow@0.15"]
        assert {s["n"] for s in told["scores"]} == {3}


class TestReport:
    def test_another_report_is_replaced_and_other_files_are_not_touched(self, home: Home) -> None:
        folder, out = write(home.folder / "made", [row("i", "none"), row("i", "infoflow@0.15")]), home.folder / "report"
        for _ in range(2):
            assert home.cli("eval", "report", folder, "--out", out).code == 0
        result = home.cli("eval", "report", folder, "--out", folder)
        assert result.code == 2 and "holds files that are no report's (rows.jsonl)" in result.err

    def test_files_are_written_and_named(self, home: Home) -> None:
        explained, document = home.folder / "explained.json", home.folder / "boats.txt"
        document.write_text("Boat 1 carries 4 nets. " * 30)
        asked = home.cli("explain", "How many nets?", document, "--model", home.model, "--no-store", "--json")
        assert asked.code == 0, asked.err
        explained.write_text(asked.out)
        rows = [row(f"i{n}", arm, kl_cont=0.1 * n) for n in range(4) for arm in ("full", "none", "infoflow@0.15")]
        folder, out = write(home.folder / "made", rows, RUN), home.folder / "report"
        result = home.cli("eval", "report", folder, "--out", out, "--explained", explained, "--json")
        assert result.code == 0, result.err
        told = result.record
        assert told["rows"] == 12 and all(Path(file).is_file() for file in told["files"])
        assert {"report.md", "report.html", "selection.svg", "selection.png"} <= {Path(f).name for f in told["files"]}
        assert "`infoflow@0.15`" in (out / "report.md").read_text()
        text = home.cli("eval", "report", folder, "--out", home.folder / "again").out
        assert text.startswith("12 rows told in ") and "report.html" in text


ESSAY = "\n\n".join(
    " ".join(f"Sentence {n} of paragraph {p} speaks on and on about the sea." for n in range(6)) for p in range(30)
)


class TestGenerate:
    def essays(self, home: Home) -> Path:
        folder = home.folder / "essays"
        folder.mkdir()
        (folder / "sea.txt").write_text(ESSAY)
        return folder

    def test_needles_are_read_back_as_they_were_made(self, home: Home) -> None:
        essays, out = self.essays(home), home.folder / "niah.chunks.jsonl"
        result = home.cli(
            "eval", "generate", "niah", "--essays", essays, "--lengths", "600,900", "--depths", "0,0.5,1", "--seeds", 2,
            "--kinds", "one,split,two-chunk", "--places", "any,start", "--chunk-tokens", 150, "--model", home.model,
            "--out", out, "--seed", 5, "--json",
        )  # fmt: skip
        assert result.code == 0, result.err
        encoder = TextEncoder(tiny.tokenizer())
        expected = needle_items(
            read_essays(essays), [600, 900], [0, 0.5, 1], 2, ("one", "split", "two-chunk"), chunk_tokens=150,
            count_tokens=lambda text: len(encoder.content(text)[0]), places=(None, "start"), seed=5,
        )  # fmt: skip
        assert result.record == {"out": str(out), "items": len(expected)}
        assert list(read_items(out).items) == expected
        assert {item.group for item in expected} == {"hay-s5.0", "hay-s5.1"}

    def test_a_data_set_can_be_named(self, home: Home) -> None:
        essays = self.essays(home)
        one, two = home.folder / "a.jsonl", home.folder / "b.jsonl"
        options = ("--essays", essays, "--lengths", 300, "--depths", 0.5, "--chunk-tokens", 150, "--model", home.model)
        niah = ("eval", "generate", "niah", *options)
        vt = ("eval", "generate", "vt", "--count", 1, "--hops", 1)
        for verb, usual in ((niah, "niah"), (vt, "variable_tracking")):
            assert home.cli(*verb, "--out", one, "--force").code == 0
            assert home.cli(*verb, "--out", two, "--force", "--dataset", "far").code == 0
            first, second = read_items(one).items, read_items(two).items
            assert ({i.dataset for i in first}, {i.dataset for i in second}) == ({usual}, {"far"})
            assert not {i.id for i in first} & {i.id for i in second}

    def test_needles_of_larger_passages_are_refused_with_the_size_to_use(self, home: Home) -> None:
        out = home.folder / "niah.jsonl"
        made = home.cli(
            "eval", "generate", "niah", "--essays", self.essays(home), "--lengths", 600, "--depths", 0.5,
            "--chunk-tokens", 150, "--model", home.model, "--out", out,
        )  # fmt: skip
        assert made.code == 0, made.err
        result = home.predict(data=out)
        assert (result.code, result.out) == (2, "") and re.search(r"use chunk_tokens 1\d\d or more", result.err)
        assert not home.out.exists()
        assert home.predict("--chunk-tokens", 150, data=out).code == 0
        assert {r["meta"]["task"] for r in read_rows([home.out])} == {"niah"}

    @pytest.mark.parametrize("form", ["all", "value"])
    def test_variables_are_read_back_as_they_were_made(self, home: Home, form: Any) -> None:
        out = home.folder / "vt.chunks.jsonl"
        options = ("--hops", "1,3", "--orders", "shuffled", "--gap", 0, "--count", 2, "--form", form)
        result = home.cli("eval", "generate", "vt", *options, "--chunk-tokens", 40, "--out", out)
        assert result.code == 0, result.err
        expected = tracking_items([1, 3], ("shuffled",), gap=0, count=2, chunk_tokens=40, form=form)
        assert list(read_items(out).items) == expected and len(expected) == 4
        assert result.out == f"4 items written to {out}; next: infoflow-kv eval predict --data {out} --out DIR\n"

    def test_made_items_are_predicted_and_scored(self, home: Home) -> None:
        out = home.folder / "vt.chunks.jsonl"
        assert (
            home.cli("eval", "generate", "vt", "--hops", 1, "--count", 1, "--chunk-tokens", 40, "--out", out).code == 0
        )
        assert home.predict("--chunk-tokens", 400, data=out).code == 0
        assert {r["meta"]["hops"] for r in read_rows([home.out])} == {1}
        told = home.cli("eval", "score", home.out, "--json").record
        assert all("hit" in s["summaries"] for s in told["scores"] if s["dataset"] == "variable_tracking")

    def test_a_name_that_is_no_unicode_is_cleaned_as_in_data_files(self, home: Home) -> None:
        out = home.folder / "a.jsonl"
        result = home.cli("eval", "generate", "vt", "--dataset", "a\udcff", "--count", 1, "--hops", 1, "--out", out)
        assert result.code == 0, result.err
        assert {item.dataset for item in read_items(out).items} == {"a\ufffd"}

    def test_a_file_that_is_there_is_kept_unless_forced(self, home: Home) -> None:
        out = home.data()
        before = out.read_bytes()
        result = home.cli("eval", "generate", "vt", "--count", 1, "--out", out)
        assert (result.code, result.out, out.read_bytes()) == (2, "", before)
        assert "is there already; give another name, or --force" in result.err
        assert home.cli("eval", "generate", "vt", "--count", 1, "--out", out, "--force").code == 0
        assert read_items(out).items[0].dataset == "variable_tracking"


class TestWriting:
    def test_every_field_survives(self, tmp_path: Path) -> None:
        items = [
            Item(
                "a/1",
                "d",
                "Wer? „so“\n\u2028",
                ("x", "é y"),
                (Passage("T", "one\ntwo"), Passage("", " three ")),
                (1, 0),
                "g",
                "Do it.",
                {"kind": "one", "place": None, "depth": 0.5, "chain": ["A", "B"], "doc": "not the group"},
            ),
            Item("b", "e", "Q?", ("A",), (Passage("", "t"),), meta={"choices": {"A": "yes"}, "task": "choice"}),
        ]
        assert write_items(items, tmp_path / "new" / "a.chunks.jsonl") == 2
        assert list(read_items(tmp_path / "new" / "a.chunks.jsonl").items) == items

    def test_what_cannot_be_written(self, tmp_path: Path) -> None:
        item = Item("a", "d", "Q?", ("x",), (Passage("", "t"),), meta={"group": "mine"})
        with pytest.raises(OptionError, match="item 'a' has group in its meta"):
            write_items([item], tmp_path / "a.jsonl")
        with pytest.raises(OptionError, match="no items to write"):
            write_items([], tmp_path / "a.jsonl")
        with pytest.raises(OptionError, match="is a folder"):
            write_items([item], tmp_path)
        assert list(tmp_path.iterdir()) == []


# ---- bad input: exit code 2, one clear line, and nothing is lost ----


def held_output(home: Home) -> Result:
    with writer(home.out, {"format": 1}):
        return home.predict()


def rows_of_another_version(home: Home) -> Result:
    assert home.predict(methods="full").code == 0
    (home.out / "rows.jsonl").write_text('{"format": 9, "_id": "q0", "arm": "full"}\n')
    return home.predict()


def run_of_another_version(home: Home) -> Result:
    home.out.mkdir()
    (home.out / "run.json").write_text('{"format": 9}')
    return home.predict()


def run_over_other_data(home: Home) -> Result:
    assert home.predict(methods="full").code == 0
    return home.predict(data=home.data(record(5)), methods="full")


def run_with_other_options(home: Home) -> Result:
    assert home.predict(methods="full").code == 0
    return home.predict("--instruction", "Be brief.", methods="full")


def score_of(*rows: Record, run: Record | None = None) -> Callable[[Home], Result]:
    return lambda home: home.cli("eval", "score", write(home.folder / "made", rows, run))


def score_of_text(text: str) -> Callable[[Home], Result]:
    def run(home: Home) -> Result:
        folder = write(home.folder / "made", [row("a", "full")])
        file = folder / "rows.jsonl"
        file.write_text(file.read_text() + text)
        return home.cli("eval", "score", folder)

    return run


def prompted(*arguments: object, text: str | None = None) -> Callable[[Home], Result]:
    def predict(home: Home) -> Result:
        given = arguments
        if text is not None:
            (home.folder / "prompts.json").write_text(text)
            given = ("--prompts", home.folder / "prompts.json")
        return home.predict(*given, methods="full")

    return predict


def report(*arguments: object, explained: str | None = None) -> Callable[[Home], Result]:
    def run(home: Home) -> Result:
        given = arguments
        if explained is not None:
            (home.folder / "explained.json").write_text(explained)
            given = (*arguments, "--explained", home.folder / "explained.json")
        folder = write(home.folder / "made", [row("a", "full"), row("a", "none")])
        return home.cli("eval", "report", folder, "--out", home.folder / "report", *given)

    return run


def niah(*arguments: object) -> Callable[[Home], Result]:
    def run(home: Home) -> Result:
        (home.folder / "essays").mkdir()
        (home.folder / "essays" / "sea.txt").write_text(ESSAY)
        options = ("--essays", home.folder / "essays", "--model", home.model, "--out", home.folder / "niah.jsonl")
        return home.cli("eval", "generate", "niah", *options, "--lengths", 300, "--chunk-tokens", 150, *arguments)

    return run


def vt(*arguments: object) -> Callable[[Home], Result]:
    return lambda home: home.cli("eval", "generate", "vt", "--out", home.folder / "vt.jsonl", *arguments)


def over_the_window(home: Home) -> Result:
    return home.predict(data=home.data(record(0, passages=record(0)["passages"] * 16, supporting=[])))


def without(field: str) -> Record:
    return {name: value for name, value in record(1).items() if name != field}


BAD: dict[str, tuple[str, Callable[[Home], Result]]] = {
    # data
    "malformed line": (
        "boats.chunks.jsonl', line 2: not JSON",
        lambda h: h.predict(data=h.data(record(0), '{"_id": ')),
    ),
    "not a number": (
        "boats.chunks.jsonl', line 2: not JSON .NaN is not a finite number",
        lambda h: h.predict(data=h.data(record(0), json.dumps(record(1, score=float("nan"))))),
    ),
    "not an object": ("line 2: not an object", lambda h: h.predict(data=h.data(record(0), "[1]"))),
    "no question": ("line 2: 'question' is missing", lambda h: h.predict(data=h.data(record(0), without("question")))),
    "no answers": ("line 2: 'answers' is missing", lambda h: h.predict(data=h.data(record(0), without("answers")))),
    "no id": ("line 2: '_id' is missing", lambda h: h.predict(data=h.data(record(0), without("_id")))),
    "blank passage": (
        "line 1: passage 0 of 'passages': 'text' is empty",
        lambda h: h.predict(data=h.data(record(0, passages=[{"text": " "}]))),
    ),
    "gold outside": ("supporting names passage 9", lambda h: h.predict(data=h.data(record(0, supporting=[9])))),
    "duplicate id": (
        "line 3: the id 'q0' is taken by .*line 1",
        lambda h: h.predict(data=h.data(record(0), record(1), record(0))),
    ),
    "one id in two files": (
        "other.jsonl', item 1: the id 'q2' is taken by .*boats.chunks.jsonl', item 3",
        lambda h: h.predict("--data", h.data(record(2), name="other.jsonl")),
    ),
    "no gold left": (
        "none of its 1 records can be used: .*line 1: no gold answer is left once normalised",
        lambda h: h.predict(data=h.data(record(0, answers=["The", "!"]))),
    ),
    "empty data": ("line 1: empty, no records", lambda h: h.predict(data=h.data(""))),
    "no such file": ("nowhere.jsonl' does not exist", lambda h: h.predict(data=h.folder / "nowhere.jsonl")),
    "a folder": ("is a folder; give one file", lambda h: h.predict(data=h.folder)),
    "unknown format": ("fit no known format; expected one of", lambda h: h.predict(data=h.data({"text": "t"}))),
    "all over the window": ("none of the 1 items could be measured: .* window of 2048", over_the_window),
    "skip all": ("--skip 3 passes over every item", lambda h: h.predict("--skip", 3)),
    "skip backwards": ("--skip -1: give the number", lambda h: h.predict("--skip", -1)),
    "limit 0": ("--limit 0: at least 1", lambda h: h.predict("--limit", 0)),
    # arms
    "unknown method": ("unknown method 'infoflw'; did you mean 'infoflow'", lambda h: h.predict(methods="infoflw")),
    "unknown difference": ("unknown difference 'layer'", lambda h: h.predict(methods="infoflow[layer=1]")),
    "open bracket": ("is not understood; expected a method", lambda h: h.predict(methods="infoflow[layers=1")),
    "no method": ("no arm was given", lambda h: h.predict(methods="")),
    "arm twice": ("'full' comes twice", lambda h: h.predict(methods="full,none,full")),
    "budget for none": ("full takes no budget", lambda h: h.predict(methods="full@0.15")),
    "budget over 1": ("1.5 is outside 0..1", lambda h: h.predict("--budget", "0.05,1.5")),
    "budget in words": ("'much' is neither a number", lambda h: h.predict("--budget", "much")),
    "no budget": ("'infoflow' needs a budget", lambda h: h.predict("--budget", "")),
    "unknown geometry": ("unknown geometry 'LOCAL'", lambda h: h.predict("--geometry", "LOCAL")),
    "layers of another model": ("layers '22-25' are outside", lambda h: h.predict(methods="infoflow[layers=22-25]")),
    "answers of another arm": (
        "--generate names 'epic@0.3', which is not among --methods .full, none",
        lambda h: h.predict("--generate", "epic@.3"),
    ),
    "answers of no arm": ("budget 0.3, which no arm has", lambda h: h.predict("--generate", "0.3")),
    # measuring
    "no new tokens": ("max_new_tokens is 0", lambda h: h.predict("--max-new-tokens", 0)),
    "no continuation": ("continuation is 0", lambda h: h.predict("--continuation", 0)),
    "no lengthening": ("lengthen is 0", lambda h: h.predict("--lengthen", 0)),
    "negative seed": ("seed -1 is outside", lambda h: h.predict("--seed", -1)),
    "tiny chunks": ("chunk_tokens is 2", lambda h: h.predict("--chunk-tokens", 2)),
    "unknown head policy": ("head policy 'neck' is not one of", lambda h: h.predict("--head-policy", "neck")),
    # output
    "two writers": ("another run writes to .*give another --out", held_output),
    "output is a file": ("--out '.*boats.chunks.jsonl' is a file", lambda h: h.predict("--out", h.data())),
    "output in /proc": ("--out '/proc/infoflow/run' cannot be", lambda h: h.predict("--out", "/proc/infoflow/run")),
    "rows of another version": ("rows.jsonl, line 1: format 9, this version writes 1", rows_of_another_version),
    "run of another version": ("run.json has format 9", run_of_another_version),
    "other data before": ("holds a run with other data", run_over_other_data),
    "other options before": ('with other options .instruction: .*, now "Be brief', run_with_other_options),
    # score and report
    "no rows": ("nowhere.* does not exist; give a folder that", lambda h: h.cli("eval", "score", h.folder / "nowhere")),
    "newer rows": ("line 1: format 2, and this .* reads format 1; update", score_of({**row("a", "full"), "format": 2})),
    "newer run": ("run.json: format 2", score_of(row("a", "full"), run={**RUN, "format": 2})),
    "malformed row": ("line 2: not a JSON line", score_of_text("{nonsense}\n")),
    "row without a field": ("line 2: no dataset", score_of_text('{"format": 1, "_id": "b", "arm": "full"}\n')),
    "arm twice in rows": ("item 'a' has arm 'full' already at", score_of(row("a", "full"), row("a", "full"))),
    "other ids": (
        "saw other token ids than arm 'full'",
        score_of(row("a", "full"), row("a", "none", token_ids_sha256="else")),
    ),
    "unknown reference": (
        "unknown reference method 'epc'",
        lambda h: h.cli("eval", "score", h.made(), "--reference", "epc"),
    ),
    "report to a file": ("--out '.*' is a file", lambda h: report("--out", h.data())(h)),
    "unknown report reference": ("unknown reference method", report("--reference", "epc")),
    "explained not there": ("nowhere.json' cannot be read", report("--explained", "nowhere.json")),
    "explained not JSON": ("explained.json' is not JSON", report(explained="{")),
    "explained of others": ("explains no request: the report has format None", report(explained='{"methods": []}')),
    "explained is a list": ("explains no request", report(explained="[]")),
    "explained nested": ("explained.json' is not JSON .nested too deep", report(explained="[" * 200_000)),
    "prompts nested": ("is not JSON .nested too deep", prompted(text="[" * 200_000)),
    "prompts not there": ("nowhere.json' cannot be read", prompted("--prompts", "nowhere.json")),
    "prompts not JSON": ("is not JSON", prompted(text="{")),
    "prompts are a list": ("holds no templates", prompted(text="[]")),
    "prompts of others": (
        "unknown data set in the prompts 'boats'",
        prompted(text='{"hotpotqa": "{context} {input}"}'),
    ),
    "prompt without question": ("{context} 1 times and {input} 0 times", prompted(text='{"boats": "{context}"}')),
    "prompt asks first": ("puts the question before the documents", prompted(text='{"boats": "{input} {context}"}')),
    "prompts and instruction": ("exclude each other", prompted("--prompts", "x.json", "--instruction", "Answer.")),
    # generate
    "no essays": ("does not exist; give a folder of .txt files", niah("--essays", "nowhere")),
    "lengths in words": ("--lengths holds 'long', which is not a whole number", niah("--lengths", "long")),
    "no lengths": ("--lengths is ','; give at least one number", niah("--lengths", ",")),
    "depth 2": ("a depth of 2.0 was given", niah("--depths", "0,2")),
    "unknown kind": ("unknown kind of needle 'two'", niah("--kinds", "two")),
    "unknown place": ("unknown place in the chunk 'top'", niah("--places", "top")),
    "essays too short": ("a haystack of 99999 was asked for|haystack of 99,999", niah("--lengths", "99999")),
    "needles named as all": ("--dataset: a data set is named 'pooled'", niah("--dataset", "pooled")),
    "variables named as all": ("--dataset: a data set is named 'pooled'", vt("--dataset", "pooled")),
    "data named as all": (
        "line 1: a data set is named 'pooled'",
        lambda h: h.predict(data=h.data(record(0, dataset="pooled"))),
    ),
    "blank name": ("name is blank", niah("--dataset", " ")),
    "no hops": ("hops is .0.; each must be from 1", vt("--hops", "0")),
    "unknown order": ("unknown order 'backward' .known: forward, shuffled", vt("--orders", "backward")),
    "unknown form": ("unknown form 'both'", vt("--form", "both")),
    "negative gap": ("gap is -1", vt("--gap", -1)),
    # usage
    "no data": ("missing option '--data'", lambda h: h.cli("eval", "predict", "--out", h.out)),
    "unknown verb": ("no such command 'predcit'.*did you mean 'predict'", lambda h: h.cli("eval", "predcit")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, home: Home) -> None:
    words, run = BAD[name]
    result = run(home)
    assert (result.code, result.out) == (2, ""), result.err
    assert "Traceback" not in result.err
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(words, errors[0], re.IGNORECASE), result.err
    for made in ("niah.jsonl", "vt.jsonl", "report"):
        assert not (home.folder / made).exists()


def test_bad_input_loses_nothing(home: Home) -> None:
    """After every refusal the rows are what they were, and the first command still goes on."""
    assert home.predict(methods="full").code == 0
    before = {path.name: path.read_bytes() for path in home.out.iterdir()}
    for arguments, methods in ((("--seed", 1), "full"), ((), "infoflw"), (("--limit", 0), "full")):
        assert home.predict(*arguments, methods=methods).code == 2
    assert {path.name: path.read_bytes() for path in home.out.iterdir()} == before
    result = home.predict("--json")
    assert (result.record["found"], result.record["written"]) == (3, 6)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(home: Home) -> None:
    home.out.mkdir(mode=0o500)
    result = home.predict()
    assert (result.code, result.out) == (2, "") and "cannot be written" in result.err


@pytest.mark.parametrize("verb", ["predict", "score", "report", "generate niah", "generate vt"])
def test_help_teaches_by_example(cli: Cli, verb: str) -> None:
    result = cli("eval", *verb.split(), "--help")
    assert result.code == 0
    shown = result.out.partition("Examples:")[2].partition("╭")[0]
    examples = [line.strip() for line in shown.splitlines() if line.strip()]
    assert len(examples) > 1 and all(line.startswith(f"infoflow-kv eval {verb} ") for line in examples)
    assert "--json" in result.out
    if verb == "predict":  # brackets are text, no markup
        assert '--methods "full,epic,infoflow[layers=all]" --out run' in result.out


def test_help_of_the_laboratory_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from infoflow_kv.cli import main; code = main(['eval', 'predict', '--help']); "
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'{heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

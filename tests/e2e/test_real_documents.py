"""Two processes over real company documents: the second, in another order, prefills nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DATA = os.environ.get("INFOFLOW_DATA", "")
pytestmark = pytest.mark.skipif(not DATA, reason="INFOFLOW_DATA is not set: no real inputs")


def ask(paths: list[Path], store: Path) -> dict:
    command = [sys.executable, "-m", "infoflow_kv", "ask", "Which plan covers vision?", *map(str, paths)]
    done = subprocess.run(
        [*command, "--store", str(store), "--max-new-tokens", "4", "--json"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_second_process_in_another_order_reuses_every_chunk(tmp_path):
    text = (Path(DATA) / "contoso_hr" / "pages.jsonl").read_text(encoding="utf-8")
    pages = [json.loads(line) for line in text.split("\n") if line]
    paths = []
    for number, page in enumerate(pages[4:16]):
        paths.append(tmp_path / f"page{number}.txt")
        paths[-1].write_text(page["text"], encoding="utf-8")
    cold = ask(paths, tmp_path / "kv")["usage"]
    warm = ask(paths[::-1], tmp_path / "kv")["usage"]
    assert cold["cached_chunks"] == 0
    assert cold["prefilled_tokens"] > 3000
    assert warm["cached_chunks"] == warm["chunks"] == cold["chunks"]
    assert warm["prefilled_tokens"] == 0
    assert warm["context_tokens"] == cold["context_tokens"]
    assert 0 < warm["recomputed_tokens"] == int(0.15 * warm["reusable_tokens"] + 0.5)

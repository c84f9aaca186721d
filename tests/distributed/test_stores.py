"""What the stores of the ranks hold changes who prefills what, never the answer; and the counts add up."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from many_requests import DOCUMENTS, assert_same, engine_of, many, model_of
from ranks import run_ranks, thorough

from infoflow_kv.store import DiskStore, verify

SOURCE = "tiny:qwen3"
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}
LAYOUTS: list[Any] = [thorough(2, "Q"), (4, [2, 2])]
# The second sees what the first has stored.
TWICE: list[dict[str, Any]] = [{"budget": 0.3}, {"budget": 0.3, "method": "influence"}]


def filled(folder: Path, documents: list[str], method: str = "infoflow") -> None:
    """A store that holds these documents and the chat header."""
    request = {"store": str(folder), "method": method}
    engine_of(model_of(SOURCE, SIZES), request).add(documents)


def in_store(requests: list[dict[str, Any]], layout: Any, folder: Any) -> list[dict[str, Any]]:
    return [{**one, "layout": layout, "store": folder} for one in requests]


def expected(tmp_path: Path, documents: list[str], requests: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    folder = tmp_path / "alone"
    if documents:
        filled(folder, documents)
    return many(None, SOURCE, in_store(requests, "auto", str(folder)), SIZES)


@cache
def keys_alone() -> frozenset[str]:
    """What one process stores for TWICE."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        many(None, SOURCE, in_store(TWICE, "auto", folder), SIZES)
        return frozenset(DiskStore(folder).keys())


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
@pytest.mark.parametrize("held", [0, 2, len(DOCUMENTS)], ids=["cold", "partly warm", "warm"])
def test_one_store_for_all_ranks(tmp_path, size, layout, held):
    folder = tmp_path / "shared"
    if held:
        filled(folder, DOCUMENTS[:held])
    requests = in_store(TWICE, layout, str(folder))
    found = run_ranks(many, size, SOURCE, requests, SIZES, timeout=120.0)
    assert_same(found, expected(tmp_path, DOCUMENTS[:held], TWICE), requests, usage=True)
    assert set(DiskStore(folder).keys()) == keys_alone()
    assert verify(folder).is_clean


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_each_rank_has_a_store_of_its_own_that_holds_other_documents(tmp_path, size, layout):
    folders = [str(tmp_path / str(rank)) for rank in range(size)]
    for rank, folder in enumerate(folders):
        filled(Path(folder), DOCUMENTS[rank : rank + 2])  # some twice, the last of five on none of two ranks
    requests = in_store(TWICE, layout, folders)
    found = run_ranks(many, size, SOURCE, requests, SIZES, timeout=120.0)
    held = DOCUMENTS[: size + 1]
    assert_same(found, expected(tmp_path, held, TWICE), requests, usage=True)
    stored = [set(DiskStore(folder).keys()) for folder in folders]
    assert set.union(*stored) == keys_alone()
    assert all(verify(folder).is_clean for folder in folders)


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_a_damaged_chunk_is_prefilled_again_and_stored_whole(tmp_path, size, layout):
    folder = tmp_path / "shared"
    filled(folder, DOCUMENTS)
    files = sorted((path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 10_000), key=str)
    assert len(files) > 2 * size
    for path in files[::3]:  # the header among them, or not
        path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    alone = expected(tmp_path, DOCUMENTS, TWICE)
    requests = in_store(TWICE, layout, str(folder))
    found = run_ranks(many, size, SOURCE, requests, SIZES, timeout=120.0)
    assert_same(found, alone, requests)
    cached, prefilled, _ = found[0]["0.usage"].tolist()
    chunks = int(found[0]["0.measured"][1])
    assert chunks - len(files[::3]) <= cached < chunks
    assert prefilled > 0
    assert found[0]["1.usage"].tolist()[:2] == [chunks, 0]  # all there again
    assert set(DiskStore(folder).keys()) == keys_alone()
    assert verify(folder).is_clean


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_a_document_that_stands_there_twice_is_counted_as_in_one_process(size, layout):
    documents = [*DOCUMENTS[:2], DOCUMENTS[0], DOCUMENTS[0]]
    requests: list[dict[str, Any]] = [
        {"budget": 0.3, "documents": documents, "alone": True},
        {"budget": 0.3, "documents": documents, "method": "influence"},
        {"budget": 0.3, "documents": documents, "method": "influence"},
    ]
    expected = many(None, SOURCE, requests, SIZES)
    requests = [{**one, "layout": layout} for one in requests]
    assert_same(run_ranks(many, size, SOURCE, requests, SIZES, timeout=120.0), expected, requests, usage=True)

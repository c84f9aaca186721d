"""A tiny model with documents, as the benchmarks take them; ceilings over small buffers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiny
from infoflow_kv.benchmark.context import Setting
from infoflow_kv.models import LanguageModel, wrap
from infoflow_kv.records import Document

SMALL = {"rows": 8, "slots": 16, "buffer_bytes": 2**16, "repeats": 1}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only lose by more
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    return wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")


@pytest.fixture(scope="session")
def setting(model: LanguageModel) -> Setting:
    documents = tuple(
        Document(text="\n\n".join(f"Boat {b} of quay {q} carries {b * q} nets." for b in range(6)), title=f"Quay {q}")
        for q in range(4)
    )
    return Setting(
        model,
        documents,
        "How many nets does boat 3 of quay 2 carry?",
        repeats=2,
        warmup=0,
        chunk_tokens=48,
        environment={"processor": "none", "infoflow_kv": "0"},
    )


@pytest.fixture
def small() -> dict[str, int]:
    return dict(SMALL)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path

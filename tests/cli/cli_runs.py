"""What the tests of the command line share: one call's result, model folders, documents, processes."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import infoflow_kv
import tiny


@dataclass(frozen=True)
class Result:
    """What one call of the command line left behind."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The one JSON object on stdout; fails if anything else stands there."""
        [record] = self.records
        return record

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout, one a line; fails if anything else stands there."""
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Result]
KEEPER = "Ada Brand has kept the lighthouse of Saltmere since the winter of the long storm."
HARBOUR = "The harbour of Saltmere closes at nine.\n\nThe boats come home at six and are counted twice."


def save_model(folder: Path, nudge: float = 0.0) -> Path:
    """The tiny model in a folder, replaced if it is there; `nudge` is added to one of its matrices."""
    hf = tiny.hf_model("llama")
    with torch.no_grad():
        hf.model.layers[1].self_attn.v_proj.weight.add_(nudge)
    hf.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def environment(cache: Path) -> dict[str, str]:
    """For a process of its own: the package importable, one thread, its own cache folder, no network."""
    source = str(Path(infoflow_kv.__file__).parents[1])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        "INFOFLOW_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def write_documents(folder: Path, *texts: str) -> Path:
    """The folder, with one text file for each text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


def chunk_files(store: Path) -> list[Path]:
    """The chunk files of a store."""
    return sorted(store.glob("??/*.safetensors"))

"""What a measurement ran on: one record per run, kept beside every number."""

import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import infoflow_kv
from infoflow_kv import __version__


def environment(device: str = "cpu", command: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, code, processor, threads and load of this machine, as plain values.

    `command`: the arguments of the run (default: this process's), kept without the folders of this machine.
    """
    return {
        "infoflow_kv": __version__,
        "code": code_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "bf16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "load_average": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(without_folders(sys.argv if command is None else command)),
    }


def code_digest(folder: Path | None = None) -> str:
    """SHA-256 over the package's .py files (or those under `folder`), by name: their names and their bytes."""
    folder = Path(infoflow_kv.__file__).parent if folder is None else folder
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
        data = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            text = lines.read()
        names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
        flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in text]
        return f"{names[0]} ({' '.join(flags)})"
    except (OSError, IndexError):
        return platform.processor()


def without_folders(arguments: Sequence[str]) -> list[str]:
    """The arguments, of absolute paths the last part only: where a file lay on this machine is nobody's business.

    >>> without_folders(["eval", "--data", "/home/me/a.jsonl", "--out=/tmp/run", "gguf:/models/m.gguf"])
    ['eval', '--data', 'a.jsonl', '--out=run', 'gguf:m.gguf']
    """
    found = []
    for argument in arguments:
        before, path = re.fullmatch(r"((?:-[^=]*=)?(?:gguf:)?)(.*)", argument, re.DOTALL).groups()  # type: ignore[union-attr]
        found.append(f"{before}{Path(path).name}" if Path(path).is_absolute() else argument)
    return found

"""What a measurement ran on: one record per run, kept beside every number."""

import os
import platform
import sys
import time
from typing import Any

import torch
import transformers

import infoflow_kv


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions, processor, threads and load of this machine, as plain values."""
    return {
        "infoflow_kv": infoflow_kv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "bf16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "load_average": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
    }


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

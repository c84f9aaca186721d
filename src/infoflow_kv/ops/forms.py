"""In which form a staircase is attended: what each form needs, and which is taken on which device.

| form     | what it is                                               | where                                  |
|----------|----------------------------------------------------------|----------------------------------------|
| `triton` | our kernel, `triton_staircase.py`                        | CUDA, with Triton; CPU when interpreted |
| `flex`   | torch's FlexAttention, compiled, `flex.py`               | CUDA and XPU with Triton; CPU          |
| `blocks` | masked attention, block of rows by block, `staircase.py` | anywhere                               |

Without a choice a CPU takes none of them, but the quickest of its own forms for rows without a window (`quickest.py`).
The variable INFOFLOW_CPU_FORM, or `cpu_form`, names one for all:

| CPU form     | what it is                                                                              |
|--------------|-----------------------------------------------------------------------------------------|
| `auto`       | what a short trial finds quickest, once per process; `rule` where there is little to do |
| `rule`       | no trial: `products` for bfloat16 without AMX, else `pieces-64`                         |
| `pieces-N`   | torch's flash kernel: rectangles and masked edges of N = 64, 128 or 256 rows            |
|              | (`pieces.py`); rows that follow each other whole                                        |
| `products`   | two matrix products and a softmax (`products.py`); `pieces-64` where logits take too much  |
"""

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Literal, cast, get_args

import torch

from infoflow_kv.errors import OptionError, unknown_name
from infoflow_kv.shapes import Float, Tensor

Form = Literal["triton", "flex", "blocks"]
Choice = Literal["auto", "triton", "flex", "blocks"]
CpuForm = Literal["pieces-64", "pieces-128", "pieces-256", "products"]
CpuChoice = Literal["auto", "rule", "pieces-64", "pieces-128", "pieces-256", "products"]

VARIABLE = "INFOFLOW_ATTENTION"
CPU_VARIABLE = "INFOFLOW_CPU_FORM"

# What `auto` takes: the first that can, and that gives the right numbers there. Other devices take masked blocks.
BY_DEVICE: dict[str, tuple[Form, ...]] = {"cuda": ("triton", "flex", "blocks"), "xpu": ("flex", "blocks")}


@cache
def choice_of_environment() -> Choice:
    """The choice in INFOFLOW_ATTENTION, read once; `auto` where it is unset or empty. OptionError for another name."""
    return known_choice(os.environ.get(VARIABLE, "") or "auto")


def known_choice(name: str) -> Choice:
    """`name`, which must be that of a form or `auto`; OptionError otherwise."""
    if name not in get_args(Choice):
        raise unknown_name(f"form of attention (in {VARIABLE} or given)", name, get_args(Choice))
    return cast(Choice, name)


@cache
def cpu_choice_of_environment() -> CpuChoice:
    """The choice in INFOFLOW_CPU_FORM, read once; `auto` where it is unset or empty. OptionError for another name."""
    return known_cpu_choice(os.environ.get(CPU_VARIABLE, "") or "auto")


def known_cpu_choice(name: str) -> CpuChoice:
    """`name`, which must be that of a CPU's form, `rule` or `auto`; OptionError otherwise."""
    if name not in get_args(CpuChoice):
        raise unknown_name(f"CPU form of attention (in {CPU_VARIABLE} or given)", name, get_args(CpuChoice))
    return cast(CpuChoice, name)


def pick(
    choice: Choice, query: Float[Tensor, "heads rows head_dim"], is_right: Callable[[Form, Tensor], bool]
) -> Form | None:
    """The form for this query; None where the CPU's own forms are due. OptionError for a choice that cannot be had.

    `is_right`: whether a form gives the right numbers for such queries; `auto` takes no other.
    """
    if choice != "auto":
        missing = MISSING[choice](query)
        if missing is not None:
            raise OptionError(f"the form of attention '{choice}' ({VARIABLE}) {missing}")
        return choice
    if query.device.type == "cpu":
        return None
    forms = BY_DEVICE.get(query.device.type, ("blocks",))
    able = (form for form in forms if MISSING[form](query) is None)
    return next(form for form in able if form == "blocks" or is_right(form, query))


def _missing_for_triton(query: Tensor) -> str | None:
    if not has_triton():
        return "needs Triton, which is not installed: pip install 'infoflow-kv[triton]'"
    from infoflow_kv.ops import triton_staircase

    if query.device.type != "cuda" and not triton_staircase.interprets():
        return f"needs a CUDA device, not {query.device.type} (tests interpret it there: TRITON_INTERPRET=1)"
    capability = _capability(query)
    if capability is not None and capability < (8, 0):
        return f"needs a GPU of compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    if query.dtype not in triton_staircase.DTYPES or query.shape[-1] > triton_staircase.MAX_HEAD_DIM:
        widest = triton_staircase.MAX_HEAD_DIM
        return f"takes float32, float16 and bfloat16 heads up to {widest} wide, not {query.shape[-1]} in {query.dtype}"
    return None


def _missing_for_flex(query: Tensor) -> str | None:
    device = query.device.type
    if device not in ("cpu", "cuda", "xpu"):
        return f"runs on cpu, cuda and xpu, not on {device}"
    if device != "cpu" and not has_triton():
        return "needs Triton, into which torch compiles it there: pip install 'infoflow-kv[triton]'"
    capability = _capability(query)
    if capability is not None and capability < (7, 0):
        return f"needs a GPU of compute capability 7.0 or newer, not {capability[0]}.{capability[1]}"
    return None


def _capability(query: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(query.device) if query.device.type == "cuda" else None


def _nothing_missing(query: Tensor) -> str | None:
    return None


# Why a form cannot take this query, None where it can.
MISSING: dict[Form, Callable[[Tensor], str | None]] = {
    "triton": _missing_for_triton,
    "flex": _missing_for_flex,
    "blocks": _nothing_missing,
}


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None

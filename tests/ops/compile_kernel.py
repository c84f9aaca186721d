"""`python compile_kernel.py 80 90`: compiles the Triton kernel for CUDA architectures 8.0 and 9.0, without a GPU.

Prints the shared memory in bytes that a program takes on each, for plain heads 64 and 128 wide and for 128 with
window, softcap and sinks.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infoflow_kv.ops.triton_staircase import _attend_block, tiles_for


def shared_memory(architecture: int, head_dim: int, has_all: bool) -> int:
    tiles = tiles_for(head_dim, torch.bfloat16)
    constants = {
        "GROUP": 3, "HEAD_DIM": head_dim, "WIDE": head_dim, "ROWS": tiles.rows, "SLOTS": tiles.slots, "WIDENS": False,
        "HAS_WINDOW": has_all, "HAS_SOFTCAP": has_all, "HAS_SINKS": has_all,
    }  # fmt: skip
    types = {"ranks": "*i64", "lse": "*fp32", "sinks": "*fp32", "scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("query", "keys", "values", "out"), "*bf16")
    # Heads lie side by side in memory, and 16 divides the other strides.
    constants |= {name: 1 for name in _attend_block.arg_names if name.endswith("_dim")}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in _attend_block.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and name not in ("num_rows", "window"))
    }
    source = ASTSource(_attend_block, signature, constants, aligned)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).metadata.shared


if __name__ == "__main__":
    for architecture in map(int, sys.argv[1:]):
        for head_dim, has_all in ((64, False), (128, False), (128, True)):
            print(shared_memory(architecture, head_dim, has_all))

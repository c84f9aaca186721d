"""Cases of staircase attention for the GPU forms, and the program that runs Triton's interpreter on them.

The interpreter must be asked for before Triton is imported, and would stay on: it has a process of its own.
`python gpu_cases.py OUT.safetensors` writes output and LSE of every case.
"""

import sys
from dataclasses import dataclass

import torch

from infoflow_kv.ops import AttentionSpec

SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0, 1.5, -20.0])


@dataclass(frozen=True)
class Case:
    """What is attended: `group` query heads to each of two K/V heads."""

    ranks: torch.Tensor
    group: int = 3
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(0.3, self.window, self.softcap, SINKS[: 2 * self.group] if self.has_sinks else None)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, K and V as a model and a request hold them: views with strides of their own, and NaN in the slots
        after the last rank, which are not filled yet."""
        generator = torch.Generator().manual_seed(len(self.ranks))
        make = lambda *shape: torch.randn(*shape, generator=generator).to(self.dtype)  # noqa: E731
        query = make(len(self.ranks), 2 * self.group, self.head_dim).transpose(0, 1)
        filled = int(self.ranks[-1]) + 1
        buffers = make(2, 3, filled + 5, 2, self.head_dim + 2)  # K or V, layers, slots, K/V heads, wider than a head
        buffers[:, :, filled:] = float("nan")
        keys, values = (buffers[i, 1, ..., : self.head_dim].transpose(0, 1) for i in (0, 1))
        return query, keys, values


SCATTERED = torch.randperm(95, generator=torch.Generator().manual_seed(1))[:41].sort().values
TAIL = torch.arange(57, 90)
SPARSE = torch.cat([torch.arange(0, 70, 7), torch.arange(80, 93)])

CASES = {
    "scattered": Case(SCATTERED),
    "all": Case(torch.arange(70), group=1),
    "tail": Case(TAIL, group=4),
    "sparse and prompt": Case(SPARSE, group=1),
    "two rows": Case(torch.tensor([0, 99])),
    "odd width": Case(SCATTERED, head_dim=20),
    "window": Case(SCATTERED, window=13),
    "window of one": Case(TAIL, window=1, group=1),
    "window past a gap": Case(SPARSE, window=5),
    "wide window": Case(SPARSE, window=60, group=4),
    "softcap": Case(SPARSE, softcap=2.0),
    "sinks": Case(SCATTERED, has_sinks=True),
    "everything": Case(TAIL, window=20, softcap=3.0, has_sinks=True),
    "bfloat16": Case(SCATTERED, dtype=torch.bfloat16),
    "bfloat16 window and sinks": Case(TAIL, window=20, has_sinks=True, dtype=torch.bfloat16),
}


def main(path: str) -> None:
    from jaxtyping import install_import_hook
    from safetensors.torch import save_file

    install_import_hook("infoflow_kv.ops.triton_staircase", "beartype.beartype")  # as pytest does in its process
    from infoflow_kv.ops import Staircase
    from infoflow_kv.ops.triton_staircase import Tiles, attend_by_triton, interprets

    assert interprets()
    found = {}
    for name, case in CASES.items():
        given = case.tensors()
        # Small tiles, so that a hundred slots are several of each kind: full, masked, not read.
        out, lse = attend_by_triton(*given, case.ranks, case.spec, Tiles(16, 16))
        found |= {f"{name}/out": out, f"{name}/lse": lse}
    case = CASES["everything"]
    found["picked"] = Staircase(case.ranks, form="triton").attend(*case.tensors(), case.spec)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])

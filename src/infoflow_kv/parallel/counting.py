"""How many bytes a rank sends: counted at torch's own calls, so that no exchange can forget to report itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from infoflow_kv.errors import ComputeError
from infoflow_kv.parallel.group import Group
from infoflow_kv.shapes import Tensor

# They send no payload: who receives, who waits, who only meets.
_SILENT = {"recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's gap
    """While it is active: the payload bytes that this rank sends, by phase and operation.

    Attributes: `sent`, (phase, operation) → bytes; `calls`, the same → calls; `total`, all bytes. Headers of the
    network are not counted. Counted is what the ring and pairwise algorithms of gloo and NCCL send: an all-gather
    (size - 1) times the own bytes, an all-to-all all rows but one's own, an all-reduce 2 (size - 1) / size of its
    bytes, a send its bytes. A broadcast counts its bytes once for each receiver, and at the source only: gloo sends
    it along a tree, in which receivers pass it on. Each counts with the size of its own team, not of the group.
    Raises ComputeError at an operation that it does not know. Time nothing under it: the first call imports torch's
    compiler, which takes seconds.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group = group
        self.sent: dict[tuple[str, str], int] = {}
        self.calls: dict[tuple[str, str], int] = {}

    @property
    def total(self) -> int:
        """All bytes sent, in all phases."""
        return sum(self.sent.values())

    def by_phase(self) -> dict[str, int]:
        """Phase → bytes sent in it."""
        found: dict[str, int] = {}
        for (phase, _), count in self.sent.items():
            found[phase] = found.get(phase, 0) + count
        return found

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What the operation gives; counts it first."""
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name not in _SILENT:
            names = [argument.name for argument in func._schema.arguments]
            self._count(name, dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, name: str, given: dict[str, Any]) -> None:
        if name not in _OPERATIONS:
            raise ComputeError(f"the byte counter does not know what '{name}' sends; add it to the counter's table")
        operation, formula = _OPERATIONS[name]
        entry = self._group.phase_name, operation
        self.sent[entry] = self.sent.get(entry, 0) + formula(given, _process_group(given))
        self.calls[entry] = self.calls.get(entry, 0) + 1


def _process_group(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    return dist.distributed_c10d._resolve_process_group(given["group_name"])  # type: ignore[attr-defined]


def _payload(given: dict[str, Any]) -> int:
    """Bytes of what this rank gives: the argument has one of these names, by operation."""
    names = ("input_tensors", "input_tensor", "input", "tensors")
    return _bytes(next(given[name] for name in names if name in given))


def _bytes(given: Tensor | Sequence[Any]) -> int:
    return given.numel() * given.element_size() if isinstance(given, torch.Tensor) else sum(map(_bytes, given))


def _to_all_others(given: dict[str, Any], group: dist.ProcessGroup) -> int:
    return (group.size() - 1) * _payload(given)


def _splits_of_others(given: dict[str, Any], group: dist.ProcessGroup) -> int:
    sends, own = given["input_split_sizes"], given["input"]
    if not sends:  # equal parts
        return _bytes(own) // group.size() * (group.size() - 1)
    row = _bytes(own) // max(1, own.shape[0])
    return int(row * (sum(sends) - sends[group.rank()]))


def _reduced(given: dict[str, Any], group: dist.ProcessGroup) -> int:
    return 2 * (group.size() - 1) * _payload(given) // group.size()


def _from_source(given: dict[str, Any], group: dist.ProcessGroup) -> int:
    source = given["root_rank"] if "root_rank" in given else given["src"]
    return _to_all_others(given, group) if group.rank() == source else 0


_Formula = Callable[[dict[str, Any], dist.ProcessGroup], int]
# torch's names, those that change a tensor and the functional ones → our name and what it sends.
_OPERATIONS: dict[str, tuple[str, _Formula]] = {
    "send": ("shift", lambda given, group: _payload(given)),
    "allgather_": ("all_gather", _to_all_others),
    "_allgather_base_": ("all_gather", _to_all_others),
    "all_gather_into_tensor": ("all_gather", _to_all_others),
    "alltoall_base_": ("all_to_all", _splits_of_others),
    "all_to_all_single": ("all_to_all", _splits_of_others),
    "allreduce_": ("all_reduce", _reduced),
    "all_reduce": ("all_reduce", _reduced),
    "broadcast_": ("broadcast", _from_source),
    "broadcast": ("broadcast", _from_source),
}

"""The tensors of a chunk's file: which they are and where they lie follows from the identity alone.

A text chunk has `keys` and `values`. A chunk with images has its inputs as well: `positions` and `visual` as int32,
`embeddings` and, where the model adds rows to its first layers, `layer_rows` in the model's dtype.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infoflow_kv.errors import OptionError, StoreError
from infoflow_kv.records import ChunkIdentity, ChunkInputs, ChunkKV
from infoflow_kv.store.identity import MOVEMENT

if TYPE_CHECKING:
    from torch import Tensor

# KV as it is, and how far it moved behind a neighbour (one number per layer, K/V head and token).
STORED_KINDS = ("none", MOVEMENT)
# Name in the file and bytes. In this order safetensors lays tensors of several dtypes out, and those of one by name:
# wider ones first, so that every tensor is aligned.
_DTYPES = {"float32": ("F32", 4), "int32": ("I32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
_MODEL_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a chunk's file: bytes `start..stop-1` of the payload. `code` is the dtype's name in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def code(self) -> str:
        return _DTYPES[self.dtype][0]


class IndexCheck:
    """Whether positions and visual tokens lie where they can, told from the payload's bytes as they come by.

    A wrong one would give a wrong answer without a word. `fault` says what is wrong, and is empty if nothing is.
    """

    def __init__(self, identity: ChunkIdentity) -> None:
        self.fault = ""
        self._parts = [part for part in parts_of(identity) if part.dtype == "int32"]
        self._num_tokens = len(identity.token_ids)
        self._first, self._last = 0, -1

    def feed(self, block: memoryview) -> None:
        """Nothing; the payload's next block is looked at. All blocks but the last are of a multiple of four bytes."""
        for part in self._parts:
            start, stop = max(part.start - self._first, 0), min(part.stop - self._first, len(block))
            if start < stop:
                self.judge(part.name, block[start:stop].cast("i"))
        self._first += len(block)

    def judge(self, name: str, numbers: Sequence[int]) -> None:
        """Nothing; the next numbers of `positions` or `visual`, one or more, are looked at."""
        if name == "positions":
            if min(numbers) < 0:
                self.fault = "it has a position below 0"
        elif not (self._last < numbers[0] and all(map(operator.lt, numbers, numbers[1:]))):
            self.fault = "its visual tokens are not in ascending order"
        elif numbers[-1] >= self._num_tokens:
            self.fault = "it has a visual token behind its last token"
        else:
            self._last = numbers[-1]


def parts_of(identity: ChunkIdentity) -> tuple[Part, ...]:
    """The tensors of the chunk's file in the order in which they lie there, without gaps; empty ones are left out.

    Raises StoreError for a dtype or quantisation that is not stored.
    """
    if identity.quantisation not in STORED_KINDS:
        raise StoreError(
            f"KV of quantisation {identity.quantisation!r} is not stored; expected one of {', '.join(STORED_KINDS)}"
        )
    dtype = identity.model.dtype
    if dtype not in _MODEL_DTYPES:
        raise StoreError(f"KV of dtype {dtype!r} is not stored; expected one of {', '.join(_MODEL_DTYPES)}")
    shapes = {"keys": (dtype, shape_of(identity)), "values": (dtype, shape_of(identity)), **_input_shapes(identity)}
    order = list(_DTYPES)
    parts, start = [], 0
    for name in sorted(shapes, key=lambda name: (order.index(shapes[name][0]), name)):
        dtype, shape = shapes[name]
        stop = start + math.prod(shape) * _DTYPES[dtype][1]
        if stop > start or name in ("keys", "values"):
            parts.append(Part(name, dtype, shape, start, stop))
        start = stop
    return tuple(parts)


def shape_of(identity: ChunkIdentity) -> tuple[int, int, int, int]:
    """[layers, kv_heads, tokens, head_dim] of the chunk's keys and of its values."""
    model = identity.model
    return model.num_layers, model.num_kv_heads, len(identity.token_ids), model.head_dim


def payload_bytes(identity: ChunkIdentity) -> int:
    """Bytes of all tensors together. Raises StoreError for a dtype or quantisation that is not stored."""
    return parts_of(identity)[-1].stop


def tensors_of(chunk: ChunkKV) -> dict[str, "Tensor"]:
    """The tensors to be written, by their names in the file: on the CPU, contiguous, none sharing memory."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for part in parts_of(chunk.identity):
        tensor = _tensor(chunk, part.name).detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[part.name] = tensor.clone() if storage in seen else tensor  # safetensors refuses shared memory
        seen.add(storage)
    return tensors


def view_chunk(data: bytearray, start: int, identity: ChunkIdentity) -> ChunkKV:
    """The chunk whose payload begins at `start`; its tensors share memory with `data`."""
    import torch

    found = {
        part.name: torch.frombuffer(
            data, dtype=getattr(torch, part.dtype), count=math.prod(part.shape), offset=start + part.start
        ).view(part.shape)
        for part in parts_of(identity)
    }
    inputs = None
    if shapes := _input_shapes(identity):
        dtype, shape = shapes["layer_rows"]
        rows = found["layer_rows"] if "layer_rows" in found else torch.empty(shape, dtype=getattr(torch, dtype))
        inputs = ChunkInputs(found["positions"], found["visual"], found["embeddings"], rows)
    return ChunkKV(identity, found["keys"], found["values"], inputs)


def check_chunk(chunk: ChunkKV) -> None:
    """Nothing. Raises OptionError if the tensors are not what the chunk's identity promises, StoreError if the chunk is
    of a kind that is not stored or not finite.

    A chunk that could not be read back, or that would poison every answer that uses it, is refused before it is stored.
    """
    identity, shape, dtype = chunk.identity, shape_of(chunk.identity), chunk.identity.model.dtype
    payload_bytes(identity)
    if math.prod(shape) == 0:
        raise OptionError(f"a chunk of shape {list(shape)} is empty; expected at least one token, layer and head")
    shapes = _input_shapes(identity)
    if (chunk.inputs is not None) != bool(shapes):
        raise OptionError(
            "the chunk has no inputs, its identity promises some; give the ChunkInputs of its images"
            if shapes
            else "the chunk has inputs, its identity promises none; set `inputs` and `inputs_layout` of the identity"
        )
    _check_tensor("keys", chunk.keys, dtype, shape)
    _check_tensor("values", chunk.values, dtype, shape)
    for name, expected in shapes.items():
        _check_tensor(name, _tensor(chunk, name), *expected)
    if chunk.inputs is not None:
        check = IndexCheck(identity)
        check.judge("positions", chunk.inputs.positions.flatten().tolist())
        check.judge("visual", chunk.inputs.visual.tolist())
        if check.fault:
            raise OptionError(f"the chunk cannot be stored: {check.fault}")


def _input_shapes(identity: ChunkIdentity) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each tensor of the chunk's inputs, empty ones included; nothing where it has none."""
    if not identity.inputs_layout:
        return {}
    visual, hidden, early, axes = identity.inputs_layout
    dtype = identity.model.dtype
    return {
        "positions": ("int32", (axes, len(identity.token_ids))),
        "visual": ("int32", (visual,)),
        "embeddings": (dtype, (visual, hidden)),
        "layer_rows": (dtype, (early, visual, hidden)),
    }


def _tensor(chunk: ChunkKV, name: str) -> "Tensor":
    owner = chunk if name in ("keys", "values") else chunk.inputs
    tensor: Tensor = getattr(owner, name)
    return tensor


def _check_tensor(name: str, tensor: "Tensor", dtype: str, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
        raise OptionError(
            f"{name} are {list(tensor.shape)} {tensor.dtype}; expected {list(shape)} {dtype} from the chunk's identity"
        )
    if tensor.requires_grad:
        raise OptionError(f"{name} carry a gradient; prefill under torch.inference_mode() or detach them")
    if dtype != "int32" and tensor.numel() and not _all_finite(tensor):
        raise StoreError(f"{name} hold NaN or infinity; the chunk is not stored")


def _all_finite(tensor: "Tensor") -> bool:
    """Whether no element is NaN or infinite. One pass at memory speed: `isfinite().all()` takes 15 times as long."""
    import torch

    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))

"""A team of ranks and its exchanges. All move raw bytes: not every backend knows every dtype."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from infoflow_kv.parallel.waiting import Waiting, started
from infoflow_kv.shapes import Tensor

# torch 2.13 renamed it and warns of the old name.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Shift:
    """A step of a ring under way: `wait()` gives what the previous member sent."""

    def __init__(
        self,
        waiting: Waiting,
        works: list[dist.Work],
        sent: Tensor | None,
        received: Tensor,
        device: torch.device,
    ) -> None:
        self._waiting = waiting
        self._works = works
        self._sent = sent  # kept until it is sent
        self._received = received
        self._device = device

    def wait(self) -> Tensor:
        """The tensor from the previous member; raises ParallelError. A second call gives the same again."""
        self._waiting.finish(self._works)
        self._sent = None
        self._received = self._received.to(self._device)
        return self._received


class Team:
    """Some of the ranks, and their exchanges; every member must make the same calls in the same order.

    Attributes: `size`, `index` (this rank's place in the team), `ranks` (the members' global ranks, by index).
    A team of 1 exchanges nothing: it gets back what it gave, not a copy. Every exchange raises ParallelError when a
    member is lost or does not answer in time, and ValueError for sizes that contradict each other.
    """

    def __init__(
        self,
        waiting: Waiting,
        ranks: Sequence[int],
        process_group: dist.ProcessGroup | None,
        staged: bool = False,
    ) -> None:
        """`staged`: the backend serves CPU tensors only; others are copied there and back."""
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(waiting.rank)
        self.process_group = process_group
        self._waiting = waiting
        self._staged = staged

    def all_gather(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows (dim 0) of all members, [sum(counts), ...], in order of index; member i gives counts[i] of them.

        Sends (size - 1) times the own bytes, and makes no call where all counts are zero.
        """
        self._check("counts", counts, tensor, own=counts[self.index] if len(counts) == self.size else None)
        if self.size == 1:
            return tensor
        total = sum(counts)
        row = _row_bytes(tensor)
        if total * row == 0:
            return tensor.new_empty((total, *tensor.shape[1:]))
        if min(counts) == max(counts):
            own = self._bytes(tensor)
            received = own.new_empty(total * row)
            with self._waiting.guard():
                works = started(_GATHER(received, own, group=self.process_group, async_op=True))
            self._waiting.finish(works)
            return _rows(received, tensor, total)
        # Uneven: padding to the largest would be sent too. A copy for each receiver instead; its own stays here.
        repeated = tensor.repeat(self.size, *[1] * (tensor.dim() - 1))
        return self._exchange(repeated, [tensor.shape[0]] * self.size, counts)

    def all_to_all(self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Rows [sum(receives), ...], in order of sender: the first sends[0] rows go to member 0, and so on.

        Zeros are allowed: a rank with nothing to send or to receive takes part all the same.
        """
        self._check("sends", sends, tensor, own=None)
        if len(receives) != self.size or min(receives) < 0 or receives[self.index] != sends[self.index]:
            raise ValueError(
                f"receives {list(receives)} do not fit a team of {self.size} in which member {self.index} sends "
                f"{list(sends)}: expected one count for each member, and the same for itself"
            )
        return tensor if self.size == 1 else self._exchange(tensor, sends, receives)

    def shift(self, tensor: Tensor, shape_from_previous: Sequence[int]) -> Shift:
        """A step of a ring, under way: sends to the next member and receives from the previous one.

        What comes has the given shape, which may be another than the sent one, and the same dtype. `tensor` must not
        be changed before `wait()`.
        """
        shape = tuple(shape_from_previous)
        if self.size == 1:
            if shape != tuple(tensor.shape):
                raise ValueError(f"a team of 1 gets back its shape {tuple(tensor.shape)}, not {shape}")
            return Shift(self._waiting, [], None, tensor, tensor.device)
        own = self._bytes(tensor)
        received = own.new_empty(math.prod(shape) * tensor.element_size())
        after, before = self.ranks[(self.index + 1) % self.size], self.ranks[self.index - 1]
        steps = []
        # Both ends know the size of a message: neither starts an empty one.
        if own.numel():
            steps.append(dist.P2POp(dist.isend, own, after, group=self.process_group))
        if received.numel():
            steps.append(dist.P2POp(dist.irecv, received, before, group=self.process_group))
        works: list[dist.Work] = []
        if steps:
            with self._waiting.guard():
                works = started(dist.batch_isend_irecv(steps))
        return Shift(self._waiting, works, own, received.view(tensor.dtype).view(shape), tensor.device)

    def broadcast(self, tensor: Tensor, source_index: int) -> Tensor:
        """The tensor of the member `source_index`; the others give one of the same shape and dtype, left unchanged."""
        if not 0 <= source_index < self.size:
            raise ValueError(f"source_index {source_index} is not in a team of {self.size}")
        if self.size == 1 or tensor.numel() == 0:
            return tensor
        moved = self._bytes(tensor)
        if self.index != source_index:
            moved = torch.empty_like(moved)
        source = self.ranks[source_index]
        with self._waiting.guard():
            works = started(dist.broadcast(moved, src=source, group=self.process_group, async_op=True))
        self._waiting.finish(works)
        if self.index == source_index:
            return tensor
        return moved.to(tensor.device).view(tensor.dtype).view(tensor.shape)

    def agree(self, value: bytes | str) -> None:
        """Returns if all members hold the same value, otherwise raises ParallelError on all of them."""
        if self.size == 1:
            return
        digest = hashlib.sha256(value.encode() if isinstance(value, str) else value).digest()
        own = torch.tensor([list(digest)], dtype=torch.uint8)
        digests = [bytes(row) for row in self.all_gather(own, [1] * self.size).tolist()]
        others = [rank for rank, found in zip(self.ranks, digests, strict=True) if found != digests[0]]
        if others:
            raise self._waiting.error(
                f"rank(s) {', '.join(map(str, others))} were given another request than rank {self.ranks[0]}: expected "
                "the same documents, question, model and options on all ranks"
            )

    def _exchange(self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        row = _row_bytes(tensor)
        total = sum(receives)
        if row == 0:  # of width 0, on all members
            return tensor.new_empty((total, *tensor.shape[1:]))
        own = self._bytes(tensor)
        received = own.new_empty(total * row)
        splits = [count * row for count in receives], [count * row for count in sends]
        with self._waiting.guard():
            # Always, even without own rows: the others cannot know of it and wait for this rank.
            works = started(dist.all_to_all_single(received, own, *splits, group=self.process_group, async_op=True))
        self._waiting.finish(works)
        return _rows(received, tensor, total)

    def _bytes(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return flat.cpu() if self._staged else flat

    def _check(self, name: str, counts: Sequence[int], tensor: Tensor, own: int | None) -> None:
        expected = sum(counts) if own is None else own
        if len(counts) != self.size or min(counts) < 0 or tensor.dim() < 1 or tensor.shape[0] != expected:
            raise ValueError(
                f"{name} {list(counts)} do not fit member {self.index} of a team of {self.size} and a tensor of shape "
                f"{tuple(tensor.shape)}: expected one count for each member, and that many rows"
            )


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _rows(received: Tensor, like: Tensor, count: int) -> Tensor:
    """Bytes as rows of the shape, dtype and device of another tensor's."""
    return received.to(like.device).view(like.dtype).view(count, *like.shape[1:])

"""This rank's part of a layout: which heads, which part of the sequence, and the exchanges between them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from infoflow_kv.errors import OptionError
from infoflow_kv.ops import AttentionSpec
from infoflow_kv.parallel.cost import Layout
from infoflow_kv.parallel.group import Group
from infoflow_kv.shapes import Float, Tensor


class Shard:
    """A rank's place in a layout of `head_shards` × `sequence_shards` ranks.

    `heads`: the team that shares one part of the sequence, each member with its own heads. `sequence`: the team that
    holds the same heads, each member with its own part. OptionError where the layout fits neither ranks nor heads.
    """

    def __init__(self, group: Group, layout: Layout, num_heads: int, num_kv_heads: int) -> None:
        if layout.ranks != group.size:
            raise OptionError(f"layout {layout.name} is for {layout.ranks} ranks, and {group.size} share the request")
        if num_kv_heads % layout.head_shards:
            raise OptionError(
                f"{layout.head_shards} head shards do not divide the model's {num_kv_heads} K/V heads; choose "
                "layout Q, or a number of ranks that has a divisor in common with them"
            )
        self.group, self.layout = group, layout
        self.heads, self.sequence = group.team(layout.head_shards)
        self.num_kv_heads = num_kv_heads // layout.head_shards
        self.num_heads = num_heads // layout.head_shards
        at = self.heads.index
        self.own_kv_heads = slice(at * self.num_kv_heads, (at + 1) * self.num_kv_heads)
        self.own_heads = slice(at * self.num_heads, (at + 1) * self.num_heads)

    def spec(self, spec: AttentionSpec) -> AttentionSpec:
        """A layer's attention for the heads of this rank."""
        return spec if spec.sinks is None else replace(spec, sinks=spec.sinks[self.own_heads])

    def to_heads(
        self, rows: Float[Tensor, "heads here width"], counts: Sequence[int]
    ) -> Float[Tensor, "own_heads team_rows width"]:
        """Own heads of the rows of the whole heads team, in order of member; `counts`: rows of each member."""
        shards = self.heads.size
        if shards == 1:
            return rows
        heads, here, width = rows.shape
        own = heads // shards
        flat = rows.reshape(heads * here, width)
        received = self.heads.all_to_all(flat, [own * here] * shards, [own * count for count in counts])
        parts = torch.split(received, [own * count for count in counts])
        return torch.cat([p.view(own, count, width) for p, count in zip(parts, counts, strict=True)], dim=1)

    def from_heads(
        self, rows: Float[Tensor, "own_heads team_rows width"], counts: Sequence[int]
    ) -> Float[Tensor, "heads here width"]:
        """The way back of `to_heads`."""
        shards = self.heads.size
        if shards == 1:
            return rows
        own, _, width = rows.shape
        here = counts[self.heads.index]
        flat = torch.cat([part.reshape(-1, width) for part in torch.split(rows, list(counts), dim=1)])
        received = self.heads.all_to_all(flat, [own * count for count in counts], [own * here] * shards)
        return received.view(shards * own, here, width)

    def all_heads(self, rows: Float[Tensor, "own_heads rows width"]) -> Float[Tensor, "heads rows width"]:
        """All heads of rows that every rank of the heads team has, from each one's own."""
        return self.heads.all_gather(rows, [rows.shape[0]] * self.heads.size)


def packed(
    out: Float[Tensor, "heads rows head_dim"], lse: Float[Tensor, "heads rows"]
) -> tuple[Tensor, torch.dtype, int]:
    """A partial output and its LSE as bytes `[rows, heads, head_dim × itemsize + 4]`: one message, nothing rounded."""
    rows_first = out.transpose(0, 1).contiguous().view(torch.uint8)
    sums = lse.transpose(0, 1).contiguous()[..., None].view(torch.uint8)
    return torch.cat([rows_first, sums], dim=-1), out.dtype, int(out.shape[-1])


def unpacked(
    message: Tensor, dtype: torch.dtype, head_dim: int
) -> tuple[Float[Tensor, "parts heads rows head_dim"], Float[Tensor, "parts heads rows"]]:
    """Partial outputs and LSEs of messages `[parts, rows, heads, bytes]`, see `packed`."""
    width = head_dim * dtype.itemsize
    outs = message[..., :width].contiguous().view(dtype).transpose(1, 2)
    lses = message[..., width:].contiguous().view(torch.float32)[..., 0].transpose(1, 2)
    return outs, lses

"""Attention over a part of the slots, with the LSE by which parts of several ranks merge exactly.

Each row sees a stretch of the part's slots, which may be empty. Rows and stretches both ascend, so that on a CPU the
same rectangles serve as for a whole staircase.
"""

from dataclasses import dataclass, replace

import torch

from infoflow_kv.ops.forms import choice_of_environment, pick
from infoflow_kv.ops.pieces import Piece, bias_of, cut, in_pieces
from infoflow_kv.ops.spec import AttentionSpec, by_head
from infoflow_kv.ops.staircase import is_right, pack, unpack
from infoflow_kv.shapes import Bool, Float, Int, Tensor

# Rows per step of the form that any device and any layer takes: it writes the logits down.
ROWS_PER_STEP = 32


@dataclass(frozen=True, slots=True)
class Stretches:
    """For each row the slots `starts..stops-1` of a part that it sees; neither ever falls from row to row."""

    starts: Int[Tensor, " rows"]
    stops: Int[Tensor, " rows"]

    def visible(self, rows: slice, num_slots: int) -> Bool[Tensor, "some slots"]:
        """Which of the part's slots some of the rows see."""
        slots = torch.arange(num_slots, device=self.stops.device)
        return (slots >= self.starts[rows, None]) & (slots < self.stops[rows, None])


def stretches(ranks: Int[Tensor, " rows"], slot_ranks: Int[Tensor, " slots"], window: int | None = None) -> Stretches:
    """What rows of these ranks see of slots of those ranks; both ascend."""
    stops = torch.searchsorted(slot_ranks, ranks, right=True)
    if window is None:
        return Stretches(torch.zeros_like(stops), stops)
    return Stretches(torch.searchsorted(slot_ranks, ranks - window, right=True), stops)


class PartialAttention:
    """The attention of some rows over one part of the slots; made once for all layers with the same window."""

    def __init__(self, seen: Stretches) -> None:
        self.seen = seen
        self._num_rows = int(seen.stops.numel())
        self._first = int((seen.stops == 0).sum())  # the rows before see nothing here
        self._filled = int(seen.stops[-1]) if self._num_rows else 0
        self._starts_late = bool((seen.starts > 0).any())
        self._pieces: tuple[Piece, ...] | None = None
        self._biases: dict[tuple[int, torch.dtype], list[Tensor | None]] = {}

    def attend(
        self,
        query: Float[Tensor, "heads rows head_dim"],
        keys: Float[Tensor, "kv_heads slots head_dim"],
        values: Float[Tensor, "kv_heads slots head_dim"],
        spec: AttentionSpec,
    ) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
        """Output over the part, and the float32 LSE: 0 and -inf for a row that sees nothing. Sinks are left out: they
        count once, over all parts (`add_sinks`)."""
        heads, rows, _ = query.shape
        lse = torch.full((heads, rows), float("-inf"), dtype=torch.float32, device=query.device)
        out = torch.zeros_like(query)
        if self._first == rows:
            return out, lse
        if (
            not self._starts_late
            and query.device.type != "cpu"
            and pick(choice_of_environment(), query, is_right) == "triton"
        ):
            return self._by_triton(query, keys, values, spec, out, lse)
        if query.device.type != "cpu" or spec.softcap is not None or self._starts_late:
            # Slots that no row sees may not be written yet; a NaN there would survive its weight of 0.
            keys, values = keys[:, : self._filled], values[:, : self._filled]
            for start in range(self._first, rows, ROWS_PER_STEP):
                part = slice(start, min(start + ROWS_PER_STEP, rows))
                logits = logits_of(query[:, part], keys, self.seen.visible(part, self._filled), spec)
                out[:, part], lse[:, part] = output_of(logits, values, query.dtype)
            return out, lse
        there, group = query[:, self._first :], heads // keys.shape[0]
        part_out, part_lse = self._in_pieces(pack(there, keys.shape[0]), keys, values, spec.scale, group)
        out[:, self._first :] = unpack(part_out, there.shape)
        lse[:, self._first :] = unpack(part_lse[..., None], there[..., :1].shape)[..., 0]
        return out, lse

    def _by_triton(
        self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, out: Tensor, lse: Tensor
    ) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
        from infoflow_kv.ops.triton_staircase import attend_by_triton  # loads a compiler, which is not everywhere

        there, last_seen = slice(self._first, None), self.seen.stops[self._first :] - 1
        plain = replace(spec, window=None, sinks=None)
        out[:, there], lse[:, there] = attend_by_triton(query[:, there], keys, values, last_seen, plain)
        return out, lse

    def _in_pieces(
        self, packed: Tensor, keys: Tensor, values: Tensor, scale: float, group: int
    ) -> tuple[Float[Tensor, "kv_heads packed head_dim"], Float[Tensor, "kv_heads packed"]]:
        if self._pieces is None:
            self._pieces = cut(self.seen.stops[self._first :] - 1)
        biases = self._biases.get((group, packed.dtype))
        if biases is None:
            biases = [bias_of(piece, group, packed.dtype) for piece in self._pieces]
            self._biases[group, packed.dtype] = biases
        return in_pieces(packed, keys, values, self._pieces, biases, scale)


def logits_of(
    query: Float[Tensor, "heads rows head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    seen: Bool[Tensor, "rows slots"],
    spec: AttentionSpec,
) -> Float[Tensor, "heads rows slots"]:
    """float32 logits with scale, softcap and mask."""
    heads, rows, head_dim = query.shape
    kv_heads = keys.shape[0]
    packed = (query * spec.scale).reshape(kv_heads, -1, head_dim)  # scaled first: float16 overflows at 65,504
    logits = by_head(packed, keys.transpose(1, 2)).float().view(heads, rows, keys.shape[1])
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    return logits.masked_fill_(~seen, float("-inf"))


def output_of(
    logits: Float[Tensor, "heads rows slots"], values: Float[Tensor, "kv_heads slots head_dim"], dtype: torch.dtype
) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
    """Output and LSE of rows with these logits; 0 and -inf for a row that sees nothing."""
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - finite(lse)[..., None]).to(values.dtype)
    heads, rows, slots = logits.shape  # in numbers: of no slots at all no size can be guessed
    out = by_head(weights.view(values.shape[0], heads // values.shape[0] * rows, slots), values)
    return out.view(heads, rows, values.shape[-1]).to(dtype), lse


def finite(lse: Float[Tensor, "*stack"]) -> Float[Tensor, "*stack"]:
    """The LSE with 0 for -inf: what is subtracted from logits that are all -inf, so that no NaN comes of it."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def merge_parts(
    outs: Float[Tensor, "parts heads rows head_dim"], lses: Float[Tensor, "parts heads rows"]
) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
    """Output and LSE over the union of disjoint parts, exactly; both float32. Parts with LSE -inf count nothing."""
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - finite(lse))
    return (outs.float() * weights[..., None]).sum(dim=0), lse


def add_sinks(
    out: Float[Tensor, "heads rows head_dim"],
    lse: Float[Tensor, "heads rows"],
    sinks: Float[Tensor, " heads"] | None,
) -> tuple[Float[Tensor, "heads rows head_dim"], Float[Tensor, "heads rows"]]:
    """Output and LSE with the heads' sinks in the denominator, where the layer has sinks."""
    if sinks is None:
        return out, lse
    whole = torch.logaddexp(lse, sinks.float()[:, None])
    return out * torch.exp(lse - whole)[..., None], whole

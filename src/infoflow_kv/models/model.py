"""A loaded model: what the rooms may ask of it, and nothing of Transformers' own types beside."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import hooks
from infoflow_kv.models.fingerprint import weights_fingerprint
from infoflow_kv.models.plain import plain_copy
from infoflow_kv.models.probe import Support
from infoflow_kv.models.rotary import Rotary, RotaryTables
from infoflow_kv.models.vision import Vision
from infoflow_kv.records import ModelIdentity, VisualRows
from infoflow_kv.shapes import Float, Int, Tensor


class LanguageModel:
    """One model with its tokenizer, ready for position-free prefill, repair and decode.

    Thread-safe for forwards: nothing of a request is kept on it. Make it with `load` or `wrap`.
    """

    def __init__(self, hf: Any, tokenizer: Any, name: str, support: Support, tokenizer_fingerprint: str) -> None:
        self._hf = hf
        self._support = support
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self.tokenizer = tokenizer
        self.name = name
        # Method → the layer set that suits this model, where it was measured (`layers="auto"` of the engine).
        self.layer_sets: Mapping[str, str] = {}
        self.vision: Vision | None = None  # of a model that reads images
        self.dtype: torch.dtype = hf.dtype
        self.device: torch.device = hf.device
        self.num_layers = support.num_layers
        self.num_heads = support.num_heads
        self.num_kv_heads = support.num_kv_heads
        self.head_dim = support.head_dim
        self.window_tokens = window_tokens(hf.config)
        self.stop_ids = stop_ids(hf, tokenizer)
        self._versions: tuple[tuple[int, int], ...] = ()
        self._weights = ""
        self._regime = lru_cache(maxsize=4096)(lambda length: self.rotary().fingerprint(length))

    @property
    def family(self) -> str:
        """Transformers' name of the architecture."""
        return str(self._hf.config.model_type)

    @property
    def rotates_anew(self) -> bool:
        """Whether all keys must be rotated anew once a sequence outgrows a length (longrope)."""
        return self._support.rotates_anew

    @property
    def needs_eager(self) -> bool:
        """Whether plain Transformers can run this model exactly only in its eager attention (softcap, sinks)."""
        return self._support.needs_eager

    @property
    def identity(self) -> ModelIdentity:
        """What decides the KV of this model. The weights are hashed anew when a parameter was replaced or changed in
        place; a write through `.data` leaves no trace in torch, so load the model again after merging an adapter."""
        versions = tuple((p.data_ptr(), p._version) for p in self._hf.parameters())
        if versions != self._versions:
            self._weights, self._versions = weights_fingerprint(self._hf), versions
        return ModelIdentity(
            weights=self._weights,
            tokenizer=self._tokenizer_fingerprint,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def rotary(self) -> Rotary:
        """The rotary embedding for one request."""
        s = self._support
        return Rotary(s.rotary_module, s.layer_types, s.rotated_layers, s.apply_rotary, self.dtype, self.device)

    def rope_regime(self, num_tokens: int) -> str:
        """Fingerprint of what RoPE and windows do to a sequence of this length."""
        return self._regime(num_tokens if self._support.length_matters else 0) + self._support.windows_tag

    def forward(
        self,
        token_ids: Int[Tensor, " rows"],
        positions: Int[Tensor, " rows"],
        rotary: RotaryTables,
        attend: hooks.Attend,
        num_logits: int = 0,
        write: hooks.Write | None = None,
        visual: VisualRows | None = None,
    ) -> Float[Tensor, "logit_rows vocab"] | None:
        """float32 logits of the last `num_logits` rows; None for 0 rows or when `attend` raised `StopForward`.

        `write`: takes the last layer's keys and values of all rows; that layer then attends for the last `num_logits`
        rows alone, as nothing else of it is wanted. `attend` is called for these there, after `write`.

        `visual`: rows (its `slots` are indices of rows here) that read something else than their tokens' embeddings.

        Every layer's attention is `attend`; ComputeError if a layer did not come by (its KV would be silently wrong) or
        if the logits are not finite.
        """
        call = hooks.AttentionCall(rotary, attend, self._support.windows, write=write, num_whole=num_logits)
        read: dict[str, Tensor] = {"input_ids": token_ids[None].to(self.device)}
        if visual is not None and visual.slots.numel():
            call.visual, call.layer_rows = visual.slots, visual.layer_rows
            embeddings = self._hf.get_decoder().get_input_embeddings()(read["input_ids"])
            read = {"inputs_embeds": embeddings.index_copy(1, visual.slots, visual.embeddings[None])}
        target = self._hf if num_logits else self._hf.get_decoder()
        extra = {"logits_to_keep": num_logits} if num_logits else {}
        with torch.inference_mode():
            try:
                out = target(
                    **read,
                    position_ids=positions[None].to(self.device),
                    use_cache=False,
                    infoflow=call,
                    **extra,
                )
            except hooks.StopForward:
                return None
            if call.layers_seen != list(range(self.num_layers)):
                raise ComputeError(
                    f"attention ran in layers {call.layers_seen}, expected 0..{self.num_layers - 1} once each"
                )
            if not num_logits:
                return None
            logits: Tensor = out.logits[0].float()
        if not bool(torch.isfinite(logits).all()):
            raise ComputeError("the model gave logits that are not finite; no answer is given from them")
        return logits

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def empty_slots(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """Uninitialised key and value buffers `[layers, kv_heads, slots, head_dim]` for one request."""
        shape = (self.num_layers, self.num_kv_heads, num_slots, self.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        return keys, torch.empty_like(keys)

    def plain(self, attention: str = "sdpa") -> Any:
        """The same weights as an ordinary Transformers model: the reference that invariants compare with.

        A second module tree over the same tensors, without our hooks; costs no memory for weights.
        """
        return plain_copy(self._hf, self._support.rotary_module, attention)

    def text(self, token_ids: list[int]) -> str:
        """Decoded text without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def window_tokens(config: Any) -> int:
    """The longest sequence that the model was made for."""
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        limit = int(limit * float(rope.get("factor", 1.0)))
    if limit < 1:
        raise ComputeError("the model's config has no max_position_embeddings, so its window is not known")
    return limit


def stop_ids(hf: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the generation config's list and the tokenizer's own end token."""
    found: set[int] = set()
    for source in (getattr(hf, "generation_config", None), hf.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, int):
            found.add(ids)
        elif isinstance(ids, (list, tuple)):
            found.update(int(i) for i in ids)
    return frozenset(found)

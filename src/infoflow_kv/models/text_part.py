"""The language part of a vision-language model as the causal model that the probe and `LanguageModel` expect."""

from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from infoflow_kv.models.plain import cache_of
from infoflow_kv.shapes import Float, Int, Tensor


class TextPart(PreTrainedModel, GenerationMixin):
    """Decoder and output layer of a vision-language model, over the same parameters; the tower stays outside.

    Images come in as `inputs_embeds`. `set_attn_implementation` changes the decoder alone, so the tower keeps the
    attention that it was loaded with. Fingerprints of this module cover what text KV depends on, and no more.
    `generate` works for text; a plain answer over images is the whole model's.
    """

    base_model_prefix = "decoder"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, hf: Any) -> None:
        decoder = hf.get_decoder()
        # The decoder's own object, no copy: the layers read the name of their attention from it.
        super().__init__(decoder.config)
        self._supports_attention_backend = bool(getattr(decoder, "_supports_attention_backend", False))
        self.decoder = decoder
        self.lm_head = hf.get_output_embeddings()
        self.generation_config = hf.generation_config

    def get_decoder(self) -> Any:
        """The module with `embed_tokens`, `layers` and `rotary_emb`."""
        return self.decoder

    def get_input_embeddings(self) -> Any:
        return self.decoder.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def set_attn_implementation(
        self, attn_implementation: str | dict[Any, Any], allow_all_kernels: bool = False
    ) -> None:
        """Changes how the decoder attends; its own class knows what it can do."""
        self.decoder.set_attn_implementation(attn_implementation, allow_all_kernels)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # Transformers looks for experts in the class's source file; ours are in the decoder's, which chose already.
        return True

    def forward(
        self,
        input_ids: Int[Tensor, "1 rows"] | None = None,
        inputs_embeds: Float[Tensor, "1 rows hidden"] | None = None,
        position_ids: Int[Tensor, "..."] | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """`logits` `[1, rows, vocab]`, of the last `logits_to_keep` rows (0: all).

        `position_ids`: `[1, rows]`, or `[axes, 1, rows]` as the model takes them. All other keywords go to the decoder.
        """
        out = self.decoder(
            input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=use_cache, **kwargs
        )
        hidden = out.last_hidden_state
        logits = self.lm_head(hidden[:, -logits_to_keep or None :])
        if not use_cache:
            return CausalLMOutputWithPast(logits=logits)
        return CausalLMOutputWithPast(logits=logits, **cache_of(out))

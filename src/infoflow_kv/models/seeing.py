"""A vision-language model made ready: its language part is probed as any model, then proven again with an image."""

import io
import math
from collections.abc import Mapping
from typing import Any

import torch

from infoflow_kv.errors import InfoFlowError, ModelError, UnsupportedModelError
from infoflow_kv.models import hooks
from infoflow_kv.models.fingerprint import refuse_slow_tokenizer, tokenizer_fingerprint
from infoflow_kv.models.memory import LocalMemory
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.pictures import read_picture
from infoflow_kv.models.probe import PROBE_TOKENS, TOLERANCE, attention_modules, decoder_layers, probe, random_ids
from infoflow_kv.models.rows import forward_rows
from infoflow_kv.models.text_part import TextPart
from infoflow_kv.models.vision import Prepared, Vision, VisionAdapter, find_adapter
from infoflow_kv.records import VisualRows
from infoflow_kv.shapes import Float, Tensor

PROBE_PICTURE = 56, 84  # pixels; small, and not square, so that rows and columns cannot be mixed up


def wrap_vision(hf: Any, tokenizer: Any, name: str, processor_config: Mapping[str, Any] | None) -> LanguageModel:
    """A LanguageModel over the language part of `hf`, whose `vision` reads images; `hf` is taken over.

    Raises UnsupportedModelError where text or an image does not come out as Transformers itself computes it.
    """
    refuse_slow_tokenizer(tokenizer, name)
    hf = hf.eval().requires_grad_(False)
    try:
        adapter = find_adapter(hf, processor_config, tokenizer)
    except (KeyError, TypeError, AttributeError, ValueError) as failure:
        raise ModelError(f"the image settings of model '{name}' cannot be used ({str(failure)[:200]})") from failure
    if adapter is None:
        raise UnsupportedModelError(
            f"{type(hf).__name__} is not supported: it reads images in a way that is not known here (docs/models.md)"
        )
    text = TextPart(hf)
    prepared = adapter.prepare(read_picture(probe_picture()))
    ids = probe_ids(text, prepared)
    expected = whole_forward(hf, adapter, ids, prepared)  # before the hooks: this is Transformers' own answer
    support = probe(text)
    if support.length_matters:
        # A sequence with images has fewer positions than tokens, and tiles are prefilled as shorter sequences.
        raise UnsupportedModelError(
            f"{type(hf).__name__} is not supported: its rotary frequencies depend on the length of the sequence, which "
            "does not go with images yet"
        )
    if adapter.num_early:
        for layer in decoder_layers(text, attention_modules(text)):
            layer.register_forward_hook(hooks.add_layer_rows, with_kwargs=True)
    model = LanguageModel(text, tokenizer, name, support, tokenizer_fingerprint(tokenizer))
    # Another `Vision` than the model's, which is to know nothing of the probe's picture.
    found = own_forward(model, Vision(adapter, model.window_tokens), ids, prepared)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not (math.isfinite(error) and error <= TOLERANCE[text.dtype]):
        raise UnsupportedModelError(
            f"{type(hf).__name__} is not supported: with an image its logits differ from its own by {error:.2g} "
            f"(relative; {TOLERANCE[text.dtype]:.0e} allowed)"
        )
    model.vision = Vision(adapter, model.window_tokens)
    return model


def probe_picture() -> bytes:
    """A small PNG of random pixels."""
    from PIL import Image

    width, height = PROBE_PICTURE
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def probe_ids(text: Any, prepared: Prepared) -> list[int]:
    """Random text, the image, random text."""
    words = [token for token in random_ids(text).tolist() if token not in prepared.token_ids]
    half = len(words) // 2
    return [*words[:half], *prepared.token_ids, *words[half:]]


def whole_forward(hf: Any, adapter: VisionAdapter, ids: list[int], prepared: Prepared) -> Float[Tensor, "rows vocab"]:
    """float32 logits of Transformers' own forward, pixels included."""
    given = adapter.forward_inputs(ids, [prepared])
    try:
        with torch.inference_mode():
            logits: Tensor = hf(**given, use_cache=False).logits[0].float()
    except InfoFlowError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"{type(hf).__name__} is not supported: its own forward failed on a small image ({reason})"
        ) from error
    finally:
        if hasattr(hf.model, "rope_deltas"):
            hf.model.rope_deltas = None  # it would move the positions of the next request
    return logits


def own_forward(
    model: LanguageModel, vision: Vision, ids: list[int], prepared: Prepared
) -> Float[Tensor, "rows vocab"]:
    """The same through our rows: positions, features and rows of early layers as a stored chunk has them."""
    inputs = vision.inputs(vision.images(ids, [prepared]))
    ranks = torch.arange(len(ids), device=model.device)
    keys, values = model.empty_slots(len(ids))
    tables = model.rotary().tables(inputs.positions.long())
    visual = VisualRows(*(x.to(model.device) for x in (inputs.visual.long(), inputs.embeddings, inputs.layer_rows)))
    token_ids = torch.tensor(ids, device=model.device)
    logits = forward_rows(model, token_ids, ranks, tables, LocalMemory(keys, values), len(ids), visual=visual)
    assert logits is not None and len(ids) > PROBE_TOKENS // 2
    return logits

"""Plain Transformers on a prompt with images: what arms are compared with.

The decoder is the model's own, without our hooks, with its own mask and cache; it reads what the model's own tower
makes of the pixels, at the positions that the model's own rule gives to the whole prompt. The tests hold it against the
whole model's forward over pixels.
"""

import time
from typing import TYPE_CHECKING, Any

import torch

from infoflow_kv.errors import ComputeError
from infoflow_kv.models import PlainRun
from infoflow_kv.models.plain import cache_of, whole_kv
from infoflow_kv.records import Prompt
from infoflow_kv.shapes import Float, Tensor

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel

REFERENCE = "transformers"
"""What rows say of the full prefill that they are compared with."""


def greedy_seeing(model: "LanguageModel", plain: Any, prompt: Prompt, max_new_tokens: int) -> PlainRun:
    """The greedy answer of plain Transformers to a prompt with images; ends after the first of the model's stop ids.

    Its time to the first token holds the vision tower, whether or not that has seen the images before.
    """
    start = time.perf_counter()
    with torch.inference_mode():
        given = inputs_of(model, plain, prompt)
        out = plain(**given, use_cache=True, logits_to_keep=1)
        logits = [out.logits[0, -1:].float()]
        ids = [int(logits[-1].argmax())]
        first = time.perf_counter()
        place = given["position_ids"].amax() + 1
        while len(ids) < max_new_tokens and ids[-1] not in model.stop_ids:
            new = torch.tensor([ids[-1:]], device=model.device)
            axes = given["position_ids"].shape[:-1]
            out = plain(
                input_ids=new, position_ids=place.expand(*axes, 1), **cache_of(out), use_cache=True, logits_to_keep=1
            )
            logits.append(out.logits[0, -1:].float())
            ids.append(int(logits[-1].argmax()))
            place = place + 1
    keys, values = whole_kv(out, prompt.num_tokens + len(ids) - 1)
    return PlainRun(tuple(ids), torch.cat(logits), keys, values, first - start, time.perf_counter() - start)


def logits_seeing(
    model: "LanguageModel", plain: Any, prompt: Prompt, more: tuple[int, ...]
) -> Float[Tensor, "more vocab"]:
    """float32 logits before each of the tokens `more` behind the prompt, by one forward over all."""
    with torch.inference_mode():
        out = plain(**inputs_of(model, plain, prompt, more), use_cache=False, logits_to_keep=len(more) + 1)
    logits: Tensor = out.logits[0, :-1].float()
    return logits


def inputs_of(model: "LanguageModel", plain: Any, prompt: Prompt, more: tuple[int, ...] = ()) -> dict[str, Any]:
    """The keywords of the plain decoder for the prompt and the tokens `more`. Where there are images the tower runs;
    nothing of a chunk is used."""
    token_ids = prompt.token_ids + more
    ids = torch.tensor([token_ids], device=model.device)
    prepared = [one for chunk in prompt.chunks if chunk.images is not None for one in chunk.images.prepared]
    if not prepared:
        return {"input_ids": ids}
    if model.vision is None:
        raise ComputeError(f"a prompt has images, but {model.name} reads none; it is another model's")
    adapter = model.vision.adapter
    encoded = [adapter.encode(one) for one in prepared]
    embeddings = plain.get_input_embeddings()(ids)
    is_visual = ids == adapter.image_token_id
    embeddings[is_visual] = torch.cat([one.embeddings for one in encoded]).to(embeddings)
    positions = adapter.positions(token_ids, prepared).long().to(model.device)
    given: dict[str, Any] = {
        "inputs_embeds": embeddings,
        "position_ids": positions[:, None] if positions.shape[0] > 1 else positions,
    }
    if adapter.num_early:
        rows = torch.cat([one.layer_rows for one in encoded], dim=1).to(model.device)
        given |= {"visual_pos_masks": is_visual, "deepstack_visual_embeds": list(rows)}
    return given

"""In which form should the movement of a chunk's V be kept? Selection quality and bytes per token of each form.

The record behind method `influence` holds ‖ΔV‖ of each token behind a neighbour, per layer. Finer and coarser forms are
made here and used to select tokens at one budget; what counts is the distance to full prefill (plain
Transformers) over its greedy continuation, as in the laboratory. Also measured: another neighbour, the chunk that
really stands before in this request. Writes one JSON line per question and form.
"""

import argparse
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from environment import environment

from infoflow_kv import load
from infoflow_kv.calibrate import Given, Keeper, with_selector
from infoflow_kv.evaluate.distances import divergences
from infoflow_kv.evaluate.measuring import Bench, documents_of
from infoflow_kv.evaluate.options import Options
from infoflow_kv.evaluate.readers import read_items
from infoflow_kv.methods import find_method
from infoflow_kv.models import greedy
from infoflow_kv.prefilling import identify, prefill
from infoflow_kv.recipes import make_recipe
from infoflow_kv.select import AttentionMass

GROUPS = 4


def attention_per_head(engine, prompt) -> torch.Tensor:
    """Attention mass `[layers, kv_heads, context]`: one scoring forward per K/V head, the others weighted 0."""
    model, masses = engine.model, []
    for head in range(model.num_kv_heads):

        def only(scene, layer, head=head):
            weight = torch.zeros(model.num_kv_heads, scene.context.num_tokens)
            weight[head] = 1
            return weight

        keeper = Keeper(AttentionMass(tuple(range(model.num_layers)), "sum", only))
        method = with_selector(find_method("infoflow"), keeper)
        engine.run(prompt, recipe=replace(make_recipe(model, "infoflow", 0.01), method=method))
        masses.append(keeper.found)
    return torch.stack(masses, dim=1)


def movement(engine, parts, neighbour_of) -> torch.Tensor:
    """‖ΔV‖ `[layers, kv_heads, context]` of each chunk behind its head and the ids that `neighbour_of(index)` gives."""
    model = engine.model
    pieces = [torch.zeros(model.num_layers, model.num_kv_heads, parts.head.num_tokens)]
    for index, part in enumerate(parts.chunks):
        ids = part.identity.head_ids + neighbour_of(index)
        before = prefill(model, identify(model, ids, (), part.identity.namespace))
        rope = model.rope_regime(len(ids) + part.num_tokens)
        moved = prefill(model, replace(part.identity, head_ids=ids, rope=rope), before)
        pieces.append((moved.values - part.values).float().norm(dim=-1))
    return torch.cat(pieces, dim=2)


def eight_bits(norms: torch.Tensor) -> torch.Tensor:
    """Eighths of a power of two: 256 steps from 2^-16 to 2^16."""
    return torch.exp2(torch.round(torch.log2(norms.clamp_min(2.0**-16)) * 8) / 8)


def forms(fixed: torch.Tensor, real: torch.Tensor) -> dict[str, tuple[torch.Tensor, float]]:
    """Form → the weights that it gives back `[layers, kv_heads or 1, context]`, and its bytes per token."""
    layers, heads, _ = fixed.shape
    per_layer = fixed.square().sum(dim=1, keepdim=True).sqrt()
    level = per_layer.mean(dim=2, keepdim=True).clamp_min(1e-6)  # of the model, not of the token: kept once
    relative = per_layer / level
    bounds = [round(i * layers / GROUPS) for i in range(GROUPS + 1)]
    grouped = torch.cat(
        [relative[a:b].mean(dim=0, keepdim=True).expand(b - a, -1, -1) for a, b in itertools.pairwise(bounds)]
    )
    return {
        "nothing (infoflow)": (torch.ones_like(per_layer), 0),
        "per layer and head, float16": (fixed, 2 * layers * heads),
        "per layer and head, 8 bits": (eight_bits(fixed), layers * heads),
        "per layer, float16": (per_layer, 2 * layers),
        "per layer, 8 bits": (eight_bits(per_layer), layers),
        f"{GROUPS} groups of layers, float16": (grouped * level, 2 * GROUPS),
        "one number, float16": (relative.mean(dim=0, keepdim=True) * level, 2),
        "per layer and head, real neighbour": (real, 2 * layers * heads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--skip", type=int, default=150)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--budget", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "movement_forms.jsonl")
    args = parser.parse_args()
    model = load(args.model)
    bench = Bench(model, Options())
    record = environment()
    with args.out.open("w", encoding="utf-8") as out:
        for item in [i for file in args.data for i in read_items(file).items[args.skip :][: args.limit]]:
            engine = bench.engine()
            prompt = engine.prompt(item.question, documents_of(item))
            full = greedy(bench.plain, prompt.token_ids, bench.options.continuation, model.stop_ids)
            parts = engine._supply.parts(prompt)
            fixed = movement(engine, parts, lambda index, engine=engine: engine._supply.neighbour_ids)
            real = movement(engine, parts, lambda index, parts=parts: parts.chunks[index - 1].identity.token_ids)
            mass = attention_per_head(engine, prompt)
            recipe = make_recipe(model, "influence", args.budget)
            layers = list(recipe.layers)
            for form, (weights, size) in forms(fixed, real).items():
                scores = (mass * weights)[layers].sum(dim=(0, 1))
                method = with_selector(find_method("infoflow"), Given(scores))
                run = engine.run(prompt, recipe=replace(recipe, method=method), forced_ids=full.token_ids[:-1])
                kl, js = divergences(run.logits, full.logits)
                line = {
                    "_id": item.id,
                    "dataset": item.dataset,
                    "form": form,
                    "bytes_per_token": size,
                    "budget": args.budget,
                    "kl_cont": sum(kl) / len(kl),
                    "js_cont": sum(js) / len(js),
                    "environment": record,
                }
                out.write(json.dumps(line) + "\n")
            out.flush()
            print(item.id, prompt.context_tokens, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

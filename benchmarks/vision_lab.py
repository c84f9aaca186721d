"""How near reuse of images comes to full prefill, by share, tiles and selector, on tiny random models of families.

No weights of a vision-language model are at hand where this project is made, so this says how the machinery behaves,
and nothing about answers. Contexts are two texts and four pictures, of the data folder where there is one (made small)
and else drawn; the reference is plain Transformers with pixels. One JSON line for each family, seed and number of
tiles; `tools/write_vision.py` makes the tables of docs/vlm.md from them.
"""

import argparse
import json
import os
import sys
import time
from io import BytesIO
from pathlib import Path

import torch
from environment import environment
from PIL import Image as Pil

from infoflow_kv import Document, Engine, MemoryStore
from infoflow_kv.evaluate.distances import agreement, divergences
from infoflow_kv.evaluate.vision_readers import read_vision_items
from infoflow_kv.evaluate.vision_reference import greedy_seeing
from infoflow_kv.models import LanguageModel
from infoflow_kv.records import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import tiny_vlm  # noqa: E402

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "idefics3")
SELECTORS = ("infoflow", "infoflow-l2", "cacheblend", "epic", "influence", "random")
BUDGETS = (0.05, 0.15, 0.3, 0.5)
TILES = (1, 2, 4)
PLACES = 8  # of full prefill's own answer, over which distances are means
FILES = ("plotqa/test_human.json", "chartqa_format/test_augmented.json", "infovqa_format/infographicsVQA_sample.json")
TEXTS = (
    "The harbour closes at nine.",
    "The crane cost 18,500 crowns.",
)
QUESTIONS = ("How many boats came home?", "Which colour is the largest field?", "What is written in the middle?")

Case = tuple[str, list[Document]]


def small(source: Path | bytes, side: int = 160) -> bytes:
    """The picture as a PNG that no side of is longer."""
    picture = Pil.open(source if isinstance(source, Path) else BytesIO(source)).convert("RGB")
    picture.thumbnail((side, side))
    return tiny_vlm.encoded_file(picture)


def cases(data: Path | None, count: int) -> tuple[list[Case], str]:
    """Questions with their documents, and where their pictures are from."""
    asked: list[tuple[str, bytes]] = []
    for name in FILES if data is not None and (data / "vlm").is_dir() else ():
        items = read_vision_items(data / "vlm" / name).items
        # Pictures of one file follow each other: take them from all over it.
        asked += [(item.question, small(item.images[0])) for item in items[:: max(1, len(items) // count)][:count]]
    source = "published and drawn charts and tables, made small" if asked else "random soft blobs"
    if not asked:
        asked = [
            (QUESTIONS[n % len(QUESTIONS)], tiny_vlm.encoded_file(tiny_vlm.image(90 + 20 * (n % 4), 80, n)))
            for n in range(2 * count)
        ]
    found: list[Case] = []
    for n in range(count):
        question = asked[(n * 7) % len(asked)][0]
        first, second, third, fourth = (Image(asked[(n * 7 + 3 * step) % len(asked)][1]) for step in range(4))
        documents = [Document(parts=("A chart.", first)), Document(TEXTS[0]), Document(parts=(second,))]
        documents += [Document(parts=(third, "Another one.")), Document(TEXTS[1]), Document(parts=(fourth,))]
        found.append((question, documents[n % 2 :] + documents[: n % 2]))
    return found, source


def sizes(model: LanguageModel, given: list[Case]) -> dict[str, float]:
    """Mean numbers of context tokens and of visual ones among them."""
    prompts = [Engine(model).prompt(question, documents) for question, documents in given]
    visual = [sum(c.images.visual.numel() for c in p.chunks if c.images is not None) for p in prompts]
    return {
        "context_tokens": sum(p.context_tokens for p in prompts) / len(prompts),
        "image_tokens": sum(visual) / len(visual),
    }


def measure(model: LanguageModel, given: list[Case], tiles: int, seed: int) -> dict[str, dict[str, list[float]]]:
    """By arm (`selector@share`, `none`, `all`) and case: KL and agreement at the first place, and over all places."""
    plain = model.plain("sdpa")
    arms = [("none", 0.0), *[(s, b) for s in SELECTORS for b in BUDGETS], ("infoflow", 1.0)]
    names = ["none", *[f"{name}@{share:g}" for name, share in arms[1:-1]], "all"]
    fields = ("kl_first", "kl", "top1", "same")
    found: dict[str, dict[str, list[float]]] = {name: {field: [] for field in fields} for name in names}
    for question, documents in given:
        engine = Engine(model, MemoryStore(), method="influence", tiles=tiles)
        prompt = engine.prompt(question, documents)
        engine.add(documents)
        full = greedy_seeing(model, plain, prompt, PLACES)
        for name, (method, share) in zip(names, arms, strict=True):
            run = engine.run(prompt, method=method, budget=share, forced_ids=full.token_ids[:-1], seed=seed)
            kl, _ = divergences(run.logits, full.logits)
            equal = (run.logits.argmax(-1) == full.logits.argmax(-1)).float()
            record = found[name]
            record["kl_first"].append(round(kl[0], 6))
            record["kl"].append(round(sum(kl) / len(kl), 6))
            record["top1"].append(agreement(run.logits[:1], full.token_ids[:1]))
            record["same"].append(round(float(equal.mean()), 4))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("INFOFLOW_DATA"), help="folder of the data sets")
    parser.add_argument("--items", type=int, default=8, help="contexts for each model")
    parser.add_argument("--seeds", type=int, default=3, help="random models of each family")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "vision.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)  # models this small only lose by more
    given, source = cases(args.data, args.items)
    lines = []
    start = time.perf_counter()
    for family in FAMILIES:
        for seed in range(args.seeds):
            model = tiny_vlm.model(family, seed)
            for tiles in TILES:
                record = {"family": family, "seed": seed, "tiles": tiles, "items": len(given), "places": PLACES}
                record |= {"pictures": source, **sizes(model, given), "arms": measure(model, given, tiles, seed)}
                lines.append(json.dumps({**record, "environment": environment("cpu")}))
            print(f"{family}, seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Reports as the engine would make them, from a seed: no model, words for tokens."""

import random
from typing import Any

WORDS = (
    *("the", "keeper", "of", "light", "harbour", "glass", "bottle", "salt", "ferry", "bell"),
    *("town", "reef", "tower", "window", "gale", "honey", "stone", "map", "rope"),
)


def made_report(num_chunks: int = 5, chunk_tokens: int = 60, seed: int = 0, budget: float = 0.15) -> dict[str, Any]:
    """A report with four methods: no reuse, no recomputation, scores in the given order, scores with a new order."""
    rng = random.Random(seed)
    chunks = [
        {"id": f"doc{i}.md#0", "title": f"Document {i + 1}", "tokens": made_tokens(rng, chunk_tokens)}
        for i in range(num_chunks)
    ]
    shuffled = list(range(num_chunks))
    rng.shuffle(shuffled)
    plain = list(range(num_chunks))
    return {
        "format": 1,
        "question": "What does the keeper of Corran Light collect?",
        "model": "SmolLM2-135M-Instruct",
        "created": "2026-11-30",
        "budget": budget,
        "version": "0.2.0",
        "full_answer": "The keeper collects glass bottles.",
        "methods": [
            made_method(rng, chunks, "full", plain, budget=None),
            made_method(rng, chunks, "none", plain, budget=0.0),
            made_method(rng, chunks, "infoflow", plain, budget=budget),
            made_method(rng, chunks, "infoflow-reorder", shuffled, budget=budget),
        ],
        "chunks": chunks,
        "prompt_tokens": ["\n", "What", " does", " the", " keeper", " collect", "?"],
    }


def made_tokens(rng: random.Random, count: int) -> list[str]:
    """Words with a blank before them, an end of a paragraph here and there."""
    return ["\n\n" if rng.random() < 0.02 else f" {rng.choice(WORDS)}" for _ in range(count)]


def made_method(
    rng: random.Random, chunks: list[dict[str, Any]], name: str, order: list[int], budget: float | None
) -> dict[str, Any]:
    """One method's part; budget None: no reuse, 0: no scores. The first chunk in the order is exact."""
    sizes = [len(chunk["tokens"]) for chunk in chunks]
    exact = set() if budget is None else set(order[:1])
    reusable = [(c, i) for c in order if c not in exact for i in range(sizes[c])]
    scores = [[rng.lognormvariate(0, 2) * (1 + 5 * (c % 3 == 0)) for _ in range(size)] for c, size in enumerate(sizes)]
    best = sorted(reusable, key=lambda token: -scores[token[0]][token[1]])
    kept = set(best[: round((budget or 0) * len(reusable))])
    total = sum(map(sum, scores))
    return {
        "name": name,
        "rule": f"the rule of {name}",
        "source": "made for a test",
        "answer": "The keeper collects glass bottles." if name != "none" else "Owls.",
        "kl_first": None if budget is None else rng.random() / 50,
        "js_first": None if budget is None else rng.random() / 200,
        "same_first_token": None if budget is None else name != "none",
        "geometry": "GLOBAL",
        "layers": "all",
        "reorder": order != sorted(order),
        "usage": {
            "context_tokens": sum(sizes),
            "prompt_tokens": 7,
            "reusable_tokens": 0 if budget is None else len(reusable),
            "recomputed_tokens": len(kept),
            "prefilled_tokens": sum(sizes) if budget is None else 0,
            "cached_chunks": 0 if budget is None else len(chunks),
            "chunks": len(chunks),
            "new_tokens": 8,
        },
        "timings": {
            "load_seconds": 0.0 if budget is None else 0.031,
            "assemble_seconds": 0.012,
            "score_seconds": 0.21 if budget else 0.0,
            "repair_seconds": 0.34 if budget is not None else 2.2,
            "ttft_seconds": 0.61 if budget is not None else 2.26,
            "decode_seconds": 0.42,
        },
        "order": order,
        "chunks": [
            {
                "scores": scores[c] if budget else None,
                "recomputed": [int((c, i) in kept) for i in range(size)],
                "exact": c in exact,
                "mass": sum(scores[c]) / total if budget else 0.0,
            }
            for c, size in enumerate(sizes)
        ],
    }

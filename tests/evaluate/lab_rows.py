"""Made rows of the laboratory: one row by hand, or a seeded run in which arms differ by known amounts."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RUN = {
    "format": 1,
    "model": "made-135m",
    "weights": "abc123",
    "dtype": "float32",
    "environment": {"device": "cpu", "threads": 2, "torch": "2.13.0", "host": {"cores": 2}},
    "arms": ["full", "none"],
    "data": [{"file": "made.jsonl", "sha256": "0" * 64}],
    "options": {"limit": 8, "seed": 0},
}
# What the arms cost in nats; at budget b an arm keeps `base · (1 - b · gain)`.
BASE = 0.4
GAINS = {"random": 0.3, "epic": 1.5, "cacheblend": 1.7, "infoflow": 2.2, "influence": 2.6}


def row(item: str, arm: str, **changes: Any) -> dict[str, Any]:
    """One complete row; `changes` replaces fields."""
    method, _, budget = arm.partition("@")
    fields: dict[str, Any] = {
        "format": 1,
        "_id": item,
        "dataset": "made",
        "group": "",
        "arm": arm,
        "method": method.partition("[")[0],
        "budget": float(budget) if budget else {"full": 1.0}.get(arm, 0.0),
        "geometry": "GLOBAL",
        "reorder": False,
        "layers": "all",
        "prediction": "Oberoi Group",
        "answers": ["Oberoi Group"],
        "kl_first": 0.2,
        "kl_cont": 0.1,
        "js_first": 0.05,
        "js_cont": 0.02,
        "top1": True,
        "prefix": 8,
        "prefix_of": 16,
        "margin": 1.0,
        "gold_nll": 2.0,
        "full_gold_nll": 1.5,
        "closed_gold_nll": None,
        "closed_prediction": None,
        "context_tokens": 1000,
        "prompt_tokens": 30,
        "reusable_tokens": 800,
        "recomputed_tokens": 120,
        "recomputed_share": 0.15,
        "recomputed_share_all": 0.12,
        "computed_share": 0.15,
        "chunks": 10,
        "selection_lift": None,
        "rope_mean_of_max": None,
        "rope_max": None,
        "delta_k": None,
        "delta_v": None,
        "ttft_seconds": 0.5,
        "timings": {},
        "token_ids_sha256": f"ids of {item}",
        "prompt_ids_sha256": None,
        "stop_reason": "eos",
        "meta": {},
    }
    assert not set(changes) - set(fields), changes
    return {**fields, **changes}


def write(folder: Path, rows: Iterable[Mapping[str, Any]], run: Mapping[str, Any] | None = None) -> Path:
    """A run folder with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return folder


def made_run(seed: int = 0, items: int = 8, floor: bool = False) -> list[dict[str, Any]]:
    """A run on two question sets, a needle set and a variable-tracking set; `floor`: nothing made is ever found.

    On `musique` full prefill beats the closed book, on `hotpotqa` both say the same: the gate must keep it out.
    """
    found = []
    for dataset in ("musique", "hotpotqa"):
        for number in range(items):
            rng = random.Random(f"{seed}{dataset}{number}")
            meta = {"hops": [{"question": "who?", "answer": "she"}]}  # as MuSiQue has them: no variable tracking
            found += _arms(f"{dataset}-{number}", dataset, rng, meta, group=f"doc{number // 2}")
    for length in (1000, 2000, 4000, 6000, 7500):
        for depth in range(0, 101, 10):
            rng = random.Random(f"{seed}needle{length}{depth}")
            meta = {"task": "niah", "kind": "one", "length": length, "depth": depth / 100}
            chance = 0.0 if floor else 1 - length / 15000
            found += _made("needle", f"needle-{length}-{depth}", rng, meta, chance)
            if length == 2000 and depth in (0, 50, 100):  # these belong into tables, not into the heat map
                for place in ("start", "end"):
                    placed = {**meta, "kind": "two-chunk", "length": 2345, "place": place}
                    found += _made("needle", f"needle-{place}-{depth}", rng, placed, chance)
    for order in ("forward", "shuffled"):
        for hops in (1, 2, 3, 4):
            for number in range(items // 2):
                rng = random.Random(f"{seed}vt{order}{hops}{number}")
                meta = {"task": "vt", "hops": hops, "order": order, "gap": 1}
                item = f"vt-{order}-{hops}-{number}"
                found += _made("vt", item, rng, meta, 0.0 if floor else 1 - hops / 6)
    return found


def _arms(item: str, dataset: str, rng: random.Random, meta: dict[str, Any], group: str = "") -> list[dict[str, Any]]:
    base = BASE * rng.uniform(0.7, 1.3)
    common = {"dataset": dataset, "group": group, "meta": meta}
    gate = {"closed_gold_nll": 3.0, "closed_prediction": "no idea"}
    if dataset == "hotpotqa":
        gate = {"closed_gold_nll": 1.5, "closed_prediction": "Oberoi Group"}
    exact = {"kl_first": 0.0, "kl_cont": 0.0, "js_first": 0.0, "js_cont": 0.0, "gold_nll": 1.5, "prefix": 16}
    shares = {"recomputed_share": 1.0, "recomputed_share_all": 1.0, "computed_share": 1.0, "recomputed_tokens": 800}
    found = [row(item, "full", **common, **exact, **shares, **gate, ttft_seconds=2.0)]
    found.append(row(item, "none", **common, **_apart(base, 0.0, rng)))
    for budget in (0.05, 0.15, 0.3):
        for method, gain in GAINS.items():
            left = base * (1 - budget * gain) * rng.uniform(0.93, 1.07)
            found.append(row(item, f"{method}@{budget}", **common, **_apart(left, budget, rng, lifted=True)))
        if budget == 0.15:
            for geometry, worse in (("HL-TP", 1.2), ("TL-TP", 1.35)):
                left = base * (1 - budget * 2.2) * worse
                arm = f"infoflow[geometry={geometry}]@{budget}"
                found.append(row(item, arm, **common, **_apart(left, budget, rng), geometry=geometry))
            for layer in range(0, 30, 3):
                left = base * (1 - budget * 2.2) * (1 + ((layer - 18) / 18) ** 2) * rng.uniform(0.95, 1.05)
                arm = f"infoflow[layers={layer}]@{budget}"
                found.append(row(item, arm, **common, **_apart(left, budget, rng), layers=str(layer)))
            left = base * (1 - budget * 2.2) * 1.25
            arm = f"infoflow[layers=relative]@{budget}"
            found.append(row(item, arm, **common, **_apart(left, budget, rng), layers="relative"))
    return found


def _apart(distance: float, budget: float, rng: random.Random, lifted: bool = False) -> dict[str, Any]:
    """The fields of an arm that is `distance` nats away from full prefill."""
    return {
        "kl_cont": distance,
        "kl_first": distance * 1.5,
        "js_cont": distance / 8,
        "js_first": distance / 6,
        "top1": rng.random() > distance,
        "prefix": int(16 * (1 - distance)),
        "gold_nll": 1.5 + distance / 2,
        "recomputed_share": budget,
        "recomputed_share_all": budget * 0.8,
        "recomputed_tokens": int(800 * budget),
        "computed_share": budget + (0.04 if budget else 0.0),
        "ttft_seconds": 0.1 + 2 * budget,
        "selection_lift": 1 + budget if lifted else None,
    }


def _made(dataset: str, item: str, rng: random.Random, meta: dict[str, Any], chance: float) -> list[dict[str, Any]]:
    found = []
    for one in _arms(item, dataset, rng, meta):
        odds = chance * (1 - one["kl_cont"])
        one["answers"] = ["4471903"]
        one["prediction"] = "It is 4471903." if rng.random() < odds else "It is green."
        if one["arm"] == "full":
            one["prediction"] = "It is 4471903." if chance else "It is green."
            one["closed_prediction"] = "It is 12."
        found.append(one)
    return found

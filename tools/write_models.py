"""Writes docs/models.md and the package's list of tested families: tiny models of the table in tests/families.py are
built, probed and looked at.

`--check` fails where one of the two is stale, or where a model is accepted or refused that should not be.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from infoflow_kv.errors import ModelError, UnsupportedModelError
from infoflow_kv.models import quiet_transformers, wrap
from infoflow_kv.models.loading import refuse_remote_code
from infoflow_kv.models.traits import Traits, find_traits

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
LIST = ROOT / "src" / "infoflow_kv" / "models" / "tested.json"

sys.path.insert(0, str(ROOT / "tests"))

import families  # noqa: E402
import tiny  # noqa: E402
from tolerance import TINY_LOGITS  # noqa: E402

# ruff: noqa: E501 - Markdown

HEAD = """# Models

Whether a model's KV can be moved is decided by a numeric probe as it loads, never by a list of names. What follows are the
families that the tests build, tiny and with random weights; other models load just as well if the probe lets them pass.
`infoflow-kv models NAME` shows what was found on yours, and `infoflow-kv check --model NAME` runs every invariant on it. The
page is made by `make docs`.

## What is needed

- A decoder-only model of Transformers' own classes (`safetensors` weights, a fast tokenizer). Code that comes with a model is
  never run.
- Rotary position embeddings from the decoder's one `rotary_emb`, in all layers or some; of any RoPE type, whole or on a part
  of the head. Layers without RoPE are found and left unrotated.
- Every layer: one attention, whole or with a sliding window, through Transformers' `AttentionInterface`. Grouped heads, biases,
  qk-norm, softcap, sinks and experts make no difference.
- Keys and values of one shape in all layers, and the same wherever the token stands before RoPE is applied.

## What the probe does

1. It reads what the model declares: kinds of layers, positions, attention.
2. It finds the layers that rotate: a forward with NaN in place of cos and sin shows where RoPE arrives.
3. It compares keys and values before RoPE at two places: they must be the same.
4. It compares 24 random tokens through our path with the model's own attention at two places, also cut in two, with rows left
   behind before the last layer, and with windows narrowed to 8 tokens, so that they matter.

A window in the config that the model's class never looks at is found, too, and counts as none.

## Tested families

On every line budget 1 equals full prefill (cold, warm in memory, warm on disk), and a chunk moved to another place equals
its own prefill there, keys and values, both within TOLERANCE of the largest value in float32 (`tests/models/test_families.py`).
RoPE types, traits and the probe's verdict are as found on the tiny model.

"""

WINDOWS = """
## Sliding windows

In a layer with a window of W tokens, a token at least W from its chunk's start sees nothing of other chunks: recomputing it
mends nothing in that layer. Where all layers (but the last) have windows, nothing that stands before a chunk reaches further
than the sum of their widths; from there on its stored keys and values are those of full prefill. `infoflow-kv models NAME` says
both in numbers.

## Refused

"""

REST = """
Dynamic and long RoPE have other frequencies for long requests. A chunk is stored under the frequencies that its own prefill
had; keys are rotated with those of the request, and the rest is left to repair. The same holds for models whose queries grow
with their position (Ministral 3).
"""


def look(family: families.Family) -> Traits:
    """What is found on a tiny model of the family; UnsupportedModelError if it is refused."""
    return find_traits(wrap(families.hf_model(family), tiny.tokenizer(), family.title))


def tested() -> list[dict[str, Any]]:
    """One record for each tested family, as it goes into the package."""
    found = []
    for family in families.FAMILIES.values():
        traits = look(family)
        if traits.max_error > TINY_LOGITS:
            raise SystemExit(f"{family.title}: the probe measured {traits.max_error:.1e}, allowed are {TINY_LOGITS:g}")
        record = {"name": family.title, "class": traits.model_class, "rope": list(traits.rope_types)}
        found.append({**record, "traits": list(traits.words)})
    return found


def refusals() -> list[tuple[str, str, str]]:
    """Title, class and reason of what is refused."""
    found = []
    for family in families.REFUSED.values():
        try:
            look(family)
        except UnsupportedModelError as error:
            name, reason = re.fullmatch(r"(\w+) is not supported: (.*)", str(error)).groups()  # type: ignore[union-attr]
            found.append((family.title, f"`{name}`", reason))
        else:
            raise SystemExit(f"{family.title} is accepted, and tests/families.py says that it is refused")
    try:
        refuse_remote_code("NAME", {"auto_map": {"AutoModel": "own.Model"}})
    except ModelError as error:
        found.append(("models with code of their own", "`auto_map` in config.json", str(error)))
    return found


def page(records: list[dict[str, Any]]) -> str:
    lines = ["| family | class | RoPE | traits |", "|---|---|---|---|"]
    lines += [f"| {r['name']} | `{r['class']}` | {', '.join(r['rope'])} | {', '.join(r['traits'])} |" for r in records]
    lines += [WINDOWS + "| model | class | reason |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in refusals()]
    return HEAD.replace("TOLERANCE", "10⁻⁵") + "\n".join(lines) + "\n" + REST


def main() -> int:
    torch.set_num_threads(1)
    quiet_transformers()
    missing = [family.missing for family in (families.FAMILIES | families.REFUSED).values() if family.missing]
    if missing:
        raise SystemExit("\n".join(missing))
    records = tested()
    rows = ",\n".join("  " + json.dumps(record, ensure_ascii=False) for record in records)
    written = {PAGE: page(records), LIST: f"[\n{rows}\n]\n"}
    stale = [p for p, text in written.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        print(
            "\n".join(f"{p.relative_to(ROOT)} is stale; run `make docs`" for p in stale)
            or f"models: ok ({len(records)})"
        )
        return bool(stale)
    for path in stale:
        path.write_text(written[path], encoding="utf-8")
    print(f"models: {len(records)} families")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes docs/methods.md: every method with its rule, its source and the test that pins its selection.

`--check` fails where the page is stale, where a method has no such test, or where a test names no method.
"""

import ast
import sys
from pathlib import Path

from infoflow_kv.methods import METHODS, Method
from infoflow_kv.positions import GEOMETRIES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "methods.md"
TESTS = ROOT / "tests" / "methods" / "test_selections.py"

# ruff: noqa: E501 - Markdown

# method → the test in TESTS that compares its selected tokens with plain Transformers' or with a count by hand
PINNED = {
    "full": "test_full_and_none",
    "none": "test_full_and_none",
    "random": "test_random_is_seeded_and_within_the_budget",
    "first-k": "test_first_k_takes_the_first_k_of_every_chunk",
    "epic": "test_epic_spreads_the_budget_over_chunk_starts",
    "seam": "test_seam_takes_the_last_k_before_each_boundary_between_chunks",
    "cacheblend": "test_cacheblend_takes_the_largest_deviation_at_layer_1",
    "cacheblend-k": "test_cacheblend_takes_the_largest_deviation_at_layer_1",
    "cacheblend-gradual": "test_gradual_cacheblend_ranks_anew_at_each_layer",
    "infoflow": "test_infoflow_sums_attention_over_rows_heads_and_the_layer_set",
    "infoflow-l2": "test_infoflow_l2",
    "infoflow-vatp": "test_infoflow_vatp_weighs_by_the_l1_norm_of_the_value",
    "infoflow-entropy": "test_infoflow_entropy_discounts_heads_that_look_everywhere",
    "a3": "test_a3_and_prophetkv_have_layer_sets_of_their_own",
    "prophetkv": "test_a3_and_prophetkv_have_layer_sets_of_their_own",
    "influence": "test_influence_weighs_attention_by_the_movement_behind_a_neighbour",
    "oracle": "test_oracle_weighs_attention_by_the_true_movement_of_v",
}

HEAD = """# Methods

One implementation of reuse and repair serves all methods; they differ in which tokens they recompute. Every arm of a
comparison sees the same token ids, and a budget buys the same number of tokens for each ([how it is counted](method.md#5-how-the-budget-is-counted)).
The page is made by `make docs` from the table in `methods.py`; the tests are those of `tests/methods/test_selections.py`,
which compare the selected tokens with plain Transformers or with a count by hand.

"""


def row(method: Method) -> str:
    layers = "" if method.selector is None else method.layers or ("the layer set" if method.scores_by_layers else "")
    name = f"`{method.name}`" if method.parameter is None else f"`{method.name}:k` (k = {method.parameter})"
    return f"| {name} | {method.rule} | {layers} | {method.source} | `{PINNED[method.name]}` |"


def page() -> str:
    lines = ["| method | what is recomputed | layers that score | source | pinned by |", "|---|---|---|---|---|"]
    lines += [row(method) for method in METHODS.values()]
    lines += ["", "## Geometries of the scores", "", GEOMETRY, ""]
    lines += ["| geometry | context | prompt |", "|---|---|---|"]
    words = {
        "global": "0..N-1, consecutive over chunks",
        "head-local": "every chunk where it stood in its own prefill",
        "tail-local": "every chunk ends at N-1",
    }
    places = {"tail": "N..N+M-1", "head": "right after the longest chunk's local range"}
    lines += [f"| `{name}` | {words[where]} | {places[prompt]} |" for name, (where, prompt) in GEOMETRIES.items()]
    return HEAD + "\n".join(lines) + "\n" + REST


GEOMETRY = """RoPE positions *while tokens are scored*. Repair and decoding always use the global ones. Literal positions are
checked in `tests/choosing/test_exactness.py`."""

REST = """
## What can be chosen beside the method

- **Budget**: a share of the reusable tokens, or `auto:P`: the smallest set of tokens whose scores sum to the share P of all
  scores, at most `--budget-max` of the tokens. The answer says how many that were and why.
- **Layer set**: `all`, `relative` (the paper's depth), numbers, shares of the depth, `profile` (what `calibrate` measured on
  your model), `auto` (the profile, else the usual set).
- **Reorder**: chunks are scored alone (HL-TP), and those with the largest selected share go next to the question; then
  everything is scored and selected again at the new positions. Off by default, as in the paper.
- **Chunk floor and cap**: a share of the budget that is spread over all chunks by length first, and the most of it that
  one chunk may take.
- **Head policy**: chunks are prefilled behind the chat header (`head`, exact for the first chunk) or alone (`none`).
- **Repair layers**: stored KV is replaced in one range of layers only. An ablation: rows below the range run without writing,
  rows above it are dropped.

CacheBlend's rows leave on the way: all rows run layers 0 and 1, then only the chosen ones go on, in one forward. Its budget
counts the chosen rows, as its paper does; results also state the rows really computed (`computed_share`).
"""


def faults() -> list[str]:
    tree = ast.parse(TESTS.read_text(encoding="utf-8"))
    tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = [f"method '{name}' has no test that pins it (tools/write_methods.py)" for name in METHODS.keys() - PINNED]
    found += [f"'{name}' in tools/write_methods.py is no method" for name in PINNED.keys() - METHODS.keys()]
    found += [f"{TESTS.name} has no {test}" for test in set(PINNED.values()) - tests]
    return found


if __name__ == "__main__":
    problems = faults()
    if not problems and "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
            problems = [f"{PAGE.relative_to(ROOT)} is stale; run `make docs`"]
    elif not problems:
        PAGE.write_text(page(), encoding="utf-8")
    print("\n".join(problems) or f"methods: ok ({len(METHODS)})")
    sys.exit(bool(problems))

"""`infoflow-kv models`: the built-in models, the families that are tested, and what the probe says of one's own."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoflow_kv.cli import opening, options
from infoflow_kv.cli.output import emit, emit_json, emit_table, size

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel

Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="A model to load and look at; none: list what there is.", show_default=False),
]

OTHERS = """
Other models, for --model:
  FOLDER            a Transformers model with config.json, tokenizer.json and .safetensors weights
  OWNER/NAME        a model of the Hugging Face hub, fetched once
  gguf:FILE         a GGUF file, converted once and kept in the cache
Every model is probed as it loads and is refused, with the reason, if its KV cannot be moved.

Families that are tested (docs/models.md has their traits, and what is refused):
"""


def models(
    name: Name = None,
    dtype: options.Dtype = options.DTYPE,
    device: options.Device = options.DEVICE,
    as_json: options.Json = False,
) -> int:
    """List the built-in models and the tested families, or show what is special about one model.

    With a name, the model is loaded and probed: its layers, RoPE and traits, and what sliding windows mean for repair.

    Examples:

    \b
        infoflow-kv models
        infoflow-kv models ./my-model
        infoflow-kv ask "Who …?" notes/ --model ./my-model
    """
    if name is not None:
        return show(opening.load_model(name, dtype, device), as_json)

    from infoflow_kv.models.tested import list_families

    built_in, families = built_in_models(), list_families()
    if as_json:
        for record in [*built_in, *({"kind": "family", **family} for family in families)]:
            emit_json(record)
        return 0
    rows = [
        (r["name"], f"{size(r['num_bytes'])} in the cache" if r["cached"] else "fetched at first use",
         size(r["needs_bytes"]), r["licence"], f"pip package {r['source']}")
        for r in built_in
    ]  # fmt: skip
    emit_table(("model", "on this machine", "disk needed to make it", "licence", "source"), rows)
    titles = "; ".join(family["name"] for family in families)
    emit(OTHERS + textwrap.fill(titles, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    return 0


def built_in_models() -> list[dict[str, Any]]:
    """One record for each built-in model."""
    from infoflow_kv.models.embedded import EMBEDDED, cache_folder

    records: list[dict[str, Any]] = []
    for name, model in EMBEDDED.items():
        folder = cache_folder() / "models" / f"{name}-{model.gguf_sha256[:12]}"
        num_bytes = bytes_below(folder)
        records.append(
            {
                "kind": "built-in",
                "name": name,
                "cached": num_bytes > 0,
                "folder": str(folder),
                "num_bytes": num_bytes or None,
                "needs_bytes": model.disk_bytes,
                "licence": model.licence,
                "source": model.requirement,
            }
        )
    return records


def show(model: "LanguageModel", as_json: bool) -> int:
    """0; what the probe and a look at the model found is printed."""
    from infoflow_kv.models.traits import find_traits, window_advice

    traits = find_traits(model)
    advice = window_advice(traits.reach)
    if as_json:
        emit_json(
            {
                "kind": "model",
                "name": model.name,
                "class": traits.model_class,
                "layers": model.num_layers,
                "heads": model.num_heads,
                "kv_heads": model.num_kv_heads,
                "head_dim": model.head_dim,
                "context_tokens": model.window_tokens,
                "kv_bytes_per_token": model.kv_bytes_per_token,
                "rope": list(traits.rope_types),
                "traits": list(traits.words),
                "windowed_layers": traits.reach.windowed_layers,
                "window_tokens": traits.reach.window_tokens,
                "reach_tokens": traits.reach.reach_tokens,
                "advice": advice,
                "probe_error": traits.max_error,
            }
        )
        return 0
    rows = [
        ("class", traits.model_class),
        ("layers", f"{model.num_layers}, {model.num_heads} heads, {model.num_kv_heads} KV heads of {model.head_dim}"),
        ("longest request", f"{model.window_tokens} tokens"),
        ("KV", f"{size(model.kv_bytes_per_token)} a token"),
        ("RoPE", ", ".join(traits.rope_types)),
        ("traits", ", ".join(traits.words) or "none beside Llama's"),
        ("probe", f"logits within {traits.max_error:.1g} of the model's own, relative"),
    ]
    if advice:
        rows.append(("windows", advice))
    emit_table((model.name, ""), rows)
    return 0


def bytes_below(folder: Path) -> int:
    """The size of all files in a folder; 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0

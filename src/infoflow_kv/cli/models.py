"""`infoflow-kv models`: the built-in models, and how to name others."""

from pathlib import Path
from typing import Any

from infoflow_kv.cli import options
from infoflow_kv.cli.output import emit, emit_json, emit_table, size

OTHERS = """
Other models, for --model:
  FOLDER            a Transformers model with config.json, tokenizer.json and .safetensors weights
  OWNER/NAME        a model of the Hugging Face hub, fetched once
  gguf:FILE         a GGUF file, converted once and kept in the cache
Every model is probed as it loads and is refused, with the reason, if its KV cannot be moved."""


def models(as_json: options.Json = False) -> int:
    """List the built-in models, whether they are on this machine, and how to name your own.

    Examples:

    \b
        infoflow-kv models
        infoflow-kv ask "Who …?" notes/ --model ./my-model
    """
    from infoflow_kv.models.embedded import EMBEDDED, cache_folder

    records: list[dict[str, Any]] = []
    for name, model in EMBEDDED.items():
        folder = cache_folder() / "models" / f"{name}-{model.gguf_sha256[:12]}"
        num_bytes = bytes_below(folder)
        records.append(
            {
                "name": name,
                "cached": num_bytes > 0,
                "folder": str(folder),
                "num_bytes": num_bytes or None,
                "needs_bytes": model.disk_bytes,
                "licence": model.licence,
                "source": model.requirement,
            }
        )
    if as_json:
        for record in records:
            emit_json(record)
        return 0
    rows = [
        (r["name"], f"{size(r['num_bytes'])} in the cache" if r["cached"] else "fetched at first use",
         size(r["needs_bytes"]), r["licence"], f"pip package {r['source']}")
        for r in records
    ]  # fmt: skip
    emit_table(("model", "on this machine", "disk needed to make it", "licence", "source"), rows)
    emit(OTHERS)
    return 0


def bytes_below(folder: Path) -> int:
    """The size of all files in a folder; 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0

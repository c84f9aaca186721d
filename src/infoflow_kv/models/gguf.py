"""A GGUF file → a folder that `from_pretrained` reads: dequantised safetensors, tokenizer, manifest.

Loading GGUF directly takes 20 to 50 seconds each time, loading the folder about one; so it is converted once.
"""

import contextlib
import io
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from infoflow_kv.errors import ModelError
from infoflow_kv.models.gguf_tokenizer import read_tokenizer, stop_ids
from infoflow_kv.models.manifest import Progress, ensure_folder, partial_folder, sha256_of, write_manifest

logger = logging.getLogger(__name__)


def convert_gguf(
    path: Path, out_dir: Path, *, dtype: torch.dtype = torch.float32, progress: Progress = logger.info
) -> Path:
    """The folder `out_dir/STEM-DIGEST` with the model of the GGUF file `path`: converted on first use, then verified.

    Named by the file's content, so that a changed file is another folder. Raises ModelError for a file that is no
    GGUF or that transformers cannot read, and for a disk that cannot take the result.
    """
    path = Path(path).expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"no such GGUF file: {path}")
    suffix = "" if dtype is torch.float32 else "-" + str(dtype).removeprefix("torch.")
    folder = Path(out_dir) / f"{path.stem}-{sha256_of(path)[:12]}{suffix}"
    return ensure_folder(folder, lambda: write_folder(path, folder, dtype=dtype, progress=progress), progress)


def write_folder(
    path: Path, folder: Path, *, dtype: torch.dtype = torch.float32, source: str = "", progress: Progress = logger.info
) -> None:
    """Convert the GGUF file `path` into `folder`, which appears complete or not at all."""
    metadata = _read_metadata(path)
    progress(f"converting {path.name} to safetensors, once (about half a minute for a small model)")
    with partial_folder(folder) as work_dir:
        out_dir = work_dir / folder.name
        _convert(path, out_dir, metadata, dtype)
        write_manifest(
            out_dir,
            source=source or path.name,
            source_sha256=sha256_of(path),
            made_with={name: version(name) for name in ("transformers", "gguf", "torch")},
        )
        out_dir.rename(folder)


def _read_metadata(path: Path) -> dict[str, Any]:
    """All metadata fields of a GGUF file as Python values."""
    try:
        fields = GGUFReader(path).fields
        return {name: field.contents() for name, field in fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error


def _convert(path: Path, out_dir: Path, metadata: dict[str, Any], dtype: torch.dtype) -> None:
    # Newer transformers keep the weights packed unless told otherwise, and such a model cannot be saved.
    config_class = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    # Its progress bars go straight to stderr, past transformers' own switch for them.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer = read_tokenizer(path, metadata)
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=dtype, local_files_only=True, **options
            )
        except (ValueError, KeyError, RuntimeError, NotImplementedError, ImportError) as error:
            if isinstance(error, ModelError):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"transformers {transformers.__version__} cannot load {path.name}: {reason}") from error
        stops = stop_ids(metadata)
        if stops:
            model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]
        model.save_pretrained(out_dir)
        tokenizer.save_pretrained(out_dir)

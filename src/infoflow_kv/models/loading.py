"""Loads a model by built-in name, folder, hub id or `gguf:FILE`, and proves that it can be used."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from infoflow_kv.errors import InfoFlowError, ModelError, OptionError, UnsupportedModelError, unknown_name
from infoflow_kv.models.embedded import EMBEDDED, cache_folder, ensure_embedded
from infoflow_kv.models.fingerprint import refuse_slow_tokenizer, tokenizer_fingerprint
from infoflow_kv.models.gguf import convert_gguf
from infoflow_kv.models.model import LanguageModel
from infoflow_kv.models.probe import probe
from infoflow_kv.models.profiles import find_profile
from infoflow_kv.models.seeing import wrap_vision
from infoflow_kv.models.vision import FAMILIES, read_processor_config

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    name: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> LanguageModel:
    """A model ready for use.

    `name`: a built-in name (`smollm2-135m`: fetched and converted once, then kept in the cache), a folder with
    safetensors weights, a hub id, or `gguf:FILE`. `dtype`: float32, bfloat16 or float16. `device`: cpu, cuda, cuda:N.

    Raises ModelError if there is no such model, UnsupportedModelError with the reason if its KV cannot be moved.
    Code that comes with a model is never run, and weights are read from safetensors only.

    >>> model = load("smollm2-135m")  # doctest: +SKIP
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    target = torch_device(device)
    if dtype != "float32" and target.type == "cpu" and not quick_on_cpu(dtype):
        logger.warning(
            "%s is several times slower than float32 on this processor, which has no instructions for it", dtype
        )
    text = str(name)
    folder = find(text, progress or logger.info)
    try:
        refuse_remote_code(text, PreTrainedConfig.get_config_dict(folder)[0])
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_encoder(text, config)
        sees = config.model_type in FAMILIES
        loaded: Any = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        hf, report = loaded
        refuse_incomplete(text, report)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except InfoFlowError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model '{text}' could not be loaded: {reason}") from error
    hf = hf.to(target)
    model = wrap_vision(hf, tokenizer, text, read_processor_config(folder)) if sees else wrap(hf, tokenizer, text)
    profile = find_profile(model.identity)
    model.layer_sets = profile.layers if profile else EMBEDDED[text].layers if text in EMBEDDED else {}
    return model


def wrap(hf: Any, tokenizer: Any, name: str) -> LanguageModel:
    """A LanguageModel over an already loaded Transformers model; UnsupportedModelError if the probe refuses it.

    The model is taken over: from here on it is called through the LanguageModel only.
    """
    refuse_slow_tokenizer(tokenizer, name)
    support = probe(hf.eval().requires_grad_(False))
    return LanguageModel(hf, tokenizer, name, support, tokenizer_fingerprint(tokenizer))


def torch_device(device: str) -> torch.device:
    """The torch device of this name; OptionError if it is malformed or not there."""
    try:
        target = torch.device(device)
    except RuntimeError:
        raise OptionError(f"unknown device '{device}'; expected cpu, cuda or cuda:N") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device '{device}' was asked for, but torch {torch.__version__} sees no CUDA device; use cpu"
        )
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device '{device}' was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    if target.type not in ("cpu", "cuda"):
        raise OptionError(f"device '{device}' is not supported; expected cpu, cuda or cuda:N")
    return target


def quick_on_cpu(dtype: str) -> bool:
    """Whether this processor multiplies 16-bit matrices by instructions of its own."""
    if not torch._C._has_mkldnn:
        return False
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype == "bfloat16" else ops._is_mkldnn_fp16_supported())


def find(name: str, progress: Callable[[str], None]) -> str:
    """The folder or hub id behind a name."""
    if name in EMBEDDED:
        return str(ensure_embedded(name, progress=progress))
    if name.startswith("gguf:"):
        return str(converted_gguf(Path(name.removeprefix("gguf:")), progress))
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path)
        return str(path)
    if path.is_file():
        hint = f"; for a GGUF file write gguf:{name}" if path.suffix == ".gguf" else ""
        raise ModelError(f"model '{name}' is a file; expected a built-in name, a folder or a hub id{hint}")
    looks_like_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not looks_like_hub_id:
        error = unknown_name("model", name, EMBEDDED)
        raise ModelError(f"{error}; or give an existing folder, a hub id (owner/name) or gguf:FILE")
    return name


def check_folder(path: Path) -> None:
    """ModelError unless the folder holds a Transformers model in safetensors."""
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"folder '{path}' holds no model: there is no config.json in it")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"'{config}' cannot be read as JSON ({error})") from error
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"folder '{path}' has no .safetensors weights; pickled weights (.bin, .pt) are never read")


def refuse_remote_code(name: str, config: dict[str, Any]) -> None:
    """ModelError for models whose own code would have to run; Transformers' own message would ask for an option that
    is not given here."""
    if config.get("auto_map"):
        kind = str(config.get("model_type", ""))
        hint = f"; to use Transformers' own '{kind}' instead, remove auto_map" if kind in CONFIG_MAPPING else ""
        raise ModelError(
            f"model '{name}' wants code of its own to run (auto_map in its config.json), which is never done{hint}"
        )


def refuse_encoder(name: str, config: Any) -> None:
    """UnsupportedModelError for models that are no decoder alone."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model '{name}' is not supported: it is an encoder-decoder model; a decoder-only model is needed"
        )


def refuse_incomplete(name: str, report: Any) -> None:
    """ModelError where weights are missing: Transformers would fill them with random numbers and only log it."""
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        found = sorted(str(entry) for entry in report.get(kind) or ())
        if found:
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise ModelError(f"model '{name}' is not complete: {kind.replace('_', ' ')} {shown}")


def converted_gguf(path: Path, progress: Callable[[str], None]) -> Path:
    """The safetensors folder of a GGUF file, converted once per content and kept in the cache."""
    if not path.is_file():
        raise ModelError(f"GGUF file '{path}' does not exist")
    return convert_gguf(path, cache_folder() / "models", progress=progress)


def quiet_transformers() -> None:
    """Turns off Transformers' own progress bars and hints, for programs that print results."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

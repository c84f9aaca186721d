"""Fingerprints of weights and tokenizer: SHA-256 over contents, never over names or paths."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from infoflow_kv.errors import ModelError
from infoflow_kv.shapes import Tensor


def weights_fingerprint(hf: Any) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every parameter and persistent buffer, as loaded.

    The tensors themselves are hashed, not the files: other contents under the same path or name, a merged adapter or
    another conversion all change it. Two threads; SHA-256 releases the GIL.
    """
    tensors = sorted(hf.state_dict().items())
    with ThreadPoolExecutor(max_workers=2) as pool:
        digests = list(pool.map(lambda item: tensor_digest(item[1]), tensors))
    whole = hashlib.sha256()
    for (name, tensor), digest in zip(tensors, digests, strict=True):
        whole.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{digest}\n".encode())
    # Two checkpoints may differ only in the activation or an epsilon, which no tensor shows.
    whole.update(config_text(hf.config).encode())
    return whole.hexdigest()


def config_text(config: Any) -> str:
    """The config without what does not touch the arithmetic (paths, versions, dtype, attention implementation)."""
    ignored = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "_attn_implementation"}
    known = {k: v for k, v in config.to_dict().items() if k not in ignored}
    return repr(sorted((k, str(v)) for k, v in known.items()))


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 (hex) of a tensor's bytes in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def refuse_slow_tokenizer(tokenizer: Any, name: str) -> None:
    """ModelError for a tokenizer without a fast backend, which has neither offsets nor a fingerprint."""
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"model '{name}' has no fast tokenizer (tokenizer.json), which is needed for exact offsets")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 (hex) of the tokenizer's whole definition; an added token or another normaliser changes it."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

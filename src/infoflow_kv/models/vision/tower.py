"""The fingerprint of a vision tower, made anew when a weight changed; the counterpart of `LanguageModel.identity`."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from infoflow_kv.models.fingerprint import config_text, tensor_digest
from infoflow_kv.models.vision.adapter import digest


class Tower:
    """The modules between pixels and decoder, by name, and the config that shapes them."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], config: Any, extra: Mapping[str, Any]) -> None:
        self._modules = dict(modules)
        self._config = config
        self._extra = dict(extra)
        self._versions: tuple[tuple[int, int], ...] = ()
        self._fingerprint = ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of weights, dtypes and config; `extra` settings of the model that its features depend on."""
        parameters = [p for module in self._modules.values() for p in module.parameters()]
        versions = tuple((p.data_ptr(), p._version) for p in parameters)
        if versions != self._versions:
            self._fingerprint = self._hash()
            self._versions = versions
        return self._fingerprint

    def _hash(self) -> str:
        tensors = [
            (f"{name}.{key}", tensor)
            for name, module in sorted(self._modules.items())
            for key, tensor in sorted(module.state_dict().items())
        ]
        with ThreadPoolExecutor(max_workers=2) as pool:
            digests = list(pool.map(lambda item: tensor_digest(item[1]), tensors))
        lines = [
            f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{found}"
            for (name, tensor), found in zip(tensors, digests, strict=True)
        ]
        return digest(*lines, config_text(self._config), repr(sorted(self._extra.items())))

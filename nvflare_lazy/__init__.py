# SPDX-License-Identifier: Apache-2.0
"""Out-of-core model updates for NVIDIA FLARE: tensors stay on disk and behave like `torch.Tensor`s.

    open(path)              any checkpoint as a LazyTensorDict, without reading tensor data
    save(tensors, path)     lazy or ordinary tensors to safetensors, streamed and atomic
    aggregate(contributions, out=...)   combine models tile by tile, within a memory budget
    install()               make NVFlare of this process send lazily, and receive on disk
    LazyTensor, LazyTensorDict          the tensors and models that these return

Names are imported on first use, so opening a file never imports NVFlare.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvflare_lazy.aggregation.api import aggregate as aggregate
    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict as LazyTensorDict
    from nvflare_lazy.formats.open_checkpoint import open as open
    from nvflare_lazy.formats.save_checkpoint import save as save
    from nvflare_lazy.tensors.lazy_tensor import LazyTensor as LazyTensor
    from nvflare_lazy.transport.registration import install as install

__version__ = "0.1.0"

_LAZY_EXPORTS = {
    "LazyTensor": "nvflare_lazy.tensors.lazy_tensor",
    "LazyTensorDict": "nvflare_lazy.formats.lazy_tensor_dict",
    "aggregate": "nvflare_lazy.aggregation.api",
    "install": "nvflare_lazy.transport.registration",
    "open": "nvflare_lazy.formats.open_checkpoint",
    "save": "nvflare_lazy.formats.save_checkpoint",
}

__all__ = ["LazyTensor", "LazyTensorDict", "aggregate", "install", "open", "save"]


def __getattr__(name: str) -> Any:
    home = _LAZY_EXPORTS.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

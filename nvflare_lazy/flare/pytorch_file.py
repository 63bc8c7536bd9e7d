# SPDX-License-Identifier: Apache-2.0
"""A PyTorch checkpoint in the layout of NVFlare's own persistor, for tools that expect one after a job."""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvflare_lazy.flare.checkpoint_store import json_part
from nvflare_lazy.flare.initial_model import NVFLARE_SECTION
from nvflare_lazy.formats.atomic_file import sync_directory
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors.entry import TensorEntry

# The name in `PTModelPersistenceFormatManager`.
_META = "meta_props"


def write_pytorch_file(tensors: LazyTensorDict, path: Path, *, meta: Mapping[str, Any] | None = None) -> None:
    """Write `{"model": tensors, "meta_props": meta}` with `torch.save`, atomically.

    `torch.save` requires all tensors at once; they are mapped from their file, so that they do not take memory.

    Args:
        tensors: The tensors of a safetensors file.
        path: The file to write.
        meta: Metadata to save with the tensors.
    """
    content = {NVFLARE_SECTION: OrderedDict((name, _mapped(entry)) for name, entry in tensors.entries.items())}
    kept = json_part(meta or {})
    if kept:
        content[_META] = kept
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(hidden, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    sync_directory(str(path.parent))


def _mapped(entry: TensorEntry) -> torch.Tensor:
    place = entry.source.file_range()
    if place is None or not entry.nbytes or entry.strides is not None:
        return entry.lazy().materialize()
    file, offset = place
    # Copy on write, although nothing is written: torch warns about read-only maps.
    data = np.memmap(file.path, np.uint8, "c", offset, (entry.nbytes,))
    return torch.from_numpy(data).view(entry.dtype).reshape(entry.shape)

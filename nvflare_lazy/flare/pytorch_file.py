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

# As `PTModelPersistenceFormatManager` calls it.
_META = "meta_props"


def write_pytorch_file(tensors: LazyTensorDict, path: Path, *, meta: Mapping[str, Any] | None = None) -> None:
    """Write `{"model": tensors, "meta_props": meta}` with `torch.save`, or leave what is there as it is.

    `torch.save` wants all tensors at once; these are mapped from their file, so that they are not in memory.

    Args:
        tensors: The tensors of a safetensors file.
        path: Where to.
        meta: What to keep beside them.
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
    # Copy on write, which nobody does: a read-only map would make torch warn.
    data = np.memmap(file.path, np.uint8, "c", offset, (entry.nbytes,))
    return torch.from_numpy(data).view(entry.dtype).reshape(entry.shape)

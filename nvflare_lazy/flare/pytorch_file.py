# SPDX-License-Identifier: Apache-2.0
"""A PyTorch checkpoint in the layout that NVFlare's persistor writes, for tools that expect one after a job."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvflare_lazy.flare.checkpoint_store import json_part
from nvflare_lazy.formats.atomic_file import AtomicFile, sync_directory
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.open_checkpoint import NVFLARE_SECTION
from nvflare_lazy.tensors.entry import TensorEntry

# The name in `PTModelPersistenceFormatManager`.
_META = "meta_props"


def write_pytorch_file(tensors: LazyTensorDict, path: Path, *, meta: Mapping[str, Any] | None = None) -> None:
    """Write `{"model": tensors, "meta_props": meta}` with `torch.save`, all-or-nothing.

    `torch.save` takes all tensors at once; these are mapped from their safetensors file, so that they are not
    in memory.
    """
    content = {NVFLARE_SECTION: OrderedDict((name, _mapped(entry)) for name, entry in tensors.entries.items())}
    kept = json_part(meta or {})
    if kept:
        content[_META] = kept
    with AtomicFile(path) as file:
        with file.descriptor() as fd, open(fd, "wb", closefd=False) as stream:
            torch.save(content, stream)
        file.sync()
        file.publish()
    sync_directory(file.directory)


def _mapped(entry: TensorEntry) -> torch.Tensor:
    place = entry.source.file_range()
    if place is None or not entry.nbytes or entry.strides is not None:
        return entry.lazy().materialize()
    file, offset = place
    # Copy on write, although nothing is written: torch warns about read-only maps.
    data = np.memmap(file.path, np.uint8, "c", offset, (entry.nbytes,))
    return torch.from_numpy(data).view(entry.dtype).reshape(entry.shape)

# SPDX-License-Identifier: Apache-2.0
"""Whether a model already is a file: then saving it takes a name, not a copy.

Aggregation writes the next global model as a safetensors file and hands out lazy tensors of it. By the time the
persistor gets them they have been through NVFlare's dictionaries; here they find back to their file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare_lazy.errors import NVFlareLazyError
from nvflare_lazy.formats.safetensors_reader import open_safetensors
from nvflare_lazy.tensors.entry import geometry_of
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_file import TensorFile


def file_that_holds(weights: Mapping[str, Any], below: Path) -> Path | None:
    """Return the safetensors file that holds these tensors and no others, or None.

    Args:
        weights: Lazy tensors or arrays by name.
        below: A directory of ours: a file elsewhere belongs to somebody who may change it.
    """
    file = _only_file(weights)
    if file is None or not Path(os.path.realpath(file.path)).is_relative_to(os.path.realpath(below)):
        return None
    try:
        with file.descriptor() as fd:
            if not os.path.samestat(os.fstat(fd), os.stat(file.path)):
                return None
        entries = open_safetensors(file.path).entries
    except (OSError, NVFlareLazyError):
        return None
    if entries.keys() != weights.keys():
        return None
    for name, value in weights.items():
        entry, place = entries[name], entries[name].source.file_range()
        if value.nbytes and (place is None or value.source.file_range()[1] != place[1]):
            return None
        if geometry_of(value) != (entry.element_type, entry.shape):
            return None
    return Path(file.path)


def _only_file(weights: Mapping[str, Any]) -> TensorFile | None:
    found: TensorFile | None = None
    for value in weights.values():
        if not isinstance(value, (LazyTensor, LazyArray)):
            return None
        place = value.source.file_range()
        if place is None:
            if value.nbytes:
                return None
            continue
        if found is not None and place[0] is not found:
            return None
        found = place[0]
    return found

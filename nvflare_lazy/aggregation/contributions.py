# SPDX-License-Identifier: Apache-2.0
"""What a contributor sent, reduced to what aggregation needs of it: for each tensor a type, a shape and its bytes.

The first step of aggregating a round. Lazy and ordinary tensors and arrays all become the same here, and none is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvflare_lazy.errors import UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.tensors.entry import entry_of
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.lazy_tensor_dict import LazyTensorDict

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

    from nvflare_lazy.tensors.entry import TensorEntry

#: What a contributor may send under a name.
Value = torch.Tensor | LazyTensor | LazyArray | np.ndarray[Any, Any] | np.generic


def read_entries(
    tensors: Mapping[str, Any], owner: str, exclude: re.Pattern[str] | None = None
) -> dict[str, TensorEntry]:
    """Return the entries of a contribution by name; no tensor is read.

    Args:
        tensors: Tensors or arrays by name, lazy or not.
        owner: Whose they are, for messages.
        exclude: Pass over what has such a name, whatever it is.

    Raises:
        UnsupportedTensorError: One is none, or has no dense elements.
        UnsupportedDtypeError: One is of a type that torch has not.
    """
    # Twenty thousand recipes are at hand at once; making lazy tensors of them first would take a second.
    values: Mapping[str, Any] = tensors.entries if isinstance(tensors, LazyTensorDict) else tensors
    entries = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise UnsupportedTensorError(f"a tensor of {owner} has the name {name!r}, which is no text: give it one")
        if exclude is not None and exclude.search(name):
            continue
        try:
            entries[name] = entry = entry_of(value)
            if entry.element_type.torch is None:
                _ = entry.dtype  # raises
        except (UnsupportedTensorError, UnsupportedDtypeError) as error:
            raise type(error)(f"{name!r} of {owner}: {error}; exclude it, or convert it first") from error
    return entries

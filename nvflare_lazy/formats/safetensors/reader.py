# SPDX-License-Identifier: Apache-2.0
"""Opens a safetensors file as lazy tensors: the header is read and validated, the data is read on use.

Checkpoints, shards and received results are opened with it, each with one descriptor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.safetensors.header import read_header
from nvflare_lazy.remote import open_file

if TYPE_CHECKING:
    import os

    from nvflare_lazy.tensors.tensor_file import OpenFile


def open_safetensors(path: str | os.PathLike[str], file: OpenFile | None = None) -> LazyTensorDict:
    """Open a safetensors file.

    Args:
        path: The file.
        file: The same file, if it is open already.

    Example:
        >>> tensors = open_safetensors("model.safetensors")
        >>> tensors.metadata
    """
    file = open_file(path) if file is None else file
    header = read_header(file)
    file.contents = header.tensors
    return LazyTensorDict.from_files([file], metadata=header.metadata)

# SPDX-License-Identifier: Apache-2.0
"""A safetensors file as lazy tensors: the header is read and checked, the data is left where it is.

What a received result, a checkpoint and a shard of one are opened with. One descriptor a file, read with `pread`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nvflare_lazy.formats.safetensors_header import SafetensorsHeader, read_header
from nvflare_lazy.tensors.byte_source import ByteSource
from nvflare_lazy.tensors.entry import TensorEntry
from nvflare_lazy.tensors.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile

if TYPE_CHECKING:
    import os

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import StoredTensor


def open_safetensors(path: str | os.PathLike[str], *, keep_alive: object = None) -> LazyTensorDict:
    """Open a safetensors file.

    Args:
        path: The file.
        keep_alive: Anything that must live as long as a tensor of the file, such as the lease of its directory.

    Example:
        >>> tensors = open_safetensors("model.safetensors")
        >>> tensors.metadata
    """
    file = TensorFile(path)
    if keep_alive is not None:
        file.own(keep_alive)
    header = read_header(file)
    return LazyTensorDict.from_entries(entries_of(file, header), metadata=header.metadata)


def entries_of(file: TensorFile, header: SafetensorsHeader) -> dict[str, TensorEntry]:
    """Return the entries of a file's tensors, in the order of their data in the file."""
    return {
        name: _entry(FileSource(file, stored.offset, stored.nbytes), stored) for name, stored in header.tensors.items()
    }


def _entry(source: ByteSource, stored: StoredTensor) -> TensorEntry:
    element_type, shape = stored.element_type, stored.shape
    if element_type.torch is None or element_type.packed != 1:
        # The header counts elements, torch counts the bytes that several of them share.
        if element_type.torch is not None and shape and shape[-1] % element_type.packed == 0:
            shape = (*shape[:-1], shape[-1] // element_type.packed)
        else:
            element_type = replace(element_type, torch=None, packed=1)
    return TensorEntry(source, element_type, shape)

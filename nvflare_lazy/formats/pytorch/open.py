# SPDX-License-Identifier: Apache-2.0
"""Opens PyTorch checkpoints (zip, legacy, tar) without reading tensor data or running code from them.

`open_pytorch` returns a `LazyTensorDict` whose sources are parts of the open file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvflare_lazy.errors import ArchiveError
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.pytorch._contents import CheckpointTree, EntryBuilder, select
from nvflare_lazy.formats.pytorch._legacy import MAGIC_FORMS, LegacyMultiStorageSource
from nvflare_lazy.formats.pytorch._tar import BLOCK, TarSource, is_tar_header
from nvflare_lazy.formats.pytorch._zip import MAGIC, ZipRecord, ZipSource, read_directory
from nvflare_lazy.remote import open_file
from nvflare_lazy.tensors.tensor_file import OpenFile

if TYPE_CHECKING:
    import os

_KINDS: dict[str, type[ZipSource] | type[LegacyMultiStorageSource] | type[TarSource]] = {
    "zip": ZipSource,
    "legacy": LegacyMultiStorageSource,
    "tar": TarSource,
}


def open_pytorch(
    path: str | os.PathLike[str], file: OpenFile | None = None, section: str | None = None
) -> LazyTensorDict:
    """Open a checkpoint of any version of `torch.save`.

    Nested names are joined by dots, list items by their index. Everything that is not a tensor is in `.extras`. A
    tensor without dense elements (sparse, quantized, nested, meta) has a name and a shape, and raises
    `UnsupportedTensorError` when it is read.

    Args:
        path: The file.
        file: The same file if it is already open.
        section: The part of a nested checkpoint to open, such as `"model"`; it is not part of the tensors' names.

    Example:
        >>> tensors = open_pytorch("checkpoint.pt", section="model")
        >>> tensors["layer.weight"].shape
        torch.Size([10, 20])
    """
    file = open_file(path) if file is None else file
    kind = _sniff(file)
    if kind is None:
        raise ArchiveError(f"{file.path} does not start like a PyTorch checkpoint")
    data = _KINDS[kind](path, file)
    content = data.content if section is None else select(file.path, data.content, section)
    tree = CheckpointTree(file.path, content, data.spend)
    builder = EntryBuilder(data)
    entries = {name: builder.entry(name, tensor) for name, tensor in tree.tensors.items()}
    return LazyTensorDict.from_entries(entries, metadata={"format": "pt"}, extras=tree.extras)


def sniff_pytorch(head: bytes) -> str | None:
    """Return which kind of PyTorch checkpoint a file looks like: "zip", "legacy", "tar", or None.

    Args:
        head: Its first 512 bytes, or all of them if there are less.
    """
    if head.startswith(MAGIC):
        return "zip"
    if any(form in head[:32] for form in MAGIC_FORMS):
        return "legacy"
    return "tar" if is_tar_header(head) else None


def zip_records(file: OpenFile) -> dict[str, ZipRecord]:
    """Return the records of a zip checkpoint, with their checksums; none for the other kinds.

    Args:
        file: The open file.
    """
    return read_directory(file) if _sniff(file) == "zip" else {}


def _sniff(file: OpenFile) -> str | None:
    head = bytearray(min(BLOCK, file.size))
    file.read_into(memoryview(head), 0)
    return sniff_pytorch(bytes(head))

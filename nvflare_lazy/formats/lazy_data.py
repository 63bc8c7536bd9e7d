# SPDX-License-Identifier: Apache-2.0
"""Opens PyTorch checkpoints (zip, legacy, tar) without reading tensor data and without running anything from them.

The way in for all three kinds; what comes out is a `LazyTensorDict` whose sources are parts of the open file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvflare_lazy.errors import ArchiveError
from nvflare_lazy.formats.checkpoint_entries import EntryMaker
from nvflare_lazy.formats.checkpoint_tree import CheckpointTree, select
from nvflare_lazy.formats.data_source import LazyDataSource
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.legacy_source import MAGIC_FORMS, LegacyMultiStorageSource
from nvflare_lazy.formats.tar_archive import BLOCK, is_tar_header
from nvflare_lazy.formats.tar_source import TarSource
from nvflare_lazy.formats.zip_archive import MAGIC
from nvflare_lazy.formats.zip_source import ZipSource
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    import os

__all__ = [
    "LazyDataSource",
    "LegacyMultiStorageSource",
    "TarSource",
    "ZipSource",
    "open_pytorch",
    "sniff_pytorch",
]

HEAD_BYTES = BLOCK
_KINDS: dict[str, type[ZipSource] | type[LegacyMultiStorageSource] | type[TarSource]] = {
    "zip": ZipSource,
    "legacy": LegacyMultiStorageSource,
    "tar": TarSource,
}


def open_pytorch(
    path: str | os.PathLike[str], file: TensorFile | None = None, section: str | None = None
) -> LazyTensorDict:
    """Open a checkpoint that `torch.save` has written, of any version.

    Nested names are joined by dots, list items by their index. Whatever is no tensor becomes `.extras`. A tensor
    without dense elements (sparse, quantized, nested, meta) has a place and a shape, and raises
    `UnsupportedTensorError` when it is read.

    Args:
        path: The file.
        file: The same file if it is open already.
        section: The part of a nested checkpoint to open, such as `"model"`; its name is left out of the tensors'.

    Example:
        >>> tensors = open_pytorch("checkpoint.pt", section="model")
        >>> tensors["layer.weight"].shape
        torch.Size([10, 20])
    """
    file = TensorFile(path) if file is None else file
    head = bytearray(min(HEAD_BYTES, file.size))
    file.read_into(memoryview(head), 0)
    kind = sniff_pytorch(bytes(head), file)
    if kind is None:
        raise ArchiveError(f"{file.path} does not begin like a PyTorch checkpoint of any kind")
    data = _KINDS[kind](path, file)
    content = data.content if section is None else select(file.path, data.content, section)
    tree = CheckpointTree(file.path, content, data.limit)
    maker = EntryMaker(data)
    entries = {name: maker.entry(name, record) for name, record in tree.tensors.items()}
    return LazyTensorDict.from_entries(entries, metadata={"format": "pt"}, extras=tree.extras)


def sniff_pytorch(head: bytes, file: TensorFile | None = None) -> str | None:
    """Return which kind of PyTorch checkpoint a file looks like: "zip", "legacy", "tar", or None.

    Args:
        head: Its first 512 bytes, or all of them if there are less.
        file: The file itself, if it is at hand; the head says enough so far.
    """
    if head.startswith(MAGIC):
        return "zip"
    if any(form in head[:32] for form in MAGIC_FORMS):
        return "legacy"
    return "tar" if is_tar_header(head) else None

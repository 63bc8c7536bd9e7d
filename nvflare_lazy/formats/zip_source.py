# SPDX-License-Identifier: Apache-2.0
"""`ZipSource`: the storages of a checkpoint that `torch.save` has written since PyTorch 1.6.

The archive holds the pickle (`data.pkl`) and one record for each storage, stored as it was in memory.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ArchiveError, PyTorchCheckpointError
from nvflare_lazy.formats.data_source import LazyDataSource
from nvflare_lazy.formats.pickle_stream import PickleStream
from nvflare_lazy.formats.unpickler import storage_ref, unpickle
from nvflare_lazy.formats.zip_archive import read_directory
from nvflare_lazy.tensors.tensor_file import FileSource

if TYPE_CHECKING:
    import os

    from nvflare_lazy.formats.zip_archive import ZipRecord
    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import TensorFile

_PICKLE = "data.pkl"
_STORAGES = "data/"
_NEWEST_VERSION = 10
_SHORT_RECORD = 64
# What else comes as a zip archive: a name in it, and what it is then.
_OTHER_KINDS = (
    (".npy", "NumPy arrays (.npz): load them with numpy.load"),
    ("archive_format", "a program of torch.export: load it with torch.export.load"),
    ("model.weights.h5", "a Keras model"),
    ("[Content_Types].xml", "an Office document"),
)


class ZipSource(LazyDataSource):
    """A zip checkpoint.

    Args:
        path: The file.
        file: The same file if it is open already.
    """

    def __init__(self, path: str | os.PathLike[str], file: TensorFile | None = None) -> None:
        super().__init__(path, file)
        records = read_directory(self.file)
        root = self._root(records)
        self._records = {name.removeprefix(root): record for name, record in records.items() if name.startswith(root)}
        self._check_kind()
        self.swapped = self._byte_order() != sys.byteorder
        record = self._records[_PICKLE]
        stream = PickleStream(self.file, record.offset, record.offset + record.nbytes)
        self.content = unpickle(stream, self._load_id)
        self.limit = stream.limit

    def keys(self) -> list[str]:
        return [name.removeprefix(_STORAGES) for name in self._records if name.startswith(_STORAGES)]

    def _storage(self, key: str) -> ByteSource | None:
        record = self._records.get(_STORAGES + key)
        return None if record is None else FileSource(self.file, record.offset, record.nbytes)

    def _load_id(self, persistent_id: object) -> object:
        if type(persistent_id) is not tuple or len(persistent_id) != 5:
            raise ValueError("the id of a storage is not a tuple of five")
        _, storage_type, key, _, numel = persistent_id
        ref = storage_ref(storage_type, key, numel)
        nbytes = self.storage(ref.key).nbytes
        if ref.total > nbytes:
            raise PyTorchCheckpointError(
                f"{self.path}: storage {quoted(ref.key)} should have {ref.total} bytes, but has {nbytes}: "
                "the file is damaged; get it again"
            )
        return self.storages.storage(ref)

    def _root(self, records: dict[str, ZipRecord]) -> str:
        """Return the one directory everything is in, which is called as the file was when it was saved."""
        roots = {name.partition("/")[0] for name in records if name.partition("/")[2] == _PICKLE}
        if len(roots) == 1:
            return f"{roots.pop()}/"
        if roots:
            raise ArchiveError(f"{self.path} holds several checkpoints; unpack it and open one of them")
        for name in records:
            for ending, what in _OTHER_KINDS:
                if name.endswith(ending):
                    raise ArchiveError(f"{self.path} is a zip archive with {what}")
        some = ", ".join(quoted(name) for name in list(records)[:3])
        raise ArchiveError(f"{self.path} is a zip archive, but no PyTorch checkpoint; it has {some or 'nothing in it'}")

    def _check_kind(self) -> None:
        if "constants.pkl" in self._records:
            raise ArchiveError(
                f"{self.path} is a TorchScript program, which is code with tensors in it: where it can do no harm, "
                "load it with torch.jit.load and save its state_dict() with torch.save or as safetensors"
            )
        version = self._short_record(".data/version") or self._short_record("version")
        if not version.strip().isdigit() or not 1 <= int(version) <= _NEWEST_VERSION:
            raise ArchiveError(
                f"{self.path} has version {quoted(version)} of the format, and 1 to {_NEWEST_VERSION} are known; "
                "get it again, or update nvflare-lazy"
            )

    def _byte_order(self) -> str:
        """Return the byte order of the storages; files from before it was written down are little-endian."""
        order = self._short_record("byteorder") or b"little"
        if order not in (b"little", b"big"):
            raise ArchiveError(f"{self.path} has byte order {quoted(order)}, which is none; it is damaged")
        return order.decode()

    def _short_record(self, name: str) -> bytes:
        record = self._records.get(name)
        if record is None:
            return b""
        return bytes(FileSource(self.file, record.offset, record.nbytes).read(0, min(record.nbytes, _SHORT_RECORD)))

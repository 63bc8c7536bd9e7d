# SPDX-License-Identifier: Apache-2.0
"""`LazyTensorDict`: a model by name, whose tensors are read on use.

Opening a checkpoint, receiving a result and aggregating return one. It holds entries and makes lazy tensors on access,
so that twenty thousand tensors cost almost nothing.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nvflare_lazy.errors import SourceReleasedError
from nvflare_lazy.formats.safetensors.header import read_header
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.entry import TensorEntry, entries_of
from nvflare_lazy.tensors.tensor_file import TemporaryPath, TensorFile

if TYPE_CHECKING:
    from nvflare_lazy.tensors.lazy_tensor import LazyTensor


@runtime_checkable
class Releasable(Protocol):
    """An owner of a model that can be released before its last reference is gone."""

    def release(self) -> None:
        """Release it; a second call does nothing."""


class LazyTensorDict(Mapping[str, "LazyTensor"]):
    """A read-only mapping from names to lazy tensors.

    Args:
        key_to_file: For each name, the safetensors file the tensor is in and its name there.
        temp_dir: A directory that is removed when the last tensor is gone, or by `cleanup()`.

    Example:
        >>> tensors = nvflare_lazy.open("model.safetensors")
        >>> tensors["head.weight"].shape  # no I/O
        >>> model.load_state_dict(tensors)  # one tensor at a time
    """

    def __init__(
        self, key_to_file: Mapping[str, tuple[str, str]], temp_dir: str | os.PathLike[str] | None = None
    ) -> None:
        files = {}
        for path in {path for path, _ in key_to_file.values()}:
            file = TensorFile(path)
            file.contents = read_header(file).tensors
            files[path] = entries_of(file)
        self._set({name: files[path][key] for name, (path, key) in key_to_file.items()}, {}, {})
        if temp_dir is not None:
            self.own(TemporaryPath(temp_dir))

    @classmethod
    def from_files(cls, files: Iterable[TensorFile], *, metadata: Mapping[str, str] | None = None) -> LazyTensorDict:
        """Make one of all tensors in files with known contents, of which no two have a tensor of the same name."""
        entries: dict[str, TensorEntry] = {}
        for file in files:
            entries.update(entries_of(file))
        return cls.from_entries(entries, metadata=metadata)

    @classmethod
    def from_entries(
        cls,
        entries: Mapping[str, TensorEntry],
        *,
        metadata: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> LazyTensorDict:
        """Make one from entries, with the metadata and the other contents of a checkpoint."""
        made = cls.__new__(cls)
        made._set(dict(entries), metadata or {}, extras or {})
        return made

    def _set(
        self,
        entries: dict[str, TensorEntry],
        metadata: Mapping[str, str],
        extras: Mapping[str, Any],
    ) -> None:
        self._entries = entries
        self._owners: list[object] = []
        self._lock = threading.Lock()
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata))
        self.extras: Mapping[str, Any] = MappingProxyType(dict(extras))

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The entries by name: shapes, dtypes and sources without making a tensor."""
        return MappingProxyType(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self._entries.values())

    def __getitem__(self, key: str) -> LazyTensor:
        return self._entries[key].lazy()

    def files(self) -> set[TensorFile]:
        """Return the open files that the tensors are read from."""
        return _files(self._entries)

    def own(self, owner: object) -> None:
        """Keep an object, such as scratch, alive for as long as this dictionary or a tensor from it.

        `cleanup()` releases it if it is `Releasable`.
        """
        self._owners.append(owner)
        # A tensor may outlive this dictionary, and it refers to its file.
        for file in self.files():
            file.own(owner)

    def make_lazy_ref(self, key: str) -> LazyTensor:
        """Return the tensor; it keeps the files alive on its own, without this dictionary."""
        return self[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        return f"LazyTensorDict({len(self)} tensors, {self.nbytes} bytes)"

    # It is immutable, and its tensors are shared anyway.
    def __copy__(self) -> LazyTensorDict:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensorDict:
        return self

    def __reduce__(self) -> Any:
        # As its tensors become ordinary ones, so it becomes an ordinary state dict.
        return OrderedDict, (), None, None, iter(self.items())

    def cleanup(self) -> None:
        """Close the files and remove the scratch now, even if tensors of it are still held somewhere.

        Reading one of those then raises `SourceReleasedError`. A second call does nothing.
        """
        with self._lock:
            entries, owners, self._owners = self._entries, self._owners, []
            gone = SourceReleasedError("this tensor was released by cleanup(): materialize() it before that")
            self._entries = {
                name: entry.over(FailedSource(entry.source.nbytes, gone)) for name, entry in entries.items()
            }
        for file in _files(entries):
            file.close()
        for owner in owners:
            if isinstance(owner, Releasable):
                owner.release()


def _files(entries: Mapping[str, TensorEntry]) -> set[TensorFile]:
    found = (entry.source.file() for entry in entries.values())
    return {file for file in found if file is not None}

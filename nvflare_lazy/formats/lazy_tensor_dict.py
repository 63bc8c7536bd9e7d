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

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import RemoteError, SourceReleasedError
from nvflare_lazy.formats.safetensors.header import read_header
from nvflare_lazy.remote import open_file
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.entry import TensorEntry, entries_of
from nvflare_lazy.tensors.tensor_file import TemporaryPath, TensorFile

if TYPE_CHECKING:
    from nvflare_lazy.tensors.lazy_tensor import LazyTensor
    from nvflare_lazy.tensors.tensor_file import OpenFile


@runtime_checkable
class Releasable(Protocol):
    """An owner of a model that can be released before its last reference is gone."""

    def release(self) -> None:
        """Release it; a second call does nothing."""


class LazyTensorDict(Mapping[str, "LazyTensor"]):
    """A read-only mapping from names to lazy tensors; it is equal to itself only, and hashable.

    Args:
        key_to_file: For each name, the safetensors file the tensor is in and its name there. A file is opened when one
            of its tensors is used.
        temp_dir: A directory that is removed when the last tensor is gone, or by `cleanup()`.

    Example:
        >>> tensors = nvflare_lazy.open("model.safetensors")
        >>> tensors["head.weight"].shape  # no I/O
        >>> model.load_state_dict(tensors)  # one tensor at a time
    """

    _names: Mapping[str, object]
    _locations: Mapping[str, tuple[str, str]]

    def __init__(
        self, key_to_file: Mapping[str, tuple[str, str]], temp_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._set({}, {}, {})
        self._names = self._locations = dict(key_to_file)
        if temp_dir is not None:
            self.own(TemporaryPath(temp_dir))

    @classmethod
    def from_files(cls, files: Iterable[OpenFile], *, metadata: Mapping[str, str] | None = None) -> LazyTensorDict:
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
        self._names = entries
        self._locations = {}
        self._opened: dict[str, dict[str, TensorEntry]] = {}
        self._released: SourceReleasedError | None = None
        self._owners: list[object] = []
        # Reentrant, because the garbage collector may run while it is held.
        self._lock = threading.RLock()
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata))
        self.extras: Mapping[str, Any] = MappingProxyType(dict(extras))

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The entries by name: shapes, dtypes and sources without making a tensor."""
        return MappingProxyType({name: self._entry(name) for name in self._names} if self._locations else self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def __getitem__(self, key: str) -> LazyTensor:
        return self._entry(key).lazy()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a tensor, or the default if there is no such name; a file without its tensor is an error."""
        return self[key] if key in self._names else default

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        return self._open(name) if entry is None else entry

    def _open(self, name: str) -> TensorEntry:
        """Open the file of a tensor, unless another one of the file was used before."""
        if name not in self._locations:
            where = {path for path, _ in self._locations.values()} | {file.path for file in self._open_files()}
            raise KeyError(f"no tensor {quoted(name)} in {', '.join(sorted(where)[:3]) or 'an empty dictionary'}")
        path, key = self._locations[name]
        with self._lock:
            if self._released is not None:
                raise self._released
            if path not in self._opened:
                self._opened[path] = self._open_file(path, key)
            entry = self._opened[path].get(key)
            if entry is None:
                raise KeyError(f"no tensor {quoted(key)} in {path}")
            return self._entries.setdefault(name, entry)

    def _open_file(self, path: str, key: str) -> dict[str, TensorEntry]:
        try:
            file = open_file(path)
        except RemoteError:
            raise
        except OSError as error:
            raise OSError(error.errno, f"cannot read tensor {quoted(key)}: {error.strerror}", path) from error
        file.contents = read_header(file).tensors
        for owner in self._owners:
            file.own(owner)
        return entries_of(file)

    def _open_files(self) -> set[OpenFile]:
        return set().union(*map(_files, (self._entries, *self._opened.values())))

    def files(self) -> set[OpenFile]:
        """Return the files that the tensors are read from, open."""
        return _files(self.entries)

    def local_files(self) -> list[TensorFile]:
        """Return those of the files that have a path on this machine, sorted by it."""
        return sorted((file for file in self.files() if isinstance(file, TensorFile)), key=lambda file: file.path)

    def own(self, owner: object) -> None:
        """Keep an object, such as scratch, alive for as long as this dictionary or a tensor from it.

        `cleanup()` releases it if it is `Releasable`.
        """
        self._owners.append(owner)
        # A tensor may outlive this dictionary, and it refers to its file.
        for file in self._open_files():
            file.own(owner)

    def make_lazy_ref(self, key: str) -> LazyTensor:
        """Return a reference to a tensor: the tensor with the attributes `file_path` and `key`, its name in the file.

        It keeps the file alive on its own, without this dictionary.
        """
        entry = self._entry(key)
        ref = entry.over(entry.source).lazy()
        file = entry.source.file()
        ref.file_path, ref.key = self._locations.get(key, (None if file is None else file.path, key))
        return ref

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    # A mapping would compare its tensors, which has no single answer.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        # Without opening files.
        return f"LazyTensorDict({len(self)} tensors" + (")" if self._locations else f", {self.nbytes} bytes)")

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
            files, owners, self._owners = self._open_files(), self._owners, []
            gone = SourceReleasedError("this tensor was released by cleanup(): materialize() it before that")
            self._released = self._released or gone
            for name, entry in self._entries.items():
                self._entries[name] = entry.over(FailedSource(entry.source.nbytes, gone))
            self._opened.clear()
        for file in files:
            file.close()
        for owner in owners:
            if isinstance(owner, Releasable):
                owner.release()


def _files(entries: Mapping[str, TensorEntry]) -> set[OpenFile]:
    found = (entry.source.file() for entry in entries.values())
    return {file for file in found if file is not None}

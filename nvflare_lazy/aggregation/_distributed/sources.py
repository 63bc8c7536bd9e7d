# SPDX-License-Identifier: Apache-2.0
"""Sources of bytes as a worker receives them: pickled with the paths of their files, and checked when it opens them."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

from nvflare_lazy.aggregation._distributed.shared_directory import SharedDirectory
from nvflare_lazy.errors import SourceError
from nvflare_lazy.remote.file import RemoteFile, RemoteSource
from nvflare_lazy.tensors.byte_source import ByteSource, SourceSlice, ZeroSource
from nvflare_lazy.tensors.converted_sources import ByteSwappedSource, CastSource, ConjugatedSource
from nvflare_lazy.tensors.strided_source import StridedSource
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile

# These are described by their attributes; other sources are copied to the shared directory.
_DESCRIBED = (
    *(FileSource, RemoteSource, SourceSlice, ZeroSource),
    *(StridedSource, ByteSwappedSource, ConjugatedSource, CastSource),
)


class SourcePickler(pickle.Pickler):
    """Pickles sources with the paths of their files. Bytes that only this process has are copied to a file first."""

    def __init__(self, file: io.BytesIO, shared: SharedDirectory) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def reducer_override(self, obj: Any) -> Any:
        """Describe a file by its path, and an unknown source by a copy in the shared directory."""
        if isinstance(obj, TensorFile):
            with obj.descriptor() as fd:
                status = os.fstat(fd)
            if not obj.is_still_at(obj.path):
                raise SourceError(f"{obj.path} was removed or replaced, so that workers cannot open it")
            return open_input, (os.path.realpath(obj.path), status.st_size, status.st_mtime_ns)
        if isinstance(obj, RemoteFile):
            return RemoteFile.reopen, (obj.url, obj.size, obj.version)
        if isinstance(obj, CastSource):
            return CastSource, obj.arguments()
        if isinstance(obj, ByteSource) and not isinstance(obj, _DESCRIBED):
            return FileSource, (self._shared.copy_of(obj), 0, obj.nbytes)
        return NotImplemented


class InputError(Exception):  # never reaches a caller: the driver converts it
    """A worker does not see an input file as the driver does."""

    def __init__(self, path: str, size: int, modified: int, problem: str, contributor: str = "") -> None:
        super().__init__(path, size, modified, problem, contributor)
        self.path = path
        self.size = size
        self.modified = modified
        self.problem = problem
        self.contributor = contributor

    def of(self, contributor: str) -> InputError:
        """Return the same error for a contribution."""
        return InputError(self.path, self.size, self.modified, self.problem, contributor)


def unpickled(text: bytes) -> list[ByteSource]:
    # The process that sent them chose this function, which pickle calls by name.
    sources: list[ByteSource] = pickle.loads(text)  # noqa: S301
    return sources


def open_input(path: str, size: int, modified: int) -> TensorFile:
    """Open an input, and check that it is the file that the driver has described."""
    try:
        file = TensorFile(path)
        with file.descriptor() as fd:
            status = os.fstat(fd)
        if (status.st_size, status.st_mtime_ns) == (size, modified):
            return file
        problem = "it has another size or time of modification"
    except OSError as error:
        problem = str(error)
    raise InputError(path, size, modified, problem)

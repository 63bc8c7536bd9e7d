# SPDX-License-Identifier: Apache-2.0
"""`RemoteFile`: a file at a URL, pinned to one version and read in ranges; the counterpart of the local `TensorFile`.

The readers of all formats use it. Requests, retries and memory are described in `_reads`.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from nvflare_lazy.errors import RemoteError, RemoteFileChangedError, RemoteNotFoundError, TruncatedSourceError
from nvflare_lazy.remote import _reads
from nvflare_lazy.remote._retries import OPEN_SECONDS, READ_SECONDS, retried
from nvflare_lazy.remote.url import basename, display, filesystem, http_status, is_url, is_web
from nvflare_lazy.tensors.byte_source import ByteSource
from nvflare_lazy.tensors.tensor_file import OpenFile, TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsspec import AbstractFileSystem

# What identifies a version of a file, under the names of the client libraries.
_VERSION_KEYS = (
    *("ETag", "etag", "VersionId", "generation", "blob_id", "md5Hash", "Content-MD5"),
    *("Last-Modified", "LastModified", "last_modified", "mtime", "updated", "created"),
)


def open_file(path: str | os.PathLike[str]) -> OpenFile:
    """Open a file by path or by URL.

    Raises:
        OSError: It does not exist, or cannot be read.
    """
    path = os.fspath(path)
    return RemoteFile(path) if is_url(path) else TensorFile(path)


def list_directory(url: str) -> list[str]:
    """Return the names of the files in a remote directory: none if it does not exist or cannot be listed.

    A web server lists a directory as a page with links.
    """

    def names() -> list[str]:
        fs, path = filesystem(url)
        # The client for the web needs the slash, which the pages' links are relative to.
        found = fs.ls(path.rstrip("/") + "/" if is_web(url) else path, detail=True)
        return sorted(basename(info["name"]) for info in found if info["type"] == "file")

    try:
        return retried(url, "list", names, OPEN_SECONDS)
    except RemoteNotFoundError:
        return []


class RemoteFile(OpenFile):
    """A remote file, read by ranges from many threads.

    Its size and its version (ETag, or time) are read when it is opened; if the file is replaced, reading raises
    `RemoteFileChangedError`.

    Args:
        url: The file.

    Raises:
        RemoteNotFoundError: It does not exist.
        RemoteError: It cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        path = display(url)
        client = retried(url, "open", lambda: _Client.open(url), OPEN_SECONDS)
        super().__init__(path, client.size)
        self._version = client.version
        self._client: _Client | None = client
        #: Identifies the file in the cache of blocks, which refers to no file.
        self.number = _reads.new_number()
        weakref.finalize(self, _reads.forget, self.number).atexit = False

    @property
    def version(self) -> tuple[str, ...]:
        """What the server states about the version of the file; two versions differ."""
        return self._version

    @classmethod
    def reopen(cls, url: str, size: int, version: tuple[str, ...]) -> RemoteFile:
        """Open the version of a file that another process has opened.

        Raises:
            RemoteFileChangedError: It was replaced.
            RemoteNotFoundError: It was removed.
        """
        try:
            file = cls(url)
        except RemoteNotFoundError as error:
            raise _removed(display(url)) from error
        if (file.size, file.version) != (size, version):
            raise _replaced(file.path)
        return file

    def source(self, offset: int, nbytes: int) -> RemoteSource:
        return RemoteSource(self, offset, nbytes)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if offset + len(buffer) > self.size:
            raise TruncatedSourceError(f"{self.path} has {self.size} bytes, but {offset + len(buffer)} are needed")
        self._opened()
        if len(buffer):
            _reads.read_into(self, buffer, offset)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        for offset, nbytes in ranges:
            if offset + nbytes > self.size:
                raise TruncatedSourceError(f"{self.path} has {self.size} bytes, but {offset + nbytes} are needed")
        self._opened()
        return _reads.read_ranges(self, ranges)

    def fetch(self, start: int, end: int) -> bytes:
        """Return a range of the file with one request, which is repeated while its error may be temporary."""
        try:
            return retried(self.url, "read", lambda: self._fetch_once(start, end), READ_SECONDS)
        except RemoteNotFoundError as error:
            raise _removed(self.path) from error

    def _fetch_once(self, start: int, end: int) -> bytes:
        data = self._opened().fetch(start, end)
        if len(data) != end - start:
            # An EOFError may be temporary: a connection that broke, which the client library did not notice.
            raise EOFError(f"the server sent {len(data)} of {end - start} bytes")
        return data

    def _opened(self) -> _Client:
        """Return the client of this process: a forked child makes its own, and finds the same version."""
        client = self._client
        if client is None:
            raise self._released()
        if client.process != os.getpid():
            client = retried(self.url, "open", lambda: _Client.open(self.url), OPEN_SECONDS)
            if (client.size, client.version) != (self.size, self._version):
                raise _replaced(self.path)
            self._client = client
        return client

    def close(self) -> None:
        self._client = None
        _reads.forget(self.number)
        super().close()


class RemoteSource(ByteSource):
    """A contiguous part of a remote file."""

    def __init__(self, file: RemoteFile, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > file.size:
            raise TruncatedSourceError(
                f"{file.path} has {file.size} bytes, but a tensor in it should be at {offset} to {offset + nbytes}"
            )
        self._file = file
        self._offset = offset
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        self._file.read_into(buffer, self._offset + offset)

    def describe(self) -> str:
        return self._file.path

    def slice(self, offset: int, nbytes: int) -> ByteSource:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside a tensor of {self.nbytes} bytes")
        return self if nbytes == self.nbytes else RemoteSource(self._file, self._offset + offset, nbytes)

    def file(self) -> RemoteFile:
        return self._file


class _Client:
    """The file in its fsspec file system, as one process has opened it.

    Attributes:
        process: The process.
        size: The size of the file.
        version: What the server states about its version.
    """

    def __init__(self, url: str, fs: AbstractFileSystem, path: str, info: dict[str, Any]) -> None:
        self.process = os.getpid()
        self._url = url
        self._fs = fs
        self._path = path
        self.fetch: Callable[[int, int], bytes]
        if is_web(url):
            self.fetch = self._fetch_web
            self._etag = info.get("ETag")
            self._modified = info.get("Last-Modified")
        elif "s3" in fs.protocol:
            # Its requests contain the ETag as If-Match, and the version of the object.
            file = fs.open(path, "rb", cache_type="none", fill_cache=False)
            self.fetch = file._fetch_range
            # The file may have been replaced since the first request.
            info = file.details
        else:
            self.fetch = self._fetch_and_check
        self.size: int = info["size"]
        self.version = _version(info)

    @classmethod
    def open(cls, url: str) -> _Client:
        fs, path = filesystem(url)
        if is_web(url) and url.partition("?")[0].endswith("/"):
            raise IsADirectoryError(url)
        try:
            info = fs.info(path)
        except FileNotFoundError as error:
            # fsspec's HTTP client raises it for every status and for broken connections.
            if error.__cause__ is not None and http_status(error) not in (404, 410):
                raise error.__cause__ from None
            raise
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{display(url)} is a directory")
        if info.get("size") is None or info.get("partial") is False:
            raise RemoteError(
                f"cannot open {display(url)}: the server does not support requests for ranges, or does not state the "
                "size; use a server that does, or download the file"
            )
        return cls(url, fs, path, info)

    def _fetch_web(self, start: int, end: int) -> bytes:
        from nvflare_lazy.remote._http import ExpectedRange

        headers = {"Accept-Encoding": "identity"}
        # A weak ETag never matches.
        if self._etag is not None and not self._etag.startswith("W/"):
            headers["If-Match"] = self._etag
        expected = ExpectedRange(display(self._url), start, end, self.size, self._etag, self._modified)
        found: bytes = self._fs.cat_file(self._path, start=start, end=end, headers=headers, trace_request_ctx=expected)
        return found

    def _fetch_and_check(self, start: int, end: int) -> bytes:
        """Read a range, and compare the version after it, since the request cannot contain the version."""
        found: bytes = self._fs.cat_file(self._path, start=start, end=end)
        info = self._fs.info(self._path)
        if (info.get("size"), _version(info)) != (self.size, self.version):
            raise _replaced(display(self._url))
        return found


def _version(info: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key))


def _replaced(path: str) -> RemoteFileChangedError:
    return RemoteFileChangedError(f"{path} was replaced after it was opened; open it again")


def _removed(path: str) -> RemoteNotFoundError:
    return RemoteNotFoundError(
        f"{path} was removed after it was opened, for example when its checkpoint was replaced; open it again"
    )

# SPDX-License-Identifier: Apache-2.0
"""`RemoteDirectory`: writes files to a directory of an object store, each of them complete or not at all.

A checkpoint that is saved to a URL is uploaded with it, file by file. An upload is repeated if the connection breaks,
and the size and the checksum of the stored file are verified.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import NVFlareLazyError, RemoteError, RemoteNotFoundError, SaveError
from nvflare_lazy.remote.url import (
    child,
    display,
    filesystem,
    is_temporary,
    is_web,
    redact,
    remote_error,
    without_secrets,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

logger = get_logger(__name__)

# A part of a file is held in memory while it is sent; several are sent at the same time.
_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
_MAX_PARTS = 10_000
_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.5
_SECONDS_BETWEEN_CHECKS = 0.2
_ABORT_SECONDS = 15
# Stores whose directories exist only as parts of names. Creating a directory could create a bucket there.
_OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf"))
# Errors of S3 that another attempt may not have, whatever their HTTP status is.
_TEMPORARY_CODES = frozenset(
    ("NoSuchUpload", "InvalidPart", "BadDigest", "RequestTimeout", "IncompleteBody", "XAmzContentSHA256Mismatch")
)


class DamagedUploadError(Exception):
    """The stored file is not the one that was sent. The upload is repeated."""


@dataclass(frozen=True)
class Upload:
    """A file to upload.

    Attributes:
        name: The name of the file in its directory.
        size: Its bytes.
        read: Returns a number of bytes from an offset; called again if the upload has to be repeated.
        check: Called from time to time; an exception that it raises cancels the upload.
        progress: Called with the bytes that have been sent since the last call.
    """

    name: str
    size: int
    read: Callable[[int, int], bytes]
    check: Callable[[], object]
    progress: Callable[[int], object]

    @classmethod
    def of(cls, name: str, data: bytes, check: Callable[[], object] = lambda: None) -> Upload:
        """Return the upload of a small file."""
        return cls(name, len(data), lambda offset, nbytes: data[offset : offset + nbytes], check, lambda nbytes: None)


class RemoteDirectory:
    """A directory of an object store, or of any other file system that fsspec can write to.

    Example:
        >>> directory = RemoteDirectory("s3://bucket/models")
        >>> directory.put(Upload.of("config.json", b"{}"))
    """

    def __init__(self, url: str) -> None:
        if is_web(url):
            raise SaveError(f"cannot write {display(url)}: web servers are read-only; use for example s3://bucket/name")
        self.url = url
        self._fs, self._path = filesystem(url)
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_s3 = "s3" in protocols
        self._is_memory = "memory" in protocols
        self._has_directories = protocols.isdisjoint(_OBJECT_STORES)

    def location(self, name: str) -> str:
        """Return the URL of a file, for messages."""
        return display(child(self.url, name))

    def names(self) -> set[str]:
        """Return the names of the files; none if the directory does not exist."""
        try:
            self._fs.invalidate_cache(self._path)
            found = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return set()
        except Exception as error:
            raise _save_error(self.url, "list", error) from without_secrets(error)
        return {str(path).rstrip("/").rpartition("/")[2] for path in found}

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        try:
            return bytes(self._fs.cat_file(self._path_of(name)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _save_error(child(self.url, name), "read", error) from without_secrets(error)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            self._fs.rm_file(self._path_of(name))
        except FileNotFoundError:
            pass
        except Exception as error:
            raise _save_error(child(self.url, name), "remove", error) from without_secrets(error)

    def check_writable(self, name: str) -> None:
        """Raise now if a file of this name could not be written, where the store can tell without writing it."""
        if self._is_s3:
            try:
                _S3Object(self._fs, self._path_of(name), Upload.of(name, b"")).probe()
            except Exception as error:
                raise _save_error(child(self.url, name), "write", error) from without_secrets(error)

    def unfinished_uploads(self, start: str) -> list[tuple[str, str]]:
        """Return the name and the identifier of each upload of a file whose name starts with `start`.

        Killed processes leave them. They take space, and no listing of files shows them.
        """
        if not self._is_s3:
            return []
        bucket, prefix, _ = self._fs.split_path(self._path_of(start))
        try:
            found = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix).get("Uploads", [])
        except Exception as error:
            raise _save_error(self.url, "list uploads to", error) from without_secrets(error)
        directory = prefix.rpartition("/")[0]
        keys = [(*upload["Key"].rpartition("/"), upload["UploadId"]) for upload in found]
        return [(name, upload_id) for parent, _, name, upload_id in keys if parent == directory]

    def abort_upload(self, name: str, upload_id: str) -> None:
        """Remove the parts of an upload that is not complete."""
        _S3Object(self._fs, self._path_of(name), Upload.of(name, b"")).abort(upload_id)

    def put(self, upload: Upload) -> None:
        """Upload a file, and replace the one of its name when the new one is complete.

        Raises:
            SaveError: If it cannot be written. The previous file of that name is unchanged.
        """
        for attempt in range(1, _TRIES + 1):
            try:
                self._put_once(upload)
                return
            except NVFlareLazyError as error:
                if not isinstance(error, RemoteError):
                    raise
                failure: Exception = error
            except Exception as error:
                failure = error
            if attempt == _TRIES or not _may_succeed_later(failure):
                raise _save_error(child(self.url, upload.name), "write", failure) from without_secrets(failure)
            pause = _FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1)  # noqa: S311
            logger.info(
                "Upload of %s failed (%s); repeating it in %.1f s",
                *(self.location(upload.name), redact(str(failure)) or type(failure).__name__, pause),
            )
            _pause(pause, upload.check)

    def _put_once(self, upload: Upload) -> None:
        path = self._path_of(upload.name)
        expected = {}
        if self._is_s3:
            etag = _S3Object(self._fs, path, upload).put()
            if etag is not None:
                expected["ETag"] = etag
        else:
            if self._has_directories:
                self._fs.makedirs(self._path, exist_ok=True)
            digest = self._put_whole(path, upload) if self._is_memory else self._put_stream(path, upload)
            expected["md5Hash"] = base64.b64encode(digest).decode()
        self._verify(path, upload.size, expected)

    def _put_whole(self, path: str, upload: Upload) -> bytes:
        # Other writes to this file system become visible with their first byte.
        data = upload.read(0, upload.size)
        self._fs.pipe_file(path, data)
        upload.progress(upload.size)
        digest: bytes = _md5(data).digest()
        return digest

    def _put_stream(self, path: str, upload: Upload) -> bytes:
        digest = _md5()
        file = self._fs.open(path, "wb", block_size=_PART_BYTES, autocommit=False)
        with suppress(ValueError):
            # A later transaction of the caller must not commit it.
            self._fs.transaction.files.remove(file)
        try:
            for offset in range(0, upload.size, _PART_BYTES):
                upload.check()
                data = upload.read(offset, min(_PART_BYTES, upload.size - offset))
                file.write(data)
                digest.update(data)
                upload.progress(len(data))
            file.close()
            upload.check()
            file.commit()
        except BaseException:
            self._discard(file, upload.name)
            raise
        stored: bytes = digest.digest()
        return stored

    def _discard(self, file: Any, name: str) -> None:
        try:
            file.discard()
        except Exception as error:
            logger.info("Cannot discard the upload of %s: %s", self.location(name), redact(str(error)))
        # Closing it, also by the garbage collector, would complete it.
        with suppress(AttributeError):
            file.closed = True

    def _verify(self, path: str, size: int, expected: dict[str, str]) -> None:
        self._fs.invalidate_cache(path)
        info = self._fs.info(path)
        if info.get("size") != size:
            raise DamagedUploadError(f"{info.get('size')} bytes are stored, and {size} were sent")
        for key, value in expected.items():
            stored = info.get(key)
            if stored is not None and str(stored).strip('"') != value:
                raise DamagedUploadError(f"the stored file has the {key} {stored}, and {value} was expected")

    def _path_of(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"


class _S3Object:
    """The upload of one object to S3, by calls of s3fs, of which several run at the same time."""

    def __init__(self, fs: AbstractFileSystem, path: str, upload: Upload) -> None:
        self._fs = fs
        bucket, key, _ = fs.split_path(path)
        self._where = {"Bucket": bucket, "Key": key}
        self._upload = upload

    def probe(self) -> None:
        """Raise if this process may not create the object, or the bucket does not exist."""
        self.abort(self._call("create_multipart_upload")["UploadId"])

    def put(self) -> str | None:
        """Upload it, and return the ETag that it must have, or None if the store's ETags are not checksums.

        The store compares each request with its Content-MD5.
        """
        upload = self._upload
        if upload.size <= _PART_BYTES:
            upload.check()
            data = upload.read(0, upload.size)
            stored: str = self._call("put_object", Body=data, ContentMD5=_base64_md5(data))["ETag"].strip('"')
            upload.progress(upload.size)
            if stored == _md5(data).hexdigest():
                return stored
            # Of an encrypted object, the ETag is not a checksum.
            if self._fs.cat_file("/".join(self._where.values())) != data:
                raise DamagedUploadError("the stored bytes differ from the sent ones")
            return None
        upload_id = self._call("create_multipart_upload")["UploadId"]
        try:
            parts, etag = self._send_parts(upload_id)
            self._complete(upload_id, parts, etag)
        except BaseException:
            self.abort(upload_id)
            raise
        return etag

    def _send_parts(self, upload_id: str) -> tuple[list[dict[str, Any]], str | None]:
        upload = self._upload
        part_bytes = max(_PART_BYTES, -(-upload.size // _MAX_PARTS))
        offsets = deque(enumerate(range(0, upload.size, part_bytes), start=1))
        running: dict[Future[Any], tuple[int, bytes, int]] = {}
        etags: dict[int, tuple[str, bytes]] = {}
        try:
            while offsets or running:
                while offsets and len(running) < _PARTS_AT_ONCE:
                    number, offset = offsets.popleft()
                    data = upload.read(offset, min(part_bytes, upload.size - offset))
                    digest = _md5(data).digest()
                    future = self._start(
                        *("upload_part", data, digest),
                        PartNumber=number,
                        UploadId=upload_id,
                    )
                    running[future] = (number, digest, len(data))
                    del data
                    upload.check()
                done, _ = wait(running, _SECONDS_BETWEEN_CHECKS, FIRST_COMPLETED)
                upload.check()
                for future in done:
                    number, digest, nbytes = running.pop(future)
                    etags[number] = (future.result()["ETag"].strip('"'), digest)
                    upload.progress(nbytes)
        except BaseException:
            for future in running:
                future.cancel()
            # A part that arrives after the end of its upload would be kept.
            wait(running, _ABORT_SECONDS)
            raise
        in_order = [etags[number] for number in sorted(etags)]
        matches = [etag == digest.hex() for etag, digest in in_order]
        if any(matches) and not all(matches):
            raise DamagedUploadError(f"part {matches.index(False) + 1} was stored with another checksum")
        parts = [{"PartNumber": number, "ETag": etags[number][0]} for number in sorted(etags)]
        whole = _md5(b"".join(digest for _, digest in in_order)).hexdigest()
        return parts, f"{whole}-{len(parts)}" if all(matches) else None

    def _complete(self, upload_id: str, parts: list[dict[str, Any]], etag: str | None) -> None:
        try:
            self._call("complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": parts})
        except Exception:
            # The object may be complete although the answer was lost.
            with suppress(Exception):
                if etag is not None and self._call("head_object")["ETag"].strip('"') == etag:
                    return
            raise

    def abort(self, upload_id: str) -> None:
        """End an upload, and remove its parts."""
        try:
            future = self._submit("abort_multipart_upload", UploadId=upload_id)
            future.result(_ABORT_SECONDS)
        except Exception as error:
            logger.warning(
                "Cannot abort the incomplete upload of %s: %s. Its parts take space until a lifecycle rule of the "
                "bucket removes them (AbortIncompleteMultipartUpload).",
                "/".join(self._where.values()),
                redact(str(error)) or type(error).__name__,
            )

    def _start(self, method: str, data: bytes, digest: bytes, **arguments: Any) -> Future[Any]:
        return self._submit(method, Body=data, ContentMD5=base64.b64encode(digest).decode(), **arguments)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        future = self._submit(method, **arguments)
        try:
            while not future.done():
                wait([future], _SECONDS_BETWEEN_CHECKS)
                self._upload.check()
        except BaseException:
            future.cancel()
            raise
        answer: dict[str, Any] = future.result()
        return answer

    def _submit(self, method: str, **arguments: Any) -> Future[Any]:
        call = self._fs._call_s3(method, **self._where, **arguments)
        return asyncio.run_coroutine_threadsafe(call, self._fs.loop)


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _base64_md5(data: bytes) -> str:
    return base64.b64encode(_md5(data).digest()).decode()


def _may_succeed_later(error: Exception) -> bool:
    if isinstance(error, DamagedUploadError) or is_temporary(error):
        return True
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in _TEMPORARY_CODES:
            return True
        cause = cause.__cause__
    return False


def _pause(seconds: float, check: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0:
        check()
        time.sleep(min(rest, _SECONDS_BETWEEN_CHECKS))


def _save_error(url: str, action: str, error: Exception) -> SaveError:
    mapped = remote_error(url, action, error)
    if action == "write" and isinstance(mapped, RemoteNotFoundError):
        return SaveError(f"cannot write {display(url)}: its bucket or directory does not exist; check the URL")
    return SaveError(str(mapped))

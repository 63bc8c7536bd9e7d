# SPDX-License-Identifier: Apache-2.0
"""`open()`: opens any checkpoint as lazy tensors; the format is recognized by content, not by name.

Used for initial models, for the results of aggregation, and by users.
"""

from __future__ import annotations

import os
import re
import stat

from nvflare_lazy.errors import (
    MissingShardError,
    RemoteDirectoryError,
    RemoteNotFoundError,
    SectionError,
    UnknownFormatError,
)
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.pytorch import open_pytorch, sniff_pytorch
from nvflare_lazy.formats.safetensors.header import MAX_HEADER_BYTES, PREFIX_BYTES
from nvflare_lazy.formats.safetensors.reader import open_safetensors
from nvflare_lazy.formats.safetensors.shards import (
    INDEX_SUFFIX,
    WEIGHT_MAP,
    in_directory,
    index_path,
    open_directory,
    open_index,
)
from nvflare_lazy.remote import is_url, list_directory, open_file
from nvflare_lazy.remote.url import display, parent, with_suffix
from nvflare_lazy.tensors.tensor_file import TensorFile

#: Where NVFlare's PyTorch persistor keeps the weights in its files.
NVFLARE_SECTION = "model"
# Far enough into an index to come across its weight map, behind whatever metadata it has.
_HEAD_BYTES = 64 << 10
# How often a checkpoint may be replaced by another process while it is being opened.
_TRIES = 8
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_GZIP = b"\x1f\x8b"
_HTML = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:!--|!doctype\s+html|html|head|body|script|title)", re.IGNORECASE)


def open(path: str | os.PathLike[str], *, section: str | None = None) -> LazyTensorDict:
    """Open a checkpoint without reading its tensors.

    Args:
        path: A safetensors file, a PyTorch checkpoint of any age (zip, legacy, tar), the index of a sharded
            checkpoint, or a directory with an index or with safetensors files. A URL ("s3://", "gs://", "hf://",
            "https://") opens a remote one, with the extra `remote`.
        section: The part of a nested PyTorch checkpoint to open, for example "model".

    Raises:
        UnknownFormatError: The file has another format; the message describes it and what to do.
        FormatError: It is one of these and breaks its rules.
        RemoteError: A URL cannot be read.

    Example:
        >>> tensors = nvflare_lazy.open("model.safetensors")
        >>> tensors["head.weight"][7].sum()  # reads one row
    """
    path = os.fspath(path)
    if is_url(path):
        return _open_url(path, section)
    directory = path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))
    for tried in range(_TRIES):
        before = _state_of(directory)
        try:
            return _open_now(path, section)
        except (FileNotFoundError, MissingShardError):
            # Always try twice: clocks of file systems are coarse.
            if tried and _state_of(directory) == before:
                raise
    return _open_now(path, section)


def open_model(path: str | os.PathLike[str]) -> LazyTensorDict:
    """Open a checkpoint without reading its tensors; in a file from NVFlare's PyTorch persistor, the model.

    Raises:
        FormatError: As `open`.
    """
    try:
        return open(path, section=NVFLARE_SECTION)
    except SectionError:
        return open(path)


def _state_of(directory: str) -> int | None:
    """Return what changes when a checkpoint of the directory is replaced."""
    try:
        return os.stat(directory).st_mtime_ns
    except OSError:
        return None


def _open_now(path: str, section: str | None) -> LazyTensorDict:
    if not os.path.exists(path):
        # A sharded checkpoint has the name of its index without the suffix; a link with that name may lead to it.
        indexes = (index_path(path), index_path(os.path.realpath(path)))
        path = next((index for index in indexes if os.path.exists(index)), path)
    if not os.path.isdir(path):
        return _open_file(path, section, is_shard=False)
    _refuse_section(path, section)
    return _open_names(path, os.listdir(path))


def _open_url(url: str, section: str | None) -> LazyTensorDict:
    """Open a remote file or directory; an index that is replaced at this moment is not waited for."""
    try:
        return _open_file(url, section, is_shard=False)
    except (RemoteNotFoundError, RemoteDirectoryError):
        names = list_directory(url)
        if names:
            _refuse_section(url, section)
            return _open_names(url, names)
        try:
            # As for a path: a sharded checkpoint has the name of its index without the suffix.
            return _open_file(with_suffix(url, INDEX_SUFFIX), section, is_shard=False)
        except RemoteNotFoundError:
            pass
        raise


def _open_names(directory: str, names: list[str]) -> LazyTensorDict:
    return open_directory(
        directory, names, lambda name: _open_file(in_directory(directory, name), None, is_shard=False)
    )


def _open_file(path: str, section: str | None, *, is_shard: bool) -> LazyTensorDict:
    if not is_url(path) and not stat.S_ISREG(os.stat(path).st_mode):
        # Opening a pipe would wait for a writer.
        raise UnknownFormatError(
            f"{path} is not a regular file; copy it to one first, because reading needs random access"
        )
    file = open_file(path)
    head = bytearray(min(_HEAD_BYTES, file.size))
    file.read_into(memoryview(head), 0)
    if _is_safetensors(head):
        _refuse_section(path, section)
        return open_safetensors(path, file)
    if sniff_pytorch(bytes(head[:512])) is not None:
        return open_pytorch(path, file, section)
    if not is_shard and _is_index(head, path):
        _refuse_section(path, section)
        directory = parent(path) if is_url(path) else os.path.dirname(path)
        opened = open_index(file, lambda name: _open_file(in_directory(directory, name), None, is_shard=True))
        # Names of shards are free again after the checkpoint was one file for a time.
        if isinstance(file, TensorFile) and not file.is_still_at(path):
            raise MissingShardError(f"{path} was replaced while its shards were opened; open it again")
        return opened
    raise UnknownFormatError(
        f"{file.path} is not a checkpoint. It is {_describe_unknown(bytes(head[:512]), file.size)}"
    )


def _is_safetensors(head: bytearray) -> bool:
    """Whether a file means to be one; if it is one that is damaged, the reader knows better what to say."""
    length = int.from_bytes(head[:PREFIX_BYTES], "little")
    text = bytes(head[PREFIX_BYTES : PREFIX_BYTES + 1])
    if 0 < length <= MAX_HEADER_BYTES and len(head) >= PREFIX_BYTES:
        return text in b"{ \t\r\n"
    return text == b"{" and 0 in head[:PREFIX_BYTES]


def _is_index(head: bytearray, path: str) -> bool:
    return head.lstrip()[:1] == b"{" and (f'"{WEIGHT_MAP}"'.encode() in head or display(path).endswith(INDEX_SUFFIX))


def _refuse_section(path: str, section: str | None) -> None:
    if section is not None:
        raise SectionError(
            f"{display(path)} has no sections, so none with the name {section!r}; only PyTorch checkpoints have some"
        )


def _describe_unknown(head: bytes, size: int) -> str:
    """Describe a file in another format, and a remedy. Failed downloads may have the name `model.safetensors`."""
    if size == 0:
        return "an empty file: the download or save that made it never finished"
    if not any(head):
        return "zero bytes: a download that reserved its space and was never filled; fetch it again"
    if head.startswith(_LFS_POINTER):
        return "a Git LFS pointer, not the file itself: run `git lfs pull` where it was cloned, or download the file"
    if head.startswith(_GZIP):
        return "gzip data: decompress it first (gunzip)"
    if _HTML.match(head):
        return (
            "an HTML page: the download brought a login or error page instead of the file; "
            "look at it in a browser, and check the address and whether you need a token"
        )
    return f"data in an unknown format that begins with {head[:32]!r}"

# SPDX-License-Identifier: Apache-2.0
"""Finds the members of a tar archive by walking its headers, strictly.

The checkpoints of PyTorch before 0.1.10 are tar archives of four members. They are read by offset, as parts of the
file; nothing is unpacked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ArchiveError, DuplicateRecordError

if TYPE_CHECKING:
    from nvflare_lazy.tensors.tensor_file import TensorFile

BLOCK = 512
# A checkpoint has four members, each with a header before its header at most.
_MOST_MEMBERS = 64
_LONGEST_PAX = 64 << 10
_FILES = (b"0", b"\0", b"7")
_PAX_RECORD = re.compile(rb"(\d{1,5}) ([^=]{1,100})=")


@dataclass(frozen=True, slots=True)
class TarMember:
    """Where the bytes of a member lie in the file."""

    offset: int
    nbytes: int


def is_tar_header(block: bytes) -> bool:
    """Whether a block is the header of a member: its checksum says so."""
    if len(block) < BLOCK or not block[0]:
        return False
    stated = block[148:156].strip(b" \0")
    if not re.fullmatch(rb"[0-7]{1,7}", stated):
        return False
    return int(stated, 8) == sum(block[:148]) + 8 * ord(" ") + sum(block[156:BLOCK])


def read_members(file: TensorFile) -> dict[str, TarMember]:
    """Return the files in an archive by name."""
    members: dict[str, TarMember] = {}
    at, headers = 0, 0
    overrides: dict[str, bytes] = {}
    while at + BLOCK <= file.size:
        header = _read(file, at, BLOCK)
        if not any(header):
            break
        headers += 1
        if not is_tar_header(header) or headers > _MOST_MEMBERS:
            raise ArchiveError(f"{file.path} begins like a tar archive, but its headers are damaged or too many")
        kind = header[156:157]
        nbytes = _size(file, overrides.get("size", header[124:136]), octal="size" not in overrides)
        at += BLOCK
        if nbytes > file.size - at:
            raise ArchiveError(f"{file.path} is a tar archive that ends before its member does: it was cut short")
        if kind == b"x":
            overrides = _pax_records(file, at, nbytes)
        elif kind in _FILES:
            name = overrides.get("path", header[:100].rstrip(b"\0")).decode("utf-8", "surrogateescape")
            if name in members:
                raise DuplicateRecordError(f"{file.path} has two members called {quoted(name)}; do not use it")
            members[name] = TarMember(at, nbytes)
            overrides = {}
        else:
            raise ArchiveError(f"{file.path} is a tar archive with links or directories, and no PyTorch checkpoint")
        at += -(-nbytes // BLOCK) * BLOCK
    return members


def _size(file: TensorFile, field: bytes, *, octal: bool) -> int:
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]{1,12}" if octal else rb"\d{1,19}", digits):
        raise ArchiveError(f"{file.path} is a tar archive with a size that is none; it is damaged")
    return int(digits, 8 if octal else 10)


def _pax_records(file: TensorFile, at: int, nbytes: int) -> dict[str, bytes]:
    """Return what an extended header says in place of the header after it."""
    if nbytes > _LONGEST_PAX:
        raise ArchiveError(f"{file.path} is a tar archive with a header of {nbytes} bytes; it is forged")
    data = _read(file, at, nbytes)
    records: dict[str, bytes] = {}
    place = 0
    while place < len(data):
        found = _PAX_RECORD.match(data, place)
        end = place + int(found[1]) if found else 0
        if not found or end <= found.end() or data[end - 1 : end] != b"\n":
            raise ArchiveError(f"{file.path} is a tar archive with an extended header that is damaged")
        key = found[2].decode("ascii", "backslashreplace")
        if key.startswith("GNU.sparse"):
            raise ArchiveError(f"{file.path} is a tar archive with holes, and no PyTorch checkpoint")
        records[key] = data[found.end() : end - 1]
        place = end
    return records


def _read(file: TensorFile, offset: int, count: int) -> bytes:
    data = bytearray(count)
    file.read_into(memoryview(data), offset)
    return bytes(data)

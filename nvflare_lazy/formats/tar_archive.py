# SPDX-License-Identifier: Apache-2.0
"""The members of a tar archive by offset, as `tarfile` finds them; nothing is unpacked.

The checkpoints of PyTorch before 0.1.10 are tar archives of four members.
"""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING, NamedTuple

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ArchiveError

if TYPE_CHECKING:
    from nvflare_lazy.tensors.tensor_file import TensorFile

BLOCK = tarfile.BLOCKSIZE
# A checkpoint has four members, with at most two headers each.
_MAX_MEMBERS = 64
_MAX_HEADER_BYTES = 128 << 10


class TarMember(NamedTuple):
    """Where the bytes of a member are in the file."""

    offset: int
    nbytes: int


def is_tar_header(block: bytes) -> bool:
    """Whether a block is the header of a member: its checksum is right."""
    try:
        tarfile.TarInfo.frombuf(block[:BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def read_members(file: TensorFile) -> dict[str, TarMember]:
    """Return the files in an archive by name."""
    members: dict[str, TarMember] = {}
    try:
        for member in tarfile.TarFile(fileobj=_Headers(file)):  # type: ignore[arg-type]
            if not member.isreg() or member.issparse():
                raise ArchiveError(
                    f"{file.path} is a tar archive with links, directories or holes, and no PyTorch checkpoint"
                )
            if member.name in members:
                raise ArchiveError(f"{file.path} has two members called {quoted(member.name)}; do not use it")
            if member.size > file.size - member.offset_data or len(members) == _MAX_MEMBERS:
                raise ArchiveError(
                    f"{file.path} is a tar archive that was cut short, or has too many members; get it again"
                )
            members[member.name] = TarMember(member.offset_data, member.size)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(
            f"{file.path} begins like a tar archive, but is damaged or cut short ({error}); get it again"
        ) from None
    return members


class _Headers:
    """A tar archive as far as `tarfile` has to read it."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._at = 0
        self._left = _MAX_HEADER_BYTES

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> None:
        self._at = offset

    def read(self, count: int) -> bytes:
        count = max(min(count, self._file.size - self._at), 0)
        self._left -= count
        if self._left < 0:
            raise ArchiveError(
                f"{self._file.path} is a tar archive with more than {_MAX_HEADER_BYTES} bytes of headers; it is forged"
            )
        data = bytearray(count)
        self._file.read_into(memoryview(data), self._at)
        self._at += count
        return bytes(data)

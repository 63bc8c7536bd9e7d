# SPDX-License-Identifier: Apache-2.0
"""The pickles in a part of an open file, as a stream that never takes memory for bytes that are not in the file.

The base of opening a PyTorch checkpoint: `_machine` reads opcodes from it, and it counts the memory of the objects that
the opcodes describe. In legacy files tensor data follows the pickle, so little is read ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvflare_lazy.errors import PyTorchCheckpointError

if TYPE_CHECKING:
    from nvflare_lazy.tensors.tensor_file import OpenFile

# Names and numbers of text opcodes are short; only an attack has a longer line.
_MAX_LINE_LEN = 4096
# Bytes that the objects of a pickle may take: some in any case, and more for each byte of pickle. Real checkpoints stay
# well below, and their pickles are rarely larger than a few megabytes.
_FREE_BYTES = 64 << 20
_BYTES_PER_BYTE = 64
_MAX_BYTES = 2 << 30


class PickleStream:
    """A cursor over the bytes `start` to `stop` of a file, read by opcodes.

    Args:
        file: The open file.
        start: Offset of the first pickle.
        stop: Offset at which the last pickle must have ended.
        read_ahead: Bytes to read at once; small where short pickles alternate with tensor data.
    """

    def __init__(self, file: OpenFile, start: int, stop: int, read_ahead: int = 64 << 10) -> None:
        self.path = file.path
        self._file = file
        self._not_pickle = start
        self._stop = stop
        self._read_ahead = read_ahead
        self._buffer = b""
        self._at = 0
        self._buffer_end = start
        self._used = 0
        self._limit = _FREE_BYTES

    @property
    def position(self) -> int:
        """Offset in the file of the next byte."""
        return self._buffer_end - len(self._buffer) + self._at

    @property
    def consumed(self) -> int:
        """Bytes of pickle read so far."""
        return self.position - self._not_pickle

    def spend(self, nbytes: int) -> None:
        """Count an object of about `nbytes` bytes, or work that takes as long as filling them."""
        self._used += nbytes
        if self._used > self._limit:
            self._limit = min(_FREE_BYTES + _BYTES_PER_BYTE * self.consumed, _MAX_BYTES)
            if self._used > self._limit:
                raise PyTorchCheckpointError(
                    f"{self.path}: the pickle would take far more memory than a state dict needs; no part was loaded"
                )

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        end = self._at + count
        if end > len(self._buffer):
            self._check(count)
            if count > self._read_ahead:
                self.spend(count)
            self._fill(count)
            end = count
        data = self._buffer[self._at : end]
        self._at = end
        return data

    def read_byte(self) -> int:
        """Return the next byte."""
        at = self._at
        if at < len(self._buffer):
            self._at = at + 1
            return self._buffer[at]
        return self.read(1)[0]

    def readline(self) -> bytes:
        """Return the bytes up to the next line feed, and the line feed."""
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.read(1)
            if len(line) > _MAX_LINE_LEN:
                raise PyTorchCheckpointError(f"{self.path}: the pickle has a line of more than {_MAX_LINE_LEN} bytes")
        return bytes(line)

    def skip(self, count: int) -> None:
        """Skip `count` bytes of tensor data without reading them."""
        self._check(count)
        self._not_pickle += count
        self._buffer, self._at, self._buffer_end = b"", 0, self.position + count

    def _check(self, count: int) -> None:
        left = self._stop - self.position
        if not 0 <= count <= left:
            raise PyTorchCheckpointError(
                f"{self.path}: the pickle asks for {count} bytes at offset {self.position}, where {left} are left: "
                "the file is cut short or damaged; get it again"
            )

    def _fill(self, count: int) -> None:
        """Fill the buffer with at least `count` bytes, starting at the position."""
        at = self.position
        chunk = bytearray(min(max(count, self._read_ahead), self._stop - at))
        self._file.read_into(memoryview(chunk), at)
        self._buffer, self._at, self._buffer_end = bytes(chunk), 0, at + len(chunk)

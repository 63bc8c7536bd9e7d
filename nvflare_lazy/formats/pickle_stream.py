# SPDX-License-Identifier: Apache-2.0
"""Reads a pickle from a part of an open file and never believes a length before the bytes are known to be there.

The lowest step of opening a PyTorch checkpoint; the unpickler asks for opcodes and scalars, and this counts what has
been consumed. In legacy files tensor data follows the pickle, so what is read ahead stays small.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

from nvflare_lazy.errors import MalformedPickleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.tensors.tensor_file import TensorFile

# Names and numbers of text opcodes are short; only an attack has a line longer than this.
_LONGEST_LINE = 4096
_WIDEST_LONG = 1024
# What the objects of a pickle may weigh in memory: some to begin with, and so much more for each of its bytes. Those
# of real checkpoints weigh less than ten times their pickle, and that is rarely more than some megabytes.
_FREE_WEIGHT = 64 << 20
_WEIGHT_A_BYTE = 32
_MOST_WEIGHT = 2 << 30
_INTEGER = re.compile(rb"-?\d{1,1200}L?")


class Budget:
    """How much the objects of a stream's pickles may weigh, all together.

    Args:
        stream: Where they come from: every byte that is read from it allows for more.
    """

    def __init__(self, stream: PickleStream) -> None:
        self._stream = stream
        self._spent = 0
        self._allowed = _FREE_WEIGHT

    def spend(self, weight: int) -> None:
        """Count an object of about so many bytes."""
        self._spent += weight
        if self._spent > self._allowed:
            self._allowed = min(_FREE_WEIGHT + _WEIGHT_A_BYTE * self._stream.consumed, _MOST_WEIGHT)
            if self._spent > self._allowed:
                raise MalformedPickleError(
                    f"{self._stream.path}: the pickle would take far more memory than a state dict needs; "
                    "nothing of it was loaded"
                )


class PickleStream:
    """A cursor over the bytes `start` to `stop` of a file.

    Args:
        file: The open file.
        start: Where the first pickle begins.
        stop: Where the last one must have ended.
        read_ahead: How much is read at once; little, where short pickles lie between tensor data.
    """

    def __init__(self, file: TensorFile, start: int, stop: int, read_ahead: int = 64 << 10) -> None:
        self.path = file.path
        self._file = file
        self._not_pickle = start
        self._stop = stop
        self._read_ahead = read_ahead
        self._buffer = b""
        self._at = 0
        self._buffer_end = start
        self.budget = Budget(self)

    @property
    def position(self) -> int:
        """Offset in the file of the next byte."""
        return self._buffer_end - len(self._buffer) + self._at

    @property
    def consumed(self) -> int:
        """Bytes of pickle read so far."""
        return self.position - self._not_pickle

    def read_byte(self) -> int:
        """Return the next byte as an integer."""
        if self._at == len(self._buffer):
            self._fill()
        self._at += 1
        return self._buffer[self._at - 1]

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        end = self._at + count
        if end <= len(self._buffer):
            data = self._buffer[self._at : end]
            self._at = end
            return data
        at = self.position
        self._check(count)
        big = bytearray(count)
        self._file.read_into(memoryview(big), at)
        self._jump(at + count)
        self.budget.spend(count)
        return bytes(big)

    def read_line(self) -> bytes:
        """Return the bytes up to the next line feed, without it."""
        line = bytearray()
        while (byte := self.read_byte()) != 0x0A:
            line.append(byte)
            if len(line) > _LONGEST_LINE:
                raise MalformedPickleError(f"{self.path}: the pickle has a line of more than {_LONGEST_LINE} bytes")
        return bytes(line)

    def skip(self, count: int) -> None:
        """Pass over `count` bytes without reading them."""
        self._check(count)
        self._not_pickle += count
        self._jump(self.position + count)

    def _jump(self, position: int) -> None:
        self._buffer, self._at, self._buffer_end = b"", 0, position

    def _check(self, count: int) -> None:
        left = self._stop - self.position
        if not 0 <= count <= left:
            raise MalformedPickleError(
                f"{self.path}: the pickle asks for {count} bytes at offset {self.position}, where {left} are left: "
                "the file is cut short or damaged; get it again"
            )

    def _fill(self) -> None:
        self._check(1)
        at = self._buffer_end
        chunk = bytearray(min(self._read_ahead, self._stop - at))
        self._file.read_into(memoryview(chunk), at)
        self._buffer, self._at, self._buffer_end = bytes(chunk), 0, at + len(chunk)


def _length(stream: PickleStream, form: str) -> int:
    count: int = struct.unpack(form, stream.read(struct.calcsize(form)))[0]
    return count


def _number(form: str) -> Callable[[PickleStream], object]:
    size, unpack = struct.calcsize(form), struct.Struct(form).unpack
    return lambda stream: unpack(stream.read(size))[0]


def _text(form: str) -> Callable[[PickleStream], object]:
    def read(stream: PickleStream) -> str:
        data = stream.read(_length(stream, form))
        try:
            # As pickle does: a name of a file that is no text is written with surrogates.
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise MalformedPickleError(f"{stream.path}: the pickle has a string that is not UTF-8") from None

    return read


def _binary(form: str) -> Callable[[PickleStream], object]:
    return lambda stream: stream.read(_length(stream, form))


def _byte_array(stream: PickleStream) -> bytearray:
    return bytearray(stream.read(_length(stream, "<Q")))


def _python2_string(form: str) -> Callable[[PickleStream], object]:
    # Python 2 wrote names and raw data alike as these; what is not text can only be data.
    def read(stream: PickleStream) -> str | bytes:
        data = stream.read(_length(stream, form))
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    return read


def _long(form: str) -> Callable[[PickleStream], object]:
    def read(stream: PickleStream) -> int:
        size = _length(stream, form)
        if not 0 <= size <= _WIDEST_LONG:
            raise MalformedPickleError(f"{stream.path}: the pickle has an integer of {size} bytes")
        return int.from_bytes(stream.read(size), "little", signed=True)

    return read


def _decimal(stream: PickleStream) -> int | bool:
    line = stream.read_line()
    if line in (b"00", b"01"):
        return line == b"01"
    if not _INTEGER.fullmatch(line):
        raise MalformedPickleError(f"{stream.path}: the pickle has an integer that is none")
    return int(line.rstrip(b"L"))


def _float_line(stream: PickleStream) -> float:
    try:
        return float(stream.read_line())
    except ValueError:
        raise MalformedPickleError(f"{stream.path}: the pickle has a float that is none") from None


def _unicode_line(stream: PickleStream) -> str:
    try:
        return stream.read_line().decode("raw-unicode-escape")
    except UnicodeDecodeError:
        raise MalformedPickleError(f"{stream.path}: the pickle has a string that is not text") from None


# Opcodes that are a scalar, of all protocols; the keys are as in Python's `pickle`.
SCALARS: dict[int, Callable[[PickleStream], object]] = {
    ord("N"): lambda _: None,
    0x88: lambda _: True,
    0x89: lambda _: False,
    ord("I"): _decimal,
    ord("L"): _decimal,
    ord("J"): _number("<i"),
    ord("K"): PickleStream.read_byte,
    ord("M"): _number("<H"),
    0x8A: _long("<B"),
    0x8B: _long("<i"),
    ord("F"): _float_line,
    ord("G"): _number(">d"),
    ord("V"): _unicode_line,
    ord("X"): _text("<I"),
    0x8C: _text("<B"),
    0x8D: _text("<Q"),
    ord("T"): _python2_string("<I"),
    ord("U"): _python2_string("<B"),
    ord("B"): _binary("<I"),
    ord("C"): _binary("<B"),
    0x8E: _binary("<Q"),
    0x96: _byte_array,
}

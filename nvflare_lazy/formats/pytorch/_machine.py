# SPDX-License-Identifier: Apache-2.0
"""`PickleMachine`: executes the opcodes of a pickle of any protocol, and makes only plain data.

The base of `_pickle`, which decides what names, calls and persistent ids mean. Each opcode is charged to the limit of
memory before it is executed. torch's weights-only unpickler reads protocol 2 only, and has no such limit.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvflare_lazy.formats.pytorch._stream import PickleStream

# About what they take in CPython, with their places on the stack.
_CONSTANT, _SCALAR, _CONTAINER, _SET = 24, 64, 80, 280
_PUT, _GET = 16, 16
# An object without arguments. Calls with arguments take more, which is known when they are made.
_CALL, _STORAGE = 160, 250
_MAX_INTEGER_BITS = 2040
_STOP = ord(".")
_UINT2, _UINT4, _UINT8 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_INT4, _FLOAT8 = struct.Struct("<i"), struct.Struct(">d")


class PickleMachine(ABC):
    """The stack, the memo and the opcodes of a pickle.

    An object of unknown type is only checked by its type: a few bytes can describe a tuple whose hash or text has no
    end.

    Args:
        stream: The stream at the beginning of the pickle; after `run()`, at its end.
    """

    def __init__(self, stream: PickleStream) -> None:
        self._stream = stream
        self._byte = stream.read_byte
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: list[Any] = []
        self._first = 0

    def run(self) -> object:
        """Execute the next pickle of the stream and return its content.

        Raises:
            ValueError, IndexError, struct.error: The pickle is invalid, or has an opcode that no checkpoint needs.
        """
        read_byte, spend = self._byte, self._stream.spend
        opcode = read_byte()
        while opcode != _STOP:
            known = _OPCODES.get(opcode)
            if known is None:
                name = next((info.name for info in pickletools.opcodes if ord(info.code) == opcode), opcode)
                raise ValueError(f"opcode {name}, which no checkpoint needs")
            cost, execute = known
            spend(cost)
            execute(self)
            opcode = read_byte()
        content = self._stack.pop()
        if self._stack or self._marked:
            raise ValueError("an end where it is not finished")
        return content

    @abstractmethod
    def find(self, module: object, name: object) -> object:
        """Return what a name means, or raise."""

    @abstractmethod
    def load_id(self, persistent_id: object) -> object:
        """Return the storage or tensor for a persistent id, or raise ValueError."""

    @abstractmethod
    def call(self, called: object, arguments: object) -> object:
        """Return the result of a call."""

    @abstractmethod
    def build(self, target: object, state: object) -> object:
        """Return an object with its state."""

    @abstractmethod
    def fill(self, kind: Any, target: Any, items: list[object]) -> Any:
        """Put items, or keys and values, into a container of a kind, and return it."""

    # ---- the stack -----------------------------------------------------------------------------------------------

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _tuple(self) -> None:
        self._push(tuple(self._pop_mark()))

    def _tuple1(self) -> None:
        self._push((self._stack.pop(),))

    def _tuple2(self) -> None:
        last = self._stack.pop()
        self._push((self._stack.pop(), last))

    def _tuple3(self) -> None:
        last, middle = self._stack.pop(), self._stack.pop()
        self._push((self._stack.pop(), middle, last))

    def _frozenset(self) -> None:
        self._push(frozenset(self.fill(set, set(), self._pop_mark())))

    def _fill_top(self, kind: Any, items: list[object]) -> None:
        self.fill(kind, self._stack[-1], items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._fill_top(dict, [key, value])

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        self._push(self.call(self._stack.pop(), arguments))

    def _build(self) -> None:
        state = self._stack.pop()
        self._push(self.build(self._stack.pop(), state))

    def _global(self) -> None:
        module = self._line().decode()
        self._push(self.find(module, self._line().decode()))

    def _stack_global(self) -> None:
        name = self._stack.pop()
        self._push(self.find(self._stack.pop(), name))

    # ---- the memo ------------------------------------------------------------------------------------------------

    def _put(self, number: int | None) -> None:
        memo, value = self._memo, self._stack[-1]
        if not memo:
            self._first = number or 0  # Python 2 numbers from 1
        index = len(memo) if number is None else number - self._first
        if index == len(memo):
            memo.append(value)
        elif 0 <= index < len(memo):
            memo[index] = value
        else:
            raise ValueError("values that are numbered out of order")

    def _get(self, number: int) -> None:
        index = number - self._first
        if not 0 <= index < len(self._memo):
            raise ValueError("a reference to a value that was never given")
        self._stack.append(self._memo[index])

    # ---- values --------------------------------------------------------------------------------------------------

    def _unpack(self, form: struct.Struct) -> Any:
        return form.unpack(self._stream.read(form.size))[0]

    def _line(self) -> bytes:
        return self._stream.readline()[:-1]

    def _int_line(self) -> None:
        # Protocol 0 writes False and True as 00 and 01, and ends some integers with an L.
        line = self._line()
        value = int(line.removesuffix(b"L"))
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise ValueError(f"an integer of {value.bit_length()} bits")
        self._push(line == b"01" if line in (b"00", b"01") else value)

    def _long(self, count: int) -> None:
        if not 0 <= 8 * count <= _MAX_INTEGER_BITS:
            raise ValueError(f"an integer of {8 * count} bits")
        self._push(int.from_bytes(self._stream.read(count), "little", signed=True))

    def _sized(self, count: int) -> bytes:
        data = self._stream.read(count)
        # Text takes up to 4 bytes for each byte in the pickle.
        self._stream.spend(4 * count)
        return data

    def _text(self, count: int) -> None:
        self._push(str(self._sized(count), "utf-8", "surrogatepass"))

    def _string(self, count: int) -> None:
        """Push a string of Python 2, which wrote names and raw data alike; a string that is not text is raw data."""
        data = self._sized(count)
        try:
            self._push(data.decode())
        except UnicodeDecodeError:
            self._push(data)


# The cost of each opcode without its data, and its function. Opcodes that are missing here are refused.
_OPCODES: dict[int, tuple[int, Callable[[PickleMachine], object]]] = {
    opcode[0]: (cost, execute)
    for opcode, cost, execute in (
        (pickle.PROTO, 0, lambda machine: machine._stream.read(1)),
        (pickle.FRAME, 0, lambda machine: machine._stream.read(8)),
        (pickle.NONE, _CONSTANT, lambda machine: machine._push(None)),
        (pickle.NEWTRUE, _CONSTANT, lambda machine: machine._push(True)),
        (pickle.NEWFALSE, _CONSTANT, lambda machine: machine._push(False)),
        (pickle.EMPTY_TUPLE, _CONSTANT, lambda machine: machine._push(())),
        (pickle.EMPTY_LIST, _CONTAINER, lambda machine: machine._push([])),
        (pickle.EMPTY_DICT, _CONTAINER, lambda machine: machine._push({})),
        (pickle.EMPTY_SET, _SET, lambda machine: machine._push(set())),
        (pickle.MARK, _CONTAINER, PickleMachine._mark),
        (pickle.TUPLE, _CONTAINER, PickleMachine._tuple),
        (pickle.TUPLE1, _CONTAINER, PickleMachine._tuple1),
        (pickle.TUPLE2, _CONTAINER, PickleMachine._tuple2),
        (pickle.TUPLE3, _CONTAINER, PickleMachine._tuple3),
        (pickle.LIST, _CONTAINER, lambda machine: machine._push(machine._pop_mark())),
        (pickle.DICT, _CONTAINER, lambda machine: machine._push(machine.fill(dict, {}, machine._pop_mark()))),
        (pickle.FROZENSET, _SET, PickleMachine._frozenset),
        (pickle.APPEND, _CONSTANT, lambda machine: machine._fill_top(list, [machine._stack.pop()])),
        (pickle.APPENDS, _CONSTANT, lambda machine: machine._fill_top(list, machine._pop_mark())),
        (pickle.SETITEM, _CONSTANT, PickleMachine._set_item),
        (pickle.SETITEMS, _CONSTANT, lambda machine: machine._fill_top(dict, machine._pop_mark())),
        (pickle.ADDITEMS, _CONSTANT, lambda machine: machine._fill_top(set, machine._pop_mark())),
        (pickle.GLOBAL, _SCALAR, PickleMachine._global),
        (pickle.STACK_GLOBAL, _SCALAR, PickleMachine._stack_global),
        (pickle.REDUCE, _CALL, PickleMachine._reduce),
        # Every class here is made by a call, which does the same.
        (pickle.NEWOBJ, _CALL, PickleMachine._reduce),
        (pickle.BUILD, _CONTAINER, PickleMachine._build),
        (pickle.BINPERSID, _STORAGE, lambda machine: machine._push(machine.load_id(machine._stack.pop()))),
        (pickle.PUT, _PUT, lambda machine: machine._put(int(machine._line()))),
        (pickle.BINPUT, _PUT, lambda machine: machine._put(machine._byte())),
        (pickle.LONG_BINPUT, _PUT, lambda machine: machine._put(machine._unpack(_UINT4))),
        (pickle.MEMOIZE, _PUT, lambda machine: machine._put(None)),
        (pickle.GET, _GET, lambda machine: machine._get(int(machine._line()))),
        (pickle.BINGET, _GET, lambda machine: machine._get(machine._byte())),
        (pickle.LONG_BINGET, _GET, lambda machine: machine._get(machine._unpack(_UINT4))),
        (pickle.INT, _SCALAR, PickleMachine._int_line),
        (pickle.LONG, _SCALAR, PickleMachine._int_line),
        (pickle.BININT, _SCALAR, lambda machine: machine._push(machine._unpack(_INT4))),
        (pickle.BININT1, _CONSTANT, lambda machine: machine._push(machine._byte())),
        (pickle.BININT2, _SCALAR, lambda machine: machine._push(machine._unpack(_UINT2))),
        (pickle.LONG1, _SCALAR, lambda machine: machine._long(machine._byte())),
        (pickle.LONG4, _SCALAR, lambda machine: machine._long(machine._unpack(_INT4))),
        (pickle.FLOAT, _SCALAR, lambda machine: machine._push(float(machine._line()))),
        (pickle.BINFLOAT, _SCALAR, lambda machine: machine._push(machine._unpack(_FLOAT8))),
        (pickle.BINSTRING, _SCALAR, lambda machine: machine._string(machine._unpack(_INT4))),
        (pickle.SHORT_BINSTRING, _SCALAR, lambda machine: machine._string(machine._byte())),
        (pickle.UNICODE, _SCALAR, lambda machine: machine._push(str(machine._line(), "raw-unicode-escape"))),
        (pickle.SHORT_BINUNICODE, _SCALAR, lambda machine: machine._text(machine._byte())),
        (pickle.BINUNICODE, _SCALAR, lambda machine: machine._text(machine._unpack(_UINT4))),
        (pickle.BINUNICODE8, _SCALAR, lambda machine: machine._text(machine._unpack(_UINT8))),
        (pickle.SHORT_BINBYTES, _SCALAR, lambda machine: machine._push(machine._sized(machine._byte()))),
        (pickle.BINBYTES, _SCALAR, lambda machine: machine._push(machine._sized(machine._unpack(_UINT4)))),
        (pickle.BINBYTES8, _SCALAR, lambda machine: machine._push(machine._sized(machine._unpack(_UINT8)))),
        (pickle.BYTEARRAY8, _SCALAR, lambda machine: machine._push(bytearray(machine._sized(machine._unpack(_UINT8))))),
    )
}

# SPDX-License-Identifier: Apache-2.0
"""Rewrites a pickle of any protocol in the few opcodes that torch's weights-only unpickler needs to make plain data.

torch's unpickler reads protocol 2 only. The opcodes that it gets from here make constants, integers, tuples and empty
containers, and nothing else. Every opcode that could call or change something (REDUCE, BUILD, ...) becomes a persistent
id: the number of an operation on the top of the stack, which `_pickle` carries out. Other values (text, globals, ...)
are in a list, and their persistent ids follow those of the operations.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.formats.pytorch._stream import PickleStream

OPERATIONS = ("call", "build", "append", "set items", "add", "list", "dict", "frozenset", "find", "load id")

# About what they take in CPython, as bytes of this code and as the object they make.
_CONSTANT, _SCALAR, _CONTAINER, _SET = 24, 64, 80, 280
_PUT, _GET = 16, 48
# An object without arguments. Calls with arguments take more, which is known when they are made.
_CALL, _STORAGE = 120, 250
_MAX_INTEGER_BITS = 2040


def _operation(name: str) -> bytes:
    return pickle.BININT1 + bytes((OPERATIONS.index(name),)) + pickle.BINPERSID


# The cost of each opcode without an argument, and its code for torch. Operations on two values get them as a tuple.
_CODES: dict[str, tuple[int, bytes]] = {
    "PROTO": (0, b""),
    "FRAME": (0, b""),
    "STOP": (0, pickle.STOP),
    "MARK": (_CONTAINER, pickle.MARK),
    "NONE": (_CONSTANT, pickle.NONE),
    "NEWTRUE": (_CONSTANT, pickle.NEWTRUE),
    "NEWFALSE": (_CONSTANT, pickle.NEWFALSE),
    "EMPTY_TUPLE": (_CONSTANT, pickle.EMPTY_TUPLE),
    "EMPTY_LIST": (_CONTAINER, pickle.EMPTY_LIST),
    "EMPTY_DICT": (_CONTAINER, pickle.EMPTY_DICT),
    "EMPTY_SET": (_SET, pickle.EMPTY_SET),
    "TUPLE1": (_CONTAINER, pickle.TUPLE1),
    "TUPLE2": (_CONTAINER, pickle.TUPLE2),
    "TUPLE3": (_CONTAINER, pickle.TUPLE3),
    "TUPLE": (_CONTAINER, pickle.TUPLE),
    "LIST": (_CONTAINER, pickle.TUPLE + _operation("list")),
    "DICT": (_CONTAINER, pickle.TUPLE + _operation("dict")),
    "FROZENSET": (_SET, pickle.TUPLE + _operation("frozenset")),
    "APPEND": (_CONSTANT, pickle.TUPLE1 + pickle.TUPLE2 + _operation("append")),
    "APPENDS": (_CONSTANT, pickle.TUPLE + pickle.TUPLE2 + _operation("append")),
    "SETITEM": (_CONSTANT, pickle.TUPLE2 + pickle.TUPLE2 + _operation("set items")),
    "SETITEMS": (_CONSTANT, pickle.TUPLE + pickle.TUPLE2 + _operation("set items")),
    "ADDITEMS": (_CONSTANT, pickle.TUPLE + pickle.TUPLE2 + _operation("add")),
    "STACK_GLOBAL": (_SCALAR, pickle.TUPLE2 + _operation("find")),
    "REDUCE": (_CALL, pickle.TUPLE2 + _operation("call")),
    # Every class here is made by a call, which does the same.
    "NEWOBJ": (_CALL, pickle.TUPLE2 + _operation("call")),
    "BUILD": (_CONTAINER, pickle.TUPLE2 + _operation("build")),
    "BINPERSID": (_STORAGE, _operation("load id")),
}
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_INTEGERS = frozenset(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"))
_PYTHON2_STRINGS = frozenset(("BINSTRING", "SHORT_BINSTRING"))
_TEXTS = frozenset(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"))
_SIZED = _PYTHON2_STRINGS | _TEXTS | frozenset(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"))
_VALUES = _SIZED | _INTEGERS | frozenset(("FLOAT", "BINFLOAT"))
_SMALL = [pickle.BININT1 + bytes((value,)) for value in range(256)]


def rewrite(stream: PickleStream, find: Callable[[tuple[str, str]], object]) -> tuple[bytes, list[object]]:
    """Return the next pickle of a stream in torch's opcodes, and the values that it refers to by persistent ids.

    Raises ValueError or struct.error for invalid pickles, and for opcodes that no checkpoint needs.

    Args:
        stream: The stream at the beginning of the pickle; afterwards, at its end.
        find: Returns what a module and a name in it mean, or raises.
    """
    spend = stream.spend
    code = bytearray(pickle.PROTO + b"\x02")
    values: list[object] = []
    # Pickles number many more values than they refer to: a value is only stored when something refers to it. These are
    # the places in the code of the value of each number, and the places that something refers to.
    places, first = array("Q"), 0
    wanted: set[int] = set()
    argument: Any
    for opcode, argument, _ in pickletools.genops(stream):  # type: ignore[arg-type]
        name = opcode.name
        known = _CODES.get(name)
        if known is not None:
            spend(known[0])
            code += known[1]
        elif name in _PUTS:
            spend(_PUT)
            if not places:
                first = argument or 0  # Python 2 numbers from 1
            index = len(places) if argument is None else argument - first
            if index == len(places):
                places.append(len(code))
            elif 0 <= index < len(places):
                places[index] = len(code)
            else:
                raise ValueError("values that are numbered out of order")
        elif name in _GETS:
            spend(_GET)
            if not 0 <= argument - first < len(places):
                raise ValueError("a reference to a value that was never given")
            place = places[argument - first]
            wanted.add(place)
            code += pickle.LONG_BINGET + struct.pack("<I", place)
        elif name in _INTEGERS and type(argument) is int and -(1 << 31) <= argument < 1 << 31:
            spend(_SCALAR)
            code += _integer(argument)
        elif name == "GLOBAL":
            spend(_SCALAR)
            code += _integer(len(OPERATIONS) + len(values)) + pickle.BINPERSID
            values.append(find(tuple(argument.split(" ", 1))))
        elif name in _VALUES:
            spend(_SCALAR + (4 * len(argument) if name in _SIZED else 0))
            code += _integer(len(OPERATIONS) + len(values)) + pickle.BINPERSID
            values.append(_value(argument, name))
        else:
            raise ValueError(f"opcode {name}, which no checkpoint needs")
    pieces: list[bytes | bytearray] = []
    at = 0
    for place in sorted(wanted):
        pieces += [code[at:place], pickle.LONG_BINPUT, struct.pack("<I", place)]
        at = place
    return b"".join([*pieces, code[at:]]), values


def _value(argument: Any, name: str) -> object:
    if name in _PYTHON2_STRINGS:
        # Python 2 wrote names and raw data alike as these; data that is not text can only be raw.
        data: bytes = argument.encode("latin-1")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data
    if type(argument) is int and argument.bit_length() > _MAX_INTEGER_BITS:
        raise ValueError(f"an integer of {argument.bit_length()} bits")
    return argument


def _integer(value: int) -> bytes:
    return _SMALL[value] if 0 <= value < 256 else pickle.BININT + struct.pack("<i", value)

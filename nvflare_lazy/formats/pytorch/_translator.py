# SPDX-License-Identifier: Apache-2.0
"""Checks a pickle of any protocol, and translates it into the few opcodes that torch's weights-only unpickler reads.

torch's unpickler decides what a checkpoint may call, but reads protocol 2 only and trusts the rest: a few bytes can
make it hash a tuple of a million million parts, or copy a list a million times. The translator follows the stack
without building anything, and refuses such pickles before torch sees them. Calls that torch does not make safely, or at
all, become *persistent ids*: tuples `("storage", function, arguments)` that `unpickler` carries out.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from array import array
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from nvflare_lazy.errors import NVFlareLazyError, PyTorchCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.formats.pytorch._stream import PickleStream

# About what they take in CPython, as the object that the pickle describes and while it is translated.
_CONSTANT, _SCALAR, _SLOT, _CONTAINER, _ITEM, _SET = 24, 64, 16, 80, 64, 280
# Objects without arguments, storages, and any other call: a tensor takes the most.
_EMPTY, _STORAGE_BYTES, _CALL = 120, 250, 600
_MAX_KEY_LEN = 8
_MAX_TUPLE_KEYS = 4096
_MAX_INTEGER_LEN = 255
# Below it an integer is its own hash, so no file can choose many that collide.
_LARGEST_KEY = 1 << 60
_LEN_STORAGE_ID = 5

Caller = Literal["torch", "ours", "ours with arguments", None]
Kind = Literal["list", "dict", "set", "bytes", "object", "global"]


class Name(NamedTuple):
    """What a global of the pickle means.

    Attributes:
        value: The value that torch's unpickler has for the name; if it has none, a function or an opaque object.
        is_known: Whether torch's unpickler has a value for the name.
        calls: The kind of function that a call runs; None if calls are refused.
        makes: The kind of object that a call returns.
    """

    value: object
    is_known: bool
    calls: Caller
    makes: Kind = "object"


class _Made:
    """A placeholder on the stack for an object that is not made yet; `weight` is the cost of copying it."""

    __slots__ = ("kind", "name", "weight")

    def __init__(self, kind: Kind, weight: int = _SLOT, name: Name | None = None) -> None:
        self.kind = kind
        self.weight = weight
        self.name = name


_STORAGE = pickle.BINUNICODE + struct.pack("<I", 7) + b"storage"
_MAKE_CALL = pickle.TUPLE3 + pickle.BINPERSID
_SMALL = [pickle.BININT1 + bytes((value,)) for value in range(256)]
_CONSTANTS = {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}


class PickleTranslator:
    """Translates one pickle.

    Args:
        stream: The stream at its beginning; afterwards, at its end.
        find_name: Returns the meaning of a dotted name, or raises.
        extend: The function that puts a tuple of items into a set or an opaque object.
        build: The function that gives an object its state.
        make_frozen_set: The function that makes a frozenset of a tuple.
        load_other_id: The function that takes a persistent id that is not a tuple.

    Attributes:
        values: What the translation refers to by index, in persistent ids `("storage", index)`.
    """

    def __init__(
        self,
        stream: PickleStream,
        find_name: Callable[[str], Name],
        extend: Callable[..., object],
        build: Callable[..., object],
        make_frozen_set: Callable[..., object],
        load_other_id: Callable[..., object],
    ) -> None:
        self.values: list[object] = [extend, build, make_frozen_set, load_other_id, _first]
        self._extend, self._build, self._frozen_set, self._load_id, self._first = map(_value, range(5))
        self._stream = stream
        self._find_name = find_name
        self._spend = stream.limit.spend
        # The translation in pieces. Each value on the stack knows its first piece: a call can still get in front of it.
        self._pieces: list[bytes] = [pickle.PROTO + b"\x02"]
        self._stack: list[object] = []
        self._starts = array("Q")
        self._marks: list[tuple[int, int]] = []
        # Values that the pickle may refer to, and the last piece of each; Python 2 counts them from 1.
        self._memo: list[object] = []
        self._memo_pieces = array("Q")
        self._first_memo = 0
        self._remembered: set[int] = set()
        self._names: dict[str, tuple[object, bytes]] = {}
        self._tuple_keys = 0

    def translate(self) -> bytes:
        """Return the pickle in the opcodes that torch reads."""
        try:
            for opcode, argument, _ in pickletools.genops(self._stream):  # type: ignore[arg-type]
                action = _ACTIONS.get(opcode.name)
                if action is None:
                    raise self._malformed(f"opcode {opcode.name}, which no checkpoint needs")
                action(self, argument)
        except NVFlareLazyError:
            raise
        except IndexError:
            raise self._malformed("too few values for an opcode") from None
        except (ValueError, struct.error) as error:
            raise self._malformed(f"an opcode that makes no sense ({str(error)[:200]})") from None
        return b"".join(self._pieces)

    def _malformed(self, what: str) -> PyTorchCheckpointError:
        return PyTorchCheckpointError(
            f"{self._stream.path}: the pickle has {what}: the file is damaged, or holds more than a state dict"
        )

    # ---- the stack ---------------------------------------------------------------------------------------------

    def _push(self, value: object, code: bytes, weight: int = _SCALAR) -> None:
        self._spend(weight)
        self._stack.append(value)
        self._starts.append(len(self._pieces))
        self._pieces.append(code)

    def _pop(self) -> object:
        if self._marks and len(self._stack) == self._marks[-1][0]:
            raise IndexError
        self._starts.pop()
        return self._stack.pop()

    def _top(self) -> tuple[object, int]:
        if self._marks and len(self._stack) == self._marks[-1][0]:
            raise IndexError
        return self._stack[-1], self._starts[-1]

    def _pop_to_mark(self) -> tuple[list[object], int]:
        """Return the values since the last mark, and the piece that is the mark."""
        if not self._marks:
            raise self._malformed("the end of a group that never began")
        height, piece = self._marks.pop()
        values = self._stack[height:]
        del self._stack[height:], self._starts[height:]
        return values, piece

    def _in_front(self, piece: int, code: bytes) -> None:
        # Counted, because calls around one value could be nested without end.
        self._spend(len(self._pieces[piece]) + len(code))
        self._pieces[piece] = code + self._pieces[piece]

    def _scalar(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind is bool:
            self._push(value, _CONSTANTS[value], _CONSTANT)
        elif kind is int:
            if 0 <= value < len(_SMALL):
                self._push(value, _SMALL[value], _CONSTANT)
            elif -(1 << 31) <= value < 1 << 31:
                self._push(value, pickle.BININT + struct.pack("<i", value))
            else:
                code = pickle.encode_long(value)
                if len(code) > _MAX_INTEGER_LEN:
                    raise self._malformed(f"an integer of {len(code)} bytes")
                self._push(value, pickle.LONG1 + bytes((len(code),)) + code)
        elif kind is float:
            self._push(value, pickle.BINFLOAT + struct.pack(">d", value))
        elif kind is str:
            code = value.encode("utf-8", "surrogatepass")
            self._push(value, pickle.BINUNICODE + struct.pack("<I", len(code)) + code, _SCALAR + 4 * len(code))
        else:
            self._push(value, self._refer_to(value), _SCALAR + 4 * len(value))

    def _python2_string(self, text: str) -> None:
        # Python 2 wrote names and raw data alike as these; data that is not text can only be raw.
        data = text.encode("latin-1")
        try:
            self._scalar(data.decode())
        except UnicodeDecodeError:
            self._scalar(data)

    def _refer_to(self, value: object) -> bytes:
        self.values.append(value)
        return _value(len(self.values) - 1)

    def _stop(self, _: None) -> None:
        if len(self._stack) != 1 or self._marks:
            raise self._malformed("an end where it is not finished")
        self._pieces.append(pickle.STOP)

    def _mark(self, _: None) -> None:
        self._spend(_CONTAINER)
        self._marks.append((len(self._stack), len(self._pieces)))
        self._pieces.append(pickle.MARK)

    def _put(self, index: int) -> None:
        # Pickles number many more values than they refer to: a value is only stored when something refers to it.
        self._spend(_SLOT)
        remembered = self._top()[0], len(self._pieces) - 1
        if not self._memo:
            self._first_memo = index
        place = index - self._first_memo
        if place == len(self._memo):
            self._memo.append(remembered[0])
            self._memo_pieces.append(remembered[1])
        elif 0 <= place < len(self._memo):
            self._memo[place], self._memo_pieces[place] = remembered
        else:
            raise self._malformed("values that are numbered out of order")

    def _get(self, index: int) -> None:
        place = index - self._first_memo
        if not 0 <= place < len(self._memo):
            raise self._malformed("a reference to a value that was never given")
        value, piece = self._memo[place], self._memo_pieces[place]
        number = struct.pack("<I", piece)
        if piece not in self._remembered:
            self._remembered.add(piece)
            self._pieces[piece] += pickle.LONG_BINPUT + number
        self._push(value, pickle.LONG_BINGET + number, _SLOT)

    # ---- containers --------------------------------------------------------------------------------------------

    def _tuple(self, count: int, code: bytes) -> None:
        values = tuple(self._pop() for _ in range(count - 1))[::-1]
        self._stack[-1] = (self._top()[0], *values)
        self._spend(_CONTAINER)
        self._pieces.append(code)

    def _marked(self, value: object, piece: int, code: bytes, weight: int) -> None:
        self._spend(weight)
        self._stack.append(value)
        self._starts.append(piece)
        self._pieces.append(code)

    def _marked_tuple(self, _: None) -> None:
        values, piece = self._pop_to_mark()
        self._marked(tuple(values), piece, pickle.TUPLE, _CONTAINER + _SLOT * len(values))

    def _marked_list(self, _: None) -> None:
        values, piece = self._pop_to_mark()
        self._in_front(piece, pickle.EMPTY_LIST)
        self._marked(_Made("list", _SLOT * len(values)), piece, pickle.APPENDS, _CONTAINER + _SLOT * len(values))

    def _marked_dict(self, _: None) -> None:
        values, piece = self._pop_to_mark()
        self._check_keys(values)
        self._in_front(piece, pickle.EMPTY_DICT)
        self._marked(_Made("dict", _ITEM * len(values)), piece, pickle.SETITEMS, _CONTAINER + _ITEM * len(values))

    def _marked_frozen_set(self, _: None) -> None:
        values, piece = self._pop_to_mark()
        for value in values:
            self._check_key(value)
        self._in_front(piece, _STORAGE + self._frozen_set)
        weight = _ITEM * len(values)
        self._marked(_Made("object", weight), piece, pickle.TUPLE + pickle.TUPLE1 + _MAKE_CALL, _SET + weight)

    def _items(self, kind: Kind, is_one: bool) -> None:
        """Add items, or keys and values, to the container below them."""
        if is_one:
            items = [self._pop() for _ in range(2 if kind == "dict" else 1)][::-1]
        else:
            items, _ = self._pop_to_mark()
        target, start = self._top()
        if type(target) is not _Made or target.kind not in (kind, "object"):
            raise self._malformed(f"items for a {_kind(target)}, which is not a {kind}")
        if kind == "dict":
            self._check_keys(items)
        elif kind == "set":
            for item in items:
                self._check_key(item)
        weight = (_SLOT if kind == "list" else _ITEM) * len(items)
        self._spend(weight)
        target.weight += weight
        if target.kind == kind != "set":
            self._pieces.append(_ADDING[kind, is_one])
        else:
            self._in_front(start, _STORAGE + self._extend)
            self._pieces.append(_GROUPING[len(items)] if is_one else pickle.TUPLE)
            self._pieces.append(pickle.TUPLE2 + _MAKE_CALL)

    def _check_keys(self, items: list[object]) -> None:
        if len(items) % 2:
            raise self._malformed("a key without a value")
        for key in items[::2]:
            self._check_key(key)

    def _check_key(self, key: object) -> None:
        if type(key) is _Made and key.kind == "bytes":
            return
        if type(key) is tuple and len(key) <= _MAX_KEY_LEN and all(map(is_plain_key, key)):
            # Tuples that collide are easily made; so many of them cost less than a second.
            self._tuple_keys += 1
            if self._tuple_keys <= _MAX_TUPLE_KEYS:
                return
        if not is_plain_key(key):
            raise self._malformed(
                f"a {_kind(key)} as a key; keys must be text, numbers, bytes, dtypes or None, or a few tuples of them"
            )

    # ---- names and calls ---------------------------------------------------------------------------------------

    def _global(self, argument: str) -> None:
        self._push(*self._lookup(*argument.split(" ", 1)))

    def _stack_global(self, _: None) -> None:
        name = self._pop()
        module, start = self._top()
        if type(module) is not str or type(name) is not str:
            raise self._malformed("a global whose name is not text")
        value, code = self._lookup(module, name)
        # The texts stay, since they may be referred to: they become arguments of a function that ignores them.
        self._in_front(start, _STORAGE + self._first + code)
        self._pieces.append(pickle.TUPLE3 + _MAKE_CALL)
        self._stack[-1] = value

    def _lookup(self, module: str, name: str) -> tuple[object, bytes]:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        module = IMPORT_MAPPING.get(module, module)
        dotted = f"{module}.{name}"
        known = self._names.get(dotted)
        if known is None:
            found = self._find_name(dotted)
            value: object = found.value if type(found.value) is torch.dtype else _Made("global", name=found)
            code = f"c{module}\n{name}\n".encode() if found.is_known else self._refer_to(found.value)
            known = self._names[dotted] = value, code
        return known

    def _reduce(self, _: None) -> None:
        arguments = self._pop()
        called, start = self._top()
        if type(called) is not _Made or called.name is None or called.name.calls is None:
            raise self._malformed(f"a call of {_kind(called)}")
        if type(arguments) is not tuple:
            raise self._malformed("a call without a tuple of arguments")
        # A function copies its arguments, and the items of tuples among them, at most once, even if they are shared.
        weight = sum(map(_weight, arguments))
        weight += sum(sum(map(_weight, part)) for part in arguments if type(part) is tuple)
        self._spend((_CALL if arguments else _EMPTY) + weight)
        if called.name.calls == "torch" or (called.name.calls == "ours with arguments" and not arguments):
            self._pieces.append(pickle.REDUCE)
        else:
            self._in_front(start, _STORAGE)
            self._pieces.append(_MAKE_CALL)
        self._stack[-1] = _Made(called.name.makes, weight)

    def _build_object(self, _: None) -> None:
        self._pop()
        start = self._top()[1]
        self._in_front(start, _STORAGE + self._build)
        self._spend(_CONTAINER)
        self._pieces.append(pickle.TUPLE2 + _MAKE_CALL)

    def _persistent_id(self, _: None) -> None:
        value, start = self._top()
        if type(value) is tuple and len(value) >= _LEN_STORAGE_ID:
            self._pieces.append(pickle.BINPERSID)
        else:
            self._in_front(start, _STORAGE + self._load_id)
            self._pieces.append(pickle.TUPLE1 + _MAKE_CALL)
        self._spend(_STORAGE_BYTES)
        self._stack[-1] = _Made("object")


def is_plain_key(key: object) -> bool:
    """Whether a dict or set may hold `key`: hashing it is quick, and no file can choose many that collide."""
    if type(key) is int:
        return -_LARGEST_KEY < key < _LARGEST_KEY
    return type(key) in (str, bytes, bool, float, type(None), torch.dtype)


def _first(value: object, *_: object) -> object:
    return value


def _value(index: int) -> bytes:
    return _STORAGE + pickle.BININT + struct.pack("<i", index) + pickle.TUPLE2 + pickle.BINPERSID


def _kind(value: object) -> str:
    # Never the value itself: a few bytes of pickle can describe one whose text has no end.
    return value.kind if type(value) is _Made else type(value).__name__


def _weight(value: object) -> int:
    if type(value) is _Made:
        return value.weight
    if type(value) in (tuple, str, bytes, bytearray):
        return _SLOT + len(value) * (_SLOT if type(value) is tuple else 1)  # type: ignore[arg-type]
    return _SLOT


_ADDING = {
    ("list", True): pickle.APPEND,
    ("list", False): pickle.APPENDS,
    ("dict", True): pickle.SETITEM,
    ("dict", False): pickle.SETITEMS,
}
_GROUPING = {1: pickle.TUPLE1, 2: pickle.TUPLE2}
_ACTIONS: dict[str, Callable[[PickleTranslator, Any], None]] = {
    "PROTO": lambda self, _: None,
    "FRAME": lambda self, _: None,
    "STOP": PickleTranslator._stop,
    "MARK": PickleTranslator._mark,
    "MEMOIZE": lambda self, _: self._put(self._first_memo + len(self._memo)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), PickleTranslator._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), PickleTranslator._get),
    "NONE": PickleTranslator._scalar,
    "NEWTRUE": lambda self, _: self._scalar(True),
    "NEWFALSE": lambda self, _: self._scalar(False),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), PickleTranslator._scalar),
    **dict.fromkeys(("FLOAT", "BINFLOAT"), PickleTranslator._scalar),
    **dict.fromkeys(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), PickleTranslator._scalar),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), PickleTranslator._scalar),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), PickleTranslator._python2_string),
    "EMPTY_TUPLE": lambda self, _: self._push((), pickle.EMPTY_TUPLE, _SLOT),
    "EMPTY_LIST": lambda self, _: self._push(_Made("list"), pickle.EMPTY_LIST, _CONTAINER),
    "EMPTY_DICT": lambda self, _: self._push(_Made("dict"), pickle.EMPTY_DICT, _CONTAINER),
    "EMPTY_SET": lambda self, _: self._push(_Made("set"), b"cbuiltins\nset\n)R", _SET),
    "TUPLE1": lambda self, _: self._tuple(1, pickle.TUPLE1),
    "TUPLE2": lambda self, _: self._tuple(2, pickle.TUPLE2),
    "TUPLE3": lambda self, _: self._tuple(3, pickle.TUPLE3),
    "TUPLE": PickleTranslator._marked_tuple,
    "LIST": PickleTranslator._marked_list,
    "DICT": PickleTranslator._marked_dict,
    "FROZENSET": PickleTranslator._marked_frozen_set,
    "APPEND": lambda self, _: self._items("list", is_one=True),
    "APPENDS": lambda self, _: self._items("list", is_one=False),
    "SETITEM": lambda self, _: self._items("dict", is_one=True),
    "SETITEMS": lambda self, _: self._items("dict", is_one=False),
    "ADDITEMS": lambda self, _: self._items("set", is_one=False),
    "GLOBAL": PickleTranslator._global,
    "STACK_GLOBAL": PickleTranslator._stack_global,
    "REDUCE": PickleTranslator._reduce,
    # Every class here is made by a call, which does the same.
    "NEWOBJ": PickleTranslator._reduce,
    "BUILD": PickleTranslator._build_object,
    "BINPERSID": PickleTranslator._persistent_id,
}

# SPDX-License-Identifier: Apache-2.0
"""Takes a pickle apart without running anything: globals come from a table of ours, the rest is plain data.

Stands between the bytes of a PyTorch checkpoint and the records that say where its tensors lie. It is a machine of its
own because Python's can be made to allocate gigabytes by a few bytes, and looks up every name in real modules.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from nvflare_lazy.errors import MalformedPickleError, NVFlareLazyError
from nvflare_lazy.formats.pickle_stream import SCALARS
from nvflare_lazy.formats.pickled_numpy import PickledArray, PickledDtype
from nvflare_lazy.formats.pickled_tensors import AttributeBag, Global, TensorRef, UnsupportedTensor, is_plain_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.formats.pickle_stream import PickleStream

_LONGEST_KEY = 8
_MOST_TUPLE_KEYS = 4096
# About what one of them takes in CPython.
_SCALAR, _SLOT, _CONTAINER, _PAIR, _SET = 32, 8, 64, 100, 232
_HIGHEST_PROTOCOL = 5


class RestrictedUnpickler:
    """Reads one pickle.

    Args:
        stream: Where it begins; afterwards, what follows it.
        find_global: Answers a module and a name with a `Global` or a constant, or raises.
        persistent_load: Answers a persistent id with a record; ValueError if it makes no sense.
    """

    def __init__(
        self,
        stream: PickleStream,
        find_global: Callable[[str, str], object],
        persistent_load: Callable[[object], object],
    ) -> None:
        self._stream = stream
        self._find_global = find_global
        self._persistent_load = persistent_load
        self._spend = stream.budget.spend
        self._memo: dict[int, object] = {}
        self._stack: list[object] = []
        self._marks: list[list[object]] = []
        self._tuple_keys = 0

    def load(self) -> object:
        """Return what the pickle describes, in records and plain Python."""
        stream = self._stream
        while (opcode := stream.read_byte()) != pickle.STOP[0]:
            scalar = SCALARS.get(opcode)
            if scalar is not None:
                self._push_new(scalar(stream), _SCALAR)
                continue
            action = _ACTIONS.get(opcode)
            if action is None:
                raise self._malformed(f"opcode {bytes([opcode])!r}, which no checkpoint needs")
            action(self)
        if len(self._stack) != 1 or self._marks:
            raise self._malformed("an end where it is not finished")
        return self._stack.pop()

    def _malformed(self, what: str) -> MalformedPickleError:
        return MalformedPickleError(
            f"{self._stream.path}: the pickle has {what}: the file is damaged, or holds more than a state dict"
        )

    def _pop(self) -> object:
        if not self._stack:
            raise self._malformed("too few values for an opcode")
        return self._stack.pop()

    def _top(self) -> object:
        if not self._stack:
            raise self._malformed("too few values for an opcode")
        return self._stack[-1]

    def _push_new(self, value: object, weight: int) -> None:
        self._spend(weight)
        self._stack.append(value)

    # ---- framing, marks, memo ----------------------------------------------------------------------------------

    def _protocol(self) -> None:
        if self._stream.read_byte() > _HIGHEST_PROTOCOL:
            raise self._malformed("a protocol that does not exist yet")

    def _frame(self) -> None:
        self._stream.read(8)

    def _mark(self) -> None:
        self._spend(_CONTAINER)
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[object]:
        if not self._marks:
            raise self._malformed("the end of a group that never began")
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _put(self, index: int) -> None:
        self._spend(_PAIR)
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self._malformed("a reference to a value that was never given")
        self._push_new(self._memo[index], _SLOT)

    def _memoize(self) -> None:
        self._put(len(self._memo))

    def _index_line(self) -> int:
        line = self._stream.read_line()
        if not line.isdigit() or len(line) > 10:
            raise self._malformed("a reference that is not a number")
        return int(line)

    def _index(self, width: int) -> int:
        return int.from_bytes(self._stream.read(width), "little")

    # ---- containers --------------------------------------------------------------------------------------------

    def _tuple(self, count: int) -> None:
        items = tuple(self._pop() for _ in range(count))[::-1]
        self._push_new(items, _CONTAINER)

    def _marked_tuple(self) -> None:
        items = self._since_mark()
        self._push_new(tuple(items), _CONTAINER + _SLOT * len(items))

    def _marked_list(self) -> None:
        items = self._since_mark()
        self._push_new(items, _CONTAINER + _SLOT * len(items))

    def _marked_dict(self) -> None:
        items = self._since_mark()
        self._push_new({}, _CONTAINER)
        self._fill_dict(items)

    def _frozen_set(self) -> None:
        items = self._since_mark()
        for item in items:
            self._check_key(item)
        self._push_new(frozenset(items), _SET + _PAIR * len(items))

    def _extend(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is not list:
            raise self._malformed(f"items for a {_kind(target)}, which is no list")
        self._spend(2 * _SLOT * len(items))
        target.extend(items)

    def _fill_dict(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is not dict or len(items) % 2:
            raise self._malformed(f"keys and values for a {_kind(target)}, or a key without a value")
        self._spend(_PAIR * len(items))
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._check_key(key)
            target[key] = value

    def _fill_set(self) -> None:
        items = self._since_mark()
        target = self._top()
        if type(target) is not set:
            raise self._malformed(f"members for a {_kind(target)}, which is no set")
        self._spend(_PAIR * len(items))
        for item in items:
            self._check_key(item)
            target.add(item)

    def _append(self) -> None:
        self._extend([self._pop()])

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._fill_dict([key, value])

    def _check_key(self, key: object) -> None:
        if type(key) is tuple and len(key) <= _LONGEST_KEY and all(map(is_plain_key, key)):
            # Tuples that collide are easily made; so many of them cost less than a second.
            self._tuple_keys += 1
            if self._tuple_keys <= _MOST_TUPLE_KEYS:
                return
        if not is_plain_key(key):
            raise self._malformed(
                f"a {_kind(key)} as a key; keys must be text, numbers, bytes, dtypes or None, or a few tuples of them"
            )

    # ---- what would run code elsewhere -------------------------------------------------------------------------

    def _global(self) -> None:
        module, name = self._stream.read_line(), self._stream.read_line()
        self._push_global(module.decode("utf-8", "backslashreplace"), name.decode("utf-8", "backslashreplace"))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(module) is not str or type(name) is not str:
            raise self._malformed("a global whose name is not text")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        self._push_new(self._find_global(module, name), _SCALAR)

    def _reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        self._call(called, arguments)

    def _new_object(self) -> None:
        arguments, called = self._pop(), self._pop()
        if type(called) is not Global or not called.is_class:
            raise self._malformed(f"a new object of {_kind(called)}, which is no class")
        self._call(called, arguments)

    def _new_object_with_names(self) -> None:
        names = self._pop()
        if type(names) is not dict or names:
            raise self._malformed("a new object with named arguments")
        self._new_object()

    def _call(self, called: object, arguments: object) -> None:
        if type(called) is not Global:
            raise self._malformed(f"a call of {_kind(called)}")
        if type(arguments) is not tuple:
            raise self._malformed(f"a call of {called.name} without a tuple of arguments")
        # A builder copies its arguments at most once, whatever else shares them.
        self._spend(_CONTAINER + sum(map(_weight, arguments)))
        try:
            self._stack.append(called.build(*arguments))
        except NVFlareLazyError:
            raise
        except (TypeError, ValueError) as error:
            raise self._malformed(f"a call of {called.name} that makes no sense ({error})") from None

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        self._spend(_weight(state))
        kind = type(target)
        if kind is dict:
            return  # attributes of an OrderedDict, such as the `_metadata` of a state dict
        if kind in (TensorRef, UnsupportedTensor):
            # A parameter's gradient flag and hooks, or attributes; four or five items would be another tensor.
            if type(state) is tuple and len(state) > 3:
                raise self._malformed("a tensor that is replaced by its own state")
            return
        if not isinstance(target, (AttributeBag, PickledArray, PickledDtype)):
            raise self._malformed(f"a state for a {_kind(target)}")
        try:
            target.set_state(state)
        except (TypeError, ValueError) as error:
            raise self._malformed(f"a {_kind(target)} that makes no sense ({error})") from None

    def _persistent(self) -> None:
        persistent_id = self._pop()
        try:
            self._push_new(self._persistent_load(persistent_id), _PAIR)
        except NVFlareLazyError:
            raise
        except (TypeError, ValueError) as error:
            raise self._malformed(f"a storage that makes no sense ({error})") from None


def _kind(value: object) -> str:
    # Never the value itself: a few bytes of pickle can describe one whose text has no end.
    return value.name if type(value) is Global else type(value).__name__


def _weight(argument: object) -> int:
    if type(argument) in (dict, list, set, frozenset, tuple):
        return _PAIR * len(argument)  # type: ignore[arg-type]
    if type(argument) in (str, bytes, bytearray):
        return len(argument)  # type: ignore[arg-type]
    return _SLOT


_ACTIONS: dict[int, Callable[[RestrictedUnpickler], object]] = {
    pickle.PROTO[0]: RestrictedUnpickler._protocol,
    pickle.FRAME[0]: RestrictedUnpickler._frame,
    pickle.MARK[0]: RestrictedUnpickler._mark,
    pickle.POP[0]: RestrictedUnpickler._pop,
    pickle.POP_MARK[0]: RestrictedUnpickler._since_mark,
    pickle.MEMOIZE[0]: RestrictedUnpickler._memoize,
    pickle.PUT[0]: lambda self: self._put(self._index_line()),
    pickle.BINPUT[0]: lambda self: self._put(self._index(1)),
    pickle.LONG_BINPUT[0]: lambda self: self._put(self._index(4)),
    pickle.GET[0]: lambda self: self._get(self._index_line()),
    pickle.BINGET[0]: lambda self: self._get(self._index(1)),
    pickle.LONG_BINGET[0]: lambda self: self._get(self._index(4)),
    pickle.EMPTY_TUPLE[0]: lambda self: self._stack.append(()),
    pickle.EMPTY_LIST[0]: lambda self: self._push_new([], _CONTAINER),
    pickle.EMPTY_DICT[0]: lambda self: self._push_new({}, _CONTAINER),
    pickle.EMPTY_SET[0]: lambda self: self._push_new(set(), _SET),
    pickle.TUPLE[0]: RestrictedUnpickler._marked_tuple,
    pickle.TUPLE1[0]: lambda self: self._tuple(1),
    pickle.TUPLE2[0]: lambda self: self._tuple(2),
    pickle.TUPLE3[0]: lambda self: self._tuple(3),
    pickle.LIST[0]: RestrictedUnpickler._marked_list,
    pickle.DICT[0]: RestrictedUnpickler._marked_dict,
    pickle.FROZENSET[0]: RestrictedUnpickler._frozen_set,
    pickle.APPEND[0]: RestrictedUnpickler._append,
    pickle.APPENDS[0]: lambda self: self._extend(self._since_mark()),
    pickle.SETITEM[0]: RestrictedUnpickler._set_item,
    pickle.SETITEMS[0]: lambda self: self._fill_dict(self._since_mark()),
    pickle.ADDITEMS[0]: RestrictedUnpickler._fill_set,
    pickle.GLOBAL[0]: RestrictedUnpickler._global,
    pickle.STACK_GLOBAL[0]: RestrictedUnpickler._stack_global,
    pickle.REDUCE[0]: RestrictedUnpickler._reduce,
    pickle.NEWOBJ[0]: RestrictedUnpickler._new_object,
    pickle.NEWOBJ_EX[0]: RestrictedUnpickler._new_object_with_names,
    pickle.BUILD[0]: RestrictedUnpickler._build,
    pickle.BINPERSID[0]: RestrictedUnpickler._persistent,
}

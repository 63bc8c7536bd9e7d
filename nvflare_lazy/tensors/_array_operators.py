# SPDX-License-Identifier: Apache-2.0
"""The operators of `LazyArray`, which call the operators of the loaded array.

They do not use NumPy's mixin, which calls ufuncs: `array ** 2` and `array == "text"`, for example, differ from ufuncs.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from nvflare_lazy.tensors._undispatched_methods import raise_immutable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self: function(self._load())


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: function(self._load(), self._loaded(other))


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: function(other, self._load())


def _raising(sign: str) -> Any:
    return lambda self, other: raise_immutable(sign, "array")


class ArrayOperators:
    """Python's operators, by way of `_load()`."""

    __slots__ = ()

    if TYPE_CHECKING:

        def _load(self) -> np.ndarray[Any, Any]:
            """Return the loaded array."""

        @staticmethod
        def _loaded(value: Any) -> Any:
            """Return the value with lazy arrays replaced by loaded ones."""

    __hash__ = None  # type: ignore[assignment]

    __lt__, __le__, __gt__, __ge__ = map(_binary, (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = map(_binary, (operator.eq, operator.ne))

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __divmod__, __rdivmod__ = _binary(divmod), _reflected(divmod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)

    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(abs), _unary(operator.invert)

    __iadd__, __isub__, __imul__ = map(_raising, ("+=", "-=", "*="))
    __itruediv__, __ifloordiv__, __imod__ = map(_raising, ("/=", "//=", "%="))
    __ipow__, __imatmul__ = map(_raising, ("**=", "@="))
    __iand__, __ior__, __ixor__ = map(_raising, ("&=", "|=", "^="))
    __ilshift__, __irshift__ = map(_raising, ("<<=", ">>="))

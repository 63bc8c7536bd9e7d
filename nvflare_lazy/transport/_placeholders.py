# SPDX-License-Identifier: Apache-2.0
"""Placeholders for tensors and arrays in a message, and the references to the payloads that contain them.

The placeholders of a message's first payload are as NVFlare writes them, those of further payloads name theirs. A
placeholder also has the value's dtype and shape, which a receiver without this package does not look at.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.transport import _nvflare_private

if TYPE_CHECKING:
    from nvflare.fuel.utils.fobs.datum import Datum

    from nvflare_lazy.transport._backends import ArrayBackend

_SEPARATOR = "@"
_DTYPE = "dtype"
_SHAPE = "shape"
_MAX_AXES = 64
_MAX_NBYTES = 1 << 62
_MAX_LOCATION = 4096
# A forwarded message may mix payloads; each costs its receiver a download.
_MAX_PAYLOADS = 256


class OutgoingPayloads:
    """The payloads that a message refers to, in the order in which its values refer to them."""

    def __init__(self) -> None:
        self.payloads: dict[str, str | None] = {}

    def placeholder(self, ref_id: str, fqcn: str | None, item_id: str) -> dict[str, Any]:
        """Return the placeholder for an item."""
        self.payloads.setdefault(ref_id, fqcn)
        first = next(iter(self.payloads))
        content = item_id if ref_id == first else f"{item_id}{_SEPARATOR}{ref_id}"
        return {_nvflare_private.ENC_TYPE: _nvflare_private.ENC_REF, _nvflare_private.ENC_DATA: content}


class IncomingPayloads:
    """The payloads of a message that is decoded; a placeholder that names none refers to the last one."""

    def __init__(self) -> None:
        self._by_ref: dict[str, Any] = {}
        self._last: Any = None

    def check_room(self) -> None:
        """Raise unless the message may refer to one more payload."""
        if len(self._by_ref) >= _MAX_PAYLOADS:
            raise ProtocolError(f"the message refers to more than {_MAX_PAYLOADS} payloads")

    def add(self, ref_id: str, payload: Any) -> None:
        """Add the next payload."""
        self._by_ref[ref_id] = self._last = payload

    def replace(self, old: Any, new: Any) -> Any:
        """Put another payload into the place of one; return it."""
        self._by_ref = {ref_id: new if payload is old else payload for ref_id, payload in self._by_ref.items()}
        self._last = new if self._last is old else self._last
        return new

    def find(self, content: str) -> Any:
        """Return the payload that a placeholder belongs to, or None."""
        _, separator, ref_id = content.partition(_SEPARATOR)
        return self._by_ref.get(ref_id) if separator else self._last


class PayloadReference(NamedTuple):
    """A payload that stays with its sender; `decided` once this process has decided not to take it."""

    fqcn: str
    ref_id: str
    secure: bool
    decided: bool = False


def item_of(content: str) -> str:
    """Return the item that a placeholder names."""
    return content.partition(_SEPARATOR)[0]


def description(backend: ArrayBackend, dtype: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the part of a placeholder that describes its value."""
    return {_DTYPE: backend.encode_dtype(dtype), _SHAPE: list(shape)}


def described(backend: ArrayBackend, placeholder: dict[str, Any]) -> tuple[Any, tuple[int, ...] | None]:
    """Return dtype and shape of a placeholder's value; None for both if they are missing or invalid."""
    shape = placeholder.get(_SHAPE)
    try:
        dtype = backend.decode_dtype(_as_tuples(placeholder.get(_DTYPE)))
    except RecursionError:
        dtype = None
    if dtype is None or not isinstance(shape, list) or len(shape) > _MAX_AXES:
        return None, None
    if not all(type(size) is int and 0 <= size < _MAX_NBYTES for size in shape):
        return None, None
    if backend.nbytes(dtype, tuple(max(size, 1) for size in shape)) >= _MAX_NBYTES:
        return None, None
    return dtype, tuple(shape)


def location_of(datum: Datum) -> tuple[str, str]:
    """Return the cell that has a payload, and NVFlare's name for the payload there."""
    value = datum.value
    if not isinstance(value, (str, bytes)) or len(value) > _MAX_LOCATION:
        raise ProtocolError(f"invalid datum: expected a short text, got {type(value).__name__} {quoted(value)}")
    try:
        location = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid datum: missing download location: {error}") from None
    fqcn = location.get(_nvflare_private.DATUM_FQCN) if isinstance(location, dict) else None
    ref_id = location.get(_nvflare_private.DATUM_REF_ID) if isinstance(location, dict) else None
    if not isinstance(fqcn, str) or not isinstance(ref_id, str) or not fqcn or not ref_id:
        raise ProtocolError(f"invalid datum: missing download location: {quoted(value)}")
    return fqcn, ref_id


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value

# SPDX-License-Identifier: Apache-2.0
"""Placeholders for tensors and arrays in a message, and the references to the payloads that contain them.

The placeholders of a message's first payload are as NVFlare writes them, those of further payloads name theirs. A
placeholder also has the value's dtype and shape, which a receiver without this package does not look at.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.transport import _nvflare_private

if TYPE_CHECKING:
    from nvflare.fuel.utils.fobs.datum import Datum

    from nvflare_lazy.transport._backends import ArrayBackend

_SEPARATOR = "@"
_DTYPE = "dtype"
_SHAPE = "shape"


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

    def add(self, ref_id: str, payload: Any) -> None:
        """Add the next payload."""
        self._by_ref[ref_id] = self._last = payload

    def find(self, content: str) -> Any:
        """Return the payload that a placeholder belongs to, or None."""
        _, separator, ref_id = content.partition(_SEPARATOR)
        return self._by_ref.get(ref_id) if separator else self._last


class PayloadReference(NamedTuple):
    """A payload that stays with its sender."""

    fqcn: str
    ref_id: str
    secure: bool


def item_of(content: str) -> str:
    """Return the item that a placeholder names."""
    return content.partition(_SEPARATOR)[0]


def description(backend: ArrayBackend, dtype: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the part of a placeholder that describes its value."""
    return {_DTYPE: backend.encode_dtype(dtype), _SHAPE: list(shape)}


def described(backend: ArrayBackend, placeholder: dict[str, Any]) -> tuple[Any, tuple[int, ...] | None]:
    """Return dtype and shape of a placeholder's value; None for both if they are missing or invalid."""
    shape, encoded = placeholder.get(_SHAPE), placeholder.get(_DTYPE)
    if isinstance(encoded, list):
        encoded = _as_tuples(encoded)
    dtype = None if encoded is None else backend.decode_dtype(encoded)
    if dtype is None or not isinstance(shape, list) or len(shape) > 64:
        return None, None
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        return None, None
    return dtype, tuple(shape)


def location_of(datum: Datum) -> tuple[str, str]:
    """Return the cell that has a payload, and NVFlare's name for the payload there."""
    try:
        location = json.loads(datum.value)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"invalid datum: missing download location: {error}") from None
    fqcn = location.get(_nvflare_private.DATUM_FQCN) if isinstance(location, dict) else None
    ref_id = location.get(_nvflare_private.DATUM_REF_ID) if isinstance(location, dict) else None
    if not isinstance(fqcn, str) or not isinstance(ref_id, str) or not fqcn or not ref_id:
        raise ProtocolError(f"invalid datum: missing download location: {str(datum.value)[:200]}")
    return fqcn, ref_id


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value

# SPDX-License-Identifier: Apache-2.0
"""The list of a payload's tensors that a sender sends first: names, types, shapes, and offsets of their bytes.

The bytes of all tensors are contiguous, and both ends address them by offset. A received manifest is untrusted input:
everything in it is checked before a byte of disk or memory is reserved for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.transport.limits import PayloadLimits, PayloadSize

if TYPE_CHECKING:
    from nvflare_lazy.transport._backends import ArrayBackend

VERSION = 1
_MAX_BYTES = 64 << 20
_MAX_NAME_BYTES = 4096
# Bytes of a record without its name, which may include the fields of a structured NumPy type.
_USUAL_RECORD_BYTES = 128
_EXTRA_BYTES = 64 << 10
# Memory that decoding and the headers of the files take, measured: up to 300 bytes for an item, 400 for its entry in a
# header, and six times the name if JSON escapes every character.
_ITEM_COST = 1000
_BYTE_COST = 8
_READ_BYTES = 64 << 10
_MAX_AXES = 64
_MAX_TOTAL_BYTES = 1 << 62


@dataclass(slots=True)
class ManifestItem:
    """One tensor of a payload.

    Attributes:
        name: What the payload calls it.
        dtype: A dtype of the backend (torch or NumPy).
        shape: Its shape.
        nbytes: Bytes of its elements.
        offset: Where its bytes begin in the run of all bytes.
        alias: Whether these are the bytes of an earlier item: tied tensors travel once.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    alias: bool


@dataclass(frozen=True)
class Manifest:
    """All tensors of a payload, in the order of their bytes."""

    items: tuple[ManifestItem, ...]
    nbytes: int

    @property
    def size(self) -> PayloadSize:
        """What its tensors take; tied ones count each, as they do in a model."""
        return PayloadSize(
            sum(item.nbytes for item in self.items),
            len(self.items),
            sum(len(item.name.encode()) for item in self.items),
        )

    def by_name(self) -> Mapping[str, ManifestItem]:
        """Return the items by name."""
        return {item.name: item for item in self.items}

    def stored(self) -> Iterator[ManifestItem]:
        """Return the items that have data."""
        return (item for item in self.items if not item.alias)


def lay_out(described: Iterable[tuple[str, Any, tuple[int, ...], int, object]]) -> Manifest:
    """Lay out tensors contiguously, given by name, dtype, shape and bytes, and a key of their bytes.

    The key is the same for tensors with the same bytes, or None if that is not known.
    """
    items: list[ManifestItem] = []
    first: dict[object, ManifestItem] = {}
    end = 0
    for name, dtype, shape, nbytes, key in described:
        first_item = first.get((key, nbytes)) if key is not None and nbytes else None
        if first_item is not None:
            items.append(ManifestItem(name, dtype, shape, nbytes, first_item.offset, True))
            continue
        item = ManifestItem(name, dtype, shape, nbytes, end, False)
        items.append(item)
        end += nbytes
        if key is not None:
            first[key, nbytes] = item
    return Manifest(tuple(items), end)


def encode(manifest: Manifest, backend: ArrayBackend) -> bytes:
    """Write a manifest for the wire."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack([VERSION, backend.name, len(manifest.items), manifest.nbytes])
    for index, item in enumerate(manifest.items):
        name = None if item.name == default_name(index) else item.name
        packer.pack([name, backend.encode_dtype(item.dtype), item.shape, item.offset if item.alias else None])
    encoded: bytes = packer.bytes()
    return encoded


def max_encoded_bytes(limits: PayloadLimits) -> int:
    """Return the most bytes that a list of tensors within these limits may have."""
    return min(limits.name_bytes + limits.tensors * _USUAL_RECORD_BYTES + _EXTRA_BYTES, _MAX_BYTES)


def decoding_cost(items: int, encoded_bytes: int) -> int:
    """Return the bytes of memory that decoding a list takes for a moment, and writing the headers of its files."""
    return items * _ITEM_COST + encoded_bytes * _BYTE_COST


def decode(
    data: bytes | bytearray | memoryview, backend: ArrayBackend, sender: str, limits: PayloadLimits | None = None
) -> Manifest:
    """Read a manifest from the wire.

    Raises:
        ProtocolError: If it cannot be true, or is more than the limits.
    """
    try:
        return _Decoder(data, backend, limits or PayloadLimits()).manifest()
    except ProtocolError as error:
        raise ProtocolError(f"invalid list of tensors from {sender}: {error}") from None
    except Exception as error:
        raise ProtocolError(f"damaged list of tensors from {sender}: {type(error).__name__}: {error}") from None


def default_name(index: int) -> str:
    """What NVFlare calls the tensor with this number; such names need not travel."""
    return f"T{index}"


class _Decoder:
    def __init__(self, data: bytes | bytearray | memoryview, backend: ArrayBackend, limits: PayloadLimits) -> None:
        self._backend = backend
        self._limits = limits
        # Reads in small parts: fed with the complete input, it would make a copy.
        self._unpacker = msgpack.Unpacker(
            _Reader(data),
            read_size=_READ_BYTES,
            max_buffer_size=_MAX_BYTES,
            max_array_len=max(_MAX_AXES, 64),
            max_map_len=0,
            max_str_len=_MAX_NAME_BYTES,
            max_bin_len=0,
            max_ext_len=0,
            use_list=False,
        )
        self._first: dict[int, int] = {}
        self._name_bytes = 0

    def manifest(self) -> Manifest:
        version, backend, count, total = self._next(4)
        if type(version) is not int or version != VERSION or backend != self._backend.name:
            raise ProtocolError(
                f"expected version {VERSION} of a list of {self._backend.name}, "
                f"got version {quoted(version)} of {quoted(backend)}"
            )
        if not _is_count(count) or count > self._limits.tensors:
            raise ProtocolError(f"{quoted(count)} tensors, more than the limit of {self._limits.tensors}")
        items: list[ManifestItem] = []
        names: set[str] = set()
        end = 0
        for index in range(count):
            item = self._item(index, end)
            if item.name in names:
                raise ProtocolError(f"two tensors have the name {quoted(item.name)}")
            names.add(item.name)
            items.append(item)
            end = max(end, item.offset + item.nbytes)
        if next(iter(self._unpacker), None) is not None:
            raise ProtocolError(f"bytes follow the last of its {count} tensors")
        if not _is_count(total) or end != total:
            raise ProtocolError(f"the tensors have {end} bytes, and {quoted(total)} were announced")
        return Manifest(tuple(items), end)

    def _next(self, length: int) -> tuple[Any, ...]:
        try:
            value = next(self._unpacker)
        except StopIteration:
            raise ProtocolError("it ends before the last tensor") from None
        if not isinstance(value, tuple) or len(value) != length:
            raise ProtocolError(f"expected a record of {length} fields")
        return value

    def _item(self, index: int, end: int) -> ManifestItem:
        name, encoded, shape, alias = self._next(4)
        name = default_name(index) if name is None else name
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise ProtocolError(f"{quoted(name)} cannot be the name of a tensor")
        self._name_bytes += len(name.encode())
        if self._name_bytes > self._limits.name_bytes:
            raise ProtocolError(f"its names have more bytes than the limit of {self._limits.name_bytes}")
        if not isinstance(shape, tuple) or len(shape) > _MAX_AXES or not all(_is_count(size) for size in shape):
            raise ProtocolError(f"{quoted(name)} has the shape {quoted(shape)}")
        dtype = self._backend.decode_dtype(encoded)
        if dtype is None:
            raise ProtocolError(f"{quoted(name)} is of the unknown type {quoted(encoded)}")
        nbytes = self._backend.nbytes(dtype, shape)
        # An axis without elements hides none of the others: their strides would not fit into 63 bits.
        if end + self._backend.nbytes(dtype, tuple(max(size, 1) for size in shape)) > _MAX_TOTAL_BYTES:
            raise ProtocolError(f"{quoted(name)} is too large, with the shape {quoted(shape)}")
        if alias is None:
            if nbytes:
                self._first[end] = nbytes
            return ManifestItem(name, dtype, shape, nbytes, end, False)
        if type(alias) is not int or self._first.get(alias) != nbytes:
            raise ProtocolError(f"{quoted(name)} shares the bytes of a missing tensor, at {quoted(alias)}")
        return ManifestItem(name, dtype, shape, nbytes, alias, True)


class _Reader:
    """The file that an `Unpacker` reads from."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def read(self, count: int) -> bytes:
        """Return the next bytes."""
        piece = bytes(self._data[self._at : self._at + count])
        self._at += len(piece)
        return piece


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_TOTAL_BYTES

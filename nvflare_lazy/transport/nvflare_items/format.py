# SPDX-License-Identifier: Apache-2.0
"""NVFlare's own format of a tensor on the wire: a safetensors or npz byte string with one entry.

Processes without this package send and receive it. Received items are untrusted input and read strictly: their headers
decide which bytes are written to disk.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from nvflare_lazy.errors import FormatError, ProtocolError, UnsupportedDtypeError
from nvflare_lazy.formats.safetensors.header import encode_header, parse_message
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.lazy_array import LazyArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvflare_lazy.tensors.byte_source import ByteSource

_MAX_HEADER_BYTES = 1 << 20
_MAX_ARRAY_HEADER_BYTES = 128 << 10
_MAX_AXES = 64
_SUFFIX = ".npy"


def pack_tensor(name: str, value: Any, source: ByteSource) -> bytearray:
    """Write one tensor, whose row-major bytes are `source`, as NVFlare does."""
    head = _header(name, value.dtype, tuple(value.shape))
    item = bytearray(len(head) + source.nbytes)
    item[: len(head)] = head
    source.read_into(memoryview(item)[len(head) :])
    return item


def pack_array(name: str, array: Any) -> memoryview:
    """Write one array as NVFlare does."""
    loaded = array.materialize() if isinstance(array, LazyArray) else array
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive,
        archive.open(f"{name}.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array(file, loaded, allow_pickle=False)
    return stream.getbuffer()


def unpack_tensors(item: Any, sender: str) -> Iterator[tuple[str, Any, tuple[int, ...], memoryview]]:
    """Read the tensor that NVFlare sent as one item: name, dtype, shape and bytes.

    Raises:
        ProtocolError: If the item contradicts its header, or is not exactly one tensor.
    """
    with _report_damage(item, sender):
        header = parse_message(item, f"an item from {sender}", max_header_bytes=_MAX_HEADER_BYTES)
        if len(header.tensors) != 1:
            raise ProtocolError(f"expected 1 tensor in an item of {sender}, got {len(header.tensors)}")
        ((name, (row, shape, offset, nbytes)),) = header.tensors.items()
        if row.torch is None:
            raise ProtocolError(f"{sender} sent {name} as {row.name}, which this release of torch does not have")
        if row.packed > 1 and shape:
            shape = (*shape[:-1], shape[-1] // row.packed)
        if prod(shape) * row.torch.itemsize != nbytes:
            raise ProtocolError(f"{sender} sent {name} with a row that ends inside a byte")
    yield name, row.torch, shape, memoryview(item)[offset : offset + nbytes]


def unpack_arrays(item: Any, sender: str) -> Iterator[tuple[str, Any, tuple[int, ...], memoryview]]:
    """Read the array that NVFlare sent as one item: name, dtype, shape and bytes.

    Raises:
        ProtocolError: If the item is not what its headers say, or is not exactly one array in the form that NVFlare
            writes.
    """
    with _report_damage(item, sender):
        name, data = _only_member(memoryview(item))
        dtype, shape, elements = _read_array(name, data)
    yield name, dtype, shape, elements


def unpack_array_file(item: Any, sender: str) -> Iterator[tuple[str, Any, tuple[int, ...], memoryview]]:
    """Read an array as `numpy.save` writes it: an empty name, dtype, shape and bytes.

    Raises:
        ProtocolError: If the bytes contradict their header.
    """
    with _report_damage(item, sender):
        dtype, shape, elements = _read_array("the array", memoryview(item))
    yield "", dtype, shape, elements


def _read_array(name: str, data: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], memoryview]:
    dtype, shape, fortran, start = _array_header(data)
    _check_shape(shape, dtype.itemsize, name)
    elements = data[start:]
    # Numpy does not keep types whose elements have no bytes, such as U0.
    supported = dtype.itemsize and not dtype.hasobject and dtype.subdtype is None
    if not supported or len(elements) != prod(shape) * dtype.itemsize:
        raise ProtocolError(f"{name} has {len(elements)} bytes for {shape} of {dtype}")
    if fortran and len(shape) > 1:
        turned = np.frombuffer(elements, dtype).reshape(shape[::-1]).T
        elements = np.ascontiguousarray(turned).reshape(-1).view(np.uint8).data
    return dtype, shape, elements


def _check_shape(shape: tuple[int, ...], itemsize: int, name: str) -> None:
    """Check that an array of this shape can exist.

    Raises:
        ProtocolError: If an axis is not a count, or the strides do not fit into 63 bits.
    """
    counts = all(type(size) is int and size >= 0 for size in shape)
    # An axis without elements hides none of the others: they still determine the strides.
    if not counts or len(shape) > _MAX_AXES or prod(max(size, 1) for size in shape) * itemsize >= 1 << 62:
        raise ProtocolError(f"{name} has an invalid shape: {str(shape)[:80]}")


@contextmanager
def _report_damage(item: Any, sender: str) -> Iterator[None]:
    if not isinstance(item, (bytes, bytearray, memoryview)):
        raise ProtocolError(f"{sender} sent an invalid item: expected bytes, got {type(item).__name__}")
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"{sender} sent an invalid item: {error}") from error
    # Numpy reads the text of a header with Python's parser, which has errors of all these types.
    except (FormatError, ValueError, TypeError, ArithmeticError, LookupError, struct.error) as error:
        raise ProtocolError(f"{sender} sent a damaged item: {error}") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"{sender} sent an item that cannot be read: {type(error).__name__}") from error


def _header(name: str, dtype: Any, shape: tuple[int, ...]) -> bytes:
    row = dtypes.by_torch(dtype)
    if row.name is None:
        raise UnsupportedDtypeError(
            f"{name} has the type {dtype}, which a receiver without nvflare-lazy does not support; convert it, or "
            "install nvflare-lazy at the receiver"
        )
    shown = (*shape[:-1], shape[-1] * row.packed) if shape else shape
    return encode_header([(name, row.name, shown)], where=name)[0]


# The records of a zip archive: PKWARE's APPNOTE.TXT 4.3.7, 4.3.12 and 4.3.14 to 4.3.16.
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4s2IQ")
_END = struct.Struct("<4s4H2IH")
_SIZES64 = struct.Struct("<2H2Q")
_UTF8 = 0x800
_IN_EXTRA = 0xFFFFFFFF


def _only_member(archive: memoryview) -> tuple[str, memoryview]:
    """Return name and bytes of the array in an archive that `numpy.savez` wrote.

    The archive is one record after the other: the member's header, its bytes, its entry in the directory, and the end.
    No offset in it is followed, so nothing can be read twice.
    """
    magic, _, flags, method, _, _, crc, packed, nbytes, name_length, extra_length = _LOCAL.unpack_from(archive)
    if magic != b"PK\3\4" or method != zipfile.ZIP_STORED or flags & ~_UTF8:
        raise ProtocolError("an archive in a form that NVFlare does not write")
    raw_name = bytes(archive[_LOCAL.size : _LOCAL.size + name_length])
    start = _LOCAL.size + name_length + extra_length
    if packed == nbytes == _IN_EXTRA:
        kind, length, nbytes, packed = _SIZES64.unpack_from(archive, _LOCAL.size + name_length)
        if (kind, length, extra_length) != (1, _SIZES64.size - 4, _SIZES64.size):
            raise ProtocolError("an archive in a form that NVFlare does not write")
    data = archive[start : start + nbytes]
    if packed != nbytes or len(data) != nbytes or zlib.crc32(data) != crc:
        raise ProtocolError("an array that is truncated or damaged: its checksum is wrong")
    _check_end(archive[start + nbytes :], raw_name, (crc, nbytes), start + nbytes)
    name = raw_name.decode("utf-8" if flags & _UTF8 else "ascii")
    if not name.endswith(_SUFFIX):
        raise ProtocolError(f"expected an array, got the member {name[:80]!r}")
    return name.removesuffix(_SUFFIX), data


def _check_end(end: memoryview, raw_name: bytes, contents: tuple[int, int], directory: int) -> None:
    """Check that an archive ends with a directory of the one member, `directory` bytes after its beginning."""
    crc, nbytes = contents
    magic, *entry, header = _CENTRAL.unpack_from(end)
    method, name_length, extra_length, comment_length = entry[3], *entry[9:12]
    size = _CENTRAL.size + name_length + extra_length
    listed = (method, *entry[6:9], comment_length, header, bytes(end[_CENTRAL.size : _CENTRAL.size + name_length]))
    shown = min(nbytes, _IN_EXTRA)
    if magic != b"PK\1\2" or listed != (zipfile.ZIP_STORED, crc, shown, shown, 0, 0, raw_name):
        raise ProtocolError("the archive's directory lists a different member")
    after = end[size:]
    if len(after) == _END64.size + _LOCATOR64.size + _END.size:
        found = _END64.unpack_from(after)
        if (found[0], *found[6:]) != (b"PK\6\6", 1, 1, size, directory):
            raise ProtocolError("an archive with more than one member")
        after = after[_END64.size + _LOCATOR64.size :]
    # From 4 GiB, the offset here is a placeholder.
    expected = (b"PK\5\6", 0, 0, 1, 1, size, min(directory, _IN_EXTRA), 0)
    if len(after) != _END.size or _END.unpack(after) != expected:
        raise ProtocolError("an archive with more than one member")


def _array_header(data: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    stream = io.BytesIO(data[:_MAX_ARRAY_HEADER_BYTES])
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ProtocolError(f"an array of format version {version}, which NVFlare does not send")
    shape, fortran, dtype = read(stream)
    return dtype, shape, fortran, stream.tell()

# SPDX-License-Identifier: Apache-2.0
"""NVFlare's own format of a tensor on the wire: a safetensors or npz byte string with one entry.

Processes without this package send and receive it. Received items are untrusted input and read strictly: their headers
decide what is written to disk.
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
    """Read tensors that NVFlare sent: name, dtype, shape and bytes of each in an item.

    Raises:
        ProtocolError: If the item is not what its header says.
    """
    with _report_damage(item, sender):
        header = parse_message(item, f"an item from {sender}", max_header_bytes=_MAX_HEADER_BYTES)
        view = memoryview(item)
        for name, (row, shape, offset, nbytes) in header.tensors.items():
            if row.torch is None:
                raise ProtocolError(f"{sender} sent {name} as {row.name}, which this release of torch does not have")
            if row.packed > 1 and shape:
                shape = (*shape[:-1], shape[-1] // row.packed)
            if prod(shape) * row.torch.itemsize != nbytes:
                raise ProtocolError(f"{sender} sent {name} with a row that ends inside of a byte")
            yield name, row.torch, shape, view[offset : offset + nbytes]


def unpack_arrays(item: Any, sender: str) -> Iterator[tuple[str, Any, tuple[int, ...], memoryview]]:
    """Read arrays that NVFlare sent: name, dtype, shape and bytes of each in an item.

    Raises:
        ProtocolError: If the item is not what its header says.
    """
    with _report_damage(item, sender):
        view = memoryview(item)
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            for info in archive.infolist():
                data = _member(view, info, sender)
                dtype, shape, fortran, start = _array_header(data)
                elements = data[start:]
                if dtype.hasobject or len(elements) != prod(shape) * dtype.itemsize:
                    raise ProtocolError(
                        f"{sender} sent {info.filename} with {len(elements)} bytes for {shape} of {dtype}"
                    )
                if fortran and len(shape) > 1:
                    turned = np.frombuffer(elements, dtype).reshape(shape[::-1]).T
                    elements = np.ascontiguousarray(turned).reshape(-1).view(np.uint8).data
                yield info.filename.removesuffix(".npy"), dtype, shape, elements


@contextmanager
def _report_damage(item: Any, sender: str) -> Iterator[None]:
    if not isinstance(item, (bytes, bytearray, memoryview)):
        raise ProtocolError(f"{sender} sent an invalid item: expected bytes, got {type(item).__name__}")
    try:
        yield
    except ProtocolError:
        raise
    except (FormatError, ValueError, EOFError, OSError, zipfile.BadZipFile, NotImplementedError, KeyError) as error:
        raise ProtocolError(f"{sender} sent a damaged item: {error}") from error


def _header(name: str, dtype: Any, shape: tuple[int, ...]) -> bytes:
    row = dtypes.by_torch(dtype)
    if row.name is None:
        raise UnsupportedDtypeError(
            f"{name} is of {dtype}, and a receiver without nvflare-lazy cannot take that: convert it, or install "
            "nvflare-lazy at the receiver"
        )
    shown = (*shape[:-1], shape[-1] * row.packed) if shape else shape
    return encode_header([(name, row.name, shown)], where=name)[0]


def _member(archive: memoryview, info: zipfile.ZipInfo, sender: str) -> memoryview:
    """Return a view of the bytes of a stored member, after checking them."""
    lengths = archive[info.header_offset + 26 : info.header_offset + 30]
    if info.compress_type != zipfile.ZIP_STORED or len(lengths) != 4:
        raise ProtocolError(f"{sender} sent {info.filename} in a form that NVFlare does not use")
    name_bytes, extra_bytes = struct.unpack("<HH", lengths)
    start = info.header_offset + 30 + name_bytes + extra_bytes
    data = archive[start : start + info.file_size]
    if len(data) != info.file_size or zlib.crc32(data) != info.CRC:
        raise ProtocolError(f"{sender} sent {info.filename} truncated or damaged: its checksum is wrong")
    return data


def _array_header(data: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    stream = io.BytesIO(data[:_MAX_ARRAY_HEADER_BYTES])
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ProtocolError(f"an array of format version {version}, which NVFlare does not send")
    shape, fortran, dtype = read(stream)
    return dtype, shape, fortran, stream.tell()

# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors headers; headers are untrusted, and an error names the violated rule.

Checkpoints on disk and tensors from the network are validated here first. It is stricter than the safetensors library
in exactly these rules:

- a key must be unique, among tensors and in the metadata (the library takes the last value);
- no white space before the header, and only spaces after it, as the format requires;
- an entry is an object of exactly `dtype`, `shape` and `data_offsets`, of at most 16384 characters (the library
  ignores further fields and takes an array in their order), a dtype is a string (the library takes `{"F32": null}`),
  and `__metadata__` is an object (the library takes null);
- a shape has at most 64 dimensions, as in torch and NumPy, and one with a zero in it must still be countable in 63
  bits without the zero, as torch requires;
- at most 500,000 names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import MetadataMismatchError, SafetensorsError, UnserializableTensorError
from nvflare_lazy.formats.safetensors import _strict_json
from nvflare_lazy.formats.safetensors._strict_json import JsonCursor
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.tensor_file import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from typing_extensions import Buffer

    from nvflare_lazy.tensors.dtypes import ElementType
    from nvflare_lazy.tensors.tensor_file import OpenFile

#: Size of the field before the header, which holds its length.
PREFIX_BYTES = 8
#: The longest header that the format allows.
MAX_HEADER_BYTES = 100_000_000
#: The key of the metadata; every other key of a header is the name of a tensor.
METADATA_KEY = "__metadata__"

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DIMENSIONS = 64
_MAX_COUNTABLE = (1 << 63) - 1

# An entry as all but a few writers put it: this reads it faster than a JSON parser does.
_NUMBER = "(?:0|[1-9][0-9]{0,17})"
_USUAL_ENTRY = re.compile(
    rf'\{{"dtype":"([A-Z0-9_]+)","shape":\[((?:{_NUMBER}(?:,{_NUMBER}){{0,{_MAX_DIMENSIONS - 1}}})?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)


class _Kind(NamedTuple):
    """A dtype and shape, checked. Models have few different ones: each is checked once."""

    row: ElementType
    shape: tuple[int, ...]
    nbytes: int


# More than these, in an unusual header, are checked again.
_MAX_KINDS = 4096


@dataclass(frozen=True)
class SafetensorsHeader:
    """A header that keeps all the rules.

    Attributes:
        tensors: The tensors by name, in the order of their bytes. Their offsets count from the beginning of the file.
        metadata: The text stored with them.
        data_start: The position of the first byte of data.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    data_start: int

    @property
    def total_nbytes(self) -> int:
        """The size of the whole file or message."""
        return end_of(self.tensors, self.data_start)

    def check_total(self, total_nbytes: int, where: str) -> None:
        """Raise unless a file or message of `total_nbytes` ends where its last tensor does."""
        expected = self.total_nbytes
        if total_nbytes < expected:
            raise SafetensorsError(
                "data-truncated",
                f"{where} has {total_nbytes} of the {expected} bytes its header promises: "
                "the download or copy broke off; fetch it again",
            )
        if total_nbytes > expected:
            raise SafetensorsError(
                "trailing-data", f"{where} has {total_nbytes - expected} bytes after its last tensor"
            )


def read_header(file: OpenFile) -> SafetensorsHeader:
    """Read and check the header of a file, and compare the file size with it.

    Example:
        >>> header = read_header(TensorFile("model.safetensors"))
        >>> header.tensors["head.weight"].shape
    """
    prefix = bytearray(min(PREFIX_BYTES, file.size))
    file.read_into(memoryview(prefix), 0)
    text = bytearray(header_length(prefix, file.path, total_nbytes=file.size))
    file.read_into(memoryview(text), PREFIX_BYTES)
    header = parse_header(text, file.path)
    header.check_total(file.size, file.path)
    return header


def parse_message(message: Buffer, where: str, *, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
    """Check the header of a safetensors byte string, and compare the size of the string with it."""
    view = memoryview(message).cast("B")
    length = header_length(view[:PREFIX_BYTES], where, total_nbytes=len(view), max_header_bytes=max_header_bytes)
    header = parse_header(view[PREFIX_BYTES : PREFIX_BYTES + length], where)
    header.check_total(len(view), where)
    return header


def header_length(
    prefix: Buffer, where: str, *, total_nbytes: int | None = None, max_header_bytes: int = MAX_HEADER_BYTES
) -> int:
    """Return the length of the header that follows the first eight bytes.

    It is at most `max_header_bytes`, and no longer than the whole, if its length is known.
    """
    start = bytes(prefix)
    if len(start) < PREFIX_BYTES:
        raise SafetensorsError(
            "header-truncated", f"{where} has {len(start)} bytes, less than the length field of a header"
        )
    length = int.from_bytes(start, "little")
    if length > max_header_bytes:
        raise SafetensorsError(
            "header-too-large", f"{where} says its header has {length} bytes; {max_header_bytes} are allowed"
        )
    if total_nbytes is not None and PREFIX_BYTES + length > total_nbytes:
        raise SafetensorsError(
            "header-truncated",
            f"{where} ends after {total_nbytes} bytes, in its header, which should have {length}: "
            "the download or copy broke off; fetch it again",
        )
    return length


def parse_header(text: Buffer, where: str) -> SafetensorsHeader:
    """Check the text of a header, without its first eight bytes, against every rule that does not need the data."""
    text = memoryview(text).cast("B")
    if bytes(text[:1]) != b"{":
        raise SafetensorsError("header-start", f"{where}: a header starts with '{{', this one with {bytes(text[:1])!r}")
    cursor = JsonCursor(text, where)
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    kinds: dict[tuple[str, str], _Kind] = {}
    data_start = PREFIX_BYTES + len(text)
    for key in cursor.members():
        if key == METADATA_KEY:
            metadata = _metadata(cursor, where)
        else:
            tensors[key] = _stored(cursor, kinds, data_start, where, key)
    if not cursor.only_spaces_follow():
        raise SafetensorsError(
            "header-padding", f"{where}: only spaces may follow the header's JSON, up to its given length"
        )
    # Stable: empty tensors keep the order of the header.
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1][2:]))
    _check_coverage(tensors, data_start, where)
    return SafetensorsHeader(tensors, metadata, data_start)


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    where: str,
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Write the beginning of a file, up to its data, by the rules by which `parse_header` reads it.

    Args:
        tensors: Name, dtype as the format calls it, and shape of each tensor, in the order of their bytes.
        metadata: Text to store with them.
        where: Description of the file, for messages.

    Returns:
        The bytes, and the tensors by name with their positions in the file.

    Example:
        >>> start, contents = encode_header([("w", "F32", (2, 2))], where="model.safetensors")
        >>> len(start), contents["w"].nbytes
        (72, 16)
    """
    members = []
    if metadata:
        members.append(f'"{METADATA_KEY}":' + _to_json(_sorted_text(metadata, where)))
    known: dict[tuple[str, tuple[int, ...]], tuple[_Kind, str]] = {}
    laid: dict[str, tuple[_Kind, int]] = {}
    begin = 0
    for name, dtype, shape in tensors:
        if name in laid or name == METADATA_KEY:
            raise MetadataMismatchError(f"{where}: {quoted(name)} is promised twice, or is the metadata's own name")
        found = known.get((dtype, tuple(shape)))
        if found is None:
            kind = _kind(dtype, [*shape], where, name)
            found = known[dtype, kind.shape] = kind, _geometry_text(kind)
        kind, text = found
        laid[name] = kind, begin
        members.append(_member(name, text, begin, kind.nbytes))
        begin += kind.nbytes
    if begin > _MAX_COUNTABLE:
        raise SafetensorsError("size-overflow", f"{where}: {begin} bytes are more than can be counted in 63 bits")
    if max(len(members), len(metadata or ())) > _strict_json.MAX_MEMBERS:
        raise SafetensorsError("too-many-tensors", f"{where}: more than {_strict_json.MAX_MEMBERS} names in one header")
    try:
        data = f"{{{','.join(members)}}}".encode()
    except UnicodeEncodeError as error:
        raise UnserializableTensorError(f"{where}: a name or a piece of metadata cannot be written: {error}") from None
    length = -(-len(data) // 8) * 8
    if length > MAX_HEADER_BYTES:
        raise SafetensorsError(
            "header-too-large", f"{where}: its header would have {length} bytes, the format allows 100 MB"
        )
    data_start = PREFIX_BYTES + length
    contents = {
        name: StoredTensor(kind.row, kind.shape, data_start + begin, kind.nbytes)
        for name, (kind, begin) in laid.items()
    }
    return length.to_bytes(PREFIX_BYTES, "little") + data.ljust(length), contents


def pad_header(header: bytes, nbytes: int) -> bytes:
    """Return the beginning of a file with more spaces in front of its data."""
    data = header[PREFIX_BYTES:].ljust(len(header) - PREFIX_BYTES + nbytes)
    return len(data).to_bytes(PREFIX_BYTES, "little") + data


class GrowingHeader:
    """The header of a file to which tensors are appended: valid after each of them, in a fixed number of bytes.

    Args:
        room: Number of bytes up to the data; spaces fill the unused ones.
        where: Description of the file, for messages.
    """

    def __init__(self, room: int, where: str) -> None:
        self.empty = (room - PREFIX_BYTES).to_bytes(PREFIX_BYTES, "little") + b"{}".ljust(room - PREFIX_BYTES)
        self._room = room
        self._where = where
        self._at = PREFIX_BYTES + 1
        self._begin = 0

    def append(self, name: str, dtype: str, shape: Sequence[int]) -> tuple[bytes, int]:
        """Return the bytes that add a tensor to the header, and their position in the file."""
        if name == METADATA_KEY:
            raise MetadataMismatchError(f"{self._where}: {quoted(name)} is the metadata's own name")
        kind = _kind(dtype, [*shape], self._where, name)
        member = _member(name, _geometry_text(kind), self._begin, kind.nbytes)
        try:
            data = f"{',' if self._at > PREFIX_BYTES + 1 else ''}{member}}}".encode()
        except UnicodeEncodeError as error:
            raise UnserializableTensorError(f"{self._where}: a name cannot be written: {error}") from None
        at, self._begin = self._at, self._begin + kind.nbytes
        self._at += len(data) - 1
        assert self._at < self._room
        return data, at


def _geometry_text(kind: _Kind) -> str:
    return f'"dtype":"{kind.row.name}","shape":[{",".join(map(str, kind.shape))}]'


def _member(name: str, geometry: str, begin: int, nbytes: int) -> str:
    return f'{_to_json(name)}:{{{geometry},"data_offsets":[{begin},{begin + nbytes}]}}'


def end_of(contents: Mapping[str, StoredTensor], data_start: int = 0) -> int:
    """Return the position after the last byte of some tensors."""
    return max((stored.offset + stored.nbytes for stored in contents.values()), default=data_start)


def _sorted_text(metadata: Mapping[str, object], where: str) -> dict[str, object]:
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise SafetensorsError(
                "invalid-metadata", f"{where}: metadata must map text to text, but {key!r} is not text"
            )
        if not isinstance(value, str):
            raise SafetensorsError(
                "invalid-metadata",
                f"{where}: metadata must map text to text, but {key!r} has a {type(value).__name__}",
            )
    return dict(sorted(metadata.items()))


def _metadata(cursor: JsonCursor, where: str) -> dict[str, str]:
    if not cursor.is_at("{"):
        raise SafetensorsError("invalid-metadata", f"{where}: {METADATA_KEY} must be an object")
    metadata = {}
    for key in cursor.members():
        if not cursor.is_at('"'):
            raise SafetensorsError(
                "invalid-metadata", f"{where}: {METADATA_KEY} must hold strings, but {quoted(key)} does not"
            )
        metadata[key] = cursor.string()
    return metadata


def _stored(
    cursor: JsonCursor, kinds: dict[tuple[str, str], _Kind], data_start: int, where: str, name: str
) -> StoredTensor:
    """Read the entry of a tensor."""
    match = cursor.take(_USUAL_ENTRY)
    if match is None:
        entry = cursor.flat_object()
        if entry is None or entry.keys() != _FIELDS:
            raise SafetensorsError(
                "invalid-entry",
                f"{where}: tensor {quoted(name)} must be an object of exactly dtype, shape and data_offsets"
                + ("" if entry is None else f", not of {quoted(', '.join(entry))}"),
            )
        kind = _kind(entry["dtype"], entry["shape"], where, name)
        begin, end = _offsets(entry["data_offsets"], where, name)
    else:
        dtype, sizes, *offsets = match.groups()
        known = kinds.get((dtype, sizes))
        if known is None:
            known = _kind(dtype, list(map(int, sizes.split(","))) if sizes else [], where, name)
            if len(kinds) < _MAX_KINDS:
                kinds[dtype, sizes] = known
        kind = known
        begin, end = _offsets(list(map(int, offsets)), where, name)
    if end - begin != kind.nbytes:
        raise SafetensorsError(
            "tensor-size",
            f"{where}: tensor {quoted(name)} takes {kind.nbytes} bytes as {list(kind.shape)} {kind.row.name}, "
            f"but its data_offsets span {end - begin}",
        )
    return StoredTensor(kind.row, kind.shape, data_start + begin, kind.nbytes)


def _kind(dtype: object, sizes: object, where: str, name: str) -> _Kind:
    row, shape = _row(dtype, where, name), _shape(sizes, where, name)
    return _Kind(row, shape, _nbytes(row, shape, where, name))


def _row(dtype: object, where: str, name: str) -> ElementType:
    row = dtypes.by_name(dtype) if type(dtype) is str else None
    if row is None:
        raise SafetensorsError(
            "unknown-dtype",
            f"{where}: tensor {quoted(name)} has the dtype {quoted(dtype)}, which the format does not know",
        )
    return row


def _shape(value: object, where: str, name: str) -> tuple[int, ...]:
    if type(value) is not list or len(value) > _MAX_DIMENSIONS:
        raise SafetensorsError(
            "invalid-shape",
            f"{where}: the shape of tensor {quoted(name)} must be a list of at most {_MAX_DIMENSIONS} numbers",
        )
    for size in value:
        if type(size) is not int or size < 0:
            raise SafetensorsError(
                "invalid-shape",
                f"{where}: tensor {quoted(name)} has the shape {quoted(str(value))}; "
                "sizes are non-negative whole numbers",
            )
    return tuple(value)


def _nbytes(row: ElementType, shape: tuple[int, ...], where: str, name: str) -> int:
    count = 1
    for size in shape:
        count *= size or 1
    if max(count, count * row.bits // 8) > _MAX_COUNTABLE:
        raise SafetensorsError(
            "size-overflow",
            f"{where}: tensor {quoted(name)} has the shape {list(shape)}, more than can be counted in 63 bits",
        )
    expected = dtypes.nbytes(row, shape)
    if expected is None:
        raise SafetensorsError(
            "partial-byte",
            f"{where}: tensor {quoted(name)} ends inside a byte: {list(shape)} elements of {row.bits} bits each",
        )
    return expected


def _offsets(value: object, where: str, name: str) -> tuple[int, int]:
    if type(value) is list and len(value) == 2:
        begin, end = value
        if type(begin) is int and type(end) is int and 0 <= begin <= end <= _MAX_COUNTABLE:
            return begin, end
    raise SafetensorsError(
        "invalid-offsets",
        f"{where}: tensor {quoted(name)} has the data_offsets {quoted(str(value))}; "
        "they are two non-negative whole numbers, begin and end",
    )


def _check_coverage(tensors: dict[str, StoredTensor], data_start: int, where: str) -> None:
    reached, last = data_start, ""
    for name, (_, _, offset, nbytes) in tensors.items():
        if offset != reached:
            before = f"tensor {quoted(last)}" if last or reached > data_start else "the beginning of the data"
            if offset > reached:
                raise SafetensorsError(
                    "offset-gap",
                    f"{where}: {offset - reached} bytes between {before} and tensor {quoted(name)} belong to no tensor",
                )
            raise SafetensorsError(
                "offset-overlap", f"{where}: tensor {quoted(name)} begins {reached - offset} bytes inside {before}"
            )
        reached, last = offset + nbytes, name

# SPDX-License-Identifier: Apache-2.0
"""One conversion: whatever kind, byte order, strides and dtype a value has, everything that reads it reads the same.

A converter that ignores one combination returns wrong numbers without an error. So each use is tried with all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nvflare_lazy
from nvflare_lazy.errors import UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.dtypes import ELEMENT_TYPES, by_torch
from nvflare_lazy.tensors.entry import TensorEntry, entry_of
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_memory import storage_bytes
from nvflare_lazy.transport._backends import NUMPY, TORCH
from nvflare_lazy.transport._disk_consumer import DiskConsumer
from nvflare_lazy.transport._downloadable import Payload
from nvflare_lazy.transport.array_downloader import ArrayConsumer, ArrayDownloadable
from nvflare_lazy.transport.segments import manifest as manifests
from nvflare_lazy.transport.tensor_downloader import DiskTensorConsumer, TensorConsumer, TensorDownloadable

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch warns a single time

LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.T,
    "sliced": lambda x: x[::2, 1::2],
    "row": lambda x: x[2],
    "single": lambda x: x[1, 2],
    "empty": lambda x: x[:0],
    "expanded": lambda x: np.broadcast_to(x[:1], (3, 6)) if isinstance(x, np.ndarray) else x[:1].expand(3, 6),
    "reversed": lambda x: x[::-1, ::-1],
}
DTYPES = [row.torch for row in ELEMENT_TYPES if row.torch is not None]
ARRAY_DTYPES = [row.torch for row in ELEMENT_TYPES if row.torch is not None and row.numpy is not None]
# Without a mean, or without a name in the format of files.
NO_MEAN = {torch.complex128, torch.complex32}
NO_MEAN |= {dtype for dtype in DTYPES if str(dtype).endswith(("e8m0fnu", "e2m1fn_x2"))}
NO_FILE = {torch.complex128, torch.complex32}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Four rows of six, all different as far as the type can tell."""
    if "float4" in str(dtype):
        return torch.arange(24, dtype=torch.uint8).view(dtype).reshape(4, 6)
    return torch.arange(1, 25).remainder(2 if dtype == torch.bool else 100).to(torch.float32).to(dtype).reshape(4, 6)


def bits(dtype: torch.dtype, layout: str) -> bytes:
    """The row-major, native bytes of a layout, computed by NumPy without regard for the type."""
    whole = np.frombuffer(bytes(storage_bytes(numbers(dtype))), f"V{dtype.itemsize}").reshape(4, 6)
    return LAYOUTS[layout](whole).tobytes()


def shape(layout: str) -> tuple[int, ...]:
    return tuple(LAYOUTS[layout](np.zeros((4, 6))).shape)


def as_entry(layout: str, dtype: torch.dtype) -> TensorEntry:
    whole = numbers(dtype)
    view = LAYOUTS[layout](whole)
    source = MemorySource(storage_bytes(whole))
    return TensorEntry(source, by_torch(dtype), tuple(view.shape), view.stride(), view.storage_offset())


def as_array(layout: str, dtype: torch.dtype, order: str) -> Any:
    native = numbers(dtype).numpy()
    if order == "unaligned":  # a field of records, with a byte between its elements and the next
        records = np.zeros((4, 6), [("flag", "u1"), ("x", native.dtype)])
        records["x"] = native
        return LAYOUTS[layout](records["x"])
    return LAYOUTS[layout](native.astype(native.dtype.newbyteorder(order)))


def as_lazy_array(layout: str, dtype: torch.dtype, order: str) -> LazyArray:
    array = np.asarray(as_array(layout, dtype, order))
    return LazyArray(MemorySource(array.tobytes()), array.dtype, array.shape)


KINDS = {
    "tensor": lambda layout, dtype: LAYOUTS[layout](numbers(dtype)),
    "lazy tensor": lambda layout, dtype: LAYOUTS[layout](LazyTensor.from_tensor(numbers(dtype))),
    "entry": as_entry,
    "array": lambda layout, dtype: as_array(layout, dtype, "="),
    "array, big-endian": lambda layout, dtype: as_array(layout, dtype, ">"),
    "array, unaligned": lambda layout, dtype: as_array(layout, dtype, "unaligned"),
    "lazy array": lambda layout, dtype: as_lazy_array(layout, dtype, "="),
    "lazy array, big-endian": lambda layout, dtype: as_lazy_array(layout, dtype, ">"),
}

Combination = tuple[torch.dtype, str]


def values_of(kind: str, excluded: set[torch.dtype] = frozenset()) -> dict[Combination, Any]:
    """A value for each combination of dtype and strides."""
    is_array = "array" in kind
    return {
        (dtype, layout): KINDS[kind](layout, dtype)
        for dtype in (ARRAY_DTYPES if is_array else DTYPES)
        for layout in LAYOUTS
        if dtype not in excluded and (is_array or layout != "reversed")
    }


def by_name(values: dict[Combination, Any]) -> dict[str, Any]:
    return {f"{dtype} {layout}": value for (dtype, layout), value in values.items()}


def check(values: dict[Combination, Any], tensors: Any) -> None:
    """The tensors by name have the bytes, dtypes and shapes of the combinations."""
    wrong = []
    for dtype, layout in values:
        found = tensors[f"{dtype} {layout}"]
        loaded = found.materialize() if isinstance(found, (LazyArray, LazyTensor)) else found
        if not isinstance(loaded, torch.Tensor):  # in the byte order in which it was sent
            loaded = torch.from_numpy(np.array(loaded, loaded.dtype.newbyteorder("=")))
        same = (loaded.dtype, tuple(loaded.shape)) == (dtype, shape(layout))
        if not same or bytes(storage_bytes(loaded)) != bits(dtype, layout):
            wrong.append((dtype, layout))
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_entry_of(kind):
    """Dtype, shape, bytes, and the objects made from them."""
    wrong = []
    for (dtype, layout), value in values_of(kind).items():
        entry = entry_of(value)
        expected = bits(dtype, layout)
        rows = entry.rows()
        # In parts, which may start and end inside an element.
        parts = b"".join(bytes(rows.read(at, min(5, rows.nbytes - at))) for at in range(0, rows.nbytes, 5))
        found = {bytes(rows.read()), parts, bytes(entry.lazy().source.read())}
        if by_torch(dtype).numpy is not None:
            found.add(entry.array().materialize().tobytes())
        if found != {expected} or entry.spec != (dtype, shape(layout)) or entry.nbytes != len(expected):
            wrong.append((dtype, layout))
    assert not wrong


def test_entries_are_returned_as_they_are():
    """Aggregation calls `entry_of` for each tensor of each client, and most of these are entries."""
    entry = as_entry("sliced", torch.float32)
    assert entry_of(entry) is entry


def test_pending_signs_and_scalars():
    """Conjugated and negated views have the values that torch shows; NumPy's scalars are arrays without dimensions."""
    complex_numbers = torch.tensor([1 + 2j, 3 - 4j])
    for value in (complex_numbers.conj(), torch._neg_view(complex_numbers), complex_numbers.conj().imag):
        assert bytes(entry_of(value).rows().read()) == bytes(storage_bytes(value.clone().resolve_neg().resolve_conj()))
    assert entry_of(np.float32(1.5)).lazy().item() == 1.5


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([1.0], UnsupportedTensorError),
        (torch.eye(2).to_sparse(), UnsupportedTensorError),
        (torch.empty(2, device="meta"), UnsupportedTensorError),
        (np.array(["text"]), UnsupportedDtypeError),
        (np.array([None]), UnsupportedDtypeError),
    ],
    ids=["list", "sparse", "meta", "text", "objects"],
)
def test_what_is_no_dense_tensor(value, error):
    """A clear error instead of wrong bytes."""
    with pytest.raises(error):
        entry_of(value)


@pytest.mark.parametrize("kind", KINDS)
def test_save(kind, tmp_path):
    """A file has one byte order and no strides."""
    values = values_of(kind, NO_FILE)
    for combination in [(dtype, layout) for dtype, layout in values if "float4" in str(dtype) and layout == "single"]:
        del values[combination]  # the format counts half bytes, and one alone is half of a byte
    nvflare_lazy.save(by_name(values), tmp_path / "model.safetensors")
    check(values, nvflare_lazy.open(tmp_path / "model.safetensors"))
    for dtype in NO_FILE.intersection(dtype for dtype, _ in values_of(kind)):
        with pytest.raises(UnsupportedDtypeError):
            nvflare_lazy.save({"x": KINDS[kind]("plain", dtype)}, tmp_path / "other.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_aggregate(kind, tmp_path):
    """The mean of equal values is the value."""
    values = values_of(kind, NO_MEAN)
    contributions = {site: by_name(values) for site in "abc"}
    check(values, nvflare_lazy.aggregate(contributions, tmp_path / "model.safetensors"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "entry"])
def test_send_segments(kind):
    """The manifest and the bytes that a receiver with this package asks for."""
    values = values_of(kind)
    backend = NUMPY if "array" in kind else TORCH
    payload = Payload(by_name(values), backend)
    received = {}
    for item in manifests.decode(payload.encoded_manifest, backend, "the sender").items:
        received[item.name], memory = backend.new(item.dtype, item.shape)
        memory[:] = payload.read_item(item.name, 0, item.nbytes)
    check(values, received)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "entry"])
def test_send_items(kind, tmp_path):
    """The items that a receiver without this package takes; received in memory and on disk."""
    if "array" in kind:
        values = values_of(kind)
        downloadable, consumers = ArrayDownloadable, [ArrayConsumer(), DiskConsumer(NUMPY, tmp_path)]
    else:
        values = values_of(kind, NO_FILE | {dtype for dtype in DTYPES if by_torch(dtype).packed != 1})
        downloadable, consumers = TensorDownloadable, [TensorConsumer(), DiskTensorConsumer(tmp_path)]
    sender = downloadable(by_name(values), 1 << 20)
    items = [sender.produce_item(index) for index in range(len(values))]
    received, _ = [consumer.consume_items(items, None) for consumer in consumers]
    check(values, received)
    consumers[1].release()
    check(values, consumers[1].values())

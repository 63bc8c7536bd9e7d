# SPDX-License-Identifier: Apache-2.0
"""Make PyTorch checkpoints of every kind and age, forged ones included, and compare the tensors read from them."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors.tensor_memory import storage_bytes

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
# Saved with a separate storage class, as every version of torch did.
CLASSIC = [torch.bool, torch.uint8, *SIGNED, *FLOATING, *COMPLEX]
# Saved as untyped storages, each with a dtype. Torch itself cannot read them back from a legacy file.
RECENT = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
_NUMBER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_tensor(dtype: torch.dtype, numel: int, seed: int = 0) -> torch.Tensor:
    """Any bit patterns the dtype has: NaNs, infinities and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The row-major elements of an ordinary tensor as bytes, whatever its strides."""
    tensor = tensor.detach().resolve_conj()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor) if tensor.dtype is not torch.complex32 else tensor.view(torch.int32)
    numbers = tensor.resolve_neg().view(_NUMBER_OF_WIDTH[tensor.dtype.itemsize])
    return bytes(storage_bytes(numbers.contiguous()))


def layouts(dtype: torch.dtype) -> dict[str, object]:
    """A state dict of every layout there is, most of them over one storage."""
    base = random_tensor(dtype, 120)
    alone = random_tensor(dtype, 17, seed=1)
    block = base.view(2, 5, 12)
    return {
        "contiguous": block,
        "alone": alone,
        "tied": block,
        "same place, another object": base.view(2, 5, 12),
        "flat": base,
        "transposed": block[0].t(),
        "permuted": block.permute(2, 0, 1),
        "every second": base[::2],
        "every third from the second": block[:, 1::3],
        "columns": block[0][:, 3:7],
        "rows": block[1][2:4],
        "selected": block.select(2, 5),
        "last element": base[-1],
        "expanded": base[3].expand(4, 5),
        "expanded rows": block[0, 0].expand(3, 12),
        "expanded in the middle": block[0].unsqueeze(1).expand(5, 3, 12),
        "overlapping": base.as_strided((6, 4), (2, 1), 7),
        "diagonal": base.as_strided((5,), (13,), 2),
        "scalar": random_tensor(dtype, 1, seed=2).reshape(()),
        "ones everywhere": block[0].reshape(1, 5, 1, 12, 1),
        "odd strides of ones": base.as_strided((1, 5, 1), (99, 1, 77), 4),
        "empty": torch.empty(0, dtype=dtype),
        "empty but shaped": torch.empty(3, 0, 5, dtype=dtype),
        "empty part": base[60:60],
        "empty columns": block[0][:, 4:4],
        "parameter": torch.nn.Parameter(base[24:36].view(3, 4), requires_grad=dtype in FLOATING + COMPLEX),
        "transposed parameter": torch.nn.Parameter(block[1].t(), requires_grad=False),
    }


def assert_same(lazy: LazyTensorDict, expected: dict[str, torch.Tensor]) -> None:
    """Every tensor has the dtype, shape and bits that it should, loaded and read by its source."""
    assert list(lazy) == list(expected)
    for name, tensor in expected.items():
        entry = lazy.entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape)), name
        assert bytes(lazy[name].source.read()) == raw(tensor), name
        loaded = lazy[name].materialize()
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape), name
        assert raw(loaded) == raw(tensor), name


# ---- files that torch writes -------------------------------------------------------------------------------------


@contextmanager
def without_checksums():
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def save_zip(content: object, path: Path, protocol: int = 2) -> None:
    torch.save(content, path, pickle_protocol=protocol)


def save_legacy(content: object, path: Path, protocol: int = 2) -> None:
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)


def records_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


def write_records(path: Path, records: dict[str, bytes]) -> None:
    """Write an archive with torch's own writer, which adds the version automatically."""
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in records.items():
        if name not in ("version", ".data/serialization_id"):
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


def save_big_endian(content: dict[str, torch.Tensor], path: Path, width: int) -> None:
    """Byte order of a big-endian machine: every number of `width` bytes is reversed, and a record names the order."""
    save_zip(content, path)
    records = records_of(path)
    for name, data in records.items():
        if name.startswith("data/"):
            whole = len(data) // width * width
            words = (data[at : at + width][::-1] for at in range(0, whole, width))
            records[name] = b"".join(words) + data[whole:]
    other = "big" if sys.byteorder == "little" else "little"
    write_records(path, records | {"byteorder": other.encode()})


# ---- files that torch wrote once ---------------------------------------------------------------------------------


class Tar:
    """Writes the format of PyTorch before 0.1.10, by the rules that torch's own reader of it follows."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
        # (number of the view, of its root, first element, number of elements)
        self.views: list[tuple[int, int, int, int]] = []
        self.storage_of: dict[int, int] = {}

    def save(self, content: object, path: Path) -> None:
        pickled = self._pickle(content)
        members = {
            "sys_info": pickle.dumps({"protocol_version": 1000, "little_endian": True, "type_sizes": {}}, protocol=2),
            "pickle": pickled,
            "tensors": self._tensor_table(),
            "storages": self._storage_table(),
        }
        with closing(tarfile.open(path, "w:", format=tarfile.PAX_FORMAT)) as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                info.mtime = 1484000000.25  # the time of a real file has a fraction, and so its own header
                tar.addfile(info, io.BytesIO(data))

    def _pickle(self, content: object) -> bytes:
        file = io.BytesIO()
        tar = self

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj):
                if isinstance(obj, torch.Tensor):
                    number = id(obj)
                    tar.tensors[number] = obj
                    return str(number)
                return None

        Pickler(file, protocol=2).dump(content)
        return file.getvalue()

    def _tensor_table(self) -> bytes:
        table = [pickle.dumps(len(self.tensors), protocol=2)]
        for number, tensor in self.tensors.items():
            key = self.storage_of.get(number)
            if key is None:
                storage = tensor.untyped_storage()
                key = storage._cdata
                self.storages[key] = (storage, tensor.dtype)
            table.append(pickle.dumps((number, key, torch.FloatTensor), protocol=2))
            table.append(struct.pack("<ii", tensor.dim(), 0))
            table.append(struct.pack(f"<{tensor.dim()}q", *tensor.shape))
            table.append(struct.pack(f"<{tensor.dim()}q", *tensor.stride()))
            table.append(struct.pack("<q", tensor.storage_offset()))
        return b"".join(table)

    def _storage_table(self) -> bytes:
        table = [pickle.dumps(len(self.storages), protocol=2)]
        for key, (storage, dtype) in self.storages.items():
            storage_class = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
            table.append(pickle.dumps((key, "cpu", storage_class), protocol=2))
            table.append(struct.pack("<q", storage.nbytes() // dtype.itemsize))
            table.append(bytes(storage_bytes(torch.empty(0, dtype=torch.uint8).set_(storage))))
        table.append(pickle.dumps(self.views, protocol=2))
        return b"".join(table)


def save_tar(content: object, path: Path) -> None:
    Tar().save(content, path)


class StorageId:
    """Placeholder for a storage in a pickle that is written by hand."""

    def __init__(self, *persistent_id: object) -> None:
        self.persistent_id = persistent_id


class Named:
    """Placeholder for a global in a pickle that is written by hand; calling it makes a placeholder for the call."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *arguments: object, state: object = None) -> Called:
        return Called(self, arguments, state)


class Called:
    def __init__(self, function: Named, arguments: tuple[object, ...], state: object) -> None:
        self.function, self.arguments, self.state = function, arguments, state


class HandPickler(pickle._Pickler):
    """Python's own pickler, which writes down globals that need not exist."""

    def persistent_id(self, obj):
        return obj.persistent_id if isinstance(obj, StorageId) else None

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Named):
            self.write(b"c" + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Called):
            self.save(obj.function)
            self.save(obj.arguments)
            self.write(b"R")
            if obj.state is not None:
                self.save(obj.state)
                self.write(b"b")
        else:
            super().save(obj, save_persistent_id)


def hand_pickle(content: object, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    HandPickler(file, protocol).dump(content)
    return file.getvalue()


def write_legacy(
    path: Path,
    content: bytes,
    storages: Iterable[tuple[str, int, bytes]] = (),
    *,
    magic: bytes | None = None,
    machine: bytes | None = None,
    keys: bytes | None = None,
) -> None:
    """Write a legacy file from a pickle and (key, number of elements, bytes) of its storages."""
    storages = list(storages)
    parts = [
        pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2) if magic is None else magic,
        pickle.dumps(torch.serialization.PROTOCOL_VERSION, protocol=2),
        pickle.dumps({"little_endian": True}, protocol=2) if machine is None else machine,
        content,
        pickle.dumps([key for key, _, _ in storages], protocol=2) if keys is None else keys,
        *(struct.pack("<q", numel) + data for _, numel, data in storages),
    ]
    path.write_bytes(b"".join(parts))


def write_zip(path: Path, content: bytes, storages: dict[str, bytes] | None = None) -> None:
    """Write a zip file from a pickle and its storages."""
    data = {f"data/{key}": value for key, value in (storages or {}).items()}
    write_records(path, {"data.pkl": content, "byteorder": b"little"} | data)


def write_tar(path: Path, members: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] | None = None) -> None:
    with closing(tarfile.open(path, "w:", format=tarfile.PAX_FORMAT)) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if change is not None:
                change(info)
            tar.addfile(info, io.BytesIO(data))


def float_storage(key: str, numel: int, view: object = None, name: str = "FloatStorage") -> StorageId:
    """The persistent id of a storage in a legacy file."""
    return StorageId("storage", Named("torch", name), key, "cpu", numel, view)

# SPDX-License-Identifier: Apache-2.0
"""Consumers and downloadables alone, as a component may use them: NVFlare's calls, and the files on disk."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from nvflare.fuel.f3.streaming.cacheable import CacheableObject, ItemConsumer
from nvflare.fuel.f3.streaming.download_service import DownloadService, DownloadStatus, ProduceRC
from nvflare.fuel.f3.streaming.obj_downloader import ObjectDownloader

from nvflare_lazy.errors import ProtocolError, TransferAbortedError, UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.safetensors.header import parse_message
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.transport import _received_files as shards
from nvflare_lazy.transport._backends import NUMPY, TORCH
from nvflare_lazy.transport._disk_consumer import DiskConsumer, UnmanagedDirectory
from nvflare_lazy.transport._downloadable import Payload
from nvflare_lazy.transport._memory_consumer import MemorySink
from nvflare_lazy.transport.array_downloader import ArrayConsumer, ArrayDownloadable
from nvflare_lazy.transport.segments import manifest as manifests
from nvflare_lazy.transport.tensor_downloader import (
    DiskTensorConsumer,
    TensorConsumer,
    TensorDownloadable,
    cleanup_active_disk_tensor_downloads,
)


def item(**tensors):
    return safetensors.torch.save(tensors)


def items_of(downloadable):
    """All items that a receiver without this package gets."""
    state, items = None, []
    while True:
        code, data, state = downloadable.produce(state, "site-1")
        if code == ProduceRC.EOF:
            return items
        assert code == ProduceRC.OK
        items += data


# ---- to disk, by items ---------------------------------------------------------------------------------------------


def test_files_are_valid(tmp_path):
    """Few files, each readable by the safetensors library, with the received names and tensors."""
    consumer = DiskTensorConsumer(str(tmp_path))
    expected = {f"T{i}": torch.full((i % 3 + 1,), float(i)) for i in range(20_000)}
    result = None
    for name, tensor in expected.items():
        result = consumer.consume_items([item(**{name: tensor})], result)
    consumer.release()
    files = sorted(tmp_path.iterdir())
    assert len(files) <= 4
    found = {}
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        assert parse_message(file.read_bytes(), str(file)).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert result["T7"][1] == "T7"
    assert Path(result["T7"][0]) in files


def test_stock_calls(tmp_path):
    """What NVFlare's own consumer is used for works the same: files by name for a `LazyTensorDict`."""
    consumer = DiskTensorConsumer(str(tmp_path))
    result = consumer.consume_items([item(a=torch.ones(3)), item(b=torch.zeros(2))], None)
    # Its files are valid at once, and after each further call.
    tensors = LazyTensorDict(result, str(tmp_path))
    assert torch.equal(tensors["a"], torch.ones(3))
    more = consumer.consume_items([item(c=torch.full((4,), 7.0))], dict(result))
    assert torch.equal(LazyTensorDict(more)["c"], torch.full((4,), 7.0))
    (path,) = {path for path, _ in more.values()}
    assert safetensors.torch.load_file(path).keys() == {"a", "b", "c"}
    assert torch.equal(tensors["b"], torch.zeros(2))
    consumer.release()
    consumer.cleanup()
    assert torch.equal(tensors["a"], torch.ones(3))
    tensors.cleanup()
    assert not tmp_path.exists()


def test_cleanup_ends_it(tmp_path):
    """After `cleanup` the directory stays removed, and later data is refused."""
    consumer = DiskTensorConsumer(str(tmp_path))
    consumer.consume_items([item(a=torch.ones(3))], None)
    cleanup_active_disk_tensor_downloads("the job is over")
    assert not tmp_path.exists()
    assert consumer.error == "the download from the sender failed: the job is over"
    assert isinstance(consumer.failure, TransferAbortedError)
    with pytest.raises(TransferAbortedError):
        consumer.consume_items([item(b=torch.ones(3))], None)
    assert not tmp_path.exists()


def test_cleanup_of_a_root(tmp_path):
    """If a root is given, only the downloads below it are cancelled."""
    mine, other = tmp_path / "mine" / "1", tmp_path / "other"
    mine.mkdir(parents=True)
    other.mkdir()
    consumers = [DiskTensorConsumer(mine), DiskTensorConsumer(other)]
    cleanup_active_disk_tensor_downloads("over", root_dir=tmp_path / "mine")
    assert [mine.exists(), other.exists()] == [False, True]
    # In the job's scratch, and received while an NVFlare workflow has a separate directory.
    consumers[1].workflow_roots = {"/tmp/nvflare_tensor_offload_job"}
    cleanup_active_disk_tensor_downloads("over", root_dir="/tmp/nvflare_tensor_offload_job")
    assert not other.exists()
    assert consumers[1].error == "the download from the sender failed: over"


def test_last_tensor_frees_the_directory(tmp_path, no_gc):
    """The directory lives as long as a tensor of it, and no longer."""
    consumer = DiskTensorConsumer(tmp_path)
    consumer.consume_items([item(a=torch.ones(3)), item(b=torch.zeros(2))], None)
    consumer.release()
    tensors = consumer.tensors()
    kept = tensors["a"]
    del tensors, consumer
    assert torch.equal(kept, torch.ones(3))
    del kept
    assert not tmp_path.exists()


def test_files_are_recycled_once_their_tensors_are_gone(tmp_path, no_gc):
    """No received file stays open after its last tensor: otherwise none would be written over in the next round."""
    with JobScratch.open(tmp_path / "scratch", job="job", min_free=0, warn=False) as job:
        consumer = DiskTensorConsumer(job.download())
        consumer.consume_items([item(a=torch.ones(1 << 19))], None)
        consumer.release()
        tensors = consumer.tensors()
        kept = tensors["a"][:2]
        del consumer, tensors
        assert torch.equal(kept, torch.ones(2))
        assert not (job.path / "recycled").exists()
        del kept
        assert len(list((job.path / "recycled").iterdir())) == 1


# ---- to memory, by items -------------------------------------------------------------------------------------------


def test_callback():
    """With a callback, each tensor is delivered on arrival, and the return value of the callback is the result."""
    seen = []
    consumer = TensorConsumer(
        lambda tensors, factor: seen.append(tensors) or dict.fromkeys(tensors, factor), {"factor": 2}
    )
    result = consumer.consume_items([item(a=torch.ones(3)), item(b=torch.zeros(2))], None)
    assert result == {"a": 2, "b": 2}
    assert [list(tensors) for tensors in seen] == [["a"], ["b"]]
    with pytest.raises(ValueError, match="must be callable"):
        TensorConsumer("no function", {})


@pytest.mark.parametrize("consumer", [TensorConsumer, ArrayConsumer])
def test_items_twice(consumer):
    """An item that comes twice is an error."""
    data = (
        item(a=torch.ones(3))
        if consumer is TensorConsumer
        else bytes(items_of(ArrayDownloadable({"a": np.ones(3)}, 1))[0])
    )
    with pytest.raises(ProtocolError):
        consumer().consume_items([data, data], None)


def test_damaged_arrays():
    """Arrays are checked by their checksum and their size, and never unpickled."""
    good = bytes(items_of(ArrayDownloadable({"a": np.arange(100.0)}, 1))[0])
    damaged = bytearray(good)
    damaged[300] ^= 1
    import io

    stream = io.BytesIO()
    np.savez_compressed(stream, a=np.zeros(1000))
    objects = io.BytesIO()
    np.savez(objects, a=np.array([{}], dtype=object))
    for bad in (bytes(damaged), good[:-30], b"PK", b"", stream.getvalue(), objects.getvalue()):
        with pytest.raises(ProtocolError):
            ArrayConsumer().consume_items([bad], None)


# ---- serving -------------------------------------------------------------------------------------------------------


def test_items_are_as_nvflare_makes_them():
    """Without a cell no segments are sent: every receiver gets whole items, readable by the libraries."""
    tensors = {"a": torch.randn(4, 5).T, "b": torch.tensor(2.5), "c": torch.zeros(0), "d": torch.ones(2).bfloat16()}
    got = {}
    for data in items_of(TensorDownloadable(tensors, 1 << 20)):
        got |= safetensors.torch.load(bytes(data))
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    made = TensorDownloadable(tensors, 1 << 20)
    assert torch.equal(safetensors.torch.load(made.produce_item(3))["d"], tensors["d"])


def test_bases():
    """Code that expects NVFlare's base classes accepts ours."""
    made = TensorDownloadable({"a": torch.zeros(3)}, 1000)
    assert isinstance(made, CacheableObject)
    assert (made.size, made.keys, made.get_item_count(), made.get_item_size(0)) == (1, ["a"], 1, 12)
    made.transaction_done("transaction", "status")
    made.release()
    assert (made.cache, made.base_obj, made.get_item_size(0)) == (None, None, None)
    with pytest.raises(RuntimeError, match="released"):
        made.produce_item(0)
    assert issubclass(DiskTensorConsumer, ItemConsumer)
    assert isinstance(TensorConsumer(), ItemConsumer)


def test_chunks():
    """Small tensors travel together up to the chunk size, a large one alone."""
    sizes = [10, 10, 5000, 10, 10, 10]
    made = TensorDownloadable({str(i): torch.zeros(size) for i, size in enumerate(sizes)}, 1000)
    state, counts = None, []
    while (reply := made.produce(state, "x"))[0] == ProduceRC.OK:
        state = reply[2]
        counts.append(state["count"])
    assert counts == [2, 1, 3]


def test_bad_state():
    """A receiver cannot ask for a place that makes no sense."""
    made = TensorDownloadable({"a": torch.zeros(3)}, 1000)
    for state in ({"start": -1}, {"start": "0"}, {"start": 0, "count": True}):
        with pytest.raises(ValueError, match="invalid download state"):
            made.produce(state, "x")


def test_what_cannot_be_sent():
    """Sparse tensors and arrays of objects say so before anything is sent."""
    with pytest.raises(UnsupportedTensorError, match="to_dense"):
        Payload({"a": torch.eye(3).to_sparse()}, TORCH).read_item("a", 0, 1)
    with pytest.raises(UnsupportedDtypeError, match="Python objects"):
        _ = Payload({"a": np.array([{}])}, NUMPY).manifest
    made = TensorDownloadable({"a": torch.zeros(3, dtype=torch.complex128)}, 1000)
    with pytest.raises(UnsupportedDtypeError, match="install nvflare-lazy"):
        made.produce_item(0)


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_any_part(piece):
    """Any cut of the run of bytes gives the same bytes: of views, of tied and of lazy tensors, in memory or not."""
    base = torch.randn(10, 6)
    values = {
        "view": base.T,
        "empty": torch.zeros(0),
        "tied": base,
        "twin": base.detach(),
        "lazy": LazyTensor.from_tensor(base)[2:5],
        "odd": torch.tensor([True, False, True]),
    }
    payload = Payload(values, TORCH)
    expected = b"".join(
        values[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name in ("view", "tied", "lazy", "odd")
    )
    total = payload.manifest.nbytes
    assert total == len(expected)
    got = b"".join(payload.read(start, min(piece, total - start)) for start in range(0, total, piece))
    assert got == expected
    assert [entry.alias for entry in payload.manifest.items] == [False, False, False, True, False, False]


def test_pulled_from_behind_a_hop():
    """A transaction that names a hop is finished when a process behind the hop has pulled, and only then."""
    downloader = ObjectDownloader(
        cell=MagicMock(), timeout=60.0, num_receivers=2, receiver_ids=("site-1.job", "site-2.job")
    )
    ref = DownloadService._ref_table[downloader.add_object(TensorDownloadable({"a": torch.zeros(3)}, 1000))]
    ref.obj_downloaded("site-1.job.trainer", DownloadStatus.SUCCESS)
    assert not ref.tx.is_finished()
    ref.obj_downloaded("site-2.job.trainer", DownloadStatus.FAILED)
    assert not ref.tx.is_finished()
    ref.obj_downloaded("site-2.job.other", DownloadStatus.SUCCESS)
    assert ref.tx.is_finished()
    downloader.delete_transaction()


def test_sent_from_where_it_is():
    """A part of one ordinary tensor is the tensor's own memory: nothing is copied."""
    tensor = torch.zeros(1000)
    part = Payload({"a": tensor}, TORCH).read(100, 400)
    tensor[30] = 1.0
    assert memoryview(part).cast("B").cast("f")[5] == 1.0


# ---- sinks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_sinks_take_any_order(tmp_path, backend, monkeypatch):
    """Segments in any order, cut anywhere, make the same values in memory and on disk, over several files."""
    monkeypatch.setattr(shards, "_MAX_NAMES_PER_FILE", 3)
    random = np.random.default_rng(3)
    values = {
        f"T{i}": torch.from_numpy(random.standard_normal(int(n))) for i, n in enumerate([5, 0, 900, 1, 0, 33, 7, 0])
    }
    if backend is NUMPY:
        values = {name: tensor.numpy() for name, tensor in values.items()}
    values["T8"] = values["T2"]
    payload = Payload(values, backend)
    manifest = manifests.decode(payload.encoded_manifest, backend, "site-1")
    delivered = {}
    memory = MemorySink(manifest, backend, delivered.__setitem__)
    disk = shards.PreallocatedShards(manifest, backend, UnmanagedDirectory(tmp_path))
    starts = list(range(0, manifest.nbytes, 1000))
    random.shuffle(starts)
    for start in starts:
        data = memoryview(bytes(payload.read(start, min(1000, manifest.nbytes - start))))
        memory.write(start, data)
        disk.write(start, data)
    memory.finish()
    received = disk.finish()
    assert len(list(tmp_path.iterdir())) == 3
    for name, value in values.items():
        assert np.array_equal(np.asarray(delivered[name]), np.asarray(value))
        assert bytes(received[name].source.read()) == np.ascontiguousarray(value).tobytes()
    assert delivered["T8"] is not delivered["T2"]
    for file in tmp_path.iterdir():
        assert parse_message(file.read_bytes(), str(file)).tensors


def test_arrays_on_disk(tmp_path):
    """Arrays of any type come back from disk as lazy arrays of that type."""
    arrays = {
        "f": np.arange(6, dtype=">f4").reshape(2, 3),
        "u": np.array(["a", "bcd"]),
        "i": np.array(7),
        "F": np.asfortranarray(np.arange(6).reshape(2, 3)),
    }
    consumer = DiskConsumer(NUMPY, tmp_path)
    consumer.consume_items([bytes(data) for data in items_of(ArrayDownloadable(arrays, 1))], None)
    consumer.release()
    got = consumer.values()
    for name, array in arrays.items():
        assert isinstance(got[name], LazyArray)
        assert got[name].dtype == array.dtype
        assert np.array_equal(got[name], array)

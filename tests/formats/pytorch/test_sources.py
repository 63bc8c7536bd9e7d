# SPDX-License-Identifier: Apache-2.0
"""`LazyDataSource`, the sources that change what they read, and how little is read and kept at all."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from nvflare_lazy.errors import ArchiveError, PyTorchCheckpointError
from nvflare_lazy.formats.pytorch import (
    LazyDataSource,
    LegacyMultiStorageSource,
    TarSource,
    ZipSource,
    open_pytorch,
)
from nvflare_lazy.tensors.tensor_file import TensorFile
from tests.formats.pytorch import files
from tests.measure import open_files

KINDS = {
    "zip": (files.save_zip, LazyDataSource.from_zip, ZipSource),
    "legacy": (files.save_legacy, LazyDataSource.from_legacy_multi_storage, LegacyMultiStorageSource),
    "tar": (files.save_tar, TarSource, TarSource),
}
MIB = 1 << 20


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def saved(tmp_path, kind):
    """A file of each kind with two storages, and the bytes of the storages."""
    content = {"a": torch.arange(100.0), "b": torch.arange(7, dtype=torch.int16)}
    KINDS[kind][0](content, tmp_path / "model.pt")
    return tmp_path / "model.pt", content


def test_reads_storages_by_key(kind, saved):
    """Each storage by its key, whole or in part, as its bytes."""
    path, content = saved
    data = KINDS[kind][1](path)
    assert type(data) is KINDS[kind][2]
    assert len(data.keys()) == 2
    found = {len(data.read(key)): key for key in data.keys()}  # noqa: SIM118  (not a mapping)
    for tensor in content.values():
        key = found[tensor.nbytes]
        assert data.contains(key)
        assert bytes(data.read(key)) == files.raw(tensor)
        assert bytes(data.read_range(key, 4, 6)) == files.raw(tensor)[4:10]
        assert data.storage(key).nbytes == tensor.nbytes


def test_keys_that_are_not_there(kind, saved):
    """A key that no storage has is an error, also if it is the name of something else in the archive."""
    data = KINDS[kind][1](saved[0])
    for key in ("", "99", "data.pkl", "../data.pkl", "pickle"):
        assert not data.contains(key)
        with pytest.raises(PyTorchCheckpointError, match="has no storage"):
            data.read(key)


def test_ranges_that_are_not_there(kind, saved):
    """A range that leaves its storage does not reach into the next one."""
    data = KINDS[kind][1](saved[0])
    key = data.keys()[0]
    size = data.storage(key).nbytes
    for offset, count in ((0, size + 1), (size, 1), (-1, 2)):
        with pytest.raises(ValueError, match="outside"):
            data.read_range(key, offset, count)


def test_names_in_the_archive(kind, saved):
    """A storage has its key and the names that other readers of checkpoints use for it; `length` is a keyword."""
    data = KINDS[kind][1](saved[0])
    key = data.keys()[0]
    names = [f"data/{key}"] if kind != "zip" else [f"data/{key}", f"model/data/{key}"]
    for name in names:
        assert data.contains(name)
        assert data.read(name) == data.read(key)
        assert data.read_range(name, offset=4, length=6) == data.read_range(key, 4, 6)


def test_files_of_an_archive(tmp_path):
    """The files of a zip by their full names, as other readers list them, with the pickle but not among the data."""
    files.save_zip({"a": torch.arange(100.0), "b": torch.arange(7)}, tmp_path / "z.pt")
    data = ZipSource(tmp_path / "z.pt")
    assert data.data_files() == ["z/data/0", "z/data/1"]
    assert data.contains("z/data.pkl")
    assert data.read_file("z/data.pkl")[:2] == b"\x80\x02"
    assert data.read_file("z/data/0") == data.read("0")
    assert data.read_file_range("z/data/0", offset=8, length=4) == data.read("0")[8:12]
    for name in ("y/data/0", "z/data/9"):
        assert not data.contains(name)
        with pytest.raises(PyTorchCheckpointError, match="has no storage"):
            data.read_file(name)


def test_storages_of_a_legacy_file(tmp_path):
    """The file states keys and boundaries: those of a caller are compared with it."""
    files.save_legacy({"a": torch.arange(100.0), "b": torch.arange(7)}, tmp_path / "model.pt")
    data = LegacyMultiStorageSource(tmp_path / "model.pt")
    keys = data.keys()
    data.set_storage_keys(keys)
    data.track_storage_usage(keys[0], 0, len(data.read(keys[0])))
    with pytest.raises(PyTorchCheckpointError, match="has the storages"):
        data.set_storage_keys(keys[::-1])
    with pytest.raises(ValueError, match="outside"):
        data.track_storage_usage(keys[0], 8, len(data.read(keys[0])))
    with pytest.raises(ArchiveError, match="is not a zip archive"):
        ZipSource(tmp_path / "model.pt")


def test_one_descriptor_for_everything(kind, saved):
    """All tensors of a file read from one descriptor, which is closed with the last of them."""
    gc.collect()
    before = open_files()
    lazy = open_pytorch(saved[0])
    tensors = list(lazy.values())
    assert open_files() == before + 1
    saved[0].unlink()
    assert tensors[1].tolist() == list(range(7))
    del lazy, tensors
    gc.collect()
    assert open_files() == before


def test_failing_to_open_closes_the_file(tmp_path):
    """An error at opening leaves no descriptor behind."""
    gc.collect()
    before = open_files()
    files.write_zip(tmp_path / "model.pt", b"N")
    for _ in range(5):
        with pytest.raises(ValueError, match="0 are left"):
            open_pytorch(tmp_path / "model.pt")
    gc.collect()
    assert open_files() == before


def test_takes_a_file_that_is_open(saved):
    """A caller that sniffed the file passes it on: it is not looked up by name again."""
    path, content = saved
    file = TensorFile(path)
    path.rename(path.with_name("elsewhere"))
    files.assert_same(open_pytorch(path, file), content)


def test_cleanup_releases_the_file(saved):
    """`cleanup()` closes the file under all tensors."""
    lazy = open_pytorch(saved[0])
    tensor = lazy["b"]
    lazy.cleanup()
    with pytest.raises(OSError, match="released"):
        tensor.tolist()


def test_cleanup_reaches_files_under_rewritten_bytes(tmp_path):
    """A file whose bytes are turned around, conjugated or gathered as they are read is closed like any other."""
    content = {"plain": torch.randn(3, 4), "strided": torch.randn(6, 8)[::2, ::3]}
    files.save_big_endian(content, tmp_path / "model.pt", 4)
    lazy = open_pytorch(tmp_path / "model.pt")
    held = [lazy["plain"], lazy["strided"], lazy["plain"].t()]
    lazy.cleanup()
    for tensor in held:
        with pytest.raises(OSError, match="released"):
            tensor.tolist()


def test_many_threads(kind, tmp_path):
    """Many threads that read views of one storage at once get what one does."""
    base = torch.randn(64, 48)
    content = {"base": base, "transposed": base.t(), "columns": base[:, ::5]}
    KINDS[kind][0](content, tmp_path / "model.pt")
    lazy = open_pytorch(tmp_path / "model.pt")
    wrong = []

    def read() -> None:
        for _ in range(30):
            wrong.extend(name for name, tensor in content.items() if not torch.equal(lazy[name].materialize(), tensor))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", ["zip", "legacy", "tar"])
def test_little_is_read_and_kept(tmp_path, kind, rchar, rss_anon):
    """Opening reads the directory and the pickle. A tensor costs its own bytes, and no data is kept."""
    content = {f"layers.{index}.weight": torch.zeros(MIB // 4) for index in range(64)}
    KINDS[kind][0](content, tmp_path / "model.pt")
    # Torch imports parts of itself at their first use, which counts as reading.
    open_pytorch(tmp_path / "model.pt")["layers.0.weight"][5:9].tolist()
    gc.collect()
    memory, read = rss_anon(), rchar()
    lazy = open_pytorch(tmp_path / "model.pt")
    assert rchar() - read < MIB
    assert rss_anon() - memory < 8 * MIB
    read = rchar()
    assert lazy["layers.40.weight"].materialize().nbytes == MIB
    assert rchar() - read < MIB + 64 * 1024
    read = rchar()
    assert lazy["layers.41.weight"][5:9].tolist() == [0, 0, 0, 0]
    assert rchar() - read < 64 * 1024


def test_a_part_of_a_legacy_file_does_not_need_the_rest(tmp_path, rchar):
    """The last storage is found without reading those before it."""
    files.save_legacy({str(index): torch.full((MIB // 4,), index) for index in range(32)}, tmp_path / "model.pt")
    assert open_pytorch(tmp_path / "model.pt")["30"][7].item() == 30
    read = rchar()
    assert open_pytorch(tmp_path / "model.pt")["31"][7].item() == 31
    assert rchar() - read < MIB // 2

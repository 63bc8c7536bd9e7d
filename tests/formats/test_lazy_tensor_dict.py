# SPDX-License-Identifier: Apache-2.0
"""A dictionary of lazy tensors: a mapping, cheap to carry, and the owner of the files behind it."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import save_file

import nvflare_lazy
from nvflare_lazy.errors import SourceReleasedError
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors.dtypes import by_torch
from nvflare_lazy.tensors.entry import TensorEntry
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile


class Lease:
    """Resource that counts its releases and reports when it is deleted."""

    def __init__(self) -> None:
        self.released = 0
        self.gone = threading.Event()
        weakref.finalize(self, self.gone.set)

    def release(self) -> None:
        self.released += 1


def make(tmp_path, owner=None) -> LazyTensorDict:
    path = tmp_path / "data"
    torch.arange(20, dtype=torch.float32).numpy().tofile(path)
    file = TensorFile(path)
    entries = {
        "a": TensorEntry(FileSource(file, 0, 40), by_torch(torch.float32), (2, 5)),
        "b": TensorEntry(FileSource(file, 40, 40), by_torch(torch.float32), (5, 2), (1, 5), 0),
    }
    entries["tied"] = entries["a"]
    made = LazyTensorDict.from_entries(entries, metadata={"k": "v"}, extras={"epoch": 3})
    made.own(owner)
    return made


def test_is_a_mapping(tmp_path):
    """All that a mapping does, with lazy tensors in the order they were given."""
    made = make(tmp_path)
    assert isinstance(made, Mapping)
    assert list(made) == list(made.keys()) == ["a", "b", "tied"]
    assert len(made) == 3
    assert "a" in made
    assert "z" not in made
    assert made.get("z", 5) == 5
    with pytest.raises(KeyError, match=r"no tensor 'z' in .*/data"):
        made["z"]
    assert all(isinstance(tensor, LazyTensor) for tensor in made.values())
    assert [key for key, _ in made.items()] == list(made)
    assert isinstance(made.make_lazy_ref("a"), LazyTensor)
    assert torch.equal(made["b"], torch.arange(10, 20).float().reshape(2, 5).T)
    assert dict(made).keys() == made.keys()
    assert (made.metadata, made.extras, made.nbytes) == ({"k": "v"}, {"epoch": 3}, 120)
    assert repr(made) == "LazyTensorDict(3 tensors, 120 bytes)"
    with pytest.raises(TypeError, match="does not support item assignment"):
        made["a"] = torch.zeros(1)


def test_copies_share(tmp_path):
    """A copy, deep or not, is the dictionary itself: it cannot be changed, and its bytes are shared anyway."""
    made = make(tmp_path)
    assert copy.copy(made) is made
    copied = copy.deepcopy({"params": made, "again": made})
    assert copied["params"] is copied["again"] is made


def test_pickles_as_a_state_dict(tmp_path):
    """Pickled or saved by torch it is an ordinary dictionary of ordinary tensors, with ties and order kept."""
    made = make(tmp_path)
    torch.save(made, tmp_path / "saved.pt")
    for loaded in (pickle.loads(pickle.dumps(made)), torch.load(tmp_path / "saved.pt", weights_only=True)):
        assert type(loaded) is OrderedDict
        assert list(loaded) == ["a", "b", "tied"]
        assert all(type(tensor) is torch.Tensor and torch.equal(tensor, made[name]) for name, tensor in loaded.items())
        assert loaded["tied"] is loaded["a"]


def test_identity(tmp_path):
    """A dictionary equals itself only, as any object: comparing the tensors of two has no single answer."""
    made, other = make(tmp_path), make(tmp_path)
    assert made == made
    assert made != other
    assert made != dict(made)
    assert made in [other, made]
    assert {made: 1, other: 2}[made] == 1


def test_views_are_iterable_repeatedly(tmp_path):
    """`items()` and `values()` can be iterated repeatedly, and `next(iter(...))` starts over."""
    made = make(tmp_path)
    items, values = made.items(), made.values()
    for _ in range(2):
        assert next(iter(items))[0] == "a"
        assert next(iter(values)) is made["a"]
        assert len(list(items)) == len(list(values)) == 3


def test_tied_entries_stay_tied(tmp_path):
    """Two names of one entry give the same object, so that it is sent and saved as tied."""
    made = make(tmp_path)
    a = made["a"]
    assert made["tied"] is a
    assert made["b"] is not a
    assert made["a"] is a


def test_loads_into_a_module(tmp_path):
    """A module takes it for a state dict."""
    module = torch.nn.Module()
    module.register_parameter("a", torch.nn.Parameter(torch.zeros(2, 5)))
    assert module.load_state_dict(make(tmp_path), strict=False).missing_keys == []
    assert torch.equal(module.a.data, torch.arange(10).float().reshape(2, 5))


def test_twenty_thousand_entries_cost_nothing(tmp_path):
    """Making and copying a large dictionary makes no tensor."""
    source = FileSource(TensorFile("/dev/null"), 0, 0)
    entries = {f"{i}": TensorEntry(source, by_torch(torch.float32), (0,)) for i in range(20_000)}
    made = LazyTensorDict.from_entries(entries)
    assert made.nbytes == 0
    assert all(entry._made is None for entry in made.entries.values())


def test_cleanup_releases_now(tmp_path):
    """cleanup() releases the lease even if tensors exist, and reading one raises an error with the reason."""
    lease = Lease()
    made = make(tmp_path, lease)
    held = made["a"]
    part = held[1]
    made.cleanup()
    made.cleanup()
    assert lease.released == 1
    for tensor in (held, part, made["a"], made["b"]):
        with pytest.raises(SourceReleasedError, match="released"):
            tensor.sum()
    assert made["a"].shape == (2, 5)
    assert list(made) == ["a", "b", "tied"]


def test_last_tensor_keeps_the_lease(tmp_path, no_gc):
    """The lease lives as long as the dictionary or any tensor or view from it."""
    lease = Lease()
    gone = lease.gone
    made = make(tmp_path, lease)
    view = made["b"][1:]
    del made, lease
    assert not gone.is_set()
    assert view.sum() > 0
    del view
    assert gone.is_set()


def test_from_files_like_nvflares(tmp_path, no_gc):
    """The constructor NVFlare's own class has: names to files, and a directory that goes with the last tensor."""
    directory = tmp_path / "received"
    directory.mkdir()
    save_file({"x": torch.ones(3), "y": torch.zeros(2)}, directory / "0.safetensors")
    save_file({"x": torch.full((2,), 7.0)}, directory / "1.safetensors")
    names = {"T0": (str(directory / "0.safetensors"), "x"), "T1": (str(directory / "1.safetensors"), "x")}
    made = nvflare_lazy.LazyTensorDict(names, str(directory))
    assert torch.equal(made["T0"], torch.ones(3))
    tensor = made["T1"]
    del made
    assert directory.exists()
    assert torch.equal(tensor, torch.full((2,), 7.0))
    del tensor
    assert not directory.exists()


def test_files_are_opened_on_use(tmp_path):
    """An error names the file and the key, and costs the tensors of that file only, even in `get()`."""
    save_file({"x": torch.ones(3)}, tmp_path / "0.safetensors")
    path, missing = str(tmp_path / "0.safetensors"), str(tmp_path / "1.safetensors")
    made = nvflare_lazy.LazyTensorDict({"T0": (path, "x"), "T1": (path, "nothing"), "T2": (missing, "y")})
    assert list(made) == ["T0", "T1", "T2"]
    assert repr(made) == "LazyTensorDict(3 tensors)"
    assert torch.equal(made["T0"], torch.ones(3))
    assert made.get("T3") is None
    for read in (made.__getitem__, made.get, made.make_lazy_ref):
        with pytest.raises(KeyError, match=f"no tensor 'nothing' in {path}"):
            read("T1")
        with pytest.raises(FileNotFoundError, match=f"cannot read tensor 'y': No such file or directory: '{missing}'"):
            read("T2")
    with pytest.raises(KeyError, match=f"no tensor 'T3' in {path}, {missing}"):
        made["T3"]
    save_file({"y": torch.zeros(2)}, missing)
    assert made["T2"].shape == (2,)
    made.cleanup()
    with pytest.raises(SourceReleasedError):
        made["T0"].sum()
    with pytest.raises(SourceReleasedError):
        made["T1"]


def test_lazy_refs(tmp_path):
    """A reference has the file's path and the tensor's name there, and materializes without the dictionary."""
    directory = tmp_path / "received"
    directory.mkdir()
    save_file({"x": torch.ones(3)}, directory / "0.safetensors")
    path = str(directory / "0.safetensors")
    made = nvflare_lazy.LazyTensorDict({"T0": (path, "x")}, str(directory))
    ref = made.make_lazy_ref("T0")
    assert (ref.file_path, ref.key) == (path, "x")
    assert made["T0"].file_path is None
    del made
    assert torch.equal(ref.materialize(), torch.ones(3))
    ref = nvflare_lazy.open(path).make_lazy_ref("x")
    assert (ref.file_path, ref.key) == (path, "x")


def test_cleanup_removes_the_directory(tmp_path):
    """cleanup() removes the directory at once, and a directory that is already missing is not an error."""
    directory = tmp_path / "received"
    directory.mkdir()
    save_file({"x": torch.ones(3)}, directory / "0.safetensors")
    made = nvflare_lazy.LazyTensorDict({"T": (str(directory / "0.safetensors"), "x")}, directory)
    made.cleanup()
    assert not directory.exists()
    made.cleanup()

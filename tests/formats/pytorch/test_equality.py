# SPDX-License-Identifier: Apache-2.0
"""Lazily opened tensors equal those of `torch.load` bit for bit, for every dtype, layout and kind of file."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from nvflare_lazy.formats.pytorch import open_pytorch
from nvflare_lazy.tensors.tensor_file import FileSource
from tests.formats.pytorch import files

# Torch warns at the first complex32 tensor, in any program.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ZIP_KINDS = {f"zip, protocol {protocol}": protocol for protocol in range(1, 6)}
LEGACY_KINDS = {f"legacy, protocol {protocol}": protocol for protocol in range(1, 6)}


def load(path) -> dict[str, torch.Tensor]:
    # Protocols above 3 and tar files are more than torch's own restricted unpickler reads; these files are ours.
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("dtype", files.CLASSIC + files.RECENT, ids=str)
@pytest.mark.parametrize("kind", ZIP_KINDS)
def test_zip(tmp_path, dtype, kind):
    """All layouts of all dtypes, over the protocols of pickle."""
    files.save_zip(files.layouts(dtype), tmp_path / "model.pt", ZIP_KINDS[kind])
    files.assert_same(open_pytorch(tmp_path / "model.pt"), load(tmp_path / "model.pt"))


@pytest.mark.parametrize("dtype", files.CLASSIC + files.RECENT, ids=str)
def test_zip_without_checksums(tmp_path, dtype):
    """Torch can omit the checksums, and Python's zipfile cannot read such a file."""
    with files.without_checksums():
        files.save_zip(files.layouts(dtype), tmp_path / "model.pt")
        files.assert_same(open_pytorch(tmp_path / "model.pt"), load(tmp_path / "model.pt"))


@pytest.mark.parametrize("dtype", files.CLASSIC, ids=str)
@pytest.mark.parametrize("kind", LEGACY_KINDS)
def test_legacy(tmp_path, dtype, kind):
    """All layouts of the dtypes that torch reads back from legacy files."""
    files.save_legacy(files.layouts(dtype), tmp_path / "model.pt", LEGACY_KINDS[kind])
    files.assert_same(open_pytorch(tmp_path / "model.pt"), load(tmp_path / "model.pt"))


@pytest.mark.parametrize("dtype", files.RECENT, ids=str)
def test_legacy_files_that_torch_writes_and_cannot_read(tmp_path, dtype):
    """Torch fails on the untyped storages in its legacy files; here they have the saved bytes."""
    content = files.layouts(dtype)
    files.save_legacy(content, tmp_path / "model.pt")
    with pytest.raises(AttributeError, match="dtype"):
        load(tmp_path / "model.pt")
    files.assert_same(open_pytorch(tmp_path / "model.pt"), content)


@pytest.mark.parametrize("dtype", files.CLASSIC, ids=str)
def test_tar(tmp_path, dtype):
    """All layouts in the oldest kind; that torch reads the same file the same way shows that it is one."""
    content = {name: tensor.detach() for name, tensor in files.layouts(dtype).items()}
    files.save_tar(content, tmp_path / "model.pt")
    files.assert_same(open_pytorch(tmp_path / "model.pt"), load(tmp_path / "model.pt"))


@pytest.mark.parametrize("dtype", files.CLASSIC, ids=str)
def test_big_endian(tmp_path, dtype):
    """Numbers of a big-endian machine are reversed, and each half of a complex number separately."""
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    content = files.layouts(dtype)
    files.save_big_endian(content, tmp_path / "model.pt", width)
    lazy = open_pytorch(tmp_path / "model.pt")
    files.assert_same(lazy, load(tmp_path / "model.pt"))
    files.assert_same(lazy, content)


@pytest.mark.parametrize("dtype", files.RECENT, ids=str)
def test_big_endian_with_recent_dtypes(tmp_path, dtype):
    """Torch reverses untyped storages by single bytes, which has no effect; here they have the saved bytes."""
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    content = files.layouts(dtype)
    files.save_big_endian(content, tmp_path / "model.pt", width)
    files.assert_same(open_pytorch(tmp_path / "model.pt"), content)


@pytest.mark.parametrize("saver", [files.save_zip, files.save_legacy], ids=["zip", "legacy"])
@pytest.mark.parametrize("dtype", files.COMPLEX, ids=str)
def test_pending_conjugation_and_negation(tmp_path, saver, dtype):
    """A conjugated or negated view is saved as untouched bytes and a note; its elements are correct."""
    # Not just any bits: what torch's arithmetic makes of a NaN depends on where in a vector it stands.
    base = torch.randn(4, 6, dtype=dtype)
    real = torch.randn(24)
    content = {
        "conjugated": base.conj(),
        "conjugated, transposed": base.conj().t(),
        "imaginary part of a conjugate": base.clone().conj().imag,
        "negated": torch._neg_view(base),
        "negated conjugate": torch._neg_view(base.conj()),
        "negated floats": torch._neg_view(real)[3::4],
        "plain": base,
    }
    saver(content, tmp_path / "model.pt")
    files.assert_same(open_pytorch(tmp_path / "model.pt"), load(tmp_path / "model.pt"))


def test_one_storage_as_two_dtypes(tmp_path):
    """Untyped storages can be shared by tensors of different widths; in big-endian files each turns its own."""
    numbers = files.random_tensor(torch.uint32, 8)
    content = {"words": numbers, "halves": numbers.view(torch.uint16)[1::3], "bytes": numbers.view(torch.float8_e5m2)}
    files.save_zip(content, tmp_path / "model.pt")
    lazy = open_pytorch(tmp_path / "model.pt")
    files.assert_same(lazy, load(tmp_path / "model.pt"))
    assert lazy.entries["words"].source is lazy.entries["halves"].source


def test_odd_end_of_a_storage(tmp_path):
    """A storage may have a few bytes more than its elements fill."""
    content = {"numbers": files.random_tensor(torch.uint8, 11)[:8].view(torch.int32)}
    for saver in (files.save_zip, files.save_legacy):
        saver(content, tmp_path / "model.pt")
        files.assert_same(open_pytorch(tmp_path / "model.pt"), content)
    files.save_big_endian(content, tmp_path / "model.pt", 4)
    files.assert_same(open_pytorch(tmp_path / "model.pt"), content)


def test_offsets_are_those_that_torch_knows(tmp_path):
    """Under FakeTensorMode, torch returns the offset of each storage in a zip file: the same offsets."""
    tensors = {f"t{index}": torch.randn(index * 7 + 1) for index in range(20)}
    torch.save(tensors, tmp_path / "model.pt")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        known = torch.load(tmp_path / "model.pt")
    lazy = open_pytorch(tmp_path / "model.pt")
    for name, tensor in known.items():
        _, offset = lazy.entries[name].source.file_range()
        assert offset == tensor.untyped_storage()._checkpoint_offset


@pytest.mark.parametrize("saver", [files.save_zip, files.save_legacy, files.save_tar], ids=["zip", "legacy", "tar"])
def test_contiguous_tensors_are_plain_parts_of_the_file(tmp_path, saver):
    """What needs no gathering can be copied by the kernel: its source is a part of the file."""
    base = torch.arange(24.0)
    content = {"whole": base, "rows": base.view(4, 6)[1:3], "columns": base.view(4, 6)[:, 1:3]}
    saver(content, tmp_path / "model.pt")
    lazy = open_pytorch(tmp_path / "model.pt")
    file, offset = lazy["rows"].source.file_range()
    data = (tmp_path / "model.pt").read_bytes()[offset : offset + 48]
    assert np.frombuffer(data, dtype="<f4").tolist() == content["rows"].flatten().tolist()
    assert isinstance(lazy["whole"].source, FileSource)
    assert lazy["columns"].source.file_range() is None
    assert lazy["whole"].source.file_range()[0] is file


@pytest.mark.parametrize("saver", [files.save_zip, files.save_legacy, files.save_tar], ids=["zip", "legacy", "tar"])
def test_tied_tensors_are_one_and_shared_storages_are_shared(tmp_path, saver):
    """Tied weights are the same entry, so senders and writers see one tensor; views share the source."""
    base = torch.arange(24.0)
    content = {"a": base, "b": base, "c": base.view(24), "d": base.view(4, 6), "e": base.clone()}
    saver(content, tmp_path / "model.pt")
    lazy = open_pytorch(tmp_path / "model.pt")
    assert lazy.entries["a"] is lazy.entries["b"] is lazy.entries["c"]
    assert lazy["a"] is lazy["b"]
    assert lazy.entries["d"] is not lazy.entries["a"]
    assert lazy.entries["d"].source is lazy.entries["a"].source
    assert lazy.entries["e"].source is not lazy.entries["a"].source


# ---- what older versions wrote -----------------------------------------------------------------------------------


def test_tensors_of_the_first_form(tmp_path):
    """`_rebuild_tensor`, storages of CUDA, and views of storages, as PyTorch 0.1.10 to 0.3 wrote them."""
    rebuild = files.Named("torch._utils", "_rebuild_tensor")
    cuda = files.StorageId("storage", files.Named("torch.cuda", "FloatStorage"), "94", "cuda:0", 6, None)
    part = functools.partial(files.float_storage, "7", 24)
    content = {
        "whole": rebuild(part(), 0, (4, 6), (6, 1)),
        "transposed": rebuild(part(), 0, (6, 4), (1, 6)),
        "in a view": rebuild(part(("70", 6, 12)), 2, (5, 2), (2, 1)),
        "in the same view": rebuild(part(("70", 6, 12)), 0, (12,), (1,)),
        "from a GPU": rebuild(cuda, 1, (5,), (1,)),
    }
    storages = [("7", 24, files.raw(torch.randn(24))), ("94", 6, files.raw(torch.randn(6)))]
    files.write_legacy(tmp_path / "model.pt", files.hand_pickle(content), storages)
    expected = torch.load(tmp_path / "model.pt", map_location="cpu")
    files.assert_same(open_pytorch(tmp_path / "model.pt"), expected)


def test_text_of_python_2(tmp_path):
    """Python 2 wrote keys and names as byte strings."""
    rebuild = b"ctorch._utils\n_rebuild_tensor\n"
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04NtQ"
    pickled = b"\x80\x02ccollections\nOrderedDict\n]]U\x06weighta" + rebuild + b"(" + storage
    pickled += b"K\x00K\x04\x85K\x01\x85tRaa\x85R."
    files.write_legacy(tmp_path / "model.pt", pickled, [("0", 4, files.raw(torch.arange(4.0)))])
    expected = torch.load(tmp_path / "model.pt", weights_only=False)
    lazy = open_pytorch(tmp_path / "model.pt")
    files.assert_same(lazy, expected)
    assert lazy["weight"].tolist() == [0, 1, 2, 3]


def test_parameters_and_variables_of_old(tmp_path):
    """A variable was its data and a state of flags and hooks."""
    tensor = files.Named("torch._utils", "_rebuild_tensor")(files.float_storage("0", 4), 0, (4,), (1,))
    flags = (True, False, files.Named("collections", "OrderedDict")())
    content = {
        "parameter": files.Named("torch.nn.parameter", "Parameter")(tensor, state=flags),
        "variable": files.Named("torch.autograd.variable", "Variable")(tensor),
    }
    files.write_legacy(tmp_path / "model.pt", files.hand_pickle(content), [("0", 4, files.raw(torch.arange(4.0)))])
    lazy = open_pytorch(tmp_path / "model.pt")
    assert lazy["parameter"].tolist() == lazy["variable"].tolist() == [0, 1, 2, 3]


def test_byte_order_of_the_machine_does_not_matter_in_legacy_files(tmp_path):
    """Big-endian machines say so and write little-endian numbers: torch ignores what they say, and so it is here."""
    files.save_legacy({"a": torch.arange(4.0)}, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(data.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"))
    assert (tmp_path / "model.pt").read_bytes() != data
    files.assert_same(open_pytorch(tmp_path / "model.pt"), load(tmp_path / "model.pt"))


def test_views_of_storages_in_tar_files(tmp_path):
    """A storage could be a part of another; its tensors count from where the part begins."""
    base = torch.arange(24.0)
    part = base.untyped_storage()[4 * 6 : 4 * 18]
    whole = base.view(4, 6)
    view = torch.empty(0).set_(part, 2, (5, 2), (2, 1))
    tar = files.Tar()
    tar.views = [(77, whole.untyped_storage()._cdata, 6, 12)]
    tar.storage_of = {id(view): 77}
    tar.save({"whole": whole, "view": view}, tmp_path / "model.pt")
    expected = load(tmp_path / "model.pt")
    assert expected["view"].tolist() == view.tolist()
    files.assert_same(open_pytorch(tmp_path / "model.pt"), expected)


@pytest.mark.parametrize("saver", [files.save_zip, files.save_legacy], ids=["zip", "legacy"])
def test_bare_storages(tmp_path, saver):
    """A storage that was saved without a tensor is a tensor of one dimension."""
    storage = torch.arange(5, dtype=torch.int16)._typed_storage()
    saver({"storage": storage}, tmp_path / "model.pt")
    assert open_pytorch(tmp_path / "model.pt")["storage"].tolist() == [0, 1, 2, 3, 4]


def test_appended_files(tmp_path):
    """Several legacy checkpoints can follow each other in one file; the first is opened, as torch does."""
    with open(tmp_path / "model.pt", "wb") as file:
        for value in (1.0, 2.0):
            torch.save({"a": torch.full((3,), value)}, file, _use_new_zipfile_serialization=False)
    files.assert_same(open_pytorch(tmp_path / "model.pt"), load(tmp_path / "model.pt"))


@pytest.mark.parametrize("saver", [files.save_zip, files.save_legacy], ids=["zip", "legacy"])
def test_whole_training_state(tmp_path, saver):
    """A model with its optimizer, as training scripts save it: tensors by joined names, the rest as extras."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    model[2].weight = torch.nn.Parameter(model[0].weight.t())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    saver({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "model.pt")
    lazy = open_pytorch(tmp_path / "model.pt")
    expected = torch.load(tmp_path / "model.pt")
    names = {f"model.{name}": tensor for name, tensor in expected["model"].items()}
    for index, state in expected["optimizer"]["state"].items():
        names |= {f"optimizer.state.{index}.{name}": tensor for name, tensor in state.items()}
    files.assert_same(lazy, names)
    assert lazy.extras["epoch"] == 3
    assert lazy.extras["optimizer"] == {"param_groups": expected["optimizer"]["param_groups"]}
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    fresh.load_state_dict(open_pytorch(tmp_path / "model.pt", section="model"))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())

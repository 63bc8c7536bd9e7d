# SPDX-License-Identifier: Apache-2.0
"""What the nested contents of a checkpoint become: names, sections and extras; and tensors without dense elements."""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from nvflare_lazy.errors import (
    ForbiddenGlobalError,
    PyTorchCheckpointError,
    SectionError,
    UnsupportedTensorError,
)
from nvflare_lazy.formats.pytorch import open_pytorch
from tests.formats.pytorch import files


def saved(tmp_path, content: object, **options: object):
    torch.save(content, tmp_path / "model.pt", **options)
    return tmp_path / "model.pt"


def t(value: float = 0.0) -> torch.Tensor:
    return torch.full((2,), float(value))


# ---- names -------------------------------------------------------------------------------------------------------


def test_plain_state_dict_keeps_its_names(tmp_path):
    """Names of a state dict are not touched, dots and all, and there is nothing else."""
    lazy = open_pytorch(saved(tmp_path, collections.OrderedDict({"a.b": t(), "c": t(), "": t()})))
    assert list(lazy) == ["a.b", "c", ""]
    assert lazy.extras == {}
    assert lazy.metadata == {"format": "pt"}


def test_metadata_of_a_module_is_no_extra(tmp_path):
    """The versions that `state_dict()` attaches to its OrderedDict are not contents."""
    lazy = open_pytorch(saved(tmp_path, torch.nn.BatchNorm1d(2).state_dict()))
    assert set(lazy) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert lazy.extras == {}


def test_nested_names_are_joined(tmp_path):
    """Dicts by key, lists by index, other keys as text."""
    content = {"model": {"layer": {"weight": t()}}, "list": [t(), (t(), [t()])], 3: {4.5: t(), None: t(), b"k": t()}}
    lazy = open_pytorch(saved(tmp_path, content))
    expected = ["model.layer.weight", "list.0", "list.1.0", "list.1.1.0", "3.4.5", "3.None", "3.k"]
    assert list(lazy) == expected


@pytest.mark.parametrize(
    ("content", "names", "extras"),
    [
        (t(), ["tensor"], {}),
        ([t(), t()], ["0", "1"], {}),
        ((t(), "text"), ["0"], {"1": "text"}),
        (5, [], {"value": 5}),
        (None, [], {"value": None}),
        ({}, [], {}),
        ([], [], {}),
    ],
    ids=repr,
)
def test_top_level_that_is_no_dict(tmp_path, content, names, extras):
    """A tensor, a list or a number alone gets a sensible name."""
    lazy = open_pytorch(saved(tmp_path, content))
    assert (list(lazy), lazy.extras) == (names, extras)


@pytest.mark.parametrize("content", [{"a.b": t(), "a": {"b": t()}}, {1: t(), "1": t()}, {"a": [t()], "a.0": t()}])
def test_colliding_names_are_an_error(tmp_path, content):
    """Two tensors never get one name: the error lists the names, and a section avoids it."""
    path = saved(tmp_path, content)
    with pytest.raises(PyTorchCheckpointError, match="two tensors would have"):
        open_pytorch(path)
    if "a" in content:
        assert len(open_pytorch(path, section="a")) == 1


def test_attributes_count_as_keys(tmp_path):
    """A namespace of arguments is its attributes."""
    content = {"args": argparse.Namespace(lr=0.5, init=t()), "more": types.SimpleNamespace(x=[1, 2])}
    lazy = open_pytorch(saved(tmp_path, content))
    assert list(lazy) == ["args.init"]
    assert lazy.extras == {"args": {"lr": 0.5}, "more": {"x": [1, 2]}}


# ---- sections ----------------------------------------------------------------------------------------------------


def test_nvflare_checkpoint(tmp_path):
    """The layout from NVFlare's persistor: its section selects the model, no section selects everything."""
    state = torch.nn.Linear(2, 3).state_dict()
    path = saved(tmp_path, {"model": state, "meta_props": {"name": "m"}, "train_conf": {"train": {"round": 3}}})
    model = open_pytorch(path, section="model")
    files.assert_same(model, dict(state))
    assert model.extras == {}
    everything = open_pytorch(path)
    assert list(everything) == ["model.weight", "model.bias"]
    assert everything.extras == {"meta_props": {"name": "m"}, "train_conf": {"train": {"round": 3}}}


def test_section_by_path(tmp_path):
    """A section may be nested, in a list, or have dots in its own name."""
    content = {"a": {"b": [{"w": t(1)}, {"w": t(2)}]}, "x.y": {"w": t(3)}, 7: {"w": t(4)}}
    path = saved(tmp_path, content)
    for section, value in (("a.b.0", 1), ("a.b.1", 2), ("x.y", 3), ("7", 4)):
        lazy = open_pytorch(path, section=section)
        assert {name: tensor.tolist() for name, tensor in lazy.items()} == {"w": [value, value]}


@pytest.mark.parametrize("section", ["other", "epoch", "weight", "model.w", "model.", "", "."])
def test_section_that_is_none(tmp_path, section):
    """For a missing section, or a single value, the error lists the available sections."""
    path = saved(tmp_path, {"model": {"w": t()}, "optimizer": {}, "epoch": 3, "weight": t()})
    with pytest.raises(SectionError, match="it has 'model', 'optimizer'"):
        open_pytorch(path, section=section)


def test_section_of_a_plain_state_dict(tmp_path):
    """The file has no sections; the error states this."""
    with pytest.raises(SectionError, match="has no sections"):
        open_pytorch(saved(tmp_path, {"w": t()}), section="model")


# ---- extras ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(1, 6))
def test_extras_are_plain_python(tmp_path, protocol):
    """Contents other than tensors are returned unchanged, in all protocols of pickle."""
    content = {
        "none": None,
        "numbers": [0, 1, 255, 256, 65535, 65536, -1, -(2**31), 2**31, 2**63, -(2**70), 1.5, float("inf"), True, False],
        "texts": ["", "ä", "日本", "x" * 300, "a\nb", b"", b"\x00\xff", b"y" * 300, bytearray(b"z\xfe")],
        "complex": 1 - 2j,
        "nested": {"empty": {}, "list": [], "tuple": (1, (2,), (3, 4, 5, 6)), 5: {"six": 7}, None: 1, 1.5: 2},
        "sets": [{1, "a"}, frozenset([2, b"b"]), set(), frozenset()],
        "counts": collections.Counter("aab"),
        "defaults": collections.defaultdict(list, x=[1]),
        "ordered": collections.OrderedDict(z=1, a=2),
        "dtypes": [torch.float32, torch.bfloat16],
        "size": torch.Size([2, 3]),
    }
    extras = dict(open_pytorch(saved(tmp_path, content | {"w": t()}, pickle_protocol=protocol)).extras)
    assert extras == content
    assert repr(list(extras["ordered"])) == "['z', 'a']"
    assert [type(text) for text in extras["texts"]] == [type(text) for text in content["texts"]]


@pytest.mark.parametrize("protocol", range(1, 6))
def test_objects_of_other_classes_are_opaque(tmp_path, protocol):
    """Objects that torch does not load safely, NumPy scalars included, are named, not loaded; the tensors are."""
    array = np.arange(6.0).reshape(2, 3)
    content = {"number": array[1, 1], "array": array, "path": Path("a"), "day": datetime.date(2024, 1, 2)}
    extras = open_pytorch(saved(tmp_path, content | {"w": t()}, pickle_protocol=protocol)).extras
    assert all(re.fullmatch(r"<[\w.]+, not loaded>", repr(value)) for value in extras.values())
    assert list(extras) == list(content)
    assert "numpy" in repr(extras["array"])
    assert "date" in repr(extras["day"])


def test_classes_of_other_packages_are_named(tmp_path):
    """A configuration object of any program becomes an extra with the name of its class, whatever its attributes."""
    config = files.Named("omegaconf.dictconfig", "DictConfig")(1, state={"content": [1, 2]})
    named = files.Named("__main__", "Net")
    files.write_zip(tmp_path / "model.pt", files.hand_pickle({"config": config, "class": named, "epoch": 3}))
    lazy = open_pytorch(tmp_path / "model.pt")
    assert repr(lazy.extras["config"]) == "<omegaconf.dictconfig.DictConfig, not loaded>"
    assert repr(lazy.extras["class"]) == "<__main__.Net, not loaded>"
    assert lazy.extras["epoch"] == 3


@pytest.mark.parametrize("protocol", [2, 4])
def test_containers_of_other_classes_are_opaque(tmp_path, protocol):
    """Items that are put into a dict, list or set of another class are stored, and no method of the class is run."""
    path = saved(tmp_path, {"deque": collections.deque([1, 2, 3]), "w": t()}, pickle_protocol=protocol)
    assert repr(open_pytorch(path).extras["deque"]) == "<collections.deque, not loaded>"
    for items in (b"K\x01K\x02s", b"(K\x01K\x02u", b"K\x01a", b"(K\x01e", b"(K\x01\x90"):
        files.write_zip(path, b"\x80\x04cother\nThing\n)R" + items * 3 + b".")
        assert repr(open_pytorch(path).extras["value"]) == "<other.Thing, not loaded>"


@pytest.mark.parametrize("place", ["state", "arguments", "items"])
def test_tensors_in_objects_of_other_classes_are_refused(tmp_path, place):
    """A whole pickled model, or a tensor of another class, would lose its tensors: that is an error that names it."""
    tensor = files.Named("torch._utils", "_rebuild_tensor")(files.float_storage("0", 2), 0, (2,), (1,))
    deep = [{"a": (1, tensor)}]
    net = files.Named("__main__", "Net")
    content = {
        "state": net(state={"b": deep}),
        "arguments": net(deep),
        "items": net(files.Named("other", "Class")(deep)),
    }
    files.write_legacy(tmp_path / "model.pt", files.hand_pickle([content[place]]), [("0", 2, bytes(8))])
    with pytest.raises(ForbiddenGlobalError, match=r"__main__\.Net, so it is a whole pickled model"):
        open_pytorch(tmp_path / "model.pt")


def test_random_states(tmp_path):
    """The states of the random number generators, as trainers save them: a tensor, and an opaque array."""
    content = {"numpy": np.random.RandomState(0).get_state(), "torch": torch.get_rng_state()}
    lazy = open_pytorch(saved(tmp_path, content))
    assert torch.equal(lazy["torch"].materialize(), content["torch"])
    assert lazy.extras["numpy"][0] == "MT19937"
    assert "not loaded" in repr(lazy.extras["numpy"][1])


def test_places_of_tensors_in_lists_are_kept(tmp_path):
    """Other list items keep their index; a list that has only tensors is not an extra."""
    lazy = open_pytorch(saved(tmp_path, {"mixed": [t(), 5, t()], "pure": [t(), t()], "deep": [{"a": t(), "b": 1}]}))
    assert lazy.extras == {"mixed": [None, 5, None], "deep": [{"b": 1}]}


def test_devices_and_layouts_are_text(tmp_path):
    """The placeholder of a torch object has the name of the object."""
    content = {"device": torch.device("cuda", 1), "cpu": torch.device("cpu"), "layout": torch.strided}
    content["class"] = collections.OrderedDict
    lazy = open_pytorch(saved(tmp_path, content))
    assert lazy.extras == {
        "device": "cuda:1",
        "cpu": "cpu",
        "layout": "torch.strided",
        "class": "collections.OrderedDict",
    }
    assert json.dumps(dict(lazy.extras))


def test_what_is_shared_may_be_shared(tmp_path):
    """The same dict or list in several places is not a cycle."""
    state = {"w": t(1), "b": t(2)}
    steps = [1, 2, 3]
    lazy = open_pytorch(saved(tmp_path, {"model": state, "ema": state, "a": steps, "b": steps}))
    assert list(lazy) == ["model.w", "model.b", "ema.w", "ema.b"]
    assert lazy.entries["model.w"] is lazy.entries["ema.w"]
    assert lazy.extras == {"a": steps, "b": steps}


def test_large_extras_are_no_attack(tmp_path):
    """A million of numbers, in lists and dicts, is what some trainers save."""
    content = {"w": t(), "history": {"steps": list(range(500_000)), "loss": {str(i): i / 3 for i in range(200_000)}}}
    extras = open_pytorch(saved(tmp_path, content)).extras
    assert extras["history"] == content["history"]


def _cyclic_dict() -> object:
    content: dict[str, object] = {"w": t()}
    content["self"] = content
    return content


def _cyclic_list() -> object:
    content: list[object] = []
    content.append((content,))
    return {"a": content}


def _deep() -> object:
    content: object = t()
    for _ in range(100):
        content = [content]
    return content


def _laughs() -> object:
    content: object = {"w": t()}
    for _ in range(60):
        content = {"a": content, "b": content}
    return content


def _laughing_lists() -> object:
    content: object = [1, 2, 3]
    for _ in range(60):
        content = [content] * 10
    return {"w": t(), "lists": content}


@pytest.mark.parametrize("make", [_cyclic_dict, _cyclic_list, _deep, _laughs, _laughing_lists])
def test_contents_without_end(tmp_path, make):
    """What holds itself, or repeats itself a million million times, is an error and not a hang."""
    with pytest.raises(PyTorchCheckpointError, match=r"contains itself|far more memory"):
        open_pytorch(saved(tmp_path, make()))


# ---- tensors without dense elements ------------------------------------------------------------------------------


UNSUPPORTED = {
    "coo": (lambda: torch.eye(4).to_sparse(), "a sparse tensor"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "a sparse tensor"),
    "csc": (lambda: torch.eye(4).to_sparse_csc(), "a sparse tensor"),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "a sparse tensor"),
    "meta": (lambda: torch.empty(2, 3, device="meta"), "a tensor of the meta device"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    "quint8": (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 3, torch.quint8), "a quantized tensor"),
    "qint32": (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint32), "a quantized tensor"),
    "channels": (
        lambda: torch.quantize_per_channel(torch.eye(4), torch.ones(4), torch.zeros(4), 0, torch.qint8),
        "a quantized tensor",
    ),
    "bits": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "a tensor of torch.bits8"),
    "negated": (lambda: torch._neg_view(torch.arange(4)), "a negated view"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls all of these beta, or deprecated
@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
def test_tensor_without_dense_elements(tmp_path, name, new_format):
    """It has a name, a shape and a dtype; only reading it raises an error, which gives the reason."""
    make, kind = UNSUPPORTED[name]
    tensor = make()
    path = saved(tmp_path, {"before": t(1), "odd": tensor, "after": t(2)}, _use_new_zipfile_serialization=new_format)
    lazy = open_pytorch(path)
    assert list(lazy) == ["before", "odd", "after"]
    assert lazy["before"].tolist() == [1, 1]
    assert lazy["after"].tolist() == [2, 2]
    if name != "nested":
        assert lazy["odd"].shape == tensor.shape
    for use in (lazy["odd"].materialize, lazy["odd"].tolist, lazy["odd"].source.read, lambda: lazy["odd"] + 1):
        with pytest.raises(UnsupportedTensorError, match=f"^'odd' in .* is {kind}"):
            use()


def test_tensors_with_attributes_are_tensors(tmp_path):
    """Attributes that were set on a tensor or parameter do not matter, nor do gradients."""
    tensor, parameter = t(1), torch.nn.Parameter(t(2))
    tensor.note = "seen"
    parameter.note = "too"
    lazy = open_pytorch(saved(tmp_path, {"t": tensor, "p": parameter, "g": t(3).requires_grad_()}))
    assert {name: value.tolist() for name, value in lazy.items()} == {"t": [1, 1], "p": [2, 2], "g": [3, 3]}
    assert not any(value.requires_grad for value in lazy.values())


def test_cpu_copies_of_other_devices(tmp_path):
    """Tensors of XLA and similar devices are opened if they were saved as a copy on the CPU, not as NumPy."""
    tensor = files.Named("torch._utils", "_rebuild_tensor")(files.float_storage("0", 2), 0, (2,), (1,))
    device = files.Named("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
    content = {
        "same": device(tensor, torch.float32, "xla:0", False),
        "cast": device(tensor, torch.bfloat16, "xla:0", False),
        "array": files.Named("torch._utils", "_rebuild_xla_tensor")(np.zeros(2), torch.float32, "xla:0", False),
    }
    files.write_legacy(tmp_path / "model.pt", files.hand_pickle(content), [("0", 2, files.raw(t(5)))])
    lazy = open_pytorch(tmp_path / "model.pt")
    assert lazy["same"].tolist() == [5, 5]
    for name in ("cast", "array"):
        with pytest.raises(UnsupportedTensorError, match="another device"):
            lazy[name].tolist()


# ---- geometry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "what"),
    [
        (0, (5,), (1,), "elements up to byte 20"),
        (1, (4,), (1,), "elements up to byte 20"),
        (0, (2, 2), (3, 1), "elements up to byte 20"),
        (4, (), (), "elements up to byte 20"),
        (0, (1 << 40,), (1,), "elements up to byte"),
        (0, (2,), (1 << 59,), "elements up to byte"),
        (-1, (2,), (1,), "a negative stride or offset"),
        (0, (-2,), (1,), "negative"),
        (0, (-2, 0), (1, 1), "negative"),
        (0, (2, 2), (1,), None),
        (0, (1,) * 65, (1,) * 65, None),
        (0, (1 << 59, 1 << 59), (0, 0), "more bytes than can be counted"),
        (0, (1 << 59, 0, 1 << 59), (0, 0, 0), "more bytes than can be counted"),
    ],
)
@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "zip"])
def test_geometry_outside_of_the_storage(tmp_path, offset, shape, strides, what, legacy):
    """A tensor that would read beyond its storage is an error at opening, which has the tensor's name."""
    ids = ("storage", files.Named("torch", "FloatStorage"), "0", "cpu", 4)
    storage = files.StorageId(*ids, None) if legacy else files.StorageId(*ids)
    tensor = files.Named("torch._utils", "_rebuild_tensor")(storage, offset, shape, strides)
    pickled = files.hand_pickle({"layer.weight": tensor})
    if legacy:
        files.write_legacy(tmp_path / "model.pt", pickled, [("0", 4, bytes(16))])
    else:
        files.write_zip(tmp_path / "model.pt", pickled, {"0": bytes(16)})
    expected = "invalid pickle" if what is None else f"'layer.weight' has .*{what}"
    with pytest.raises(PyTorchCheckpointError, match=expected):
        open_pytorch(tmp_path / "model.pt")


def test_huge_expanded_tensor_costs_nothing(tmp_path):
    """One element, seen a million million times, is legal: only loading it would cost."""
    lazy = open_pytorch(saved(tmp_path, {"wide": torch.ones(1).expand(1_000_000, 1_000_000)}))
    assert lazy["wide"].shape == (1_000_000, 1_000_000)
    assert lazy["wide"][999_999, 5:8].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({("a", 1): 2, (): 3}, {("a", 1): 2, (): 3}),
        ({torch.float32: 1}, {torch.float32: 1}),
        ("a\udc80b", "a\udc80b"),
    ],
)
def test_unusual_contents(tmp_path, extra, expected):
    """Keys of tuples and dtypes, and text with an invalid byte, are equal to those from `torch.load`."""
    path = saved(tmp_path, {"w": t(), "extra": extra})
    assert torch.load(path, weights_only=True)["extra"] == expected
    assert open_pytorch(path).extras == {"extra": expected}


def test_many_tuples_as_keys_are_refused(tmp_path):
    """Tuples that collide are easily made, and a dict of many would take hours."""
    few, many = {(n, 1): n for n in range(4000)}, {(n, 1): n for n in range(5000)}
    assert len(open_pytorch(saved(tmp_path, {"w": t(), "x": few})).extras["x"]) == 4000
    with pytest.raises(PyTorchCheckpointError, match="a tuple as a key"):
        open_pytorch(saved(tmp_path, {"w": t(), "x": many}))


def test_keys_that_read_alike_are_told_apart(tmp_path):
    """No extra is lost to another whose key reads the same."""
    assert open_pytorch(saved(tmp_path, {1: "a", "1": "b", 2: "c", "w": t()})).extras == {
        "1 (int)": "a",
        "1": "b",
        "2": "c",
    }


def test_each_unsupported_tensor_says_its_own_name(tmp_path):
    """Two that are alike but for their names are not taken for one another."""
    lazy = open_pytorch(saved(tmp_path, {"first": t().to_sparse(), "second": t().to_sparse()}))
    with pytest.raises(UnsupportedTensorError, match="'second'"):
        lazy["second"].sum()

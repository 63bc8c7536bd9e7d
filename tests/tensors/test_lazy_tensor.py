# SPDX-License-Identifier: Apache-2.0
"""A lazy tensor gives what the loaded tensor would give, in every use there is."""

from __future__ import annotations

import copy
import ctypes
import io
import operator
import pickle
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from nvflare_lazy.errors import ImmutableTensorError
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_file import open_source
from nvflare_lazy.tensors.tensor_memory import storage_bytes
from tests.tensors.lazily import CountingSource, Untouchable, assert_same, lazy, random

ALL_DTYPES = [row.torch for row in dtypes.ELEMENT_TYPES if row.torch is not None]

X = random(torch.float32, 6, 8).nan_to_num() % 7 + 1
Y = torch.arange(48, dtype=torch.float32).reshape(6, 8) + 1

# Each function runs with (X, Y) and then with one or both of them lazy.
USES = {
    "add": lambda x, y: x + y,
    "radd": lambda x, y: 2 + x,
    "rsub": lambda x, y: 1 - x,
    "rtruediv": lambda x, y: 1 / x,
    "rpow": lambda x, y: 2**x,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % 3,
    "matmul": lambda x, y: x @ y.T,
    "rmatmul": lambda x, y: y.T @ x,
    "invert": lambda x, y: ~(x > y),
    "and": lambda x, y: (x > 1) & (y > 1),
    "compare": lambda x, y: (x == y, x != y, x < y, x <= 3, x > y, x >= y),
    "divmod by operator": lambda x, y: operator.truediv(x, y),
    "index int": lambda x, y: x[2],
    "index negative": lambda x, y: x[-1, -2],
    "index slice": lambda x, y: x[1:5:2, ::3],
    "index list": lambda x, y: x[[0, 3, 3]],
    "index mask": lambda x, y: x[y > 20],
    "index lazily": lambda x, y: torch.arange(100)[x.long() % 100],
    "index none": lambda x, y: x[None, ..., 0],
    "unbind": lambda x, y: x.unbind(1),
    "iterate": lambda x, y: list(x),
    "split": lambda x, y: torch.split(x, [2, 4]),
    "chunk": lambda x, y: x.chunk(3, dim=1),
    "transpose": lambda x, y: x.T,
    "permute": lambda x, y: x.permute(1, 0),
    "view": lambda x, y: x.view(2, 24),
    "view as dtype": lambda x, y: x.view(torch.int32),
    "view as bytes": lambda x, y: x.view(torch.uint8),
    "reshape of a transpose": lambda x, y: x.T.reshape(-1),
    "flatten": lambda x, y: x.flatten(),
    "expand": lambda x, y: x.expand(3, 6, 8),
    "unfold": lambda x, y: x.unfold(1, 3, 2),
    "diagonal": lambda x, y: x.diagonal(),
    "narrow": lambda x, y: torch.narrow(x, 1, 2, 3),
    "squeeze": lambda x, y: x[None].squeeze(0).unsqueeze(-1),
    "as_strided": lambda x, y: x[1:].as_strided((3, 3), (8, 2), 1),
    "movedim": lambda x, y: torch.movedim(x, 0, 1),
    "sum": lambda x, y: (x.sum(), x.sum(0), torch.sum(input=x, dim=1)),
    "all any": lambda x, y: ((x > 0).all(), torch.any(x > 5)),
    "cat": lambda x, y: torch.cat([x, y, x]),
    "stack": lambda x, y: torch.stack((x, y), dim=1),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where keyword": lambda x, y: torch.where(condition=y > 3, input=x, other=y),
    "linear": lambda x, y: torch.nn.functional.linear(x, y),
    "foreach": lambda x, y: torch._foreach_mul([x, y], 2.0),
    "allclose": lambda x, y: (torch.allclose(x, y), torch.equal(x, x), torch.equal(x, y)),
    "to dtype": lambda x, y: x.to(torch.float64),
    "to same dtype": lambda x, y: x.to(torch.float32),
    "to copy": lambda x, y: x.to(torch.float32, copy=True),
    "to device": lambda x, y: x.to("cpu"),
    "to like": lambda x, y: x.to(y.double()),
    "type": lambda x, y: x.type(torch.float16),
    "float half bfloat16": lambda x, y: (x.float(), x.half(), x.bfloat16(), x.int(), x.bool()),
    "cpu": lambda x, y: x.cpu(),
    "clone": lambda x, y: x.clone(),
    "clone of a transpose": lambda x, y: x.T.clone(memory_format=torch.contiguous_format),
    "detach": lambda x, y: x.detach(),
    "data": lambda x, y: x.data,
    "contiguous": lambda x, y: (x.contiguous(), x.T.contiguous()),
    "numpy": lambda x, y: x.numpy(),
    "numpy of a transpose": lambda x, y: x.T.numpy(),
    "asarray": lambda x, y: np.asarray(x),
    "array as type": lambda x, y: np.array(x, dtype=np.float64),
    "numpy function": lambda x, y: np.concatenate([x, y]),
    "tolist": lambda x, y: x.tolist(),
    "item": lambda x, y: x[0, 0].item(),
    "float int bool": lambda x, y: (float(x[0, 0]), int(x[0, 1]), bool(x[0, 0] > 3)),
    "index protocol": lambda x, y: list(range(10))[x.long()[0, 0]],
    "format": lambda x, y: f"{x[0, 0]:.2f}",
    "len": lambda x, y: len(x),
    "contains": lambda x, y: (3.0 in x, 1e9 in x),
    "tensor of it": lambda x, y: torch.as_tensor(x),
    "dlpack": lambda x, y: torch.from_dlpack(x),
    "numpy dlpack": lambda x, y: np.from_dlpack(x),
    "zeros_like": lambda x, y: (torch.zeros_like(x), torch.ones_like(x, dtype=torch.int8), torch.full_like(x, 3)),
    "new": lambda x, y: (x.new_zeros(2, 2), x.new_full((2,), 3.0), x.new_tensor([1.0, 2.0]), x.new([1.0, 2.0])),
    "unbound methods": lambda x, y: (torch.Tensor.add(x, y), torch.Tensor.numpy(x), torch.Tensor.tolist(x)),
    "write elsewhere": lambda x, y: torch.zeros(6, 8).add_(x).mul_(x),
    "out elsewhere": lambda x, y: torch.add(x, y, out=torch.empty(6, 8)),
    "copy_ elsewhere": lambda x, y: (torch.zeros(6, 8).copy_(x), torch.zeros(6, 8, dtype=torch.float16).copy_(x)),
    "copy_ to a transpose": lambda x, y: torch.zeros(8, 6).T.copy_(x),
    "setitem elsewhere": lambda x, y: setitem(torch.zeros(8, 8), slice(0, 6), x),
    "result type": lambda x, y: (torch.result_type(x, 1), torch.promote_types(x.dtype, torch.float64)),
    "vmap": lambda x, y: torch.func.vmap(lambda row: row * 2)(x),
    "grad transform": lambda x, y: torch.func.grad(lambda v: (v * v).sum())(x),
    "pad sequence": lambda x, y: torch.nn.utils.rnn.pad_sequence([x, y[:3]]),
    "parameters_to_vector": lambda x, y: torch.nn.utils.parameters_to_vector([x, y]),
    "meta": lambda x, y: x.to("meta").shape,
    "sparse": lambda x, y: x.to_sparse().to_dense(),
    "storage": lambda x, y: (x.untyped_storage().nbytes(), x.storage_offset(), x.stride(), x.T.stride()),
    "tree_map": lambda x, y: _pytree.tree_map(lambda t: t * 2, {"a": [x, (y,)]}),
    "shape questions": lambda x, y: (
        x.dim(), x.numel(), x.nbytes, x.element_size(), x.is_contiguous(), x.T.is_contiguous(), x.is_floating_point(),
        x.is_cpu, x.is_meta, x.is_sparse, x.layout, x.device, x.type(), x.is_shared(), x.requires_grad, x.ndim,
        x.itemsize, x.size(1), x.is_complex(), torch.is_tensor(x), torch.is_storage(x), x.is_same_size(y),
    ),
}  # fmt: skip


def setitem(target, key, value):
    target[key] = value
    return target


# torch's own __array__ warns so; ours does not.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_gives_what_the_loaded_tensor_gives(use):
    """Every use in the table: the same values, dtypes, shapes and types as for ordinary tensors, in any mode."""
    modes = [nullcontext] if use in ("grad transform", "vmap") else [nullcontext, torch.inference_mode]
    x, y = lazy(X), lazy(Y)
    for mode in modes:
        with mode():
            expected = USES[use](X, Y)
            for made in ((x, Y), (X, y), (x, y)):
                assert_same(USES[use](*made), expected)


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # torch's own, for any tensor
def test_numpy_functions():
    """NumPy's ufuncs and functions take a lazy tensor as they take a tensor."""
    assert_same(np.add(lazy(X), 1), np.add(X, 1))
    assert_same(np.mean(np.asarray(lazy(X))), np.mean(X.numpy()))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # torch's own, for any tensor
def test_torch_tensor_copies():
    """`torch.tensor(lazy)` copies, as it does from a tensor."""
    assert_same(torch.tensor(lazy(X)), X)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_loads(dtype):
    """Tensors of all dtypes of the formats, 0-d and empty ones included, load, clone, copy, view and save."""
    for shape in ((), (1,), (0,), (3, 0, 2), (4, 6)):
        tensor = random(dtype, *shape)
        made = lazy(tensor)
        for got in (made.materialize(), made.clone(), copy.deepcopy(made), made.detach(), made.cpu()):
            assert_same(got, tensor)
        assert_same(made.contiguous(), tensor)
        assert_same(torch.empty(shape, dtype=dtype).copy_(made), tensor)
        assert_same(made.reshape(-1), tensor.reshape(-1))
        # Not pickle: torch's own cannot load the dtypes it has no typed storage for, lazy or not.
        file = io.BytesIO()
        torch.save(made, file)
        file.seek(0)
        assert_same(torch.load(file, weights_only=True), tensor)
    assert_same(made[1:3], tensor[1:3])


def test_it_is_a_tensor_and_says_so():
    """`isinstance` is true for both types; serializers that go by `__class__` see a torch.Tensor."""
    made = lazy(X)
    assert isinstance(made, torch.Tensor)
    assert isinstance(made, LazyTensor)
    assert not isinstance(X, LazyTensor)
    assert made.__class__ is torch.Tensor
    assert type(made) is LazyTensor


def test_questions_cost_no_reading():
    """Shape and the like, views, copies, repr, hashing and factories touch no byte of the source."""
    made = LazyTensor(Untouchable(48 * 4), torch.float32, (6, 8))
    assert (made.shape, made.dtype, made.numel(), made.nbytes, len(made), made.device.type) == (
        X.shape, torch.float32, 48, 192, 6, "cpu",
    )  # fmt: skip
    views = [made[2], made[:, 1], made.T, made.view(-1), made.view(torch.int16), made.flatten(), made.expand(2, 6, 8)]
    views += [*made.unbind(), *made.chunk(2), made.detach(), made.data, made.cpu(), made.float(), made.to("cpu")]
    views += [copy.copy(made), copy.deepcopy(made), torch.nn.Parameter(made), made.contiguous()]
    assert all(isinstance(view, LazyTensor) for view in views)
    assert {made: 1}[made] == 1
    assert made in [made]
    text = "LazyTensor(shape=(6, 8), dtype=torch.float32, in the untouchable)"
    assert repr(made) == str(made) == f"{made}" == text
    assert (torch.zeros_like(made).shape, made.new_empty(3).dtype) == (X.shape, torch.float32)
    assert _pytree.tree_flatten({"a": made})[0] == [made]
    with pytest.raises(AssertionError, match="no I/O"):
        made.sum()


def test_one_call_reads_a_tensor_once():
    """A function that torch takes apart into many operators reads its argument one time; a row reads a row."""
    source = CountingSource(bytes(storage_bytes(X.clone())))
    made = LazyTensor(source, X.dtype, X.shape)
    torch.allclose(made, made)
    assert source.bytes_read == X.nbytes
    source.bytes_read = 0
    made[3].sum()
    made[2:4].clone()
    assert source.bytes_read == 3 * 8 * 4


WRITES = {
    "add_": lambda t: t.add_(1),
    "iadd": lambda t: operator.iadd(t, 1),
    "imul": lambda t: operator.imul(t, 2),
    "setitem": lambda t: operator.setitem(t, 0, 1.0),
    "setitem mask": lambda t: operator.setitem(t, X > 1, 0.0),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(1),
    "copy_": lambda t: t.copy_(X),
    "out": lambda t: torch.add(X, X, out=t),
    "out view": lambda t: torch.sum(X, 0, out=t[0]),
    "view": lambda t: t.view(-1).mul_(2),
    "row": lambda t: t[0].zero_(),
    "unbound row": lambda t: next(iter(t)).add_(1),
    "transpose": lambda t: t.T.add_(1),
    "detached": lambda t: t.detach().add_(1),
    "data": lambda t: t.data.add_(1),
    "cpu": lambda t: t.cpu().add_(1),
    "shared copy": lambda t: copy.deepcopy(t).add_(1),
    "contiguous": lambda t: t.contiguous().clamp_(0),
    "foreach": lambda t: torch._foreach_add_([X.clone(), t], 1),
    "index_put_": lambda t: t.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "scatter_": lambda t: t.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 1.0),
    "random_": lambda t: t.random_(),
    "init": lambda t: torch.nn.init.normal_(t),
    "clip": lambda t: t.clip_(0, 1),
    "resize_": lambda t: t.resize_(3),
    "set_": lambda t: t.set_(),
    "t_": lambda t: t.t_(),
    "assign data": lambda t: setattr(t, "data", X),
    "share_memory_": lambda t: t.share_memory_(),
    "apply_": lambda t: t.apply_(lambda v: v),
    "relu_": lambda t: torch.relu_(t),
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.5, inplace=True),
    "unbound method": lambda t: torch.Tensor.add_(t, 1),
    "operator": lambda t: torch.ops.aten.add_.Scalar(t, 1),
    "sort out": lambda t: torch.sort(X, out=(t, torch.empty(6, 8, dtype=torch.long))),
    "swap": lambda t: torch.nn.functional.relu(t, inplace=True),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_raise(write):
    """Every way to write in place, even through views and copies, raises an error with a remedy and changes nothing."""
    made = lazy(X)
    with pytest.raises(ImmutableTensorError, match=r"call materialize\(\)"):
        WRITES[write](made)
    with torch.inference_mode(), pytest.raises(ImmutableTensorError, match=r"call materialize\(\)"):
        WRITES[write](made)
    assert_same(made.materialize(), X)


def test_numpy_view_is_read_only():
    """Writing to `.numpy()` cannot silently miss the tensor: NumPy refuses it. A copy asked for is writable."""
    with pytest.raises(ValueError, match="read-only"):
        lazy(X).numpy()[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(lazy(X)).sort()
    np.array(lazy(X))[0] = 1
    with pytest.raises(ValueError, match="allow a copy"):
        np.asarray(lazy(X), copy=False)


def test_materialized_tensor_is_the_callers():
    """What materialize() returns is new each time, writable and independent."""
    made = lazy(X)
    first, second = made.materialize(), made.materialize()
    first.zero_()
    assert_same(second, X)
    assert_same(made.clone().zero_(), torch.zeros(6, 8))
    assert_same(made.materialize(), X)


def test_assigning_a_lazy_tensor_to_data_is_refused():
    """`parameter.data = lazy` would copy a tensor's inside, and here that is a null pointer: torch refuses."""
    linear = torch.nn.Linear(8, 6)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        linear.weight.data = lazy(X)
    linear.weight.sum()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch warns a single time per process
def test_raw_pointers_keep_their_data():
    """`data_ptr` stays valid, is the same for views of one storage, and shows writes through the pointer."""
    made = lazy(X)
    address = made.data_ptr()
    trash = [torch.full((6, 8), 9.0) for _ in range(100)]
    assert np.ctypeslib.as_array((ctypes.c_float * 48).from_address(address)).tolist() == X.flatten().tolist()
    assert made[1].data_ptr() == address + 32
    assert made.data_ptr() == address == made.untyped_storage().data_ptr()
    assert made.storage().data_ptr() == address
    assert copy.deepcopy(lazy(X)).data_ptr() != address
    made.untyped_storage()[0] = 0
    assert made.materialize().view(torch.uint8)[0, 0] == 0
    del trash


def test_saves_like_a_tensor(tmp_path):
    """`safetensors.torch.save`, `save_file`, `torch.save` and pickle write the elements; ties survive torch.save."""
    tensors = {"x": lazy(X), "row": lazy(Y)[2], "b": lazy(X.bfloat16()), "s": lazy(torch.tensor(3.5))}
    expected = {"x": X, "row": Y[2], "b": X.bfloat16(), "s": torch.tensor(3.5)}
    assert safetensors.torch.save(tensors) == safetensors.torch.save(expected)
    safetensors.torch.save_file(tensors, tmp_path / "f.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "f.safetensors")
    assert_same({key: loaded[key] for key in expected}, expected)
    file = io.BytesIO()
    torch.save({**tensors, "tied": tensors["x"], "parameter": torch.nn.Parameter(lazy(X))}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same({key: loaded[key] for key in expected}, expected)
    assert loaded["tied"] is loaded["x"]
    assert type(loaded["parameter"]) is torch.nn.Parameter
    assert_same(pickle.loads(pickle.dumps(tensors)), expected)


def test_parameter():
    """A lazy tensor can be a parameter: it has a gradient, and an optimizer's step on it raises."""
    parameter = torch.nn.Parameter(lazy(X))
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, LazyTensor)
    (parameter * Y).sum().backward()
    assert_same(parameter.grad, Y)
    with pytest.raises(ImmutableTensorError):
        torch.optim.SGD([parameter], 0.1).step()
    assert isinstance(copy.deepcopy(parameter), torch.nn.Parameter)
    assert copy.deepcopy(parameter).requires_grad


def test_autograd_through_a_lazy_input():
    """Gradients of and through lazy tensors equal the gradients of loaded tensors."""
    results = []
    for x in (lazy(X).requires_grad_(), X.clone().requires_grad_()):
        weight = torch.ones(8, 3, requires_grad=True)
        ((x.T[1:].T ** 2).sum(1).log() * (x @ weight).sum(1)).sum().backward()
        results.append((x.grad, weight.grad))
    assert_same(*results)
    assert not lazy(X).requires_grad
    with pytest.raises(RuntimeError, match="requires grad"):
        lazy(X).requires_grad_().numpy()


def test_load_state_dict_holds_one_tensor_at_a_time(tmp_path, rss_anon):
    """Loading 8 × 16 MiB into a model needs no second copy of even one tensor; `assign=True` keeps them lazy."""
    count, side = 8, 2048
    model = torch.nn.ModuleList(torch.nn.Linear(side, side, bias=False) for _ in range(count))
    path = tmp_path / "weights"
    torch.full((side * side,), 3.0).numpy().tofile(path)
    state = {f"{i}.weight": LazyTensor(open_source(path), torch.float32, (side, side)) for i in range(count)}
    for parameter in model.parameters():
        parameter.data.zero_()
    before = rss_anon()
    peak = [before]
    hooks = [m.register_load_state_dict_post_hook(lambda *_: peak.append(rss_anon())) for m in model]
    model.load_state_dict(state)
    assert max(peak) - before < 8 << 20
    assert all((m.weight == 3).all() for m in model)
    assert len(hooks) == count
    model.load_state_dict(state, assign=True)
    assert all(isinstance(parameter, LazyTensor) for parameter in model.parameters())
    assert_same(model[0](torch.ones(1, side)), torch.full((1, side), 3.0 * side))


def test_reads_tiles():
    """`read_into` fills a buffer with any run of elements, even of a view, without loading the tensor."""
    for tensor, expected in ((lazy(X), X), (lazy(X).T, X.T), (lazy(X)[:, 1::2], X[:, 1::2])):
        flat = expected.reshape(-1)
        tile = np.zeros(5, np.float32)
        tensor.read_into(tile, 7)
        np.testing.assert_array_equal(tile, flat[7:12])
        tensor.read_into(memoryview(tile)[:3], 2, 3)
        np.testing.assert_array_equal(tile[:3], flat[2:5])
        with pytest.raises(ValueError, match="exactly 4 elements"):
            tensor.read_into(tile, 0, 4)
        with pytest.raises(ValueError, match="outside"):
            tensor.read_into(tile, len(flat) - 4)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("narrow"), st.integers(0, 3), st.integers(0, 5), st.integers(1, 4)),
            st.tuples(st.just("transpose"), st.integers(0, 3), st.integers(0, 3)),
            st.tuples(st.just("step"), st.integers(0, 3), st.integers(2, 3)),
            st.tuples(st.just("select"), st.integers(0, 3), st.integers(0, 5)),
            st.tuples(st.just("unsqueeze"), st.integers(0, 3)),
            st.tuples(st.just("expand"), st.integers(1, 3)),
            st.tuples(st.just("reshape")),
        ),
        max_size=6,
    )
)
def test_views_of_views(steps):
    """Any chain of views reads as the same chain on the loaded tensor, with the same strides, and stays lazy."""
    plain = torch.arange(240, dtype=torch.int16).reshape(4, 5, 6, 2)
    made = lazy(plain)
    for step in steps:
        plain, made = apply_view(plain, step), apply_view(made, step)
        assert (made.shape, made.stride(), made.storage_offset()) == (
            plain.shape, plain.stride(), plain.storage_offset(),
        )  # fmt: skip
    assert_same(made, plain)
    assert_same(made.materialize(), plain)
    assert_same(pickle.loads(pickle.dumps(made)), plain)
    buffer = np.empty(plain.numel(), np.int16)
    LazyTensor.read_into(made, buffer)
    np.testing.assert_array_equal(buffer, plain.reshape(-1).numpy())


def apply_view(tensor: torch.Tensor, step: tuple) -> torch.Tensor:
    name, *args = step
    axis = args[0] % max(tensor.dim(), 1) if args else 0
    if name == "expand":
        return tensor.expand(args[0], *tensor.shape)
    if name == "unsqueeze":
        return tensor.unsqueeze(axis)
    if tensor.dim() == 0 or tensor.shape[axis] == 0:
        return tensor
    if name == "narrow":
        start = args[1] % tensor.shape[axis]
        return tensor.narrow(axis, start, min(args[2], tensor.shape[axis] - start))
    if name == "transpose":
        return tensor.transpose(axis, args[1] % tensor.dim())
    if name == "step":
        return tensor[(slice(None),) * axis + (slice(None, None, args[1]),)]
    if name == "select":
        return tensor.select(axis, args[1] % tensor.shape[axis])
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def test_conjugates_and_negatives():
    """Views that carry a pending sign are resolved, not lost."""
    value = random(torch.complex64, 3, 4)
    made = lazy(value)
    for use in (
        lambda t: t.conj(),
        lambda t: t.conj().imag,
        lambda t: t.conj().T,
        lambda t: t.real,
        lambda t: torch.view_as_real(t),
        lambda t: t.mH @ t,
    ):
        assert_same(use(made).resolve_neg(), use(value).resolve_neg())
    with pytest.raises(ImmutableTensorError):
        made.conj().zero_()
    with pytest.raises(ImmutableTensorError):
        made.real.zero_()


def test_from_tensor_shares_and_protects():
    """A lazy view of an ordinary tensor copies nothing and cannot be written through."""
    plain = X.clone()
    made = LazyTensor.from_tensor(plain.T)
    assert_same(made, plain.T)
    plain[0, 0] = 99
    assert made[0, 0] == 99
    with pytest.raises(ImmutableTensorError):
        made.add_(1)
    assert LazyTensor.from_tensor(made) is made


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_many_threads():
    """Sixteen threads that use the same tensors in every way get the right answers."""
    source = CountingSource(bytes(storage_bytes(X.clone())))
    made = LazyTensor(source, X.dtype, X.shape)
    failures: list[str] = []

    def use(seed: int) -> None:
        try:
            for step in range(30):
                names = sorted(USES)
                name = names[(seed * 7 + step) % len(names)]
                assert_same(USES[name](made, Y), USES[name](X, Y))
                assert made.data_ptr() == made.data_ptr()
        except BaseException as error:
            failures.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_wrong_geometry_is_refused():
    """A tensor cannot be laid over a source that is too short for it."""
    with pytest.raises(ValueError, match="ends at byte 12"):
        LazyTensor(MemorySource(bytes(11)), torch.float32, (3,))


def test_loading_more_than_memory_is_torchs_error(tmp_path):
    """An expanded view of astronomic size opens, and only materializing it fails."""
    made = lazy(torch.ones(1)).expand(1 << 50)
    assert made.shape == (1 << 50,)
    assert made[:3].tolist() == [1.0, 1.0, 1.0]

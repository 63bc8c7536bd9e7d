# SPDX-License-Identifier: Apache-2.0
"""Torch's functions give for lazy tensors what they give for ordinary ones, in every mode torch can be in."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nvflare_lazy.errors import ImmutableTensorError, UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_memory import storage_bytes
from tests.tensors.lazily import assert_same, copied, lazy


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


TENSORS = {
    "a": _normal(4, 5),
    "b": _normal(4, 5).abs() + 0.5,
    "w": _normal(5, 3),
    "sq": _normal(4, 4) @ _normal(4, 4).T + 4 * torch.eye(4),
    "v": _normal(4),
    "z": _normal(4, 4, dtype=torch.complex64),
    "tall": _normal(6, 3, dtype=torch.complex64),
    "i": torch.arange(20).reshape(4, 5) % 7,
    "m": _normal(4, 5) > 0,
    "image": _normal(2, 3, 6, 6),
    "kernel": _normal(4, 3, 3, 3),
    "words": _normal(2, 4, 8),
    "none": torch.zeros(0, 3, dtype=torch.complex64),
}


def given(make) -> SimpleNamespace:
    """Return all the tensors above, made lazy or copied."""
    return SimpleNamespace(**{name: make(tensor) for name, tensor in TENSORS.items()})


# Each function runs with ordinary tensors and with lazy ones.
FUNCTIONS = {
    "addmm": lambda t: torch.addmm(t.a @ t.w, t.a, t.w, beta=0.5, alpha=2),
    "addmm of transposes": lambda t: torch.addmm(t.w.T, t.sq[:3], t.a),
    "baddbmm": lambda t: torch.baddbmm(t.words, t.words @ t.words.mT, t.words),
    "addbmm": lambda t: torch.addbmm(t.words[0] @ t.words[0].T, t.words, t.words.mT),
    "addr": lambda t: torch.addr(t.sq, t.v, t.v),
    "chain": lambda t: torch.linalg.multi_dot([t.sq, t.a, t.w]),
    "kron": lambda t: torch.kron(t.a, t.w),
    "tensordot": lambda t: torch.tensordot(t.image, t.kernel, dims=([1], [1])),
    "cdist": lambda t: torch.cdist(t.a, t.b),
    "svd": lambda t: torch.linalg.svdvals(t.sq),
    "inverse": lambda t: torch.linalg.inv(t.sq),
    "solve": lambda t: torch.linalg.solve(t.sq, t.v),
    "cholesky": lambda t: torch.linalg.cholesky(t.sq),
    "det": lambda t: (torch.det(t.sq), torch.logdet(t.sq), torch.trace(t.sq)),
    "rank": lambda t: torch.linalg.matrix_rank(t.sq),
    "power": lambda t: torch.linalg.matrix_power(t.sq, 3),
    "exponential": lambda t: torch.linalg.matrix_exp(t.sq / 10),
    "eigenvalues": lambda t: torch.linalg.eigvalsh(t.sq),
    "conjugates": lambda t: (t.z.conj() @ t.z, t.z.mH, t.z * t.z.conj(), torch.vdot(t.z[0], t.z[1]), t.z.conj().imag),
    "least squares": lambda t: torch.linalg.lstsq(t.tall, t.tall[:, :1] * 2j + 1, driver="gels"),
    "complex parts": lambda t: (t.z.abs(), t.z.angle(), torch.isreal(t.z), t.z.imag + 1, torch.view_as_real(t.z)),
    "nothing complex": lambda t: (torch.isreal(t.none), torch.isfinite(t.none), t.none.imag.sum(), t.none.T * 2),
    "fft": lambda t: (torch.fft.fft(t.z), torch.fft.rfft(t.a), torch.fft.irfft(t.z), torch.fft.ifftn(t.z)),
    "hermitian fft": lambda t: (torch.fft.hfftn(t.z), torch.fft.hfft2(t.z), torch.fft.ihfftn(t.a), torch.fft.hfft(t.z)),
    "stft": lambda t: torch.stft(t.a.flatten(), 8, return_complex=True, window=t.b.flatten()[:8]),
    "convolution": lambda t: F.conv2d(t.image, t.kernel, t.v, padding=1),
    "transposed convolution": lambda t: F.conv_transpose2d(t.image, t.kernel.transpose(0, 1)),
    "unfold": lambda t: F.unfold(t.image, 3),
    "pools": lambda t: (F.max_pool2d(t.image, 2), F.avg_pool2d(t.image, 3), F.adaptive_avg_pool2d(t.image, 2)),
    "interpolate": lambda t: F.interpolate(t.image, scale_factor=2, mode="bicubic"),
    "grid sample": lambda t: F.grid_sample(
        t.image, t.image[:, :, :2, :2].permute(0, 2, 3, 1)[..., :2], align_corners=False
    ),
    "pad": lambda t: (F.pad(t.image, (1, 2, 1, 0), mode="reflect"), F.pad(t.a, (1, 1), value=3)),
    "norms": lambda t: (
        F.layer_norm(t.a, (5,), t.b[0], t.a[1]),
        F.group_norm(t.image, 3),
        F.normalize(t.a),
        F.rms_norm(t.a, (5,)),
    ),
    "batch norm in use": lambda t: F.batch_norm(t.image, t.v[:3].detach(), t.b[0, :3].detach(), t.w[0], t.w[1]),
    "batch norm without statistics": lambda t: F.batch_norm(t.image, None, None, t.w[0], t.w[1], training=True),
    "instance norm": lambda t: F.instance_norm(t.image),
    "activations": lambda t: (
        F.gelu(t.a),
        F.silu(t.a),
        F.softplus(t.a),
        F.glu(t.sq),
        F.leaky_relu(t.a),
        F.prelu(t.a, t.w[0, :1]),
    ),
    "softmax": lambda t: (F.log_softmax(t.a, 1), F.softmin(t.a, 0), torch.logsumexp(t.a, 1)),
    "attention": lambda t: F.scaled_dot_product_attention(t.words, t.words, t.words),
    "losses": lambda t: (
        F.mse_loss(t.a, t.b),
        F.cross_entropy(t.a, t.i[:, 0] % 5),
        F.kl_div(t.a, t.b),
        F.huber_loss(t.a, t.b),
        F.binary_cross_entropy_with_logits(t.a, t.b),
    ),
    "ctc": lambda t: F.ctc_loss(
        t.words.transpose(0, 1).log_softmax(-1), t.i[:2, 1:3], t.i[0, 4:5].expand(2), t.i[0, 2:3].expand(2)
    ),
    "embedding": lambda t: (F.embedding(t.i % 4, t.a), F.embedding_bag(t.i % 4, t.a), F.one_hot(t.i)),
    "dropout": lambda t: (F.dropout(t.a), F.dropout(t.a, training=False), F.alpha_dropout(t.a, 0.3)),
    "random": lambda t: (
        torch.bernoulli(t.b / t.b.max()),
        torch.multinomial(t.b, 2),
        torch.normal(t.a, t.b),
        torch.poisson(t.b),
    ),
    "random likes": lambda t: (
        torch.rand_like(t.a),
        torch.randint_like(t.a, 9),
        torch.randn_like(t.a.T),
        torch.randint_like(t.a, t.i[1, 4]),
    ),
    "scatter": lambda t: (
        t.a.scatter(0, t.i % 4, t.b),
        t.a.scatter_add(1, t.i % 5, t.b),
        t.a.scatter_reduce(0, t.i % 4, t.b, "amax"),
    ),
    "gather": lambda t: (t.a.gather(0, t.i % 4), torch.take(t.a, t.i), torch.take_along_dim(t.a, t.i % 4, 0)),
    "index ops": lambda t: (
        t.a.index_add(0, t.i[0, :2], t.b[:2]),
        t.a.index_copy(0, t.i[0, :2], t.b[:2]),
        t.a.index_fill(1, t.i[0, :2], 3.0),
        t.a.index_select(1, t.i[0, :2]),
    ),
    "index put": lambda t: t.a.index_put((t.i[0, :2],), t.b[0]),
    "masks": lambda t: (
        t.a.masked_fill(t.m, 2.0),
        t.a.masked_select(t.m),
        t.a.masked_scatter(t.m, t.b),
        torch.where(t.m, t.a, 0.0),
    ),
    "scatter views": lambda t: (
        t.a.select_scatter(t.b[0], 0, 1),
        t.a.slice_scatter(t.b[:2], 0, 1, 3),
        t.sq.diagonal_scatter(t.v),
        t.a.as_strided_scatter(t.v, (4,), (2,), 1),
    ),
    "cumulative": lambda t: (
        t.a.cumprod(1),
        t.a.cummax(0),
        t.a.logcumsumexp(0),
        t.a.diff(),
        torch.cumulative_trapezoid(t.a),
    ),
    "reductions": lambda t: (
        t.a.prod(0),
        t.a.var(1),
        t.a.std(),
        t.a.amax(0),
        t.a.aminmax(),
        t.a.median(),
        t.a.mode(0),
        t.a.nansum(),
        t.a.count_nonzero(),
    ),
    "order": lambda t: (
        t.a.argsort(1),
        t.a.kthvalue(2),
        t.a.msort(),
        torch.searchsorted(t.v.sort()[0], t.a),
        torch.bucketize(t.a, t.v.sort()[0]),
    ),
    "quantile": lambda t: (torch.quantile(t.a, 0.3, dim=0), torch.nanquantile(t.a, t.b[0, :1] / 10)),
    "sets": lambda t: (
        torch.unique(t.i, return_counts=True),
        torch.isin(t.i, t.i[0]),
        torch.bincount(t.i.flatten()),
        torch.histc(t.a),
    ),
    "repeats": lambda t: (
        t.a.repeat(2, 1),
        t.v.repeat_interleave(t.i[0, 1:]),
        torch.tile(t.a, (1, 2)),
        t.a.roll(1, 0),
        t.a.flip(1),
        t.a.rot90(),
    ),
    "joins": lambda t: (
        torch.cat([t.a, t.b], 1),
        torch.hstack([t.a, t.b]),
        torch.block_diag(t.a, t.b),
        torch.cartesian_prod(t.v, t.v),
        torch.meshgrid(t.v, t.v, indexing="ij"),
    ),
    "splits": lambda t: (
        t.a.split([1, 3]),
        t.a.tensor_split(3),
        t.a.hsplit([2]),
        torch.unravel_index(t.i, (3, 3)),
        t.a.unbind(1),
    ),
    "broadcasts": lambda t: (
        torch.broadcast_tensors(t.a, t.b[:1]),
        t.v.broadcast_to(3, 4),
        torch.atleast_3d([t.a, t.v]),
    ),
    "copies of views": lambda t: (
        torch.view_copy(t.a, (5, 4)),
        torch.split_copy(t.a, 2),
        torch.permute_copy(t.a, (1, 0)),
    ),
    "triangles": lambda t: (t.a.tril(), t.a.triu(1), torch.diag_embed(t.v), t.sq.diagonal(), torch.vander(t.i[0])),
    "einsum": lambda t: (torch.einsum("ij,jk->ki", t.a, t.w), torch.einsum("ij->ji", t.a), torch.einsum("ii->i", t.sq)),
    "sparse": lambda t: (t.a.to_sparse_csr().to_dense(), t.a.to_sparse().sum()),
    "quantized": lambda t: (
        torch.quantize_per_tensor(t.a, 0.1, 0, torch.qint8).dequantize(),
        torch.fake_quantize_per_tensor_affine(t.a, 0.1, 0, 0, 255),
    ),
    "foreach": lambda t: (
        torch._foreach_norm([t.a, t.b]),
        torch._foreach_addcmul([t.a], [t.b], [t.b]),
        torch._foreach_lerp([t.a], [t.b], 0.3),
    ),
    "bits": lambda t: (t.i & 3, t.i | t.i, t.i ^ 1, t.i << 2, ~t.m, t.i.bitwise_not(), torch.gcd(t.i, t.i + 2)),
    "specials": lambda t: (
        torch.special.erfinv(t.a / 9),
        torch.lgamma(t.b),
        torch.special.xlogy(t.a, t.b),
        torch.sinc(t.a),
        torch.frexp(t.a),
    ),
    "pairs of types": lambda t: (
        t.i * t.a,
        t.m + t.i,
        t.z * t.sq,
        t.i / 2,
        t.i // 2,
        t.a.bfloat16() + t.b,
        t.a.double() * t.b,
    ),
    "lstm": lambda t: torch.lstm(
        t.words,
        (t.words[:1, :2, :2] * 0, t.words[:1, :2, :2] * 0),
        [t.kernel.reshape(-1)[:64].view(8, 8), t.kernel.reshape(-1)[:16].view(8, 2)],
        False,
        1,
        0.0,
        False,
        False,
        True,
    ),
}


def assert_close(got: object, expected: object) -> None:
    """Not bit for bit: the alignment of memory affects the last bit of results of LAPACK and vector units."""
    got_leaves, got_spec = tree_flatten(got)
    leaves, spec = tree_flatten(expected)
    assert got_spec == spec
    for a, b in zip(got_leaves, leaves, strict=True):
        if isinstance(b, torch.Tensor) and b.layout is torch.strided:
            assert (a.requires_grad, a.dtype) == (b.requires_grad, b.dtype)
            torch.testing.assert_close(a.detach().clone(), b.detach(), equal_nan=True, rtol=1e-4, atol=1e-5)
        else:
            assert_same(a, b)


MODES = {
    "as is": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@contextlib.contextmanager
def deterministic(mode: str):
    torch.manual_seed(11)
    with MODES[mode]():
        yield


@pytest.mark.filterwarnings("ignore")  # what torch has to say on sparse, quantized or complex tensors is not the point
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gives_what_it_gives_for_ordinary_tensors(name, mode):
    """Each function, with lazy tensors only, in each mode: the same types and bits."""
    with deterministic(mode):
        expected = FUNCTIONS[name](given(copied))
    with deterministic(mode):
        got = FUNCTIONS[name](given(lazy))
    assert_close(got, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", sorted(set(FUNCTIONS) - {"quantized", "sparse", "sets", "bits", "order", "rank", "random likes"})
)
def test_gradients(name):
    """Each function's gradients, asked of lazy tensors: temporaries of the backward pass are never mixed up."""

    def gradients(make):
        torch.manual_seed(11)
        leaves = {n: make(x).requires_grad_(x.is_floating_point() or x.is_complex()) for n, x in TENSORS.items()}
        results = tree_flatten(FUNCTIONS[name](SimpleNamespace(**leaves)))[0]
        results = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
        total = sum(x.abs().double().sum() for x in results)
        wanted = [x for x in leaves.values() if x.requires_grad]
        return torch.autograd.grad(total, wanted, allow_unused=True)

    expected = gradients(copied)
    assert any(x is not None for x in expected)
    for got, wanted in zip(gradients(lazy), expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert_close(got, wanted)


def test_temporaries_that_get_an_old_id_are_not_mixed_up():
    """Within one call, the data of a deleted view is not used for the next view at its address."""
    a, b = lazy(TENSORS["a"]).requires_grad_(), lazy(TENSORS["w"]).requires_grad_()
    plain_a, plain_b = copied(TENSORS["a"]).requires_grad_(), copied(TENSORS["w"]).requires_grad_()
    for _ in range(20):
        got = torch.autograd.grad((a @ b @ b.T @ a.T @ a).sum(), (a, b))
    expected = torch.autograd.grad((plain_a @ plain_b @ plain_b.T @ plain_a.T @ plain_a).sum(), (plain_a, plain_b))
    assert torch.allclose(got[0], expected[0], rtol=1e-5)
    assert torch.allclose(got[1], expected[1], rtol=1e-5)


WITH_OUT = {
    "add": lambda t, out: torch.add(t.a, t.b, out=out),
    "matrix rank": lambda t, out: torch.linalg.matrix_rank(t.sq, out=out),
    "hermitian fft": lambda t, out: torch.fft.ihfftn(t.a, out=out),
    "kron": lambda t, out: torch.kron(t.a, t.w, out=out),
    "cat": lambda t, out: torch.cat([t.a, t.b], out=out),
    "permutation": lambda t, out: torch.take_along_dim(t.i, t.i % 4, 0, out=out),
}


@pytest.mark.parametrize("name", WITH_OUT)
def test_out(name):
    """`out=` fills an ordinary tensor, even in functions that treat subclasses differently; a lazy one raises."""
    torch.manual_seed(11)
    kind = {"matrix rank": torch.int64, "permutation": torch.int64, "hermitian fft": torch.complex64}
    expected, got = (torch.zeros(0, dtype=kind.get(name, torch.float32)) for _ in range(2))
    WITH_OUT[name](given(copied), expected)
    torch.manual_seed(11)
    assert WITH_OUT[name](given(lazy), got) is got
    assert_same(got, expected)
    assert got.numel()
    for make in (copied, lazy):
        with pytest.raises(ImmutableTensorError, match=r"call materialize\(\)"):
            WITH_OUT[name](given(make), lazy(torch.zeros_like(expected)))


HIDDEN_WRITES = {
    "batch norm in training": lambda t: F.batch_norm(t.image, t.v[:3], t.b[0, :3], training=True),
    "instance norm of statistics": lambda t: F.instance_norm(t.image, t.v[:3], t.b[0, :3], use_input_stats=True),
    "native batch norm": lambda t: torch.native_batch_norm(t.image, None, None, t.v[:3], t.b[0, :3], True, 0.1, 1e-5),
    "embedding with a largest norm": lambda t: F.embedding(t.i % 4, t.a, max_norm=0.1),
    "dropout that does nothing": lambda t: F.dropout(t.a, training=False).zero_(),
    "a function that gives back its argument": lambda t: torch.broadcast_tensors(t.a, t.b)[0].add_(1),
    "einsum that only transposes": lambda t: torch.einsum("ij->ji", t.a).mul_(2),
    "a list of views": lambda t: torch.atleast_1d([t.a])[0].add_(1),
    "conversion to itself": lambda t: t.a.to(torch.float32).to("cpu").float().contiguous().cpu().add_(1),
    "torch.as_tensor": lambda t: torch.as_tensor(t.a).add_(1),
    "torch.asarray": lambda t: torch.asarray(t.a).add_(1),
    "as_subclass": lambda t: t.a.as_subclass(torch.Tensor).add_(1),
    "torch.Tensor of it": lambda t: torch.Tensor(t.a).add_(1),
    "swapping": lambda t: torch.utils.swap_tensors(t.a, torch.zeros(4, 5)),
    "vmap": lambda t: torch.func.vmap(lambda row: row.add_(1))(t.a),
    "functionalize": lambda t: torch.func.functionalize(lambda x: x.add_(1))(t.a),
}


@pytest.mark.parametrize("mode", ["as is", "inference"])
@pytest.mark.parametrize("name", HIDDEN_WRITES)
def test_hidden_writes_raise(name, mode):
    """Writes that no schema mentions, or that reach the tensor through something that looks like a new one."""
    t = given(lazy)
    with deterministic(mode), pytest.raises(ImmutableTensorError, match=r"call materialize\(\)"):
        HIDDEN_WRITES[name](t)
    assert_same(t.a.materialize(), TENSORS["a"])


def test_collectives_do_not_write_to_a_temporary():
    """`torch.distributed` declares no writes: its in-place operators raise, and the others read."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for write in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.reduce(t, 0)):
            with pytest.raises(ImmutableTensorError, match="would write"):
                write(lazy(TENSORS["a"]))
        gathered = [torch.zeros(4, 5)]
        dist.all_gather(gathered, lazy(TENSORS["a"]))
        assert_same(gathered, [TENSORS["a"]])
    finally:
        dist.destroy_process_group()


def test_materialized_views_do_not_overlap():
    """An expanded view materializes with memory for each element, and is read without it."""
    made = lazy(TENSORS["v"]).expand(3, 4)
    loaded = made.materialize()
    loaded[0] = 9
    assert_same(loaded[1:], TENSORS["v"].expand(2, 4))
    assert_same(made + 0, TENSORS["v"].expand(3, 4))
    assert lazy(torch.ones(1)).expand(1 << 40)[:3].sum() == 3


def test_empty_views_beyond_the_storage():
    """A view of nothing may start behind the end of its storage."""
    assert_same(lazy(torch.zeros(3))[3:].materialize(), torch.zeros(0))
    assert_same(lazy(torch.zeros(0, dtype=torch.complex64)).imag + 1, torch.zeros(0))


class Tagged(torch.Tensor):
    """Tensor subclass of another package."""


@pytest.mark.parametrize("swap", [False, True])
def test_other_kinds_of_tensors_keep_their_say(swap):
    """The result of a lazy tensor and a tensor of another class has that class, with gradients through both."""
    tagged = copied(TENSORS["a"]).as_subclass(Tagged)
    made = lazy(TENSORS["b"]).requires_grad_()
    product = made * tagged if swap else tagged * made
    assert type(product) is Tagged
    (gradient,) = torch.autograd.grad(product.sum(), made)
    assert_same(gradient.as_subclass(torch.Tensor), TENSORS["a"])


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Note(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class PassOnFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


USES = [
    lambda x: x.materialize(),
    lambda x: x.clone(),
    lambda x: x * 1,
    lambda x: x.T.contiguous().T,
    lambda x: torch.from_numpy(x.numpy().copy()),
]


@pytest.mark.parametrize("mode", [PassOn, PassOnFunctions, lambda: torch.device("cpu"), lambda: torch.device("meta")])
@pytest.mark.parametrize("use", USES)
def test_loads_whatever_mode_torch_is_in(mode, use):
    """Modes that intercept every operator, and a default device, do not change loaded data."""
    made = lazy(TENSORS["a"])
    with mode():
        got = use(made)
    assert_same(got, TENSORS["a"])


def test_modes_and_gradients_hear_of_clones():
    """A clone is a plain read only where torch has nothing else to do with it."""
    made = lazy(TENSORS["a"])
    with Note() as mode:
        made.clone()
    assert torch.ops.aten.clone.default in mode.seen
    assert made.clone(memory_format=torch.contiguous_format).requires_grad is False
    wanting = lazy(TENSORS["a"]).requires_grad_()
    copy = wanting.clone()
    assert type(copy) is torch.Tensor
    copy.sum().backward()
    assert_same(wanting.grad, torch.ones(4, 5))
    argument = TENSORS["a"]
    expected = torch.func.vmap(lambda x: x * TENSORS["a"].clone())(argument)
    assert_same(torch.func.vmap(lambda x: x * made.clone())(argument), expected)


def test_loads_under_fake_tensors():
    """While torch makes fake tensors only, loading still fills memory and not a null pointer."""
    made = lazy(TENSORS["a"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        loaded = made.materialize()
        fake = made * 2
    assert_same(loaded, TENSORS["a"])
    assert (type(fake).__name__, fake.shape) == ("FakeTensor", (4, 5))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize, torch.func.vmap])
def test_loads_inside_of_function_transforms(transform):
    """A function that is differentiated, mapped or functionalized may load a tensor in the middle."""
    made = lazy(TENSORS["v"])
    argument = TENSORS["a"] if transform is torch.func.vmap else copied(TENSORS["v"])
    expected = transform(lambda x: (x.sum() * TENSORS["v"]).sum())(argument)
    assert_same(transform(lambda x: (x.sum() * made.materialize()).sum())(argument), expected)
    assert_same(transform(lambda x: (x.sum() * made).sum())(argument), expected)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_pointers_that_nobody_asked_us_for():
    """C code that takes the address without asking is refused, and does not get a null pointer."""
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(lazy(TENSORS["a"]))
    with pytest.raises(RuntimeError, match="data is not allocated"):
        torch.tensor_split(TENSORS["a"], lazy(torch.tensor([1, 2])))
    made = lazy(TENSORS["a"])
    if hasattr(made, "const_data_ptr"):
        assert made.const_data_ptr() == made.data_ptr() != 0
    with FakeTensorMode():
        fake = torch.empty(3)
    with pytest.raises(ValueError, match="without memory"):
        storage_bytes(fake)


def test_a_tensor_set_to_a_lazy_one_shares_its_memory():
    """`x.set_(lazy)` makes two views of one memory, as with ordinary tensors."""
    made = lazy(TENSORS["a"])
    other = torch.empty(0).set_(made)
    other.add_(1)
    assert_same(made + 0, TENSORS["a"] + 1)


def test_what_has_no_dense_elements_is_refused():
    """Sparse, quantized, nested and meta tensors, and dtypes no file holds, are refused by name."""
    a = TENSORS["a"]
    for tensor in (a.to_sparse(), a.to_sparse_coo(), a.to("meta"), torch.quantize_per_tensor(a, 0.1, 0, torch.qint8)):
        with pytest.raises(UnsupportedTensorError, match="no dense elements"):
            LazyTensor.from_tensor(tensor)
    with pytest.raises(UnsupportedDtypeError, match="qint8"):
        LazyTensor(MemorySource(bytes(3)), torch.qint8, (3,))


def test_reads_nothing_into_an_empty_buffer():
    """A buffer with a zero in its shape is filled with nothing."""
    lazy(TENSORS["a"]).read_into(np.zeros((0, 5), np.float32), 3)

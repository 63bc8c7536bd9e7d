# SPDX-License-Identifier: Apache-2.0
"""A model instantiated on disk has the values of an ordinary one, and its parameters are not in memory."""

from __future__ import annotations

import copy
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.measuring import MIB
from nvflare_lazy.flare.parameters_on_disk import ParametersOnDisk


class Odd(nn.Module):
    """What models do in their constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64, padding_idx=3)
        self.head = nn.Linear(64, 300)
        self.head.weight = self.embed.weight
        flat = torch.randn(6000)
        self.part = nn.Parameter(flat[1000:3000].view(20, 100))
        self.register_buffer("whole", flat)
        self.transposed = nn.Parameter(torch.randn(70, 40).t())
        self.strided = nn.Parameter(torch.randn(2, 64, 8, 8).to(memory_format=torch.channels_last))
        self.expanded = nn.Parameter(torch.randn(40, 1).expand(40, 50))
        self.complex = nn.Parameter(torch.randn(40, 50, dtype=torch.complex64).conj())
        self.register_buffer("short", torch.linspace(-1, 1, 5000).half())
        self.register_buffer("mask", torch.tril(torch.ones(80, 80, dtype=torch.bool)))
        self.register_buffer("listed", torch.tensor(list(range(3000))))
        self.register_buffer("from_numpy", torch.from_numpy(torch.arange(4000).numpy()) + 1)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(60, 60)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(60, 60), std=0.02))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(50, 60))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(50, 60))
        self.rnn = nn.LSTM(40, 40, num_layers=2, bidirectional=True)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 3)
        self.batch = copy.deepcopy(nn.BatchNorm1d(2000))
        self.conv = nn.utils.skip_init(nn.Conv2d, 8, 16, 5)
        nn.init.kaiming_normal_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)
        self.split = nn.ParameterList(torch.randn(3, 2000).chunk(3))
        self.unique = nn.Parameter(torch.randn(3000).sort().values)
        grown = torch.randn(1500)
        self.register_buffer("grown", grown.resize_(1600)[:1500])
        out = torch.empty(0)
        torch.add(torch.randn(3000), 1, out=out)
        self.register_buffer("out", out)
        self.wide = nn.Linear(40, 60).double()
        with torch.no_grad():
            self.head.bias.copy_(torch.randn(300))
            self.head.weight[5].fill_(0.25)
        self.register_buffer("gradient", torch.autograd.grad((self.head.bias**2).sum(), self.head.bias)[0])


class Converted(nn.Module):
    """A converted and copied module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).to(torch.bfloat16)
        self.second = copy.deepcopy(self.first)
        self.first.requires_grad_(False)
        self.apply(lambda module: [nn.init.normal_(part) for part in module.parameters(recurse=False)])


def bits(model: nn.Module) -> dict[str, tuple]:
    return {name: (tensor.dtype, tensor.stride(), tensor.resolve_conj()) for name, tensor in model.state_dict().items()}


def ties(model: nn.Module) -> set[tuple[str, str]]:
    """Pairs of tensors that share memory."""
    places = [(name, tensor.untyped_storage().data_ptr()) for name, tensor in model.state_dict().items()]
    return {(one, two) for one, place in places for two, other in places if one < two and place == other}


def mapped_addresses() -> list[range]:
    """Addresses of this process's file mappings."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [line[0].split("-") for line in lines if len(line) > 5 and "(deleted)" in line]
    return [range(int(begin, 16), int(end, 16)) for begin, end in found]


@pytest.mark.parametrize("model", [Odd, Converted])
def test_values(model, tmp_path):
    """Bits, strides and ties equal those from an ordinary instantiation, and so do the next random numbers."""
    torch.manual_seed(7)
    expected = model()
    then = torch.rand(3)
    torch.manual_seed(7)
    with ParametersOnDisk(tmp_path):
        found = model()
    assert torch.equal(torch.rand(3), then)
    for (name, one), (other, two) in zip(bits(expected).items(), bits(found).items(), strict=True):
        assert (name, *one[:2]) == (other, *two[:2])
        assert torch.equal(one[2], two[2]), name
    assert ties(found) == ties(expected)
    assert [part.requires_grad for part in found.parameters()] == [part.requires_grad for part in expected.parameters()]
    mapped = mapped_addresses()
    in_memory = [
        name
        for name, tensor in found.state_dict().items()
        if tensor.untyped_storage().nbytes() >= mmap.PAGESIZE and not any(tensor.data_ptr() in area for area in mapped)
    ]
    assert in_memory == (["out"] if model is Odd else [])
    assert os.listdir(tmp_path) == []


def test_it_ends_with_its_block(tmp_path):
    """Afterwards tensors and copies are ordinary ones, and those on disk can still be trained."""
    with ParametersOnDisk(tmp_path):
        layer = nn.Linear(100, 100)
    mapped = mapped_addresses()
    assert not any(torch.ones(5000).data_ptr() in area for area in mapped)
    assert not any(copy.deepcopy(torch.ones(5000)).data_ptr() in area for area in mapped)
    layer(torch.ones(2, 100)).sum().backward()
    with torch.no_grad():
        layer.weight.sub_(layer.weight.grad)
    assert any(layer.weight.data_ptr() in area for area in mapped)


def test_other_devices_and_kinds(tmp_path):
    """Tensors without memory, sparse and quantized ones are left alone."""
    with ParametersOnDisk(tmp_path):
        assert torch.empty(5000, device="meta").is_meta
        assert nn.Linear(100, 100, device="meta").to_empty(device="cpu").weight.shape == (100, 100)
        assert torch.eye(100).to_sparse().is_sparse
        assert torch.eye(100).is_contiguous()


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    """Space is reserved first: an exception with the cause instead of a signal."""

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"), ParametersOnDisk(tmp_path):
        nn.Linear(1000, 1000)


PEAK = """
import sys, torch
from pathlib import Path
from torch import nn
from nvflare_lazy.transport.malloc_tuning import tune_malloc
from nvflare_lazy.flare.parameters_on_disk import ParametersOnDisk
from benchmarks.measuring import PeakMemory
tune_malloc(keep_buffers=False)
torch.nn.Linear(3, 3)
with PeakMemory() as memory, ParametersOnDisk(Path(sys.argv[1])):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(30)], *[nn.LayerNorm(1024) for _ in range(100)])
    model.to(torch.bfloat16)
    model.register_buffer("table", torch.arange(2 << 20).float() * 2)
print(memory.growth)
"""


def test_memory(tmp_path):
    """Of 130 MiB, the largest tensor and a few buffers are in memory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    done = run([sys.executable, "-c", PEAK, str(tmp_path)], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < (16 + 32) * MIB

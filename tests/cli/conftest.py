# SPDX-License-Identifier: Apache-2.0
"""The command line from inside (fast) and from outside (as a shell runs it), and checkpoints to try it on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from nvflare_lazy.cli.program import run


class Result(NamedTuple):
    """How a command line ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch) -> Callable[..., Result]:
    """Run a command line in this process, in the test's directory."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Result:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def start(tmp_path) -> Callable[..., subprocess.Popen]:
    """Start a command line as a separate process, in the test's directory."""
    started = []

    def start(*args: object, **kwargs: object) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "nvflare_lazy.cli", *map(str, args)],
            **{
                "cwd": tmp_path,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                **kwargs,
            },
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(100, 64, generator=generator),
        "norm": torch.randn(64, generator=generator).bfloat16(),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def model(tensors, tmp_path) -> Path:
    """A safetensors file."""
    save_file(tensors, tmp_path / "in.safetensors", metadata={"format": "pt"})
    return tmp_path / "in.safetensors"


@pytest.fixture
def training(tensors, tmp_path) -> Path:
    """A training checkpoint of PyTorch."""
    content = {
        "model": tensors,
        "optimizer": {"state": {0: {"momentum": torch.zeros(100, 64)}}, "lr": 0.1},
        "epoch": 3,
    }
    torch.save(content, tmp_path / "training.pt")
    return tmp_path / "training.pt"

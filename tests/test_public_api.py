# SPDX-License-Identifier: Apache-2.0
"""The contents of `import nvflare_lazy`, and its cost: no NVFlare, and hardly more time than torch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nvflare_lazy

NAMES = ["LazyTensor", "LazyTensorDict", "aggregate", "install", "open", "save"]
SLOWER_BY_AT_MOST_SECONDS = 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file({f"layers.{i}.weight": torch.ones(4) for i in range(100)}, path)
    return path


def test_public_names():
    """Exactly these; each can be imported, and is documented."""
    assert sorted(nvflare_lazy.__all__) == NAMES
    assert sorted(dir(nvflare_lazy)) == sorted([*NAMES, "__version__"])
    for name in NAMES:
        assert getattr(nvflare_lazy, name).__doc__


def test_other_names():
    """A name that is not there is an AttributeError, as with any module."""
    with pytest.raises(AttributeError, match="has no attribute 'close'"):
        _ = nvflare_lazy.close


def test_the_package_itself_loads_nothing():
    """Not even torch, before a name is used."""
    run("import sys, nvflare_lazy; assert not {'torch', 'numpy', 'nvflare'} & set(sys.modules)")


def test_tensors_and_files_need_no_nvflare(model):
    """Opening, reading and saving work where NVFlare cannot be imported."""
    run(f"""if True:
        import sys
        sys.modules["nvflare"] = None
        import nvflare_lazy
        tensors = nvflare_lazy.open({str(model)!r})
        assert tensors["layers.0.weight"].sum() == 4
        nvflare_lazy.save(tensors, {str(model.with_name("copy.safetensors"))!r})
        nvflare_lazy.LazyTensor, nvflare_lazy.LazyTensorDict
        assert not [name for name in sys.modules if name.startswith("nvflare.")]
    """)


def test_opening_a_file_takes_hardly_longer_than_importing_torch(model):
    """Processor time for importing the package and opening a file, in a new process that has imported torch."""
    opening = f"""if True:
        import time, torch
        start = time.process_time()
        import nvflare_lazy
        nvflare_lazy.open({str(model)!r})
        print(time.process_time() - start)
    """
    for _ in range(3):
        extra = float(run(opening))
        if extra < SLOWER_BY_AT_MOST_SECONDS:
            return
    pytest.fail(f"{extra:.2f} s of processor time more than torch alone")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout

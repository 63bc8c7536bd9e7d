# SPDX-License-Identifier: Apache-2.0
"""Lazy tensors where threads, forks, other processes and NVFlare's serializer get at them."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

from nvflare_lazy.errors import SourceReleasedError
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors import entry, lazy_tensor
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.dtypes import by_torch
from nvflare_lazy.tensors.entry import TensorEntry
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_file import FileSource, TemporaryPath, TensorFile
from tests.measure import open_files

VALUES = torch.arange(1 << 14, dtype=torch.float32)


@pytest.fixture
def path(tmp_path):
    VALUES.numpy().tofile(tmp_path / "data")
    return tmp_path / "data"


def tensors(path, owner=None) -> LazyTensorDict:
    """Twelve overlapping tensors of 32 × 32."""
    file = TensorFile(path)
    entries = {
        str(i): TensorEntry(FileSource(file, i * 1024, 4096), by_torch(torch.float32), (32, 32)) for i in range(12)
    }
    made = LazyTensorDict.from_entries(entries)
    made.own(owner)
    return made


def expected(i: int) -> torch.Tensor:
    return VALUES[i * 256 : i * 256 + 1024].view(32, 32)


def check_at_random(made: LazyTensorDict, seed: int, wrong: list[str]) -> None:
    """Use tensors in many ways until they are released; note every error."""
    choices = random.Random(seed)
    try:
        for _ in range(300):
            i = choices.randrange(12)
            tensor, wanted = made[str(i)], expected(i)
            use = choices.choice(("sum", "view", "numpy", "cat", "pointer", "tile"))
            if use == "sum":
                good = torch.equal(tensor + 0, wanted)
            elif use == "view":
                good = torch.equal(tensor.T[3], wanted.T[3])
            elif use == "numpy":
                good = np.array_equal(tensor.numpy(), wanted.numpy())
            elif use == "cat":
                good = torch.equal(torch.cat([tensor, tensor]), torch.cat([wanted, wanted]))
            elif use == "pointer":
                good = tensor.data_ptr() == tensor.data_ptr() and torch.equal(tensor.clone(), wanted)
            else:
                tile = np.zeros(64, np.float32)
                tensor.read_into(tile, 32)
                good = np.array_equal(tile, wanted.flatten()[32:96].numpy())
            if not good:
                wrong.append(use)
    except SourceReleasedError:
        pass
    except Exception as error:
        wrong.append(repr(error))


def test_cleanup_under_readers(path):
    """Readers of every kind see the right elements or hear of the release, whenever that comes; no descriptor stays."""
    wrong: list[str] = []
    gc.collect()
    before = open_files()
    for attempt in range(12):
        made = tensors(path)
        readers = [threading.Thread(target=check_at_random, args=(made, seed, wrong)) for seed in range(4)]
        for reader in readers:
            reader.start()
        threading.Event().wait(attempt / 400)
        made.cleanup()
        for reader in readers:
            reader.join()
        del made, readers, reader
    gc.collect()
    assert not wrong
    assert open_files() == before


def test_threads_that_ask_at_once_get_one_tensor(path):
    """Two names of one entry stay tied even if two threads ask for them at the same time."""
    for _ in range(100):
        made, barrier, got = tensors(path), threading.Barrier(4), []

        def ask(made=made, barrier=barrier, got=got) -> None:
            barrier.wait()
            got.append(made["3"])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(tensor) for tensor in got}) == 1


def in_child(function) -> int:
    """Run a function in a forked child that ends without any of Python's farewells; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# Python 3.12 warns of forks with threads, which this test makes on purpose.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forks_while_threads_read(path):
    """A child that is forked while other threads read can also read: it inherits no locked lock."""
    made = tensors(path)
    stop = threading.Event()

    def read_on() -> None:
        while not stop.is_set():
            made["1"].source.read()

    readers = [threading.Thread(target=read_on) for _ in range(3)]
    for reader in readers:
        reader.start()
    codes = {in_child(lambda: bytes(made["2"].source.read()) == expected(2).numpy().tobytes()) for _ in range(30)}
    stop.set()
    for reader in readers:
        reader.join()
    assert codes == {0}


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_while_another_thread_makes_and_loads_tensors(path):
    """The lock under which entries make tensors is free in a child, and what threads load in a call is theirs alone."""
    made = tensors(path)
    inside, goes_on = threading.Event(), threading.Event()

    def make_and_load() -> None:
        with entry._publishing, lazy_tensor._loads.shared():
            lazy_tensor._loads.load(LazyTensor.from_tensor(torch.zeros(3)))
            inside.set()
            goes_on.wait(300)

    def use_in_child() -> bool:
        signal.alarm(60)
        return bool(lazy_tensor._loads._held is None and made["1"].sum() == expected(1).sum())

    thread = threading.Thread(target=make_and_load)
    thread.start()
    inside.wait(300)
    code = in_child(use_in_child)
    goes_on.set()
    thread.join(300)
    assert code == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_removes_nothing(path, tmp_path):
    """A child that releases the tensors, as it does at its end, does not remove the parent's directory."""
    owned = tmp_path / "owned"
    owned.mkdir()
    made = tensors(path, TemporaryPath(owned))

    def let_go() -> bool:
        nonlocal made
        made.cleanup()
        del made
        gc.collect()
        return True

    assert in_child(let_go) == 0
    assert owned.is_dir()
    assert made["1"].sum() == expected(1).sum()
    del made
    gc.collect()
    assert not owned.exists()


def test_a_file_that_is_a_pipe_does_not_block(tmp_path):
    """Opening a named pipe without a writer is an error, not a wait."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        FileSource(TensorFile(tmp_path / "pipe"), 0, 8)


def run(code: str) -> str:
    """Run a separate program and return its output."""
    program = textwrap.dedent(code)
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout


def test_interpreter_shutdown(path):
    """A program that ends with lazy tensors in globals, cycles and pinned memory ends in silence."""
    code = f"""
        import torch
        from nvflare_lazy.tensors.tensor_file import open_source
        from nvflare_lazy.tensors.lazy_tensor import LazyTensor
        from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
        from nvflare_lazy.tensors.dtypes import by_torch
        from nvflare_lazy.tensors.entry import TensorEntry
        source = open_source({str(path)!r})
        made = LazyTensorDict.from_entries({{"a": TensorEntry(source, by_torch(torch.float32), (16384,))}})
        tensor = made["a"]
        tensor.itself, made.itself = tensor, made
        tensor.data_ptr()
        view = memoryview(tensor.numpy())
        print(float(tensor[7]))
    """
    assert run(code) == "7.0\n"


def test_stock_fobs():
    """NVFlare's own decomposers, without registration of this package, send lazy tensors and arrays by value."""
    code = """
        import copy
        import numpy as np, torch
        from nvflare.apis.dxo import DXO, DataKind, from_shareable
        from nvflare.app_common.abstract.fl_model import FLModel
        from nvflare.app_common.decomposers import common_decomposers
        from nvflare.app_common.decomposers.numpy_decomposers import NumpyArrayDecomposer
        from nvflare.app_common.utils.fl_model_utils import FLModelUtils
        from nvflare.app_opt.pt.decomposers import TensorDecomposer
        from nvflare.fuel.utils import fobs
        from nvflare_lazy.tensors.lazy_array import LazyArray
        from nvflare_lazy.tensors.lazy_tensor import LazyTensor

        common_decomposers.register()
        fobs.register(TensorDecomposer)
        fobs.register(NumpyArrayDecomposer)
        over_the_wire = lambda value: fobs.loads(fobs.dumps(value))

        x = torch.arange(12.0).reshape(3, 4)
        cases = [x, x[1], x.bfloat16(), x.to(torch.float8_e4m3fn), x > 3, x[:0], x[0, 0], x.requires_grad_()]
        for plain in cases:
            got = over_the_wire({"t": LazyTensor.from_tensor(plain)})["t"]
            assert type(got) is torch.Tensor and got.dtype == plain.dtype
            assert torch.equal(got.float(), plain.float())
        tensor = LazyTensor.from_tensor(x.detach())
        array = LazyArray.from_lazy_tensor(tensor)
        for lazy in (array, array[1]):
            got = over_the_wire({"a": lazy})["a"]
            assert type(got) is np.ndarray and np.array_equal(got, lazy)

        model = FLModel(params={"t": tensor, "a": array}, metrics={"loss": 1.0})
        shareable = copy.deepcopy(FLModelUtils.to_shareable(model))
        for copied in (copy.deepcopy(model), FLModelUtils.from_shareable(shareable)):
            assert isinstance(copied.params["t"], LazyTensor) and isinstance(copied.params["a"], LazyArray)
        got = FLModelUtils.from_shareable(over_the_wire(FLModelUtils.to_shareable(model))).params
        assert torch.equal(got["t"], x) and np.array_equal(got["a"], x.detach().numpy())
        dxo = from_shareable(over_the_wire(DXO(DataKind.WEIGHTS, data={"t": tensor}).to_shareable()))
        assert torch.equal(dxo.data["t"], x)
        print("sent")
    """
    assert run(code) == "sent\n"


def test_forked_while_another_thread_pins():
    """A child can take a pointer although a thread of its parent was about to."""
    reading, goes_on = threading.Event(), threading.Event()

    class SlowSource(MemorySource):
        def _read_into(self, buffer, offset):
            reading.set()
            if os.getpid() == parent:
                goes_on.wait(300)
            super()._read_into(buffer, offset)

    parent = os.getpid()
    made = LazyTensor(SlowSource(bytes(16)), torch.float32, (4,))
    thread = threading.Thread(target=made.data_ptr)
    thread.start()
    reading.wait(300)
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if made.data_ptr() else 1)
    goes_on.set()
    thread.join(300)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

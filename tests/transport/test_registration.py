# SPDX-License-Identifier: Apache-2.0
"""`install()` puts our handlers in place, whoever came first; NVFlare's private names it rests on are there."""

from __future__ import annotations

import subprocess
import sys
import textwrap

OURS = {
    "torch.Tensor": "nvflare_lazy.transport.decomposers.LazyTensorDecomposer",
    "numpy.ndarray": "nvflare_lazy.transport.decomposers.LazyArrayDecomposer",
}


def run(code: str) -> str:
    """Run code in a process of its own: what is registered is the whole process's."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:nvflare_lazy", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_before_stock():
    """Installed first: the stock decomposers that come later change nothing, and nobody complains."""
    run("""
        import logging, nvflare_lazy
        complaints = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: complaints.append(record.getMessage())
        logging.getLogger().addHandler(handler)
        installation = nvflare_lazy.install()
        assert installation.complete and not installation.took_place_of, installation

        from nvflare.fuel.utils import fobs
        from nvflare.app_opt.pt.decomposers import TensorDecomposer
        from nvflare.app_common.decomposers import numpy_decomposers
        fobs.register(TensorDecomposer)
        numpy_decomposers.register()
        fobs.loads(fobs.dumps({"a": 1}))

        from nvflare_lazy.transport.registration import installed
        assert installed().complete, installed()
        assert type(fobs.get_dot_handler(6)).__name__ == "LazyTensorDecomposer"
        assert type(fobs.get_dot_handler(3)).__name__ == "LazyArrayDecomposer"
        assert not complaints, complaints
    """)


def test_after_stock():
    """Installed second: it takes the place of the stock decomposers and says so, once, in a log line and a value."""
    run("""
        import logging, nvflare_lazy
        from nvflare.fuel.utils import fobs
        from nvflare.app_opt.pt.decomposers import TensorDecomposer
        from nvflare.app_common.decomposers import numpy_decomposers
        fobs.register(TensorDecomposer)
        numpy_decomposers.register()
        fobs.loads(fobs.dumps({"a": 1}))

        said = []
        log = logging.getLogger("nvflare_lazy")
        log.setLevel(logging.INFO)
        handler = logging.Handler()
        handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
        log.addHandler(handler)
        from nvflare_lazy.transport.registration import installed
        assert not installed().complete
        first = nvflare_lazy.install()
        again = nvflare_lazy.install()
        assert first.complete and again.complete
        assert first.took_place_of == (
            "nvflare.app_opt.pt.decomposers.TensorDecomposer",
            "nvflare.app_common.decomposers.numpy_decomposers.NumpyArrayDecomposer",
            "nvflare.fuel.utils.fobs.decomposers.via_downloader.LazyDownloadRefDecomposer",
        ), first
        assert again.took_place_of == ()
        assert [handler.dot for handler in first.handlers] == [6, 3, None]
        assert len(said) == 1 and said[0][0] == "INFO" and "in the place of" in said[0][1], said
    """)


def test_without_a_cell():
    """Without a cell tensors are encoded by themselves, lazy ones as well, and stock NVFlare can read them."""
    run("""
        import numpy as np, torch, nvflare_lazy
        from nvflare_lazy.tensors.lazy_array import LazyArray
        from nvflare_lazy.tensors.lazy_tensor import LazyTensor
        from nvflare.fuel.utils import fobs
        nvflare_lazy.install()
        tensor = torch.arange(6.0).reshape(2, 3)
        lazy = LazyTensor.from_tensor(tensor)
        encoded = fobs.dumps({"a": tensor, "b": lazy.T, "c": LazyArray.from_lazy_tensor(lazy), "d": np.arange(3)})
        fobs.reset()
        from nvflare.app_opt.pt.decomposers import TensorDecomposer
        from nvflare.app_common.decomposers.numpy_decomposers import NumpyArrayDecomposer
        fobs.register(TensorDecomposer)
        fobs.register(NumpyArrayDecomposer)
        got = fobs.loads(encoded)
        assert torch.equal(got["a"], tensor) and torch.equal(got["b"], tensor.T)
        assert np.array_equal(got["c"], tensor.numpy()) and np.array_equal(got["d"], np.arange(3))
    """)


def test_flag_on_another_cell(tmp_path):
    """NVFlare's offload flag counts on whatever cell of the process it was set, and our own switch above it."""
    run(f"""
        import os
        os.environ["NVFLARE_LAZY_SCRATCH"] = {str(tmp_path)!r}
        from nvflare.fuel.f3.cellnet.cell import Cell
        from nvflare.fuel.utils.fobs import FOBSContextKey
        from nvflare_lazy.transport import offload
        from tests.transport.peers import free_port
        url = f"tcp://127.0.0.1:{{free_port()}}"
        cells = [Cell(name, url, False, {{}}, create_internal_listener=False) for name in ("server", "server.job")]
        where = cells[1].get_fobs_context
        assert offload.destination(where()) is None
        cells[0].update_fobs_context({{FOBSContextKey.TENSOR_DISK_OFFLOAD: True}})
        assert offload.destination(where()) is not None
        offload.disable()
        assert offload.destination(where()) is None
        offload.enable()
        cells[0].update_fobs_context({{FOBSContextKey.TENSOR_DISK_OFFLOAD: False}})
        assert offload.destination(where()) is not None
        os._exit(0)
    """)


def test_download_initiated():
    """A thread can ask whether it has sent something that others still have to download."""
    from nvflare_lazy.transport import via_downloader

    via_downloader.clear_download_initiated()
    assert not via_downloader.was_download_initiated()
    via_downloader.note_download_initiated()
    assert via_downloader.was_download_initiated()
    via_downloader.clear_download_initiated()
    assert not via_downloader.was_download_initiated()


def test_cells_of_one_process():
    """Two cells in one process hand messages over directly; a transfer between them works all the same."""
    run("""
        import os, threading, torch, nvflare_lazy
        from nvflare.fuel.f3.cellnet.cell import Cell
        from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
        from tests.transport.peers import free_port
        nvflare_lazy.install()
        url = f"tcp://127.0.0.1:{free_port()}"
        server, client = (Cell(name, url, False, {}, create_internal_listener=False) for name in ("server", "site-1"))
        server.start(); client.start()
        got = []
        server.register_request_cb(channel="c", topic="t", cb=lambda m: got.append(m.payload) or make_reply("ok"))
        tensor = torch.randn(5_000_000)
        message = new_cell_message({}, {"a": tensor})
        reply = client.send_request(channel="c", topic="t", target="server", request=message, timeout=30)
        assert torch.equal(got[0]["a"], tensor)
        os._exit(0)
    """)

# SPDX-License-Identifier: Apache-2.0
"""`register()` installs our handlers after any others; `install()` also receives on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest


def run(code: str, **environment: object) -> str:
    """Run code in a separate process: registration affects the whole process."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:nvflare_lazy", "-c", textwrap.dedent(code)],
        capture_output=True,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_before_stock():
    """Installed first: stock decomposers that are registered later change nothing, without a warning."""
    run("""
        import logging
        from nvflare_lazy.transport.registration import register, registered
        complaints = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: complaints.append(record.getMessage())
        logging.getLogger().addHandler(handler)
        registration = register()
        assert registration.complete, registration
        assert not any(handler.replaced for handler in registration.handlers)

        from nvflare.fuel.utils import fobs
        from nvflare.app_opt.pt.decomposers import TensorDecomposer
        from nvflare.app_common.decomposers import numpy_decomposers
        fobs.register(TensorDecomposer)
        numpy_decomposers.register()
        fobs.loads(fobs.dumps({"a": 1}))

        assert registered().complete, registered()
        assert fobs.get_dot_handler(6).implementation.endswith("LazyTensorDecomposer")
        assert fobs.get_dot_handler(3).implementation.endswith("LazyArrayDecomposer")
        assert not complaints, complaints
    """)


def test_after_stock():
    """Installed second: it replaces the stock decomposers and reports it, once, in a log line and a value."""
    run("""
        import logging
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
        from nvflare_lazy.transport.registration import register, registered
        assert not registered().complete
        first = register()
        again = register()
        assert first.complete and again.complete
        assert tuple(handler.replaced for handler in first.handlers if handler.replaced) == (
            "nvflare.app_opt.pt.decomposers.TensorDecomposer",
            "nvflare.app_common.decomposers.numpy_decomposers.NumpyArrayDecomposer",
            "nvflare.fuel.utils.fobs.decomposers.via_downloader.LazyDownloadRefDecomposer",
        ), first
        assert not any(handler.replaced for handler in again.handlers)
        assert [handler.dot for handler in first.handlers] == [6, 3, None]
        assert said == [("INFO", "Tensors are handled lazily: Tensor, ndarray, LazyDownloadRef")], said
    """)


def test_your_own_decomposer():
    """It is replaced with a warning that names it; `install(replace=False)` leaves it and replaces NVFlare's own."""
    run("""
        import logging, torch
        from nvflare.fuel.utils import fobs
        from nvflare.app_common.decomposers import numpy_decomposers
        from nvflare_lazy.transport.decomposers import LazyTensorDecomposer
        # Not ours, although it extends ours.
        class YourDecomposer(LazyTensorDecomposer):
            pass
        fobs.register(YourDecomposer)
        numpy_decomposers.register()
        warnings = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: warnings.append(record.getMessage())
        logging.getLogger().addHandler(handler)

        import nvflare_lazy
        kept = nvflare_lazy.install(replace=False)
        assert [handler.ours for handler in kept.handlers] == [False, True, True]
        assert kept.handlers[0].in_place == "__main__.YourDecomposer"
        assert type(fobs.get_dot_handler(6)) is YourDecomposer
        assert not warnings
        assert nvflare_lazy.install().complete
        assert nvflare_lazy.install(replace=False).complete
        (warning,) = warnings
        assert "torch.Tensor, __main__.YourDecomposer" in warning and "install(replace=False)" in warning
    """)


def test_files(tmp_path):
    """Without a cell tensors, lazy ones included, are encoded in the message, and stock NVFlare can read them.

    It finds its own decomposers by the names in a file: that of arrays without any registration, as always.
    """
    run(
        """
        import os, numpy as np, torch
        from nvflare.apis.dxo import DXO, DataKind, from_file
        from nvflare.apis.utils.decomposers import flare_decomposers
        from nvflare.app_common.abstract.fl_model import FLModel
        from nvflare.app_common.decomposers import common_decomposers
        from nvflare.app_opt.pt.decomposers import TensorDecomposer
        from nvflare.fuel.utils import fobs
        from nvflare_lazy.tensors.lazy_array import LazyArray
        from nvflare_lazy.tensors.lazy_tensor import LazyTensor
        from nvflare_lazy.transport.registration import register, registered
        register()
        flare_decomposers.register(); common_decomposers.register()
        tensor = torch.arange(6.0).reshape(2, 3)
        lazy = LazyTensor.from_tensor(tensor)
        dxo, model = os.environ["DXO"], os.environ["MODEL"]
        DXO(DataKind.WEIGHTS, data={"c": LazyArray.from_lazy_tensor(lazy), "d": np.arange(3)}).to_file(dxo)
        fobs.dumpf(FLModel(params={"a": tensor, "b": lazy.T}), model)

        fobs.reset()
        flare_decomposers.register(); common_decomposers.register()
        got = from_file(dxo).data
        assert np.array_equal(got["c"], tensor.numpy()) and np.array_equal(got["d"], np.arange(3))
        fobs.register(TensorDecomposer)
        got = fobs.loadf(model).params
        assert torch.equal(got["a"], tensor) and torch.equal(got["b"], tensor.T)
        assert not any(handler.ours for handler in registered().handlers)
        assert b"nvflare_lazy" not in open(dxo, "rb").read() + open(model, "rb").read()
        """,
        DXO=tmp_path / "dxo",
        MODEL=tmp_path / "model",
    )


def test_flag_on_another_cell(tmp_path):
    """NVFlare's offload flag counts on whatever cell of the process it was set, and our own switch above it."""
    code = """
        import os
        from nvflare.fuel.f3.cellnet.cell import Cell
        from nvflare.fuel.utils.fobs import FOBSContextKey
        from nvflare_lazy.transport import offload
        from tests.transport.peers import free_port
        url = f"tcp://127.0.0.1:{free_port()}"
        cells = [Cell(name, url, False, {}, create_internal_listener=False) for name in ("server", "server.job")]
        where = cells[1].get_fobs_context
        assert offload.runtime.mode_for(where()).scratch is None
        cells[0].update_fobs_context({FOBSContextKey.TENSOR_DISK_OFFLOAD: True})
        assert offload.runtime.mode_for(where()).scratch is not None
        offload.disable()
        assert offload.runtime.mode_for(where()).scratch is None
        offload.enable()
        cells[0].update_fobs_context({FOBSContextKey.TENSOR_DISK_OFFLOAD: False})
        assert offload.runtime.mode_for(where()).scratch is not None
        os._exit(0)
    """
    run(code, NVFLARE_LAZY_SCRATCH=tmp_path)


def test_download_initiated():
    """A thread can ask whether it has sent something that others still have to download."""
    from nvflare_lazy.transport import offload, via_downloader

    via_downloader.clear_download_initiated()
    assert not via_downloader.was_download_initiated()
    offload.runtime.by_thread.initiated = True  # as sending does
    assert via_downloader.was_download_initiated()
    via_downloader.clear_download_initiated()
    assert not via_downloader.was_download_initiated()


@pytest.mark.parametrize(
    ("install", "received"),
    [
        ("from nvflare_lazy.transport.registration import register; register()", "Tensor"),
        ("nvflare_lazy.install()", "LazyTensor"),
        ("nvflare_lazy.install(); from nvflare_lazy.transport import offload; offload.disable()", "Tensor"),
    ],
)
def test_one_line_makes_a_process_receive_on_disk(tmp_path, install, received):
    """Between two cells, which hand messages over directly; NVFlare's way to end a process leaves nothing behind."""
    code = """
        import os, torch, nvflare_lazy
        from pathlib import Path
        from nvflare.fuel.f3.cellnet.cell import Cell
        from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
        from nvflare.fuel.f3.mpm import MainProcessMonitor
        from tests.transport.peers import free_port
        exec(os.environ["INSTALL"])
        url = f"tcp://127.0.0.1:{free_port()}"
        server, client = (Cell(name, url, False, {}, create_internal_listener=False) for name in ("server", "site-1"))
        server.start(); client.start()
        got = []
        server.register_request_cb(channel="c", topic="t", cb=lambda m: got.append(m.payload) or make_reply("ok"))
        tensor = torch.randn(5_000_000)
        message = new_cell_message({}, {"a": tensor})
        reply = client.send_request(channel="c", topic="t", target="server", request=message, timeout=300)
        assert torch.equal(got[0]["a"], tensor)
        assert type(got[0]["a"]).__name__ == os.environ["RECEIVED"]
        print(len(list(Path(os.environ["NVFLARE_LAZY_SCRATCH"]).rglob("*.safetensors"))), flush=True)
        # What a job process ends with; it may call `os._exit` itself.
        MainProcessMonitor.run(lambda: 0, run_dir=os.environ["DIRECTORY"], shutdown_grace_time=0)
        os._exit(0)
    """
    scratch = tmp_path / "scratch"
    said = run(code, NVFLARE_LAZY_SCRATCH=scratch, DIRECTORY=tmp_path, INSTALL=install, RECEIVED=received)
    assert (int(said) > 0) == (received == "LazyTensor")
    assert not [path for path in scratch.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("place", "package", "on_disk"),
    [
        ("environment", "nvflare_lazy.flare.install", True),
        ("resources.json", "nvflare_lazy.flare.install", True),
        ("resources.json", "nvflare_lazy.flare.decomposers", False),
    ],
)
def test_setting_of_a_site(tmp_path, place, package, on_disk):
    """NVFlare's setting of a package to import, in the environment or a site's resources, as job processes read it.

    The package decides whether everything is received on disk, or what NVFlare's switch asks for.
    """
    resources = {"nvflare_decomposers": package} if place == "resources.json" else {}
    (tmp_path / "resources.json").write_text(json.dumps(resources))
    environment = {"NVFLARE_NVFLARE_DECOMPOSERS": package} if place == "environment" else {}
    code = """
        import os
        from nvflare.apis.fl_constant import ConfigVarName, SystemConfigs
        from nvflare.fuel.utils.config_service import ConfigService
        from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize, register_ext_decomposers
        nvflare_fobs_initialize()
        ConfigService.initialize({SystemConfigs.RESOURCES_CONF: "resources.json"}, [os.environ["SITE"]])
        # The simulator does it in a directory that is gone.
        os.chdir(os.environ["REMOVED"])
        os.rmdir(os.environ["REMOVED"])
        named = ConfigService.get_str_var(name=ConfigVarName.DECOMPOSER_MODULE, conf=SystemConfigs.RESOURCES_CONF)
        register_ext_decomposers(named)

        from nvflare.fuel.utils.fobs import FOBSContextKey
        from nvflare_lazy.transport import offload
        from nvflare_lazy.transport.registration import registered
        assert registered().complete, registered()
        switched_on = {FOBSContextKey.TENSOR_DISK_OFFLOAD: True}
        assert str(offload.runtime.mode_for(switched_on).scratch.job().root) == os.environ["NVFLARE_LAZY_SCRATCH"]
        print(offload.runtime.mode_for(None).scratch is not None)
    """
    (tmp_path / "removed").mkdir()
    where = {"SITE": tmp_path, "NVFLARE_LAZY_SCRATCH": tmp_path / "scratch", "REMOVED": tmp_path / "removed"}
    assert run(code, **where, **environment).strip() == str(on_disk)

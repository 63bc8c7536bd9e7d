# SPDX-License-Identifier: Apache-2.0
"""What we use of NVFlare without its promise is there and means what it meant; each has its name in a failing test."""

from __future__ import annotations

import inspect
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from nvflare.apis.signal import Signal
from nvflare.app_common.executors.client_api.external_process_backend import ExternalProcessBackend
from nvflare.fuel.f3 import communicator
from nvflare.fuel.f3.cellnet import core_cell
from nvflare.fuel.f3.drivers import aio_conn, aio_http_driver, grpc_driver, socket_conn
from nvflare.fuel.f3.drivers.grpc.qq import QQ
from nvflare.fuel.f3.sfm import conn_manager, sfm_conn
from nvflare.fuel.f3.streaming import byte_receiver, byte_streamer, cacheable, download_service
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.download_service import DownloadService
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import datum
from nvflare.fuel.utils.fobs import fobs as registry
from nvflare.fuel.utils.fobs.decomposers import via_downloader

from nvflare_lazy.transport import _nvflare_private

TRANSPORT = Path(_nvflare_private.__file__).parent


def test_wire_words():
    """The protocol words that peers without this package understand."""
    words = {
        name: getattr(_nvflare_private, name)
        for name in ("REF_ID", "STATE", "DATA", "STATUS", "START", "COUNT", "DATUM_REF_ID", "DATUM_FQCN")
    }
    assert words == {
        "REF_ID": "ref_id",
        "STATE": "state",
        "DATA": "data",
        "STATUS": "status",
        "START": cacheable._StateKey.START,
        "COUNT": cacheable._StateKey.COUNT,
        "DATUM_REF_ID": "ref_id",
        "DATUM_FQCN": "fqcn",
    }
    assert (_nvflare_private.ENC_TYPE, _nvflare_private.ENC_DATA) == ("type", "data")
    assert (_nvflare_private.ENC_NATIVE, _nvflare_private.ENC_REF) == ("native", "ref")


def test_items_without_copies(monkeypatch):
    """FOBS refers to values from its threshold, which it looks up for each message, and its receivers take them."""
    item, small = bytearray(1 << 20), bytes(1000)
    monkeypatch.setattr(datum, "TEN_MEGA", 10 << 20)
    assert not any(part is item for part in fobs.dumps([item, small], buffer_list=True))
    _nvflare_private.send_items_without_copies()
    message = fobs.dumps([item, small], buffer_list=True)
    assert any(part is item for part in message)
    assert sum(map(len, message)) < len(item) + 2 * len(small)
    assert fobs.loads(message) == [item, small]


def test_registry():
    """The registry is two dictionaries, by type name and by number."""
    assert isinstance(registry._decomposers, dict)
    assert isinstance(registry._dot_handlers, dict)
    assert "_decomposers" in inspect.getsource(registry.register)
    assert "_dot_handlers" in inspect.getsource(registry.get_dot_handler)


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (download_service._Ref, "mark_active", ["self"]),
        (download_service._Ref, "mark_receiver_active", ["self", "receiver"]),
        (download_service._Ref, "_finalize_receiver", ["self", "to_receiver", "status", "require_pending", "nonce"]),
        (download_service._Transaction, "begin_op", ["self"]),
        (download_service._Transaction, "end_op", ["self"]),
        (download_service._Transaction, "snapshot_refs", ["self"]),
        (download_service._Transaction, "add_total_bytes", ["self", "byte_count"]),
        (DownloadService, "_register_source_download", ["cell", "source_fqcn", "ref_id", "abort_signal"]),
        (DownloadService, "_unregister_source_download", ["source_fqcn", "ref_id", "signal"]),
        (via_downloader._DecomposeCtx, "add_item", ["self", "item"]),
        (byte_streamer.TxTask, "stop", ["self", "error", "notify"]),
        (byte_receiver.RxTask, "_schedule_remove_task", ["self", "ttl"]),
        (byte_receiver.RxTask, "_remove_task", ["self"]),
        (via_downloader.ViaDownloaderDecomposer, "_finalize_download_tx", ["self", "mgr"]),
        (via_downloader.ViaDownloaderDecomposer, "_create_downloadable", ["self", "fobs_ctx"]),
        (via_downloader.ViaDownloaderDecomposer, "_download_from_remote_cell", ["self", "fobs_ctx", "ref"]),
        (via_downloader.ViaDownloaderDecomposer, "_config_var_name", ["self", "base_name"]),
    ],
)
def test_signatures(owner, name, parameters):
    """Methods that this package calls, or that replace NVFlare's own."""
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


def test_connections():
    """Attributes for a cell's connections, and the names of sockets, queues and event loops in the drivers."""
    sources = {
        communicator.Communicator: "self.conn_manager = ",
        core_cell.CoreCell: "self.communicator = ",
        sfm_conn.SfmConnection: "self.conn = ",
        socket_conn.SocketConnection: "self.sock = ",
        aio_conn.AioConnection: "self.writer = writer\n        self.aio_ctx = ",
        aio_http_driver.WsConnection: "self.websocket = websocket\n        self.aio_context = ",
        grpc_driver.StreamConnection: "self.oq = ",
        QQ: "self.q = ",
    }
    for owner, line in sources.items():
        assert line in inspect.getsource(owner.__init__)
    assert list(inspect.signature(conn_manager.ConnManager.get_connections).parameters) == ["self", "name"]


def test_names_of_the_service():
    """Tables and locks of the download service."""
    assert isinstance(DownloadService._ref_table, dict)
    assert DownloadService._tx_lock.acquire(timeout=60)
    DownloadService._tx_lock.release()
    assert "now - tx.last_active_time > tx.timeout" in inspect.getsource(DownloadService._monitor_tx)
    assert "receiver_ids" in inspect.signature(download_service._Transaction.__init__).parameters


def test_results_of_trainers():
    """They are decoded on separate routes, before NVFlare waits for the downloads of references in them.

    A receiver's confirmation is counted before NVFlare looks whether all have the payload.
    """
    routes = inspect.getsource(ExternalProcessBackend.initialize)
    assert "(CHANNEL, Topic.RESULT_READY)" in routes
    assert "(CellChannel.SERVER_COMMAND, ServerCommandNames.GET_TASK)" in routes
    assert ExternalProcessBackend._collect_result_source_refs({"w": torch.zeros(1)}, "site-1.job.trainer") == set()
    confirm = inspect.getsource(DownloadService._handle_confirm)
    assert confirm.index("obj_confirmed") < confirm.index("_finish_transaction_if_complete")
    assert list(inspect.signature(download_service.request_download_chunk).parameters)[:5] == [
        *("from_fqcn", "ref_id", "state", "per_request_timeout", "cell")
    ]


def test_signals():
    """A signal has its trigger value, and the signal that it follows."""
    parent = Signal()
    child = Signal(parent=Signal(parent=parent))
    parent.trigger("over")
    assert child.triggered
    assert _nvflare_private.reason_of(child) == "over"
    assert _nvflare_private.reason_of(Signal()) is None


def test_items_context():
    """The same value gets the same number, and numbers count up from T0: names that need not travel."""
    context = _nvflare_private.new_items_context()
    first, second = object(), object()
    assert [context.add_item(item)[0] for item in (first, second, first)] == ["T0", "T1", "T0"]
    assert context.target_items == {"T0": first, "T1": second}


def test_all_private_names_are_here():
    """No other module of transport reaches for a private name of NVFlare."""
    private_import = re.compile(r"from nvflare(\.[\w.]+)? import [^\n]*\b_\w+")
    found = [
        path.name
        for path in TRANSPORT.rglob("*.py")
        if path.name != "_nvflare_private.py" and private_import.search(path.read_text())
    ]
    assert found == []


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def cleaning():
    return [thread for thread in threading.enumerate() if thread.name == "nvflare_lazy_cleanup"]


class Note:
    """A note of a received stream."""

    def __init__(self, remove):
        self._remove_task = remove


def test_cleanup_in_time(monkeypatch, caplog):
    """Each note is removed when it is due, whatever another one raises; then the thread ends, until the next."""
    monkeypatch.setattr(_nvflare_private, "_CLEANUP_INTERVAL_SECONDS", 0.01)
    thread, done = _nvflare_private.CleanupThread(), []
    thread.remove_later(Note(lambda: 1 / 0), 0.01)
    thread.remove_later(Note(lambda: done.append("cancelled")), 0.02).cancel()
    for number, seconds in enumerate((0.6, 0.1, 0.3)):
        thread.remove_later(Note(lambda number=number: done.append(number)), seconds)
    assert len(cleaning()) == 1
    wait_until(lambda: len(done) == 3)
    assert done == [1, 2, 0]
    assert "ZeroDivisionError" in caplog.text
    wait_until(lambda: not cleaning())
    thread.remove_later(Note(lambda: done.append(3)), 0)
    wait_until(lambda: done[-1] == 3)


def test_notes_of_nvflare(monkeypatch):
    """NVFlare's notes of received streams are removed in time, without a thread for each."""

    monkeypatch.setattr(RxTask, "_schedule_remove_task", RxTask._schedule_remove_task)
    thread = _nvflare_private.CleanupThread()
    _nvflare_private.use_single_cleanup_thread(lambda: thread)
    tasks = [RxTask(number, "tests", None) for number in range(50)]
    RxTask.rx_task_map.update({("tests", task.sid): task for task in tasks})
    before = threading.active_count()
    for task in tasks:
        task._schedule_remove_task(0.3)
    tasks[0]._remove_task()  # earlier than due, as NVFlare does
    assert threading.active_count() <= before + 1
    wait_until(lambda: not any(origin == "tests" for origin, _ in list(RxTask.rx_task_map)))
    assert all(task.cleanup_timer is None for task in tasks)

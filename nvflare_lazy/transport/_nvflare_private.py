# SPDX-License-Identifier: Apache-2.0
"""All private names of NVFlare that this package uses.

A test checks these names one by one: if a release of NVFlare changes a name, the test fails and names it, instead of a
transfer that fails with an unclear error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import select
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nvflare.app_common.utils import tensor_disk_offload_context
from nvflare.app_opt.pt import tensor_downloader
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.f3.streaming.download_service import (
    DownloadService,
    DownloadStatus,
    _PropKey,
    _Ref,
)
from nvflare.fuel.f3.streaming.transfer_progress import TransferProgressState
from nvflare.fuel.utils.fobs import FOBSContextKey, datum
from nvflare.fuel.utils.fobs import fobs as registry
from nvflare.fuel.utils.fobs.decomposers import via_downloader

from nvflare_lazy._text import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Class = TypeVar("_Class")

logger = get_logger(__name__)

_CLEANUP_INTERVAL_SECONDS = 1.0
_POLL_SECONDS = 0.005
_HAND_OVER_SECONDS = 1.0
_MAX_QUEUED_FRAMES = 2
_MIN_SEPARATE_BYTES = 1 << 20
_BYTES_ACKED = 120  # where `tcp_info` of <linux/tcp.h> has this count, since Linux 4.1

#: NVFlare's own module, which ours of the same name extends.
stock_via_downloader = via_downloader

# Keys of a download request, of its reply and of their values.
REF_ID: str = _PropKey.REF_ID
STATE: str = _PropKey.STATE
DATA: str = _PropKey.DATA
STATUS: str = _PropKey.STATUS
CONFIRM_CAPABLE: str = _PropKey.CONFIRM_CAPABLE
START: str = "start"
COUNT: str = "count"

# Encoding of an object by a decomposer, and the datum with the location of the download.
ENC_TYPE: str = stock_via_downloader.EncKey.TYPE
ENC_DATA: str = stock_via_downloader.EncKey.DATA
ENC_NATIVE: str = stock_via_downloader.EncType.NATIVE
ENC_REF: str = stock_via_downloader.EncType.REF
DATUM_REF_ID: str = stock_via_downloader._RefKey.REF_ID
DATUM_FQCN: str = stock_via_downloader._RefKey.FQCN
CTX_OBJECTS: str = stock_via_downloader._CtxKey.OBJECTS
CTX_FINAL_CB_REGISTERED: str = stock_via_downloader._CtxKey.FINAL_CB_REGISTERED


# ---- the registry of decomposers -----------------------------------------------------------------------------------


def registered_for(type_name: str) -> Any:
    """Return the decomposer registered for a type, by the type's full name, or None."""
    return registry._decomposers.get(type_name)


def replace_decomposer(decomposer: Any) -> Any:
    """Make `decomposer` the handler of its type and of its datum object types; return the one that it replaces."""
    name = registry.get_class_name(decomposer.supported_type())
    before = registry._decomposers.get(name)
    registry._decomposers[name] = decomposer
    for dot in decomposer.supported_dots() or ():
        registry._dot_handlers[dot] = decomposer
    return before


def named_in_files_as(stock: type[Any]) -> Callable[[type[_Class]], type[_Class]]:
    """Class decorator: give a decomposer NVFlare's name, which FOBS writes into each message and file.

    A process without this package loads the decomposer of that name, if NVFlare has it among its builtin ones. The
    attribute `implementation` keeps the class's own name, which its logger has.
    """

    def rename(decomposer: type[_Class]) -> type[_Class]:
        own_name = registry.get_class_name(decomposer)
        get_logger(own_name)  # printable
        decomposer.implementation = own_name  # type: ignore[attr-defined]
        decomposer.__module__, decomposer.__qualname__ = stock.__module__, stock.__qualname__
        decomposer.__name__ = stock.__name__
        return decomposer

    return rename


def implementation_of(decomposer: Any) -> str:
    """Return the class that a decomposer is an object of, by its own name."""
    # Not of a base class: your own decomposer may extend one of these.
    name: str = vars(type(decomposer)).get("implementation") or registry.get_class_name(type(decomposer))
    return name


def is_stock(decomposer: Any) -> bool:
    """Whether a decomposer is NVFlare's own."""
    return implementation_of(decomposer).startswith("nvflare.")


def new_items_context() -> Any:
    """Return NVFlare's list of the values of a message, which gives the same value the same number."""
    return stock_via_downloader._DecomposeCtx()


# ---- the sending side of the download service ----------------------------------------------------------------------


@contextmanager
def serving(ref_id: str) -> Iterator[_Ref | None]:
    """Keep a transaction from being settled while the block answers a request; None if it is over."""
    with DownloadService._tx_lock:
        ref = DownloadService._ref_table.get(ref_id)
        if ref is not None and not ref.tx.begin_op():
            ref = None
    if ref is None:
        yield None
        return
    try:
        yield ref
    finally:
        ref.tx.end_op()


def record_sent(ref: _Ref, requester: str, nbytes: int) -> None:
    """Count bytes sent for the transaction's totals and its progress."""
    ref.tx.add_total_bytes(nbytes)
    ref.emit_progress(receiver_id=requester, state=TransferProgressState.ACTIVE, bytes_delta=nbytes)


def record_activity(ref: _Ref, requester: str) -> None:
    """Let NVFlare wait for the next request of this receiver from now."""
    ref.mark_active()
    ref.mark_receiver_active(requester)


def patience_for(ref_id: str, requester: str, sender: str = "") -> float | None:
    """Return the seconds that NVFlare waits for the next request; None if it does not wait for this receiver.

    A transaction must name the receiver or, behind a forwarding hop, its parent. The receiver may also be the hop in
    front of the sender, which passes the payload on.
    """
    ref = DownloadService._ref_table.get(ref_id)
    if ref is None:
        return None
    expected = [requester if FQCN.is_ancestor(requester, sender) else name for name in ref.tx.receiver_ids or ()]
    if expected and not any(requester == name or requester.startswith(f"{name}.") for name in expected):
        return None
    return float(ref.tx.timeout)


def revoke_activity(ref_id: str, last_of: Callable[[Any], float | None]) -> None:
    """Undo that NVFlare took a request for a sign of life: it waits from the last time that a payload names.

    `last_of` returns that time for an object of the transaction, or None if it does not know.
    """
    ref = DownloadService._ref_table.get(ref_id)
    if ref is None:
        return
    times = [last_of(other.obj) for other in ref.tx.snapshot_refs()]
    known = [last for last in times if last is not None]
    if len(known) == len(times):
        ref.tx.last_active_time = max(known)


def finish_for_ancestor(ref_id: str, receiver: str, status: str) -> None:
    """Count a receiver's success for the expected receiver it is a child of.

    A transaction that names a forwarding hop would wait for it forever: the process behind the hop downloads instead.
    """
    ref = DownloadService._ref_table.get(ref_id)
    if ref is None or status != DownloadStatus.SUCCESS:
        return
    for expected in ref.tx.receiver_ids or ():
        if receiver.startswith(f"{expected}."):
            ref._finalize_receiver(expected, status)


def finish_for_all(ref_id: str, status: str) -> None:
    """Count a receiver's success for all expected receivers: it passes the payload on to them."""
    ref = DownloadService._ref_table.get(ref_id)
    if ref is None or status != DownloadStatus.SUCCESS:
        return
    for expected in ref.tx.receiver_ids or ():
        ref._finalize_receiver(expected, status)


def release_sent_messages() -> None:
    """Release every message once it is sent.

    NVFlare's task of sending one and the future of it refer to each other, so each message stays in memory until the
    garbage collector runs: after hundreds of megabytes, when tensors are sent.
    """
    if getattr(TxTask.stop, "frees", False):
        return
    stop = TxTask.stop

    @functools.wraps(stop)
    def stop_and_free(self: Any, *args: Any, **kwargs: Any) -> None:
        stop(self, *args, **kwargs)
        if self.stopped and self.stream_future is not None:
            self.stream_future.task_handle = None

    stop_and_free.frees = True  # type: ignore[attr-defined]
    TxTask.stop = stop_and_free


def send_items_without_copies() -> None:
    """Let messages refer to whole tensors from 1 MiB, as they do to larger ones, instead of copying them twice.

    FOBS puts `bytes` of at least 10 MiB behind the encoded message, and any receiver expects them there.
    """
    datum.TEN_MEGA = _MIN_SEPARATE_BYTES


def connection_to(core: Any, fqcn: str) -> Any:
    """Return NVFlare's connection to a cell, or to the nearest cell above it; None if others forward the messages."""
    manager = core.communicator.conn_manager
    while fqcn:
        for connection in manager.get_connections(fqcn) or ():
            return connection.conn
        fqcn = fqcn.rpartition(".")[0]
    return None


def has_room(connection: Any, seconds: float) -> bool:
    """Wait until a connection accepts bytes; false if it does not in this time.

    NVFlare's TCP driver blocks until the kernel has taken a message, and the other drivers queue all messages.
    """
    queue = getattr(connection, "oq", None)
    if queue is not None:  # gRPC
        return _poll(lambda: getattr(queue, "q", queue).qsize() < _MAX_QUEUED_FRAMES, seconds)
    sock = _socket_of(connection)
    if sock is None:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def nbytes_taken(connection: Any) -> int | None:
    """Return how many bytes the kernel at the other end of a connection has confirmed; None if that is not known."""
    sock = _socket_of(connection)
    try:
        info = b"" if sock is None else sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    except OSError:
        info = b""
    return int.from_bytes(info[_BYTES_ACKED:], sys.byteorder) if len(info) == _BYTES_ACKED + 8 else None


def _socket_of(connection: Any) -> Any:
    """Return the open socket of a connection, or None: the next send will report the failure."""
    stream = getattr(connection, "websocket", None) or getattr(connection, "writer", None)
    sock = stream.get_extra_info("socket") if stream is not None else getattr(connection, "sock", None)
    return sock if sock is not None and sock.fileno() >= 0 else None


def hand_over(connection: Any) -> None:
    """Let the event loop of a connection write its queue, so that `has_room` is current."""
    context = getattr(connection, "aio_context", None) or getattr(connection, "aio_ctx", None)
    if context is not None:
        with suppress(TimeoutError, concurrent.futures.TimeoutError, RuntimeError):
            context.run_coro(asyncio.sleep(0)).result(_HAND_OVER_SECONDS)


def _poll(is_true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class CleanupThread:
    """Removes NVFlare's notes of received streams when they are due, all on one thread.

    NVFlare keeps a note of each message that it received for a minute, and starts a thread for each that waits to
    remove it. Whole tensors from clients without this package are hundreds of messages, and each thread costs its
    stack. The delays differ: NVFlare lets a sender ask for up to an hour. The thread exists while a note does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[Any, float] = {}
        self._running = False

    def remove_later(self, task: Any, seconds: float) -> ScheduledRemoval:
        """Remove a note after `seconds`, or up to a second later."""
        with self._lock:
            self._due[task] = time.monotonic() + seconds
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="nvflare_lazy_cleanup", daemon=True).start()
        return ScheduledRemoval(self, task, seconds)

    def cancel(self, task: Any) -> None:
        """Drop a note, which NVFlare removed itself."""
        with self._lock:
            self._due.pop(task, None)

    def _run(self) -> None:
        while True:
            time.sleep(_CLEANUP_INTERVAL_SECONDS)
            now = time.monotonic()
            with self._lock:
                tasks = [task for task, due in self._due.items() if due <= now]
                if not self._due:
                    self._running = False
                    return
            for task in tasks:
                try:
                    task._remove_task()
                except Exception:
                    logger.exception("Cannot remove the note of a received stream")
                self.cancel(task)
            tasks.clear()


class ScheduledRemoval(NamedTuple):
    """What NVFlare takes for the timer of a note."""

    thread: CleanupThread
    task: Any
    interval: float

    def cancel(self) -> None:
        """Do not remove the note; NVFlare did."""
        self.thread.cancel(self.task)


def use_single_cleanup_thread(cleanup: Callable[[], CleanupThread]) -> None:
    """Let the cleanup thread of this process remove NVFlare's notes of received streams, not one thread per message."""

    def schedule(self: Any, ttl: float | None = None) -> None:
        with self.stop_lock:
            if self.cleanup_timer is None:
                seconds = self.completed_task_ttl if ttl is None else ttl
                self.cleanup_timer = cleanup().remove_later(self, seconds)

    RxTask._schedule_remove_task = schedule


# ---- the receiving side --------------------------------------------------------------------------------------------


@contextmanager
def source_signal(cell: Any, from_fqcn: str, ref_id: str, abort_signal: Any) -> Iterator[Any]:
    """A signal that is triggered by `abort_signal`, and when NVFlare reports that the sender is lost."""
    signal = DownloadService._register_source_download(cell, from_fqcn, ref_id, abort_signal)
    try:
        yield signal
    finally:
        DownloadService._unregister_source_download(from_fqcn, ref_id, signal)


def reason_of(signal: Any) -> Any:
    """Return what a signal, or the one it follows, was triggered with."""
    while signal is not None and signal._value is None:
        signal = signal._parent
    return None if signal is None else signal._value


def offload_flag_in_process() -> bool:
    """Whether a job asked for tensor disk offload on any cell of this process.

    In the simulator NVFlare sets the flag on the cell `server`, and results arrive on `server.simulate_job`.
    """
    return any(_of_all_cells(FOBSContextKey.TENSOR_DISK_OFFLOAD))


def offload_roots(fobs_ctx: dict[str, Any]) -> set[str]:
    """Return the directories in which NVFlare would write a payload, from its message and from all cells."""
    key = tensor_disk_offload_context._TENSOR_DISK_OFFLOAD_ROOT_DIR
    return {root for root in (fobs_ctx.get(key), *_of_all_cells(key)) if root}


def _of_all_cells(key: str) -> list[Any]:
    return [cell.get_fobs_context().get(key) for cell in list(CoreCell.ALL_CELLS.values())]


def add_disk_download(consumer: Any) -> None:
    """Let NVFlare end a download to disk when it ends its own downloads, such as at the end of a workflow."""
    with tensor_downloader._ACTIVE_DISK_TENSOR_CONSUMERS_LOCK:
        tensor_downloader._ACTIVE_DISK_TENSOR_CONSUMERS.add(consumer)


def remove_disk_download(consumer: Any) -> None:
    """Undo `add_disk_download`: the download is over."""
    with tensor_downloader._ACTIVE_DISK_TENSOR_CONSUMERS_LOCK:
        tensor_downloader._ACTIVE_DISK_TENSOR_CONSUMERS.discard(consumer)


def forget_disk_downloads() -> None:
    """Discard all downloads to disk in a forked child, where no other thread exists: they are the parent's."""
    tensor_downloader._ACTIVE_DISK_TENSOR_CONSUMERS.clear()

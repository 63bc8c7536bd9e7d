# SPDX-License-Identifier: Apache-2.0
"""`TransferRuntime`: the shared state of all transfers of a process, and the switch between disk and memory.

NVFlare passes no arguments to decomposers, so they find it here. A job's component sets the mode for the time of the
job. NVFlare's own `enable_tensor_disk_offload` decides if nothing here was set, on whatever cell NVFlare set it. One
process runs one job, in production as in the simulator.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nvflare.fuel.utils.fobs import FOBSContextKey

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.records import TransferRecord
from nvflare_lazy.records.trainer import record_in_trainer
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport._flow_control import DEFAULT_BYTES, InflightBudget, WholeTensorThrottle
from nvflare_lazy.transport.limits import PayloadLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.scratch import DownloadScratch
    from nvflare_lazy.scratch.rendezvous import Rendezvous, VisitedRendezvous

T = TypeVar("T")

logger = get_logger(__name__)


class DefaultScratch:
    """The scratch of a process that configured none: opened on first use, and again after each release."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._job: JobScratch | None = None

    def job(self) -> JobScratch:
        """Return the scratch, open."""
        with self._lock:
            if self._job is None or self._job.released:
                self._job = JobScratch.open(job=f"process {os.getpid()}")
                logger.info("Receiving tensors to %s (%s free)", self._job.path, format_size(self._job.free()))
            return self._job

    def download(self, label: str | None = None, reserve: int = 0) -> DownloadScratch:
        """Lease a directory; see `JobScratch.download`."""
        return self.job().download(label, reserve)

    def rendezvous(self) -> Rendezvous:
        """Return the directory of shared files; see `JobScratch.rendezvous`."""
        return self.job().rendezvous()

    def visit(self, lease: object) -> VisitedRendezvous | None:
        """Open the shared files of another process; see `JobScratch.visit`."""
        return self.job().visit(lease)

    def release(self) -> None:
        """Release the scratch, if it is open."""
        with self._lock:
            job, self._job = self._job, None
        if job is not None:
            job.release()


class ReceiveMode(NamedTuple):
    """How this process receives.

    Attributes:
        scratch: Where payloads go; None keeps them in memory.
        inflight_bytes: Bytes of memory that all downloads together may use in flight.
        limits: Maximum size of one message. Default: a size above any model.
        handoff: Whether processes of this host may hand over payloads as files.
    """

    scratch: JobScratch | DefaultScratch | None
    inflight_bytes: int
    limits: PayloadLimits = PayloadLimits()
    handoff: bool = True


class TransferRuntime:
    """Everything that the transfers of a process share.

    A forked child keeps the mode and nothing else: transfers, their limits and their threads belong to the parent. Its
    payloads go to its own default scratch.

    Attributes:
        default_scratch: The scratch that is used if none was configured.
        budget: Limits the segments in flight.
        throttle: Limits the whole tensors in flight.
        cleanup: The thread that removes NVFlare's notes of received streams.
        senders_with_package: Cells that have offered more than whole tensors; their first answers are small.
        by_thread: Has `initiated` in threads that have sent something that must be downloaded from this process.
        on_buffers_released: Called each time a whole tensor has left the memory of this process.
        on_transfer: Called with the record of each payload that this process has received or sent. Without
            any, this process may be a trainer, which writes the record itself.
    """

    default_scratch: DefaultScratch
    budget: InflightBudget
    throttle: WholeTensorThrottle
    cleanup: _nvflare_private.CleanupThread
    senders_with_package: set[str]
    by_thread: threading.local
    on_buffers_released: list[Callable[[], None]]
    on_transfer: list[Callable[[TransferRecord], None]]

    def __init__(self) -> None:
        self._mode: ReceiveMode | None = None
        self.start_over()

    def start_over(self) -> None:
        """Discard all transfers; for a forked child."""
        self._lock = threading.Lock()
        self.default_scratch = DefaultScratch()
        if self._mode is not None and self._mode.scratch is not None:
            self._mode = self._mode._replace(scratch=self.default_scratch)
        self.on_buffers_released = []
        self.on_transfer = []
        self.budget = InflightBudget(DEFAULT_BYTES if self._mode is None else self._mode.inflight_bytes)
        self.throttle = WholeTensorThrottle(self.budget, self.on_buffers_released)
        self._shared: dict[type, Any] = {}
        self.cleanup = _nvflare_private.CleanupThread()
        self.senders_with_package = set()
        self.by_thread = threading.local()
        self._received: dict[str, int] = {}

    def use(self, mode: ReceiveMode | None) -> ReceiveMode | None:
        """Receive in this mode, or by NVFlare's flag; return the previous mode, which a job restores at its end."""
        with self._lock:
            before, self._mode = self._mode, mode
            self.budget.resize(DEFAULT_BYTES if mode is None else mode.inflight_bytes)
            return before

    @property
    def limits(self) -> PayloadLimits:
        """The most that one message may bring."""
        mode = self._mode
        return PayloadLimits() if mode is None else mode.limits

    @property
    def handoff(self) -> bool:
        """Whether payloads may be handed over as files."""
        mode = self._mode
        return mode is None or mode.handoff

    def limit_payloads(self, limits: PayloadLimits) -> None:
        """Change the limits of the mode in use, such as when the model is known; running transfers keep theirs."""
        with self._lock:
            if self._mode is not None:
                self._mode = self._mode._replace(limits=limits)

    def shared(self, kind: type[T]) -> T:
        """Return the one object of a class that the transfers of this process share; made on first use."""
        with self._lock:
            if kind not in self._shared:
                self._shared[kind] = kind()
            made: T = self._shared[kind]
            return made

    def record_transfer(self, transfer: TransferRecord) -> None:
        """Count a payload that was received or sent."""
        if not transfer.nbytes:
            return
        if transfer.direction == "received":
            with self._lock:
                self._received[transfer.way] = self._received.get(transfer.way, 0) + transfer.nbytes
        for listener in tuple(self.on_transfer) or (record_in_trainer,):
            listener(transfer)

    def take_received(self) -> dict[str, int]:
        """Return the bytes of all payloads since the last call, by the way in which they were received."""
        with self._lock:
            received, self._received = self._received, {}
            return received

    def mode_for(self, fobs_ctx: dict[str, Any] | None) -> ReceiveMode:
        """Return how to receive the payload of a message, or one that NVFlare requests outside a message."""
        context = fobs_ctx or {}
        flag = context.get(FOBSContextKey.TENSOR_DISK_OFFLOAD)
        mode = self._mode
        if mode is None:
            on_disk = flag or _nvflare_private.offload_flag_in_process()
            mode = ReceiveMode(self.default_scratch if on_disk else None, DEFAULT_BYTES)
        # An explicit request for ordinary values: the code that follows writes to them. In the context of a message,
        # False is only the value that an earlier workflow restored on the cell.
        if flag is False and FOBSContextKey.MESSAGE not in context:
            return mode._replace(scratch=None)
        return mode

    @property
    def scratch(self) -> JobScratch | DefaultScratch:
        """Where a job's own files go: the scratch of the mode, else the default one."""
        mode = self._mode
        return self.default_scratch if mode is None or mode.scratch is None else mode.scratch

    def release_scratch(self) -> None:
        """Release the scratch of this process, because it ends."""
        self.scratch.release()
        self.default_scratch.release()


runtime = TransferRuntime()
os.register_at_fork(after_in_child=runtime.start_over)
os.register_at_fork(after_in_child=_nvflare_private.forget_disk_downloads)


def enable(scratch: JobScratch | None = None, *, inflight_bytes: int | None = None) -> None:
    """Write everything that this process receives to disk, tensors and arrays.

    Args:
        scratch: The job scratch to write to. Default: unchanged, or else one with default settings.
        inflight_bytes: Bytes of memory that all downloads together may use in flight. Default: unchanged.
    """
    limit = runtime.budget.limit if inflight_bytes is None else inflight_bytes
    runtime.use(ReceiveMode(scratch or runtime.scratch, limit, runtime.limits, runtime.handoff))


def disable() -> None:
    """Keep everything that this process receives in memory, whatever NVFlare's flag says."""
    runtime.use(ReceiveMode(None, runtime.budget.limit, runtime.limits, runtime.handoff))


def reset() -> None:
    """Leave it to NVFlare's flag again."""
    runtime.use(None)

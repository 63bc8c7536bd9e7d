# SPDX-License-Identifier: Apache-2.0
"""The one object that the transfers of a process share, and the switch between receiving on disk and in memory.

A job's component sets the mode for the time of the job. NVFlare's own `enable_tensor_disk_offload` decides if nothing
here was set, on whatever cell NVFlare set it. One process runs one job, in production as in the simulator.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nvflare.fuel.utils.fobs import FOBSContextKey

from nvflare_lazy.scratch import current_job_scratch, swap_job_scratch
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport._flow_control import DEFAULT_BYTES, InflightBudget, WholeTensorThrottle

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.scratch import JobScratch
    from nvflare_lazy.transport._disk_consumer import DiskConsumer

T = TypeVar("T")


class ReceiveMode(NamedTuple):
    """How this process receives.

    Attributes:
        on_disk: Whether payloads go to the job scratch; in memory otherwise.
        inflight_bytes: Bytes of memory that all downloads together may use in flight.
    """

    on_disk: bool
    inflight_bytes: int


class TransferRuntime:
    """Everything that the transfers of a process share.

    A forked child keeps the mode and nothing else: transfers, their limits and their threads belong to the parent. Its
    payloads go to a scratch of its own.

    Attributes:
        budget: Limits the segments in flight.
        throttle: Limits the whole tensors in flight.
        downloads: The downloads to disk in progress.
        cleanup: The thread that removes NVFlare's notes of received streams.
        senders_with_package: Cells that have offered more than whole tensors; their first answers are small.
        on_buffers_released: Called each time a whole tensor has left the memory of this process.
    """

    budget: InflightBudget
    throttle: WholeTensorThrottle
    downloads: ActiveDownloads
    cleanup: _nvflare_private.CleanupThread
    senders_with_package: set[str]
    on_buffers_released: list[Callable[[], None]]

    def __init__(self) -> None:
        self._mode: ReceiveMode | None = None
        self.start_over()

    def start_over(self) -> None:
        """Forget all transfers; for a forked child."""
        self._lock = threading.Lock()
        self.on_buffers_released = []
        self.budget = InflightBudget(DEFAULT_BYTES if self._mode is None else self._mode.inflight_bytes)
        self.throttle = WholeTensorThrottle(self.budget, self.on_buffers_released)
        self._shared: dict[type, Any] = {}
        self.downloads = ActiveDownloads()
        self.cleanup = _nvflare_private.CleanupThread()
        self.senders_with_package = set()

    def use(self, mode: ReceiveMode | None) -> ReceiveMode | None:
        """Receive in this mode; return the previous one, which a job restores when it ends.

        Args:
            mode: The mode; None leaves it to NVFlare's flag.
        """
        with self._lock:
            before, self._mode = self._mode, mode
            self.budget.resize(DEFAULT_BYTES if mode is None else mode.inflight_bytes)
            return before

    def shared(self, kind: type[T]) -> T:
        """Return the one object of a class that the transfers of this process share; made on first use."""
        with self._lock:
            if kind not in self._shared:
                self._shared[kind] = kind()
            made: T = self._shared[kind]
            return made

    def scratch_for(self, fobs_ctx: dict[str, Any] | None) -> JobScratch | None:
        """Return the scratch that a payload goes to, or None if it stays in memory.

        Args:
            fobs_ctx: NVFlare's context of the message that is being decoded.
        """
        mode = self._mode
        if mode is not None:
            on_disk = mode.on_disk
        else:
            on_disk = bool((fobs_ctx or {}).get(FOBSContextKey.TENSOR_DISK_OFFLOAD))
            on_disk = on_disk or _nvflare_private.offload_flag_in_process()
        return current_job_scratch() if on_disk else None


class ActiveDownloads:
    """The downloads to disk that are in progress; they are not kept alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._consumers: weakref.WeakSet[DiskConsumer] = weakref.WeakSet()

    def add(self, consumer: DiskConsumer) -> None:
        """Note a download that starts."""
        with self._lock:
            self._consumers.add(consumer)

    def discard(self, consumer: DiskConsumer) -> None:
        """Note that a download ended."""
        with self._lock:
            self._consumers.discard(consumer)

    def active(self) -> list[DiskConsumer]:
        """Return the downloads in progress."""
        with self._lock:
            return list(self._consumers)


runtime = TransferRuntime()
os.register_at_fork(after_in_child=runtime.start_over)


def enable(scratch: JobScratch | None = None, *, inflight_bytes: int | None = None) -> None:
    """Write everything that this process receives to disk, tensors and arrays.

    Args:
        scratch: The job scratch to write to. Default: the current one, or else one with default settings.
        inflight_bytes: Bytes of memory that all downloads together may use in flight. Default: unchanged.
    """
    if scratch is not None:
        swap_job_scratch(scratch)
    runtime.use(ReceiveMode(True, runtime.budget.limit if inflight_bytes is None else inflight_bytes))


def disable() -> None:
    """Keep everything that this process receives in memory, whatever NVFlare's flag says."""
    runtime.use(ReceiveMode(False, runtime.budget.limit))


def reset() -> None:
    """Leave it to NVFlare's flag again."""
    runtime.use(None)

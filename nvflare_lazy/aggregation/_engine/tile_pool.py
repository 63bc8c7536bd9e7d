# SPDX-License-Identifier: Apache-2.0
"""The thread pool that processes the tiles of a pass, while the calling thread reports progress or cancels.

Each thread reads, reduces and writes its own tiles, so the disk, the cores and the page cache are busy at the same time
without waiting for a queue.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from nvflare_lazy.aggregation._engine.memory_plan import SpareMemory
from nvflare_lazy.errors import AggregationCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nvflare_lazy.aggregation._engine.memory_plan import Arena, MemoryPlan

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class Progress:
    """The progress of a pass over the contributions.

    Attributes:
        stage: The purpose of the pass, for example "mean" or "pairwise distances", or "upload" while the result is
            uploaded.
        done: Bytes of contributions that have been read, or of the result that have been uploaded.
        total: Bytes to read in this pass, or to upload.
    """

    stage: str
    done: int
    total: int


class PassMonitor:
    """Reports the progress of a pass to the caller, and cancels the pass if the caller asks for it.

    Args:
        progress: Called in the calling thread from time to time, if there is progress.
        should_cancel: Called from time to time; returns whether to stop. For example, the `is_set` of an event.
    """

    def __init__(
        self, progress: Callable[[Progress], object] | None = None, should_cancel: Callable[[], bool] | None = None
    ) -> None:
        self._progress = progress
        self._should_cancel = should_cancel
        self._stage = ""
        self._total = 0
        self._done = 0
        self._reported: Progress | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def start(self, stage: str, total: int) -> None:
        """Start a pass over `total` bytes."""
        self._stage, self._total, self._done, self._stopped = stage, total, 0, False
        self.poll()

    def advance(self, nbytes: int) -> None:
        """Count bytes that have been read."""
        with self._lock:
            self._done += nbytes

    def upload(self, done: int, total: int) -> None:
        """Report how many of the result's bytes have been uploaded; raise if the caller has cancelled."""
        self._stage, self._done, self._total = "upload", done, total
        self.poll()

    def stop(self) -> None:
        """Make `check` raise in the threads of this pass."""
        self._stopped = True

    def check(self) -> None:
        """Raise if the pass has ended early: for threads that wait within a tile."""
        if self._stopped:
            raise AggregationCancelledError("aggregation cancelled; no output was written")

    def poll(self) -> None:
        """Report progress; raise if the caller has cancelled."""
        if self._should_cancel is not None and self._should_cancel():
            raise AggregationCancelledError("aggregation cancelled; no output was written")
        if self._progress is not None:
            report = Progress(self._stage, self._done, self._total)
            if report != self._reported:
                self._reported = report
                self._progress(report)


class _Pass(Generic[_Task, _Result]):
    def __init__(
        self,
        tasks: Iterable[_Task],
        work: Callable[[_Task, Arena], _Result],
        collect: Callable[[_Result], object] | None,
        spare: SpareMemory,
    ) -> None:
        self._spare = spare
        self._tasks: Iterator[tuple[int, _Task]] = enumerate(tasks)
        self._work = work
        self._collect = collect
        self._lock = threading.Lock()
        self._collect_lock = threading.Lock()
        self._waiting: dict[int, _Result] = {}
        self._next = 0
        self.stopped = False
        self.errors: list[BaseException] = []

    def run(self, arena_bytes: int, started: threading.Barrier) -> None:
        try:
            # In a new thread, the first operation of torch would apply the setting of the process.
            torch.get_num_threads()
            torch.set_num_threads(1)
            started.wait()
            with self._spare.arena(arena_bytes) as arena:
                while (task := self._take()) is not None:
                    mark = arena.mark()
                    result = self._work(task[1], arena)
                    arena.release(mark)
                    if self._collect is not None:
                        self._collect_in_order(task[0], result)
        except BaseException as error:
            self.errors.append(error)
            self.stopped = True

    def _take(self) -> tuple[int, _Task] | None:
        with self._lock:
            return None if self.stopped else next(self._tasks, None)

    def _collect_in_order(self, number: int, result: _Result) -> None:
        assert self._collect is not None
        with self._collect_lock:
            self._waiting[number] = result
            while self._next in self._waiting:
                self._collect(self._waiting.pop(self._next))
                self._next += 1


def run_tiles(
    tasks: Iterable[_Task],
    work: Callable[[_Task, Arena], _Result],
    plan: MemoryPlan,
    monitor: PassMonitor,
    *,
    collect: Callable[[_Result], object] | None = None,
    spare: SpareMemory | None = None,
) -> None:
    """Run all tasks in threads; the first error ends the pass, and is raised when all threads have ended.

    Args:
        tasks: The tasks, in order.
        work: Runs a task with the memory of its thread.
        plan: Number of threads, and memory of each.
        monitor: Receives progress, and raises if the caller cancels.
        collect: Called with the results in the order of the tasks, one at a time.
        spare: Memory that is kept for later passes. Default: the memory is freed.
    """
    one_pass = _Pass(tasks, work, collect, spare or SpareMemory())
    started = threading.Barrier(plan.threads + 1)
    threads = [
        threading.Thread(target=one_pass.run, args=(plan.arena, started), name=f"aggregate-{number}", daemon=True)
        for number in range(plan.threads)
    ]
    torch_threads = torch.get_num_threads()
    try:
        try:
            for thread in threads:
                thread.start()
            started.wait()
        finally:
            # In the pool's threads, torch computes on one thread; other new threads keep the previous setting.
            torch.set_num_threads(torch_threads)
        for thread in threads:
            while thread.is_alive():
                thread.join(_SECONDS_BETWEEN_REPORTS)
                monitor.poll()
    except BaseException:
        monitor.stop()
        raise
    finally:
        one_pass.stopped = True
        started.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if one_pass.errors:
        raise one_pass.errors[0]

# SPDX-License-Identifier: Apache-2.0
"""Threads that work through the tiles of a pass, while the caller's thread reports progress and listens for its end.

The motor of the engine. Each thread reads, reduces and writes its own tiles, so that the disk, the cores and the page
cache are busy at the same time without anybody waiting for a queue.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from nvflare_lazy.aggregation._engine.memory_plan import Arena
from nvflare_lazy.errors import AggregationCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nvflare_lazy.aggregation._engine.memory_plan import MemoryPlan

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class Progress:
    """How far a pass over the contributions is.

    Attributes:
        stage: What the pass is for, for example "mean" or "pairwise distances".
        done: Bytes of contributions that have been read.
        total: Bytes that there are to read in this pass.
    """

    stage: str
    done: int
    total: int


class PassMonitor:
    """What the caller wants to know while the threads work, and how it calls them off.

    Args:
        progress: Called in the caller's own thread now and then, if it got on since.
        should_cancel: Asked now and then whether to stop: a function, or the `is_set` of an event.
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
        self._lock = threading.Lock()

    def start(self, stage: str, total: int) -> None:
        """Begin a pass over `total` bytes."""
        self._stage, self._total, self._done = stage, total, 0
        self.poll()

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes have been read."""
        with self._lock:
            self._done += nbytes

    def poll(self) -> None:
        """Report, and raise if the caller has called it off."""
        if self._should_cancel is not None and self._should_cancel():
            raise AggregationCancelledError("the aggregation was cancelled; nothing of it was written")
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
    ) -> None:
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
            # A thread that torch has not met yet would take the process's setting at its first operation.
            torch.get_num_threads()
            torch.set_num_threads(1)
            started.wait()
            arena = Arena(arena_bytes)
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
) -> None:
    """Do all tasks in threads; the first error ends the pass and is raised, once no thread works any more.

    Args:
        tasks: What to do, in order.
        work: Does a task, with memory to do it in.
        plan: How many threads, and how much memory for each.
        monitor: Told about progress, and asked whether to go on.
        collect: Gets the results in the order of the tasks, one at a time.
    """
    one_pass = _Pass(tasks, work, collect)
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
            # In each of ours, torch computes on one thread; other new threads get what they always got.
            torch.set_num_threads(torch_threads)
        for thread in threads:
            while thread.is_alive():
                thread.join(_SECONDS_BETWEEN_REPORTS)
                monitor.poll()
    finally:
        one_pass.stopped = True
        started.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if one_pass.errors:
        raise one_pass.errors[0]

# SPDX-License-Identifier: Apache-2.0
"""`DistributedEngine`: the passes of an engine in parts, on the workers of an executor, with the same bits.

It plans the parts from headers, repeats those whose worker is lost, and adds the sums of statistics.
"""

from __future__ import annotations

import io
import queue
from asyncio import CancelledError
from bisect import bisect_right
from collections import Counter
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.aggregation._distributed.parts import (
    GroupPart,
    Limits,
    Outcome,
    Part,
    ReductionPart,
    StatisticPart,
    run_part,
)
from nvflare_lazy.aggregation._distributed.shared_directory import SharedDirectory
from nvflare_lazy.aggregation._distributed.sources import InputError, SourcePickler, open_input
from nvflare_lazy.aggregation._engine.memory_plan import BLOCK
from nvflare_lazy.aggregation._engine.passes import STRETCH, Engine, bytes_to_read
from nvflare_lazy.aggregation._engine.tile import ContributionError, TensorGroup, is_store_error, raise_input_error
from nvflare_lazy.aggregation._engine.tile_io import InputVector
from nvflare_lazy.errors import (
    AggregationCancelledError,
    ExecutorError,
    NonFiniteError,
    SharedStorageError,
    SourceError,
    TruncatedSourceError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nvflare_lazy.aggregation.executors import Workers
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.statistics import Statistic
    from nvflare_lazy.formats.safetensors.writer import StreamingWriter

logger = get_logger(__name__)

# A part that is lost so often is the cause itself, for example because it needs more memory than a worker has.
_MAX_ATTEMPTS = 3
_POLL_SECONDS = 0.1
# Running parts notice within a second that they are no longer needed.
_END_SECONDS = 30.0
_Result = TypeVar("_Result")


class DistributedEngine:
    """The passes of an engine, in parts that an executor runs.

    Args:
        engine: The engine. Each part has its budget and its threads, of which the default is one.
        workers: The executor.
        shared: The directory of this aggregation.
        part_bytes: Bytes that a part reads, about.
        fsync: Whether a worker flushes its part to the disk.
    """

    def __init__(
        self, engine: Engine, workers: Workers, shared: SharedDirectory, *, part_bytes: int, fsync: bool
    ) -> None:
        self._groups = engine.groups
        self._limits = Limits(engine.budget, engine.threads or 1, engine.tile_bytes, engine.non_finite)
        self._monitor = engine.monitor
        self._workers = workers
        self._shared = shared
        self._part_bytes = part_bytes
        self._fsync = fsync
        self._broken: Executor | None = None

    @property
    def directory(self) -> str:
        """The directory in which workers open the unfinished files."""
        return self._shared.path

    def compute_statistic(self, statistic: Statistic) -> Any:
        """Read all floating-point tensors and return the result of the statistic."""
        groups = [group for group in self._groups if group.is_float]
        count = max(len(group.members) for group in self._groups)
        totals = torch.zeros(statistic.num_sums(count), dtype=torch.float64)
        parts = [
            StatisticPart(self._shared.path, self._shared.token, self._described(ranges), self._limits, statistic)
            for ranges in self._split(groups, STRETCH)
        ]
        waiting: dict[int, torch.Tensor] = {}
        added = 0

        def add(number: int, sums: torch.Tensor) -> None:
            nonlocal added
            waiting[number] = sums
            while added in waiting:
                # One stretch after the other, as in one process: sums of floating-point numbers depend on the order.
                for stretch in waiting.pop(added):
                    totals.add_(stretch)
                added += 1

        self._monitor.start(statistic.name, sum(map(bytes_to_read, groups)))
        self._run(parts, add)
        return statistic.result(totals.numpy(), count)

    def reduce(self, reduction: Reduction, stage: str, writer: StreamingWriter) -> None:
        """Reduce all tensors and write them; `stage` is the name of the pass in progress bars."""
        splits = [*self._split(self._groups, BLOCK)]
        pieces = [[piece for part in ranges for piece in part.pieces()] for ranges in splits]
        parts = []
        for ranges, own in zip(splits, pieces, strict=True):
            locations = {}
            for name, begin, _ in own:
                locations[name] = (writer.unfinished_path(name), writer.position(name) + begin)
            described = self._described(ranges)
            parts.append(
                ReductionPart(
                    self._shared.path,
                    self._shared.token,
                    described,
                    self._limits,
                    reduction,
                    stage,
                    locations,
                    self._fsync,
                )
            )

        def record(number: int, done: None) -> None:
            for name, begin, end in pieces[number]:
                writer.record_written(name, begin, end)

        self._monitor.start(stage, sum(map(bytes_to_read, self._groups)))
        self._run(parts, record)

    def _split(self, groups: Sequence[TensorGroup], step: int) -> Iterator[list[_Range]]:
        """Yield the ranges of each part, cut at multiples of `step` elements."""
        part: list[_Range] = []
        room = self._part_bytes
        for group in groups:
            width = group.inputs[0].dtype.itemsize * len(group.members)
            start = 0
            while start < group.numel:
                fitting = max(room // width // step, 0 if part else 1) * step
                if not fitting:
                    yield part
                    part, room = [], self._part_bytes
                    continue
                count = min(fitting, group.numel - start)
                part.append(_Range(group, start, count))
                room -= count * width
                start += count
        if part:
            yield part

    def _described(self, ranges: Sequence[_Range]) -> tuple[GroupPart, ...]:
        return tuple(self._describe(part) for part in ranges)

    def _describe(self, part: _Range) -> GroupPart:
        group = part.group
        names, sizes = [], []
        for name, begin, end in part.pieces():
            names.append(name)
            sizes.append((end - begin) // group.inputs[0].dtype.itemsize)
        inputs = []
        for contributor, vector in zip(group.contributors, group.inputs, strict=True):
            try:
                inputs.append(self._pickled(vector, part))
            except Exception as error:
                raise_input_error(contributor, error)
        return GroupPart(
            group.index,
            group.dtype,
            tuple(names),
            tuple(sizes),
            group.members,
            group.contributors,
            group.inputs[0].dtype,
            tuple(inputs),
            None if group.reference is None else group.reference.dtype,
            None if group.reference is None else self._pickled(group.reference, part),
            part.start,
        )

    def _pickled(self, vector: InputVector, part: _Range) -> bytes:
        text = io.BytesIO()
        SourcePickler(text, self._shared).dump(vector.sources(part.start, part.count))
        return text.getvalue()

    def _run(self, parts: Sequence[Part[_Result]], collect: Callable[[int, _Result], object]) -> None:
        """Run all parts, and repeat those whose worker is lost; call `collect` with the number of each and its result.

        At the end, no part is still running, except on a worker that does not answer.
        """
        finished: queue.SimpleQueue[Future[Outcome[_Result]]] = queue.SimpleQueue()
        running: dict[Future[Outcome[_Result]], tuple[int, Executor]] = {}
        losses: Counter[int] = Counter()
        storage_failures = 0

        def submit(number: int) -> None:
            while True:
                executor = self._workers.executor
                try:
                    future = executor.submit(run_part, parts[number])
                    break
                except Exception as error:
                    self._lost(number, losses, error, executor)
            running[future] = (number, executor)
            future.add_done_callback(finished.put)

        try:
            for number in range(len(parts)):
                submit(number)
            while running:
                self._monitor.poll()
                try:
                    future = finished.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                number, executor = running.pop(future)
                try:
                    outcome = future.result()
                except (Exception, CancelledError) as error:
                    # The part returns its own errors, so this one is of the executor.
                    self._lost(number, losses, error, executor)
                    submit(number)
                    continue
                if outcome.error is not None:
                    problem = self._error_of(outcome.error, outcome.host, parts[number])
                    # Of all parts in a row: the second attempt at one part may come after the first at all others.
                    storage_failures += 1
                    is_of_storage = isinstance(problem, SharedStorageError) or is_store_error(problem)
                    if not is_of_storage or storage_failures >= _MAX_ATTEMPTS:
                        raise problem
                    logger.warning(
                        "A worker on %s has no access to the storage (%s); repeating its part of the aggregation",
                        outcome.host,
                        problem,
                    )
                    submit(number)
                    continue
                storage_failures = 0
                collect(number, outcome.result)  # type: ignore[arg-type]
                self._monitor.advance(parts[number].nbytes)
            self._monitor.poll()
        except BaseException:
            self._shared.revoke()
            for future in running:
                future.cancel()
            if wait(running, timeout=_END_SECONDS).not_done:
                logger.warning("Some parts of the cancelled aggregation have not ended; their output is not used")
            raise

    def _lost(self, number: int, losses: Counter[int], error: BaseException, executor: Executor) -> None:
        """Count a lost part; raise if it cannot be repeated."""
        losses[number] += 1
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        if losses[number] >= _MAX_ATTEMPTS:
            raise ExecutorError(
                f"the executor failed {_MAX_ATTEMPTS} times on one part of the aggregation ({what}); check the logs "
                f"and the memory of its workers, each of which uses up to {format_size(self._limits.budget)}, that "
                "nvflare-lazy is installed for them, and that a script with worker processes has "
                "`if __name__ == '__main__':`"
            ) from error
        if isinstance(error, BrokenExecutor):
            if not self._workers.replace(executor):
                raise ExecutorError(
                    f"the executor is broken ({what}); pass its specification, such as executor='processes', instead "
                    "of the object, so that it is started again"
                ) from error
            if executor is self._broken:
                # All parts that it had are lost with one worker.
                return
            self._broken = executor
        logger.warning("A worker was lost (%s); repeating its part of the aggregation", what)

    def _error_of(self, error: Exception, host: str, part: Part[Any]) -> Exception:
        """Return the error of a part for callers: of a contribution, of the storage, or of the aggregation.

        Raises:
            SharedStorageError: The directory of the aggregation was deleted.
        """
        if isinstance(error, InputError):
            try:
                open_input(error.path, error.size, error.modified).close()
            except InputError:
                gone = SourceError(f"{error.path} was removed or replaced during the aggregation")
                return ContributionError(error.contributor, gone) if error.contributor else gone
            return SharedStorageError(
                f"the worker on {host} does not see {error.path} as this process does ({error.problem}); put "
                "inputs and outputs on storage that all workers share, under the same path"
            )
        if isinstance(error, AggregationCancelledError):
            raise SharedStorageError(
                f"{self._shared.path} was deleted during the aggregation; exclude it from cleanup tools"
            )
        if isinstance(error, ContributionError) and not isinstance(error.error, (NonFiniteError, TruncatedSourceError)):
            try:
                part.read_inputs_of(error.contributor)
            except InputError as problem:
                return self._error_of(problem.of(error.contributor), host, part)
            except Exception as problem:
                return problem if is_store_error(problem) else error
            return SharedStorageError(
                f"the worker on {host} cannot read the contribution of {error.contributor} ({error.error}), which this "
                "process can; give all workers the mounts, packages, endpoint and credentials of this process"
            )
        return error


@dataclass(frozen=True)
class _Range:
    """Some elements of a group."""

    group: TensorGroup
    start: int
    count: int

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, and the first and the last byte, of each tensor in the range."""
        group, stop = self.group, self.start + self.count
        width = group.inputs[0].dtype.itemsize
        for index in range(bisect_right(group.ends, self.start), len(group.ends)):
            begin = group.ends[index] - group.sizes[index]
            if begin >= stop:
                break
            first, last = max(begin, self.start), min(group.ends[index], stop)
            if first < last:
                yield group.names[index], (first - begin) * width, (last - begin) * width

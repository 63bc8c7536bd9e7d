# SPDX-License-Identifier: Apache-2.0
"""The passes of an engine in parts, which the workers of an executor run: same bits, any number of parts or workers.

A worker reads its part of the inputs and writes its part of the unfinished output, both on storage that the workers
share. The process that calls `aggregate()` plans the parts from headers, adds the sums of statistics, and publishes.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import queue
import secrets
import socket
import time
from abc import ABC, abstractmethod
from asyncio import CancelledError
from bisect import bisect_right
from collections import Counter
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.aggregation._engine.memory_plan import BLOCK
from nvflare_lazy.aggregation._engine.passes import STRETCH, Engine, bytes_to_read
from nvflare_lazy.aggregation._engine.tile import ContributionError, TensorGroup, is_store_error, raise_input_error
from nvflare_lazy.aggregation._engine.tile_io import InputVector
from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor
from nvflare_lazy.errors import (
    AggregationCancelledError,
    DiskFullError,
    ExecutorError,
    NonFiniteError,
    SharedStorageError,
    SourceError,
    TruncatedSourceError,
)
from nvflare_lazy.formats.atomic_file import OUT_OF_SPACE, begin_writeback
from nvflare_lazy.remote.file import RemoteFile, RemoteSource
from nvflare_lazy.tensors.byte_source import ByteSource, SourceSlice, ZeroSource
from nvflare_lazy.tensors.converted_sources import ByteSwappedSource, CastSource, ConjugatedSource
from nvflare_lazy.tensors.strided_source import StridedSource
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer, Self

    from nvflare_lazy.aggregation._engine.tile import NonFinitePolicy
    from nvflare_lazy.aggregation.executors import Workers
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.statistics import Statistic
    from nvflare_lazy.formats.safetensors.writer import StreamingWriter

logger = get_logger(__name__)

# A part that is lost so often is the cause itself, for example because it needs more memory than a worker has.
_MAX_ATTEMPTS = 3
_POLL_SECONDS = 0.1
_CHECK_SECONDS = 1.0
# Running parts notice within a second that they are no longer needed.
_END_SECONDS = 30.0
_COPY_BYTES = 8 << 20
_FLUSH_BYTES = 32 << 20
_SUFFIX = ".parts"
_SESSION_FILE = "session"
_REVOKED_FILE = "revoked"
# These are described by their attributes; other sources are copied to the shared directory.
_DESCRIBED = (
    *(FileSource, RemoteSource, SourceSlice, ZeroSource),
    *(StridedSource, ByteSwappedSource, ConjugatedSource, CastSource),
)
_Result = TypeVar("_Result")


# ---- in the process that calls aggregate() ---------------------------------------------------------------------------


class SharedDirectory:
    """A hidden directory next to an output, with the unfinished files and a token that workers must be able to read.

    A part stops when the token is renamed. The directory is removed at the end of its block; one that a killed process
    has left is removed by the next aggregation to the same output.

    Args:
        output: The file that will be written; for a URL, one in scratch.
    """

    def __init__(self, output: str) -> None:
        directory, name = os.path.split(output)
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        start = f".{os.fsdecode(os.fsencode(name)[:200])}."
        _remove_abandoned(directory, start)
        self.path = os.path.join(directory, f"{start}{secrets.token_hex(8)}{_SUFFIX}")
        os.mkdir(self.path, 0o700)
        self.token = secrets.token_hex(16)
        self._copies: dict[int, tuple[ByteSource, TensorFile]] = {}
        self._lock_fd = os.open(os.path.join(self.path, _SESSION_FILE), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with suppress(OSError):  # without locks in the file system, an abandoned directory stays
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock_fd, self.token.encode())
        os.fsync(self._lock_fd)

    def copy_of(self, source: ByteSource) -> TensorFile:
        """Return a file with the bytes of a source that only this process can read; it is written once."""
        known = self._copies.get(id(source))
        if known is not None:
            return known[1]
        path = os.path.join(self.path, f"input-{len(self._copies)}")
        with open(path, "xb", buffering=0) as file:
            for begin in range(0, source.nbytes, _COPY_BYTES):
                data = memoryview(source.read(begin, min(_COPY_BYTES, source.nbytes - begin)))
                while data:
                    data = data[file.write(data) :]
        copy = TensorFile(path)
        self._copies[id(source)] = (source, copy)
        return copy

    def revoke(self) -> None:
        """Stop the parts that are still running."""
        with suppress(FileNotFoundError):
            # Renamed, so that the lock still tells the next aggregation whether this process was killed.
            os.rename(os.path.join(self.path, _SESSION_FILE), os.path.join(self.path, _REVOKED_FILE))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.revoke()
        os.close(self._lock_fd)
        self._copies.clear()
        try:
            _remove_shared(self.path)
        except OSError as problem:
            logger.warning("Cannot remove %s: %s. Remove it by hand.", self.path, problem)


def _remove_abandoned(directory: str, start: str) -> None:
    for name in os.listdir(directory):
        if not (name.startswith(start) and name.endswith(_SUFFIX)):
            continue
        path = os.path.join(directory, name)
        for token_name in (_SESSION_FILE, _REVOKED_FILE):
            with (
                suppress(OSError),
                _opened_directory(path) as fd,
                # For writing, which a lock on NFS needs.
                open(token_name, "r+b", opener=partial(_open_in, fd)) as token,
            ):
                fcntl.flock(token, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if token.read():
                    logger.info("Removing %s, which a killed process has left", path)
                    _remove_shared(path)


def _remove_shared(path: str) -> None:
    """Remove a shared directory; the token is last, since a directory without it cannot be recognized as abandoned."""
    with _opened_directory(path) as fd:
        tokens = (_SESSION_FILE, _REVOKED_FILE)
        for name in sorted(os.listdir(fd), key=tokens.__contains__):
            os.unlink(name, dir_fd=fd)
    os.rmdir(path)


@contextmanager
def _opened_directory(path: str) -> Iterator[int]:
    """Lend a descriptor of a directory, but not of a link: in a directory such as /var/tmp, others may create them."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_in(directory: int, name: str, flags: int) -> int:
    # Opening a pipe would wait for its other end.
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)


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
        self._limits = _Limits(engine.budget, engine.threads or 1, engine.tile_bytes, engine.non_finite)
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
            _StatisticPart(self._shared.path, self._shared.token, self._described(ranges), self._limits, statistic)
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
                path, offset = writer.location(name)
                locations[name] = (path, offset + begin)
            described = self._described(ranges)
            parts.append(
                _ReductionPart(
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

    def _described(self, ranges: Sequence[_Range]) -> tuple[_GroupPart, ...]:
        return tuple(self._describe(part) for part in ranges)

    def _describe(self, part: _Range) -> _GroupPart:
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
        return _GroupPart(
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
        _SourcePickler(text, self._shared).dump(vector.sources(part.start, part.count))
        return text.getvalue()

    def _run(self, parts: Sequence[_Part[_Result]], collect: Callable[[int, _Result], object]) -> None:
        """Run all parts, and repeat those whose worker is lost; call `collect` with the number of each and its result.

        At the end, no part is still running, except on a worker that does not answer.
        """
        finished: queue.SimpleQueue[Future[_Outcome[_Result]]] = queue.SimpleQueue()
        running: dict[Future[_Outcome[_Result]], tuple[int, Executor]] = {}
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

    def _error_of(self, error: Exception, host: str, part: _Part[Any]) -> Exception:
        """Return the error of a part for callers: of a contribution, of the storage, or of the aggregation.

        Raises:
            SharedStorageError: The directory of the aggregation was deleted.
        """
        if isinstance(error, _InputError):
            try:
                _open_input(error.path, error.size, error.modified).close()
            except _InputError:
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
            except _InputError as problem:
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


class _SourcePickler(pickle.Pickler):
    """Pickles sources with the paths of their files. Bytes that only this process has are copied to a file first."""

    def __init__(self, file: io.BytesIO, shared: SharedDirectory) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TensorFile):
            with obj.descriptor() as fd:
                status = os.fstat(fd)
            if not obj.is_still_at(obj.path):
                raise SourceError(f"{obj.path} was removed or replaced, so that workers cannot open it")
            return _open_input, (os.path.realpath(obj.path), status.st_size, status.st_mtime_ns)
        if isinstance(obj, RemoteFile):
            return RemoteFile.reopen, (obj.url, obj.size, obj.version)
        if isinstance(obj, CastSource):
            return CastSource, obj.arguments()
        if isinstance(obj, ByteSource) and not isinstance(obj, _DESCRIBED):
            return FileSource, (self._shared.copy_of(obj), 0, obj.nbytes)
        return NotImplemented


# ---- in a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Limits:
    budget: int
    threads: int
    tile_bytes: int | None
    non_finite: NonFinitePolicy


@dataclass(frozen=True)
class _GroupPart:
    """A range of the elements of a group, without its data."""

    index: int
    dtype: torch.dtype
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    members: tuple[int, ...]
    contributors: tuple[str, ...]
    element_type: torch.dtype
    inputs: tuple[bytes, ...]
    reference_type: torch.dtype | None
    reference: bytes | None
    first: int

    def open(self) -> TensorGroup:
        inputs = []
        for contributor, text in zip(self.contributors, self.inputs, strict=True):
            try:
                inputs.append(InputVector.over(_sources(text), self.element_type))
            except _InputError as error:
                raise error.of(contributor) from error
            except Exception as error:
                raise_input_error(contributor, error)
        reference = None
        if self.reference is not None:
            assert self.reference_type is not None
            reference = InputVector.over(_sources(self.reference), self.reference_type)
        return TensorGroup(
            self.index,
            self.dtype,
            self.names,
            self.sizes,
            self.members,
            self.contributors,
            tuple(inputs),
            reference,
            self.first,
        )

    @property
    def nbytes(self) -> int:
        return sum(self.sizes) * self.element_type.itemsize * len(self.members)


@dataclass(frozen=True)
class _Part(ABC, Generic[_Result]):
    """A part of a pass, as a worker receives it."""

    directory: str
    token: str
    groups: tuple[_GroupPart, ...]
    limits: _Limits

    @property
    def nbytes(self) -> int:
        """Bytes that the part reads."""
        return sum(group.nbytes for group in self.groups)

    def read_inputs_of(self, contributor: str) -> None:
        """Read the inputs of a contributor, and drop them; raises if they cannot be read."""
        for group in self.groups:
            for name, text in zip(group.contributors, group.inputs, strict=True):
                for source in _sources(text) if name == contributor else ():
                    for begin in range(0, source.nbytes, _COPY_BYTES):
                        source.read(begin, min(_COPY_BYTES, source.nbytes - begin))

    def run(self) -> _Result:
        """Run the part, in the worker."""
        self._check_token()
        groups = [group.open() for group in self.groups]
        with ExitStack() as borrowed:
            for group in groups:
                group.borrow(borrowed)
            limits = self.limits
            return self._compute(
                Engine(
                    groups,
                    limits.budget,
                    limits.threads,
                    limits.tile_bytes,
                    limits.non_finite,
                    PassMonitor(should_cancel=_Every(_CHECK_SECONDS, self._is_revoked)),
                )
            )

    @abstractmethod
    def _compute(self, engine: Engine) -> _Result:
        """Return the result of the part."""

    def _check_token(self) -> None:
        path = os.path.join(self.directory, _SESSION_FILE)
        try:
            with open(path, encoding="ascii") as file:
                problem = None if file.read() == self.token else "it has other content"
        except OSError as error:
            problem = str(error)
        if problem is not None:
            raise SharedStorageError(
                f"the worker on {socket.gethostname()} does not see {path}, which this aggregation has written "
                f"({problem}); put inputs and outputs on storage that all workers share, under the same path, and run "
                "the workers as the same user"
            )

    def _is_revoked(self) -> bool:
        try:
            # An NFS client asks the server when a file is opened.
            os.close(os.open(os.path.join(self.directory, _SESSION_FILE), os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return True
        return False


@dataclass(frozen=True)
class _StatisticPart(_Part[torch.Tensor]):
    statistic: Statistic

    def _compute(self, engine: Engine) -> torch.Tensor:
        sums: list[torch.Tensor] = []
        engine.sum_stretches(self.statistic, sums.append)
        return torch.stack(sums)


@dataclass(frozen=True)
class _ReductionPart(_Part[None]):
    reduction: Reduction
    stage: str
    locations: Mapping[str, tuple[str, int]]
    fsync: bool

    def _compute(self, engine: Engine) -> None:
        with _PartWriter(self.locations, self._is_revoked, fsync=self.fsync) as writer:
            engine.reduce(self.reduction, self.stage, writer)
            writer.finish()


class _PartWriter:
    """Writes ranges of tensors to the unfinished files of an output.

    Args:
        locations: For each tensor, the file and the position of the first byte of the range.
        is_revoked: Whether the aggregation has ended without this part.
        fsync: Whether `finish` flushes to the disk.
    """

    def __init__(
        self, locations: Mapping[str, tuple[str, int]], is_revoked: Callable[[], bool], *, fsync: bool
    ) -> None:
        self._locations = locations
        self._is_revoked = is_revoked
        self._fsync = fsync
        self._unflushed = 0
        self._files: dict[str, int] = {}
        try:
            for path, _ in locations.values():
                if path not in self._files:
                    # Only for writing: an NFS client that has read a page may write the complete page.
                    self._files[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, offset: int, data: Buffer) -> None:
        """Write bytes of a tensor at an offset in its range."""
        path, start = self._locations[name]
        view, done = memoryview(data).cast("B"), 0
        fd = self._files[path]
        # Another worker may have repeated this part, and the result may be published. Until then the inputs were
        # unchanged, so bytes that were computed before this check are correct, whenever they arrive.
        if self._is_revoked():
            raise AggregationCancelledError(f"the aggregation that writes {path} has ended")
        try:
            while done < len(view):
                done += os.pwrite(fd, view[done:], start + offset + done)
        except OSError as error:
            if error.errno not in OUT_OF_SPACE:
                raise
            raise DiskFullError(
                error.errno, f"no space for {path} ({error.strerror}), nothing was written; free some space"
            ) from error
        self._unflushed += done
        if self._fsync and self._unflushed >= _FLUSH_BYTES:
            self._unflushed = 0
            begin_writeback(fd)

    def finish(self) -> None:
        """Have the bytes on the disk, if that is required."""
        if self._fsync:
            for fd in self._files.values():
                os.fsync(fd)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            # With a network file system, closing sends written data, and may fail.
            os.close(self._files.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Outcome(Generic[_Result]):
    """What a part returns: its result, or its own error. An exception is therefore one of the executor."""

    result: _Result | None
    error: Exception | None = None
    host: str = ""


class _InputError(Exception):  # never reaches a caller: the driver converts it
    """A worker does not see an input file as the driver does."""

    def __init__(self, path: str, size: int, modified: int, problem: str, contributor: str = "") -> None:
        super().__init__(path, size, modified, problem, contributor)
        self.path = path
        self.size = size
        self.modified = modified
        self.problem = problem
        self.contributor = contributor

    def of(self, contributor: str) -> _InputError:
        """Return the same error for a contribution."""
        return _InputError(self.path, self.size, self.modified, self.problem, contributor)


class _Every:
    """A function that runs at most once in a period; in between, its last answer is repeated."""

    def __init__(self, seconds: float, function: Callable[[], bool]) -> None:
        self._seconds = seconds
        self._function = function
        self._next = 0.0
        self._last = False

    def __call__(self) -> bool:
        now = time.monotonic()
        if now >= self._next:
            self._last, self._next = self._function(), now + self._seconds
        return self._last


def run_part(part: _Part[_Result]) -> _Outcome[_Result]:
    """Run a part in a worker; executors call it."""
    try:
        return _Outcome(part.run())
    except Exception as error:
        return _Outcome(None, _portable(error), socket.gethostname())


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process."""
    if isinstance(error, ContributionError):
        return ContributionError(error.contributor, _portable(error.error))
    try:
        same = pickle.loads(pickle.dumps(error))  # noqa: S301  # just pickled
        if type(same) is type(error) and str(same) == str(error):
            return error
    except Exception as problem:
        logger.debug("%s cannot be sent: %s", type(error).__name__, problem)
    return SourceError(f"{type(error).__name__}: {error}")


def _sources(text: bytes) -> list[ByteSource]:
    # The process that sent them chose this function, which pickle calls by name.
    sources: list[ByteSource] = pickle.loads(text)  # noqa: S301
    return sources


def _open_input(path: str, size: int, modified: int) -> TensorFile:
    """Open an input, and check that it is the file that the driver has described."""
    try:
        file = TensorFile(path)
        with file.descriptor() as fd:
            status = os.fstat(fd)
        if (status.st_size, status.st_mtime_ns) == (size, modified):
            return file
        problem = "it has another size or time of modification"
    except OSError as error:
        problem = str(error)
    raise _InputError(path, size, modified, problem)

# SPDX-License-Identifier: Apache-2.0
"""Turns reads of remote files into requests: few, in parallel, and within a fixed amount of memory.

Long reads are split into requests that several threads make at once, straight into the caller's buffer. Shorter ones go
through a cache of blocks: one request fetches neighboring small tensors, and a file that is read in order is fetched
ahead. All files of a process share the threads and the cache.
"""

from __future__ import annotations

import copy
import os
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nvflare_lazy.remote.file import RemoteFile

_BLOCK_BYTES = 256 << 10
#: The most that one request asks for.
REQUEST_BYTES = 4 << 20
#: Requests in flight. Each takes up to twice its bytes for a moment, since the clients join what they receive.
MAX_REQUESTS = 8
#: Blocks that are kept, of all files.
CACHE_BYTES = 32 << 20
_CACHE_BLOCKS = CACHE_BYTES // _BLOCK_BYTES
_REQUEST_BLOCKS = REQUEST_BYTES // _BLOCK_BYTES
# Reads that are as long do not pass through the cache.
_MIN_DIRECT_BYTES = 2 * REQUEST_BYTES
# A file that is read in order is fetched this far ahead, if few files are read at once.
_MAX_AHEAD_BLOCKS = _CACHE_BLOCKS // 2

# It takes less time to receive as many bytes than to make another request.
_MAX_GAP_BYTES = 64 << 10

_Key = tuple[int, int]


class _Reader:
    """The threads that make requests, and the blocks that they have fetched; one per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[_Key, Future[memoryview]] = OrderedDict()
        self._per_file: dict[int, int] = {}
        # Files that ended while a thread held the lock, which may be the one that collects garbage.
        self._ended: deque[int] = deque()
        self._threads = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="nvflare_lazy_remote")
        # glibc returns the memory of each request to the kernel, and the next request takes new pages, unless a larger
        # block was freed before. Without this block, reading took 1.3 times as long.
        bytearray(4 * REQUEST_BYTES)

    def read_directly(self, file: RemoteFile, buffer: memoryview, offset: int) -> None:
        """Fill a long buffer with requests in parallel."""

        def fetch(begin: int, end: int) -> None:
            if not failed.is_set():
                try:
                    buffer[begin:end] = file.fetch(offset + begin, offset + end)
                except BaseException:
                    failed.set()
                    raise

        failed = threading.Event()
        starts = range(0, len(buffer), REQUEST_BYTES)
        jobs = [self._threads.submit(fetch, at, min(at + REQUEST_BYTES, len(buffer))) for at in starts]
        try:
            wait(jobs)
        except BaseException:
            # The caller's memory must not be written to after the return.
            failed.set()
            wait(jobs)
            raise
        for job in jobs:
            if (error := job.exception()) is not None:
                raise _fresh(error)

    def read_blocks(self, file: RemoteFile, buffer: memoryview, offset: int) -> None:
        """Fill a short buffer from blocks, and fetch missing ones."""
        first, last = offset // _BLOCK_BYTES, (offset + len(buffer) - 1) // _BLOCK_BYTES
        blocks = self._blocks_of(file, first, last)
        for index, block in zip(range(first, last + 1), blocks, strict=True):
            begin = index * _BLOCK_BYTES
            start, end = max(offset, begin), min(offset + len(buffer), begin + _BLOCK_BYTES)
            try:
                data = block.result()
            except BaseException as error:
                raise _fresh(error) from None
            buffer[start - offset : end - offset] = data[start - begin : end - begin]

    def _blocks_of(self, file: RemoteFile, first: int, last: int) -> list[Future[memoryview]]:
        """Return the blocks of a read; request missing ones and the following ones."""
        number = file.number
        total = -(-file.size // _BLOCK_BYTES)
        with self._lock:
            self._drop_ended()
            is_in_order = first > 0 and (number, first - 1) in self._blocks
            wanted = set(range(first, last + 1))
            if is_in_order:
                files = max(len(self._per_file), 1)
                ahead = min(_MAX_AHEAD_BLOCKS, _CACHE_BLOCKS // (2 * files))
                # Not before half of it is used, so that requests are long.
                if ahead > 1 and (number, min(last + ahead // 2, total - 1)) not in self._blocks:
                    wanted.update(range(last + 1, min(last + 1 + ahead, total)))
            self._request(file, wanted)
            found = []
            for index in range(first, last + 1):
                self._blocks.move_to_end((number, index))
                found.append(self._blocks[number, index])
            self._evict()
        return found

    def read_ranges(self, file: RemoteFile, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of short ranges, with one request for neighboring ones."""
        runs: list[list[int]] = []
        for offset, nbytes in sorted(ranges):
            if runs and offset <= runs[-1][1] + _MAX_GAP_BYTES and offset + nbytes <= runs[-1][0] + REQUEST_BYTES:
                runs[-1][1] = max(runs[-1][1], offset + nbytes)
            else:
                runs.append([offset, offset + nbytes])
        starts = [start for start, _ in runs]
        found: dict[tuple[int, int], bytes] = {}
        merged = dict(zip(starts, self._threads.map(lambda run: file.fetch(*run), runs), strict=True))
        for offset, nbytes in ranges:
            start = starts[bisect_right(starts, offset) - 1]
            found[offset, nbytes] = merged[start][offset - start : offset - start + nbytes]
        return [found[place] for place in ranges]

    def _request(self, file: RemoteFile, wanted: Iterable[int]) -> None:
        run: list[int] = []
        for index in sorted(wanted):
            if (file.number, index) in self._blocks:
                continue
            if run and (index != run[-1] + 1 or len(run) == _REQUEST_BLOCKS):
                self._submit(file, run)
                run = []
            run.append(index)
        if run:
            self._submit(file, run)

    def _submit(self, file: RemoteFile, run: list[int]) -> None:
        futures: list[Future[memoryview]] = [Future() for _ in run]
        # First, since it fails if the interpreter ends.
        self._threads.submit(self._fetch_run, file, run, futures)
        for index, future in zip(run, futures, strict=True):
            self._blocks[file.number, index] = future
        self._per_file[file.number] = self._per_file.get(file.number, 0) + len(run)

    def _fetch_run(self, file: RemoteFile, run: list[int], futures: list[Future[memoryview]]) -> None:
        start, end = run[0] * _BLOCK_BYTES, min((run[-1] + 1) * _BLOCK_BYTES, file.size)
        try:
            data = memoryview(file.fetch(start, end))
            # Copied, since a view would keep the whole answer alive for as long as one of its blocks.
            blocks = [bytes(data[begin : begin + _BLOCK_BYTES]) for begin in range(0, len(data), _BLOCK_BYTES)]
        except BaseException as error:
            with self._lock:
                for index in run:
                    self._drop((file.number, index))
            for future in futures:
                future.set_exception(error)
            return
        for future, block in zip(futures, blocks, strict=True):
            future.set_result(memoryview(block))

    def _evict(self) -> None:
        """Drop the blocks that were not used for the longest time; their readers keep them while they copy."""
        while len(self._blocks) > _CACHE_BLOCKS:
            self._drop(next(iter(self._blocks)))

    def _drop(self, key: _Key) -> None:
        if self._blocks.pop(key, None) is not None:
            rest = self._per_file[key[0]] - 1
            if rest:
                self._per_file[key[0]] = rest
            else:
                del self._per_file[key[0]]

    def forget(self, number: int) -> None:
        """Drop the blocks of a file, now or when the cache is used again."""
        self._ended.append(number)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_ended()
            finally:
                self._lock.release()

    def _drop_ended(self) -> None:
        while self._ended:
            number = self._ended.popleft()
            if number in self._per_file:
                for key in [key for key in self._blocks.copy() if key[0] == number]:
                    self._drop(key)


def _fresh(error: BaseException) -> BaseException:
    """Return a copy of an error that several threads raise: each of them would add its frames to the traceback."""
    try:
        made = copy.copy(error)
    except Exception:
        return error
    made.__cause__ = error.__cause__
    return made


def new_number() -> int:
    """Return a number for a file, different from the numbers of all earlier files."""
    return next(_numbers)


def read_into(file: RemoteFile, buffer: memoryview, offset: int) -> None:
    """Fill a buffer with the bytes of a remote file that start at an offset."""
    if len(buffer) >= _MIN_DIRECT_BYTES:
        _reader.read_directly(file, buffer, offset)
    else:
        _reader.read_blocks(file, buffer, offset)


def read_ranges(file: RemoteFile, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of short ranges, requested in parallel and together if they are close."""
    return _reader.read_ranges(file, ranges)


def forget(number: int) -> None:
    """Free the blocks of a file that is closed."""
    _reader.forget(number)


_numbers = count(1)
_reader = _Reader()


def _reset_after_fork() -> None:
    global _reader
    # Another thread may have held the lock, and the threads do not exist.
    _reader = _Reader()


os.register_at_fork(after_in_child=_reset_after_fork)

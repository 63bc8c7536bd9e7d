# SPDX-License-Identifier: Apache-2.0
"""`RemoteOutput`: writes a checkpoint to a URL, and replaces the previous one when the new one is complete.

Each file is written to a temporary file and uploaded when its last byte is written, so the disk holds about two shards.
The names of shards contain a number of their save and are never reused. The index is uploaded last: until then, readers
find the old checkpoint, and the new one after. Shards of older saves are removed then.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.errors import DiskFullError, NVFlareLazyError, SaveError
from nvflare_lazy.formats._commit import hidden_path, index_text, start_file
from nvflare_lazy.formats.atomic_file import AtomicFile
from nvflare_lazy.formats.safetensors.shards import WEIGHT_MAP, ShardName, index_path, parse_shard_name, shard_stem
from nvflare_lazy.remote.upload import RemoteDirectory, Upload
from nvflare_lazy.remote.url import basename, display, parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nvflare_lazy.formats._commit import OnWait, Shard
    from nvflare_lazy.formats.hugging_face.model_directory import ModelDirectory
    from nvflare_lazy.tensors.tensor_file import TensorFile

logger = get_logger(__name__)

# Files that are being written or wait for their upload, unless tensors are written in a different order than in the
# files.
_MAX_FILES_ON_DISK = 2
_SECONDS_BETWEEN_CHECKS = 0.2
# In the order in which they are tried. A temporary directory may be in memory, and /var/tmp is on a disk.
_DIRECTORIES = ("NVFLARE_LAZY_SCRATCH", "TMPDIR")
_ON_DISK = "/var/tmp"  # noqa: S108 - the files in it have no name


class RemoteOutput:
    """The files of a checkpoint that is written to a URL.

    Args:
        url: The checkpoint, which ends in ".safetensors".
        unfinished_in: The directory in which other processes open the files until they are complete, or None.
        progress: Called with a number of bytes of tensors each time some were uploaded, in another thread.
        check: Called from time to time by threads that wait for an upload; an exception that it raises ends the wait.
    """

    def __init__(
        self,
        url: str,
        *,
        unfinished_in: str | None,
        progress: Callable[[int], object] | None,
        check: Callable[[], object] | None,
    ) -> None:
        self._url = url
        self._name = basename(url)
        self._directory = RemoteDirectory(parent(url))
        self._unfinished_in = unfinished_in
        self._progress = progress
        self._check = check
        # Later saves have larger numbers, and no two saves the same one.
        self._generation = time.time_ns() // 1_000 * 1_000 + secrets.randbelow(1_000)
        self._shards: Sequence[Shard] = ()
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()
        self._open = 0
        self._waiting = 0
        self._sent = [0]
        self._uploaded: set[int] = set()
        self._started: set[str] = set()
        self._index_started = False
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, shards: Sequence[Shard]) -> None:
        """Notice now if the URL cannot be written. The files are created when their first byte is written."""
        self._shards = shards
        self._sent = [0] * len(shards)
        self._directory.check_writable(self._index_name if self._is_sharded else self._name)
        stem = shard_stem(self._name)
        shards_there = filter(None, map(parse_shard_name, self._directory.names()))
        newest = max((shard.generation for shard in shards_there if shard.stem == stem), default=0)
        if newest >= self._generation:
            # The clock of the machine that wrote them is ahead.
            self._generation = newest + 1 + secrets.randbelow(10**9)

    def new_file(self, shard: Shard) -> AtomicFile:
        """Return a temporary file with the header of a shard, and room for its tensors; wait for earlier uploads."""
        with self._changed:
            while self._waiting and self._open + self._waiting >= _MAX_FILES_ON_DISK:
                self._raise_error()
                self._changed.wait(_SECONDS_BETWEEN_CHECKS)
                if self._check is not None:
                    self._check()
            self._raise_error()
            self._open += 1
        directory, hidden = self._unfinished_in or scratch_directory(), hidden_path(self._unfinished_in, shard)
        file = AtomicFile(os.path.join(directory, self._name), fsync=False, hidden=hidden)
        if hidden is None:
            file.forget_name()
        try:
            return start_file(file, shard, is_shared=hidden is not None)
        except DiskFullError as error:
            raise DiskFullError(
                error.errno,
                f"no space in {directory} for a file of {format_size(shard.size)}, which is uploaded to "
                f"{display(self._url)} ({os.strerror(error.errno or 0)}); set NVFLARE_LAZY_SCRATCH to a directory on a "
                "larger disk, or choose a smaller max_shard_size",
            ) from error

    def complete(self, shard: Shard) -> None:
        """Upload a shard. A checkpoint of one file would appear with it, so that waits for `publish`."""
        if self._is_sharded:
            self._upload(shard)

    def publish(self, shards: Sequence[Shard], like: ModelDirectory | None, on_wait: OnWait | None) -> list[TensorFile]:
        """Upload the remaining files, the index last, and remove the previous checkpoint."""
        if self._is_sharded:
            for shard in shards:
                if shard.file is None:  # without a byte of tensors
                    shard.file = self.new_file(shard)
                    self._upload(shard)
            self._wait(on_wait)
        if like is not None:
            # Before the weights: a directory with weights is complete.
            for name in like.companions():
                self._put(Upload.of(name.as_posix(), like.read_companion(name), self._check_stopped))
        self._raise_if_superseded()
        if self._is_sharded:
            self._publish_index()
        else:
            if shards[0].file is None:
                shards[0].file = self.new_file(shards[0])
            self._index_started = True
            self._upload(shards[0])
            self._wait(on_wait)
        self._remove_replaced()
        self._stop()
        return []

    def abort(self) -> None:
        """Stop the upload, and remove the shards that are uploaded, unless the checkpoint has appeared."""
        self._stop()
        if self._index_started:
            # It may be there, or still appear, although its upload failed.
            return
        names, self._started = sorted(self._started), set()
        self._remove(names, "incomplete save")

    @property
    def _is_sharded(self) -> bool:
        return len(self._shards) > 1

    @property
    def _index_name(self) -> str:
        return index_path(self._name)

    def _shard_name(self, number: int) -> str:
        if not self._is_sharded:
            return self._name
        return str(ShardName(shard_stem(self._name), number + 1, len(self._shards), self._generation))

    def _upload(self, shard: Shard) -> None:
        with self._changed:
            self._raise_error()
            self._open -= 1
            self._waiting += 1
            self._queue.append(shard.number)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (number := self._next()) is not None:
                self._upload_now(number)
                with self._changed:
                    self._waiting -= 1
                    self._uploaded.add(number)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            while not self._queue:
                if self._stopped:
                    return None
                self._changed.wait()
            return None if self._stopped else self._queue.popleft()

    def _upload_now(self, number: int) -> None:
        shard = self._shards[number]
        assert shard.file is not None
        name, header = self._shard_name(number), len(shard.header)
        if self._is_sharded:
            self._started.add(name)
        sent = 0

        def progress(nbytes: int) -> None:
            nonlocal sent
            sent += nbytes
            tensors = max(0, sent - header) - self._sent[number]
            # An upload that is repeated counts where it passes the first one.
            if tensors > 0:
                self._sent[number] += tensors
                if self._progress is not None:
                    self._progress(tensors)

        def restart() -> None:
            nonlocal sent
            sent = 0

        # Not the descriptor that wrote the header: on NFS, it may not see what workers of other machines have written.
        fd = shard.file.duplicate()
        try:

            def read(offset: int, nbytes: int) -> bytes:
                if offset == 0:
                    restart()
                return os.pread(fd, nbytes, offset)

            self._directory.put(Upload(name, shard.size, read, self._check_stopped, progress))
        finally:
            os.close(fd)
        shard.file.close()

    def _wait(self, on_wait: OnWait | None) -> None:
        total = sum(stored.nbytes for shard in self._shards for stored in shard.contents.values())
        with self._changed:
            while len(self._uploaded) < len(self._shards):
                self._raise_error()
                self._changed.wait(_SECONDS_BETWEEN_CHECKS)
                if on_wait is not None:
                    on_wait(sum(self._sent), total)
        if on_wait is not None:
            on_wait(total, total)

    def _publish_index(self) -> None:
        index = index_text({self._shard_name(number): shard.contents for number, shard in enumerate(self._shards)})
        self._index_started = True
        self._put(Upload.of(self._index_name, index, self._check_stopped))
        # Another save that began later removes the shards of this one.
        missing = {self._shard_name(number) for number in range(len(self._shards))} - self._directory.names()
        if missing:
            if self._directory.read(self._index_name) == index:
                self._remove([self._index_name], "incomplete save")
            raise SaveError(
                f"{display(self._url)}: another save of the same checkpoint has removed {min(missing)}; save it again"
            )

    def _raise_if_superseded(self) -> None:
        """Raise if a save that began later is complete. It may have removed the shards of this one."""
        if not self._is_sharded:
            return
        text = self._directory.read(self._index_name) if self._index_name in self._directory.names() else None
        named = set() if text is None else _shard_generations(text, shard_stem(self._name))
        if any(generation > self._generation for generation in named):
            raise SaveError(f"{display(self._url)}: a save that began later has replaced it; nothing was changed")

    def _remove_replaced(self) -> None:
        names = self._directory.names()
        if self._is_sharded:
            if self._name in names:
                # It counts before an index until it is gone.
                self._directory.remove(self._name)
        elif self._index_name in names:
            self._remove([self._index_name], "replaced checkpoint")
        self._remove(sorted(filter(self._is_older, names)), "replaced checkpoint")
        try:
            for name, upload_id in self._directory.unfinished_uploads(shard_stem(self._name)):
                if self._is_older(name):
                    self._directory.abort_upload(name, upload_id)
        except NVFlareLazyError as error:
            # The right to list them is separate, and stores without this request exist.
            logger.info("Cannot look for incomplete uploads of killed saves: %s", error)

    def _is_older(self, name: str) -> bool:
        """Whether a file is a shard of an earlier save of this checkpoint."""
        shard = parse_shard_name(name)
        return shard is not None and shard.stem == shard_stem(self._name) and shard.generation < self._generation

    def _remove(self, names: Iterable[str], what: str) -> None:
        """Remove files that no checkpoint names. A store that fails is not asked for each of them."""
        rest = deque(names)
        while rest:
            try:
                self._directory.remove(rest[0])
            except NVFlareLazyError as error:
                logger.warning(
                    "Cannot remove %d files of a %s at %s, such as %s: %s. The next save removes them.",
                    *(len(rest), what, display(self._url), rest[0], error),
                )
                return
            rest.popleft()

    def _put(self, upload: Upload) -> None:
        self._raise_error()
        self._directory.put(upload)

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _check_stopped(self) -> None:
        if self._stopped:
            raise SaveError(f"the upload to {display(self._url)} was cancelled")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        self._check_stopped()


def _shard_generations(index: bytes, stem: str) -> set[int]:
    """Return the numbers of the saves whose shards an index names; none if it is not an index."""
    try:
        weight_map = json.loads(index)[WEIGHT_MAP]
        shards = [parse_shard_name(str(name)) for name in set(weight_map.values())]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return set()
    return {shard.generation for shard in shards if shard is not None and shard.stem == stem}


def scratch_directory() -> str:
    """Return the directory for files that are uploaded: `NVFLARE_LAZY_SCRATCH`, `TMPDIR`, or /var/tmp."""
    for directory in (*map(os.environ.get, _DIRECTORIES), _ON_DISK):
        if directory and os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK):
            return directory
    return tempfile.gettempdir()

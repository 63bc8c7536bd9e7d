# SPDX-License-Identifier: Apache-2.0
"""`RecordWriter`: appends records to the file of a site, which several processes may do, and keeps the file small.

A line is written under a lock of the file. If the file is larger than its limit, `thinning` removes details of old
rounds. Nothing is flushed to the disk: the end of a process loses no line, and records are not worth the time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from nvflare_lazy.records.schema import Record, to_line
from nvflare_lazy.records.thinning import thin

MAX_FILE_BYTES = 8 << 20
#: A file that cannot be replaced, because the disk is full, grows at most to this size.
_MAX_UNTHINNED_BYTES = 2 * MAX_FILE_BYTES


class RecordWriter:
    """Appends records to a file, and to a copy of it; see `keep_copy`.

    If a line cannot be written, the job continues: `on_error` runs once, and later lines are tried again.

    Args:
        path: The file, which need not exist.
        on_error: Receives a message for the log.
        max_bytes: The size above which the file is thinned.
    """

    def __init__(self, path: Path, on_error: Callable[[str], None], *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self._copy: Path | None = None
        self._on_error = on_error
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._failed = False

    def write(self, record: Record) -> None:
        """Append a record."""
        line = to_line(record)
        with self._lock:
            for path in (self.path, self._copy):
                if path is None:
                    continue
                try:
                    size = append(path, line)
                    if size > self._max_bytes:
                        self._thin(path)
                except OSError as error:
                    self._report(path, error)

    def keep_copy(self, copy: Path, *, continues: bool) -> None:
        """Write everything to a second file as well, which outlives the run directory.

        Args:
            copy: The second file.
            continues: Whether this job continues the one whose records the second file has. Then they become the
                beginning of this job's records. Otherwise they are replaced.
        """
        with self._lock:
            try:
                own = self.path.read_bytes() if self.path.exists() else b""
                earlier = copy.read_bytes() if continues and copy.exists() else b""
                # The run directory may be the earlier run's directory.
                known = set(own.splitlines())
                kept = b"".join(line + b"\n" for line in earlier.splitlines() if line not in known)
                for path in (self.path, copy):
                    with _locked(path):
                        _replace(path, kept + own)
                self._copy = copy
            except OSError as error:
                self._report(copy, error)

    def _thin(self, path: Path) -> None:
        with _locked(path) as fd:
            _replace(path, thin(_read(fd), self._max_bytes // 2))

    def _report(self, path: Path, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            self._on_error(f"Cannot write {path}: {error}. The records of this job will be incomplete.")


def append(path: Path, line: bytes) -> int:
    """Append a line to a file in one piece, and return the size of the file.

    Raises:
        OSError: If it cannot be written; the file is then as it was.
    """
    with _locked(path) as fd:
        size = os.fstat(fd).st_size
        if size + len(line) > _MAX_UNTHINNED_BYTES:
            raise OSError(f"it has {size} bytes, and could not be replaced by a smaller file")
        if size and os.pread(fd, 1, size - 1) != b"\n":
            # A process was killed while it wrote the last line.
            line = b"\n" + line
        try:
            done = 0
            while done < len(line):
                done += os.write(fd, line[done:])
        except OSError:
            os.ftruncate(fd, size)
            raise
        return size + done


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file for one process at a time, also if another one replaces it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            opened = os.fstat(fd)
            if not os.path.exists(path) or not os.path.samestat(opened, os.stat(path)):
                continue
            yield fd
            return
        finally:
            os.close(fd)


def _read(fd: int) -> bytes:
    content = bytearray()
    while part := os.pread(fd, 1 << 20, len(content)):
        content += part
    return bytes(content)


def _replace(path: Path, content: bytes) -> None:
    incomplete = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        incomplete.write_bytes(content)
        os.replace(incomplete, path)
    finally:
        incomplete.unlink(missing_ok=True)

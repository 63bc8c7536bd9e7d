# SPDX-License-Identifier: Apache-2.0
"""`CleanupProcess`: a process that removes the scratch of this process after a signal has ended it.

Python runs nothing at exit after SIGTERM, with which NVFlare ends external trainers and the simulator its clients, or
after SIGKILL. The other process is started with the first lease, and its program is `_cleanup_program`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from nvflare_lazy._text import get_logger

logger = get_logger(__name__)

_PROGRAM = Path(__file__).with_name("_cleanup_program.py")
_PACKAGE_PARENT = _PROGRAM.parents[2]
# Not the rest of the environment: it may contain secrets, which a process that runs for hours should not keep.
_ENVIRONMENT = ("LD_LIBRARY_PATH",)
_START_SECONDS = 60.0
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class CleanupProcess:
    """Tells another process which directories this process has leased.

    The other process sees the end of this one at the end of the stream, however this one ends. It is not a child of
    this process, and it has its own session, so that signals to a process group or a process tree do not end it. If it
    cannot be started, the next start of a job reclaims the directories, as after a failure of the machine.
    """

    def __init__(self) -> None:
        self._start_over()
        os.register_at_fork(after_in_child=self._start_over)

    def add(self, path: str) -> None:
        """Have a leased directory removed, unless it is discarded before this process ends."""
        with self._lock:
            if not self._send(b"+", path):
                self._start()
                self._send(b"+", path)

    def discard(self, path: str) -> None:
        """Leave a directory alone, because it was removed; safe to call from a finalizer."""
        with self._lock:
            self._send(b"-", path)

    def _start_over(self) -> None:
        """Have no other process; a forked child closes its copy of the stream and starts its own."""
        self._lock = threading.RLock()
        stream: socket.socket | None = getattr(self, "_stream", None)
        self._stream: socket.socket | None = None
        if stream is not None:
            stream.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            started = subprocess.Popen(  # noqa: S603 (nothing comes from outside)
                [sys.executable, "-I", "-S", os.fspath(_PROGRAM), os.fspath(_PACKAGE_PARENT)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )
            # It continues in its own child process and ends.
            started.wait(_START_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.info(
                "Cannot start a process that removes scratch after a signal: %s; the next job will remove it", error
            )
            ours.close()
        else:
            self._stream = ours
        finally:
            theirs.close()

    def _send(self, change: bytes, path: str) -> bool:
        """Report a change; False if there is no other process."""
        if self._stream is None:
            return False
        try:
            # Without waiting: if the other process is stopped, it must not stop this one.
            self._stream.send(change + os.fsencode(path) + b"\0", socket.MSG_DONTWAIT | _NO_SIGNAL)
        except BlockingIOError:
            return True
        except OSError:  # it was ended; the next lease starts another one
            stream, self._stream = self._stream, None
            stream.close()
            return False
        return True


cleanup_process = CleanupProcess()

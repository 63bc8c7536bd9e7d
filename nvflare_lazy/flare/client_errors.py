# SPDX-License-Identifier: Apache-2.0
"""The last error of a client, for the reasons in the server's log: NVFlare itself transports a return code.

A client with `TensorOffload` sends the line with a failed result, or as an event if its trainer fails without one. For
other clients, the server reads the `error_log.txt` that NVFlare streams to it in a deployment.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from nvflare.apis.fl_constant import WorkspaceConstants

from nvflare_lazy._text import quoted

#: The event, and the property of a failed result, that have the line.
ERROR_EVENT = "nvflare_lazy.client_error"
LINE = "nvflare_lazy.error"
_TRACEBACK = "Traceback (most recent call last):"
# The fields before the message: time, logger and level, as NVFlare's formatter writes them, and its context.
_FIELDS = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ - [^ ]+ - (ERROR|CRITICAL) - ")
_CONTEXT = re.compile(r"\[identity=[^\]]*\](: | - )")
# The name of every job in the simulator, whose clients have their logs in the workspace of the server.
_SIMULATED = "simulate_job"
_MAX_LINE = 400
_MAX_READ = 64 << 10
_SETTLE_SECONDS = 0.5


class LastError:
    """Finds the line of an error in text: that of an exception if there is one, otherwise the last error message."""

    def __init__(self) -> None:
        self._exception = self._message = ""
        self._in_traceback = False

    def add(self, text: str, *, is_error: bool) -> None:
        """Add the message of a log record, or a line of other output, which counts if it belongs to a traceback."""
        if not is_error and not self._in_traceback and _TRACEBACK not in text:
            return
        if is_error:
            self._in_traceback = False
        for line in text.splitlines():
            if _TRACEBACK in line:
                self._in_traceback = True
            elif self._in_traceback and line and not line[0].isspace():
                self._exception, self._in_traceback = line[:_MAX_LINE].strip(), False
        message = _CONTEXT.sub("", text.split("\n", 1)[0][: 4 * _MAX_LINE], count=1).partition(_TRACEBACK)[0]
        if is_error and message.strip():
            self._message = message[:_MAX_LINE].strip()

    @property
    def line(self) -> str:
        """The line, or the empty string."""
        return self._exception or self._message


class ErrorRecorder(logging.Handler):
    """Keeps the last error of a client's job process from its log, which has the output of its trainer.

    `send` receives each new line, in a thread of the recorder.
    """

    def __init__(self, send: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._send = send
        self._last = LastError()
        # Loggers of several threads write in turns: lines of a traceback come from the logger that started it.
        self._source: tuple[str, int | None] | None = None
        self._changed = threading.Event()
        self._closed = False

    @property
    def line(self) -> str:
        """The line of the last error in this task, or the empty string."""
        return self._last.line

    def start(self) -> None:
        """Start recording."""
        logging.root.addHandler(self)
        threading.Thread(target=self._run, name="nvflare_lazy_errors", daemon=True).start()

    def stop(self) -> None:
        """Stop recording."""
        logging.root.removeHandler(self)
        self._closed = True
        self._changed.set()

    def forget(self) -> None:
        """Start a task, whose failure has other reasons than the one before."""
        self._last = LastError()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._add(record)
        except Exception:
            self.handleError(record)

    def _add(self, record: logging.LogRecord) -> None:
        text, source = record.getMessage(), (record.name, record.thread)
        is_error = record.levelno >= logging.ERROR
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}\n{_TRACEBACK}\n{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        if _TRACEBACK in text:
            self._source = source
        before = self._last.line
        if is_error or source == self._source:
            self._last.add(text, is_error=is_error)
        if self._last.line != before:
            self._changed.set()

    def _run(self) -> None:
        sent: tuple[LastError | None, str] = (None, "")
        while self._changed.wait() and not self._closed:
            # A failure writes several lines.
            threading.Event().wait(_SETTLE_SECONDS)
            self._changed.clear()
            # The same error in a later task is sent again.
            last = self._last
            found = last, last.line
            if found[1] and found != sent and not self._closed:
                sent = found
                self._send(found[1])


class ClientErrors:
    """The last error of each client in its current task, on the server."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._lines: dict[str, str] = {}
        self._read_before: dict[str, int] = {}

    def on_task_sent(self, client: str) -> None:
        """Start a task of a client, whose earlier errors do not explain its failure."""
        self._lines.pop(client, None)
        self._read_before[client] = _size_of(self._streamed_log(client))

    def add(self, client: str, line: object) -> None:
        """Add the line that a client sent. A client without a task has no line."""
        if client in self._read_before and isinstance(line, str) and line.strip():
            self._lines[client] = line[:_MAX_LINE]

    def explain(self, client: str) -> str:
        """Return the end of a reason: the last error of a client, quoted, or which log to read."""
        line = self._lines.get(client) or self._streamed_line(client)
        if line:
            return f": {quoted(line)}"
        log = WorkspaceConstants.LOG_FILE_NAME
        return f"; see {client}/{log}" if self._job_id == _SIMULATED else f"; see {self._job_id}/{log} in its workspace"

    def _streamed_log(self, client: str) -> Path | None:
        """Return the file that NVFlare's `JobLogReceiver` is writing for a client, if it exists."""
        try:
            # The name of a client does not become a part of a path.
            with os.scandir(Path(tempfile.gettempdir()) / self._job_id) as found:
                directory = next((entry.path for entry in found if entry.name == client), None)
        except OSError:
            return None
        return None if directory is None else Path(directory) / WorkspaceConstants.ERROR_LOG_FILE_NAME

    def _streamed_line(self, client: str) -> str:
        path = self._streamed_log(client)
        if path is None:
            return ""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return ""
            begin = max(self._read_before.get(client, 0), status.st_size - _MAX_READ)
            text = os.pread(file, _MAX_READ, begin).decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(file)
        return _last_in_log(text)


def _last_in_log(text: str) -> str:
    last, message = LastError(), [""]
    for line in text.splitlines():
        if _FIELDS.match(line):
            last.add("\n".join(message), is_error=True)
            message = [_FIELDS.sub("", line, count=1)]
        else:
            message.append(line)
    last.add("\n".join(message), is_error=True)
    return last.line


def _size_of(path: Path | None) -> int:
    try:
        return 0 if path is None else path.stat().st_size
    except OSError:
        return 0

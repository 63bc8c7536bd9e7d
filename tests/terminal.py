# SPDX-License-Identifier: Apache-2.0
"""A pseudoterminal for programs under test, with an emulator that knows what a user would see on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
import threading

import pyte


class Terminal:
    """A pseudoterminal, and an emulator that shows the output to it."""

    def __init__(self, rows=12, columns=80):
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self.stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.master, self.fd = pty.openpty()
        self.resize(rows, columns)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def become_ours(self):
        """Make it the terminal of this process, the first one of a new session."""
        fcntl.ioctl(self.fd, termios.TIOCSCTTY, 0)

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self):
        with contextlib.suppress(OSError):  # EIO: the last descriptor of the other side was closed
            while data := os.read(self.master, 65536):
                self.written += data
                self.stream.feed(data)

    def close(self):
        os.close(self.fd)
        self.reader.join(60)
        os.close(self.master)

    def lines(self):
        """All lines, including those scrolled off, as they are wrapped."""
        gone = ["".join(line[column].data for column in range(self.screen.columns)) for line in self.screen.history.top]
        return [line.rstrip() for line in [*gone, *self.screen.display]]

# SPDX-License-Identifier: Apache-2.0
"""`TerminalStatus`: the progress of a round in the last row of a terminal, below the log lines of all processes.

In the simulator, server and clients write their logs to one terminal. The terminal itself scrolls them above the last
row, which is reserved as `apt` does it: other processes log as usual, and no line is overwritten.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from nvflare_lazy._text import printable

if TYPE_CHECKING:
    from nvflare_lazy.flare.round_progress import ProgressReport

_SHELL = "/bin/sh"
# Waits for the end of the process, or for a word from it.
_GUARD = 'exec 3<&0; (read -r word <&3; [ "$word" ] || printf %s "$1") &'
_NOTHING_TO_DO = b"end\n"
_MIN_ROWS = 5
_MIN_COLUMNS = 40
_MAX_BAR_COLUMNS = 30
_MAX_NAME = 40
_SAVE, _RESTORE = "\0337", "\0338"
# No terminal has more rows.
_GIVE_BACK = f"{_SAVE}\033[9999;1H\033[2K\033[r{_RESTORE}"
_TERMINALS_WITHOUT_ROWS = ("", "dumb", "unknown")


class TerminalStatus:
    """The last row of a terminal.

    Args:
        fd: Descriptor of the terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._size: os.terminal_size | None = None
        self._text = ""
        self._guard: int | None = None

    @classmethod
    def of_this_process(cls) -> TerminalStatus | None:
        """Return the last row of standard output, where NVFlare logs, if this process may use that terminal."""
        try:
            fd = sys.stdout.fileno()
            # A job in the background, or of a server in the background, must not draw on it.
            is_ours = os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() and os.access(_SHELL, os.X_OK)
        except (OSError, ValueError, AttributeError):
            return None
        return cls(fd) if is_ours and os.environ.get("TERM", "") not in _TERMINALS_WITHOUT_ROWS else None

    def show(self, report: ProgressReport | None) -> None:
        """Show the progress of a round, or an empty row between rounds."""
        with self._lock, contextlib.suppress(OSError):
            size = os.get_terminal_size(self._fd)
            if size.lines < _MIN_ROWS or size.columns < _MIN_COLUMNS:
                self._give_back()
                return
            text = "" if report is None else rendered(report, size.columns - 1)
            if size != self._size:
                if report is None and self._size is None:
                    return
                if self._guard is None:
                    self._guard = self._start_guard()
                # First one row down and up, which makes room: the cursor may be in the last row.
                self._write(f"\033D\033[1A{_SAVE}\033[1;{size.lines - 1}r{_RESTORE}")
                self._size, self._text = size, ""
            if text != self._text:
                self._text = text
                self._write(f"{_SAVE}\033[{size.lines};1H\033[2K{text}{_RESTORE}")

    def close(self) -> None:
        """Give the row back to the terminal."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._give_back()
            guard, self._guard = self._guard, None
            if guard is not None:
                with contextlib.suppress(OSError):  # the guard was ended
                    os.write(guard, _NOTHING_TO_DO)
                os.close(guard)

    def _start_guard(self) -> int:
        """Start a process that gives the row back if this one is killed; return the descriptor that it watches.

        The simulator kills all its processes if it is interrupted. The shell ends at once, and its child is not found.
        """
        theirs, ours = os.pipe()
        command = [_SHELL, "-c", _GUARD, "sh", _GIVE_BACK]
        try:
            subprocess.run(  # noqa: S603 (nothing comes from outside)
                command, stdin=theirs, stdout=self._fd, start_new_session=True, check=False
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return ours

    def _give_back(self) -> None:
        if self._size is not None:
            self._size, self._text = None, ""
            self._write(_GIVE_BACK)

    def _write(self, text: str) -> None:
        # In one piece, so that nothing of another process comes in between.
        os.write(self._fd, text.encode())


def rendered(report: ProgressReport, columns: int) -> str:
    """Return a report as one line of a terminal, at most `columns` wide, with escape codes for colors."""
    from rich.console import Console
    from rich.text import Text

    width = min(_MAX_BAR_COLUMNS, columns // 4)
    done = int(width * report.share)
    details = f"{report.completed} of {len(report.clients)} results"
    if report.aggregation is not None:
        details = report.step()
    elif report.arriving:
        details = f"{details}, {report.step()}; slowest: {report.arriving[0].client[:_MAX_NAME]}"
    line = Text.assemble(
        ("Round" if report.number is None else f"Round {report.number}", "bold"),
        " ",
        ("━" * done, "green"),
        ("─" * (width - done), "dim"),
        f" {printable(details)}",
    )
    line.truncate(columns, overflow="ellipsis")
    console = Console(file=io.StringIO(), force_terminal=True, width=columns)
    with console.capture() as capture:
        console.print(line, end="", no_wrap=True)
    return capture.get()

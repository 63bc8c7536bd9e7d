# SPDX-License-Identifier: Apache-2.0
"""The progress of a round in the last row of a terminal, to which other processes write their log lines."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading

import pyte
import pytest

from nvflare_lazy.aggregation import Progress
from nvflare_lazy.flare.round_progress import ClientProgress, ProgressReport
from nvflare_lazy.flare.terminal_status import TerminalStatus, rendered
from tests.terminal import Terminal

MIB = 1 << 20
LINES = 30
LOG = """
import sys
for number in range(30):
    print(f"2026-01-01 00:00:{number:02} - Trainer - INFO - line {number} " + "x" * (number * 3) + "|", flush=True)
"""


def report(done, *, aggregation=None, name="site-2"):
    """The progress of a round of two clients, the second of which has sent `done` MiB of 100."""
    clients = (
        ClientProgress("site-1", 100 * MIB, 100 * MIB, True),
        ClientProgress(name, done * MIB, 100 * MIB, False),
    )
    received = (100 + done) * MIB
    return ProgressReport(3, clients, clients[1:], received, 200 * MIB, False, 0.0, aggregation)


def test_lines_of_other_processes_stay_whole():
    """The row shows the progress while another process fills the terminal; then the terminal is as before."""
    terminal = Terminal()
    status = TerminalStatus(terminal.fd)
    status.show(None)
    os.write(terminal.fd, b"before\r\n")
    process = subprocess.Popen([sys.executable, "-c", LOG], stdout=terminal.fd)
    done = 0
    while process.poll() is None:
        done = min(done + 1, 99)
        status.show(report(done))
    status.show(report(99))
    shown = threading.Event()
    os.write(terminal.fd, b"\033]0;all shown\007")  # the title

    def wait_for_title():
        while terminal.screen.title != "all shown":
            shown.wait(0.01)

    wait_for_title()
    last_row = terminal.screen.display[-1]
    status.close()
    os.write(terminal.fd, b"after\r\n")
    terminal.close()

    assert "Round 3" in last_row
    assert "1 of 2 results, received 99 % (199.0 MiB of 20" in last_row
    lines = terminal.lines()
    assert not any("Round 3" in line for line in lines)
    text = "".join(line.ljust(80) if len(line) == 80 else line + "\n" for line in lines)
    for number in range(LINES):
        assert text.count(f"2026-01-01 00:00:{number:02} - Trainer - INFO - line {number} {'x' * (number * 3)}|\n") == 1
    assert lines.index("before") < lines.index("after")
    assert terminal.screen.margins is None


KILLED = """
import os, signal, sys
from nvflare_lazy.flare.round_progress import ClientProgress, ProgressReport
from nvflare_lazy.flare.terminal_status import TerminalStatus
TerminalStatus(1).show(ProgressReport(3, (), (), 1, 2, False, 0.0, None))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed():
    """The terminal gets its row back: the simulator ends its processes so when it is interrupted."""
    terminal = Terminal()
    subprocess.run([sys.executable, "-c", KILLED], stdout=terminal.fd)
    terminal.close()  # waits for the last process that has it open
    assert b"Round 3" in terminal.written
    assert terminal.screen.margins is None
    assert not any("Round" in line for line in terminal.lines())


def test_a_terminal_that_changes_its_size(capfd):
    """The row moves; a terminal that is too small shows nothing; the row is released once."""
    terminal = Terminal()
    status = TerminalStatus(terminal.fd)
    status.show(report(1))
    terminal.resize(20, 100)
    status.show(report(2))
    terminal.resize(3, 100)
    status.show(report(3))
    status.close()
    status.close()
    terminal.close()
    written = terminal.lines()
    assert not any("Round" in line for line in written[-1:])


def test_nothing_stays_open(monkeypatch):
    """Neither if the process that watches this one cannot be started, nor if the terminal is gone."""
    made, pipe, (master, fd) = [], os.pipe, os.openpty()

    def recorded():
        made.append(pipe())
        return made[-1]

    def refused(*arguments, **options):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "pipe", recorded)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 80, 0, 0))
    status = TerminalStatus(fd)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", refused)
        status.show(report(1))
    status.show(report(1))
    os.close(master)
    status.close()
    os.close(fd)
    assert len(made) >= 2
    for descriptor in {end for ends in made for end in ends}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_only_a_terminal_of_this_process(monkeypatch):
    """A pipe, a dumb terminal, and a terminal that belongs to other processes show nothing."""
    assert TerminalStatus.of_this_process() is None
    terminal = Terminal()
    program = (
        "import os, sys; from nvflare_lazy.flare.terminal_status import TerminalStatus; "
        "sys.stderr.write(str(TerminalStatus.of_this_process() is not None))"
    )

    def found(*, controls, term="xterm"):
        def make_ours():
            os.setsid()
            if controls:
                fcntl.ioctl(1, termios.TIOCSCTTY, 0)

        return subprocess.run(
            [sys.executable, "-c", program],
            stdin=terminal.fd,
            stdout=terminal.fd,
            stderr=subprocess.PIPE,
            preexec_fn=make_ours,
            env={**os.environ, "TERM": term},
            check=True,
            text=True,
        ).stderr

    assert found(controls=True) == "True"
    assert found(controls=True, term="dumb") == "False"
    assert found(controls=False) == "False"
    terminal.close()


@pytest.mark.parametrize("columns", [39, 60, 200])
def test_width_and_hostile_names(columns):
    """A row has one line that fits, and no control characters but those of its colors."""
    made = [report(1), report(1, name="\033[2J\nevil" * 30), report(1, aggregation=Progress("mean", 1, 4))]
    for text in [rendered(one, columns) for one in made]:
        screen = pyte.Screen(columns, 3)
        pyte.Stream(screen).feed(text)
        assert screen.display[0].startswith("Round 3 ")
        assert not "".join(screen.display[1:]).strip()
    assert "mean 25 % (1 B of 4 B)"[: columns // 3] in screen.display[0]

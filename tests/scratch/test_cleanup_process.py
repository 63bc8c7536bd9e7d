# SPDX-License-Identifier: Apache-2.0
"""Nothing stays in scratch after a process was ended by a signal, which runs nothing at exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvflare_lazy.scratch import JobScratch, _cleanup_process, list_scratch, reclaim
from tests.scratch.conftest import names, wait_until_empty

# Two jobs, with a recycled file, a file that is complete and one in the middle of a download.
OWNER = """
import os, sys
from nvflare_lazy.scratch import JobScratch

def lease():
    job = JobScratch.open(sys.argv[1], job="job", min_free=0, warn=False)
    recycled, kept = [job.download().new_file() for _ in range(2)]
    for file in (recycled, kept):
        file.pwrite(bytes(2 << 20), 0)
    recycled.finish().close()
    busy = job.download().new_file()
    busy.pwrite(bytes(1000), 0)
    return job, kept.finish(), busy

leased = [lease(), lease()]
"""
ALONE = (
    OWNER
    + """
print(os.getpid(), flush=True)
sys.stdin.readline()
print(lease()[0].path, flush=True)
sys.stdin.readline()
"""
)
# As torchrun does: the launcher has no scratch, and its workers are in its process group.
LAUNCHER = f"""
import subprocess, sys
script = {ALONE!r}
workers = [subprocess.Popen([sys.executable, "-c", script, sys.argv[1]], stdout=subprocess.PIPE) for _ in range(2)]
print(*[int(worker.stdout.readline()) for worker in workers], flush=True)
sys.stdin.readline()
"""
FORKING = (
    OWNER
    + """
child = os.fork()
if child == 0:
    leased.append(lease())
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    busy = leased[-1][2]
    busy.pwrite(bytes(1000), 1000)
    print(busy.finish().size, flush=True)
    sys.exit()
os.waitpid(child, 0)
"""
)


def cleanup_processes(tag: Path) -> list[int]:
    """Return the cleanup processes of processes that were started with a tag in LD_LIBRARY_PATH."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            is_one = process.name.isdigit() and b"_cleanup_program" in (process / "cmdline").read_bytes()
            if is_one and os.fsencode(tag) in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def wait_until_none(tag: Path) -> None:
    deadline = time.monotonic() + 120
    while cleanup_processes(tag) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not cleanup_processes(tag)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_process(start_child, root, how):
    """All its leases go at once, with complete, recycled and unfinished files; no other process has to start."""
    child = start_child(ALONE, root)
    child.says()
    assert len(list_scratch(root)) == 2
    child.kill(how)
    wait_until_empty(root)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_process_group(root, how):
    """A launcher and its workers, ended at the same time as NVFlare ends a trainer, leave nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, root], stdin=-1, stdout=-1, start_new_session=True, text=True
    ) as launcher:
        assert launcher.stdout
        assert len(launcher.stdout.readline().split()) == 2
        assert len(list_scratch(root)) == 4
        os.killpg(launcher.pid, how)
    wait_until_empty(root)


def test_parent_that_is_killed_before_its_forked_child(start_child, root):
    """The parent's directories go although its child runs; the child's directories stay until the child ends."""
    parent = start_child(FORKING, root)
    child = int(parent.says())
    assert len(list_scratch(root)) == 3
    parent.kill(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while len(names(root)) > 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    (left,) = list_scratch(root)
    assert left.alive
    assert f"process {child} " in left.owner
    parent.go_on()
    assert parent.says() == "2000"
    wait_until_empty(root)


def test_cleanup_process_that_is_killed(start_child, root, tmp_path, monkeypatch):
    """Its owner continues; the next lease starts another one."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    child = start_child(ALONE, root)
    child.says()
    (first,) = cleanup_processes(tmp_path)
    os.kill(first, signal.SIGTERM)
    assert cleanup_processes(tmp_path) == [first]
    os.kill(first, signal.SIGKILL)
    wait_until_none(tmp_path)
    child.go_on()
    child.says()
    assert len(cleanup_processes(tmp_path)) == 1
    child.kill(signal.SIGKILL)
    wait_until_none(tmp_path)
    # The second one has waited for its own lease. It also removes those of the first one, or any start does.
    reclaim(root)
    assert names(root) == []


def test_cleanup_process_that_is_stopped(root, monkeypatch):
    """It reads nothing more: leases are opened and released without waiting for it."""
    started = []
    popen = subprocess.Popen

    class Reader(popen):
        """Reads nothing."""

        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", "import time; time.sleep(3600)"], **options)
            started.append(self)

        def wait(self, timeout=None):
            return None

    monkeypatch.setattr(subprocess, "Popen", Reader)
    process = _cleanup_process.CleanupProcess()
    try:
        for _ in range(10_000):
            process.add(str(root))
    finally:
        for one in started:
            one.kill()
            popen.wait(one)
        process._start_over()


@pytest.fixture
def fresh(monkeypatch) -> Iterator[_cleanup_process.CleanupProcess]:
    """A separate cleanup process, started by the next lease."""
    process = _cleanup_process.CleanupProcess()
    monkeypatch.setattr("nvflare_lazy.scratch.job.cleanup_process", process)
    yield process
    process._start_over()


def test_system_that_refuses_another_process(root, fresh, monkeypatch, caplog):
    """Scratch works without it, and the log has a line about it."""
    caplog.set_level("INFO")
    monkeypatch.setattr(sys, "executable", "/no/python")
    with JobScratch.open(root, job="job", min_free=0) as job:
        assert job.download().new_file().pwrite(b"abc", 0) == 3
    assert "Cannot start a process that removes scratch after a signal: " in caplog.text
    assert names(root) == []


def test_environment_is_not_kept(root, fresh, monkeypatch, tmp_path):
    """A long-running process keeps no secret of the environment, and nothing of this process's output."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("SECRET", "password")
    with JobScratch.open(root, job="job", min_free=0):
        (pid,) = cleanup_processes(tmp_path)
        assert b"password" not in Path(f"/proc/{pid}/environ").read_bytes()
        files = {os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")}
        assert files == {"/dev/null", "socket"}

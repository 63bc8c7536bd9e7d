# SPDX-License-Identifier: Apache-2.0
"""Scratch and the ends of processes: killed, terminated, forked, or simply done."""

from __future__ import annotations

import os
import signal

import pytest

from nvflare_lazy.scratch import JobScratch, list_scratch, reclaim
from tests.scratch.conftest import names

# As if the machine had failed, or a container had ended with all its processes.
WITHOUT_CLEANUP = """
from nvflare_lazy.scratch._cleanup_process import cleanup_process

cleanup_process.add = lambda path: None
"""
OWNER = """
import sys
from nvflare_lazy.scratch import JobScratch

jobs = [JobScratch.open(sys.argv[1], job=f"job {number}", min_free=0) for number in range(int(sys.argv[2]))]
files = [job.download("from site-1").new_file() for job in jobs]
for file in files:
    file.pwrite(bytes(1000), 0)
print(jobs[0].path, flush=True)
sys.stdin.readline()
files[0].finish()
print("alive", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_owner_is_reclaimed_at_the_next_start(start_child, root, how, caplog):
    """`kill -9` in the middle of a download leaves a directory that the next start removes; SIGTERM does no worse."""
    child = start_child(WITHOUT_CLEANUP + OWNER, root, 1)
    path = child.says()
    child.kill(how)
    assert os.path.exists(path)
    assert [report.alive for report in list_scratch(root)] == [False]
    caplog.set_level("INFO")
    with JobScratch.open(root, job="next", min_free=0):
        assert f"Reclaimed {path} (1000 B) of process {child.pid} on " in caplog.text
        assert "job 'job 0'" in caplog.text
        assert not os.path.exists(path)


def test_living_owner_is_not_touched(start_child, root):
    """Other processes start, reclaim and end, while one process continues writing."""
    child = start_child(OWNER, root, 1)
    path = child.says()
    JobScratch.open(root, job="next", min_free=0).release()
    assert reclaim(root, include_other_hosts=True) == []
    assert [(str(report.path), report.alive, report.nbytes) for report in list_scratch(root)] == [(path, True, 1000)]
    child.go_on()
    assert child.says() == "alive"
    assert child.ends() == 0
    assert names(root) == []


RECLAIMER = """
import sys
from nvflare_lazy.scratch import reclaim

print(flush=True)
sys.stdin.readline()
print(",".join(one.job for one in reclaim(sys.argv[1])), flush=True)
"""


def test_processes_that_reclaim_at_once(start_child, root):
    """Each dead directory is reclaimed by exactly one of them, and none of them fails."""
    owner = start_child(WITHOUT_CLEANUP + OWNER, root, 30)
    owner.says()
    owner.kill(signal.SIGKILL)
    reclaimers = [start_child(RECLAIMER, root) for _ in range(4)]
    for reclaimer in reclaimers:
        reclaimer.says()
    for reclaimer in reclaimers:
        reclaimer.go_on()
    reclaimed = [job for reclaimer in reclaimers for job in reclaimer.says().split(",") if job]
    assert sorted(reclaimed) == sorted(f"job {number}" for number in range(30))
    assert [reclaimer.ends() for reclaimer in reclaimers] == [0] * 4
    assert names(root) == []


ENDING = """
import sys, threading
from nvflare_lazy.scratch import JobScratch

job = JobScratch.open(sys.argv[1], job="job", min_free=0)
file = job.download().new_file()
file.pwrite(b"abc", 0)
kept = file.finish()
if "writing" in sys.argv[2]:
    busy = job.download()
    def write_on_and_on():
        while True:
            file = busy.new_file()
            file.pwrite(bytes(100000), 0)
            file.close()
    for _ in range(3):
        threading.Thread(target=write_on_and_on, daemon=True).start()
threading.excepthook = lambda arguments: None
if "exception" in sys.argv[2]:
    raise RuntimeError("the script fails")
if "exit" in sys.argv[2]:
    sys.exit(3)
"""


@pytest.mark.parametrize("how", ["end", "exit", "writing", "writing, exit"])
def test_end_of_the_interpreter_cleans_up(start_child, root, monkeypatch, how):
    """A process that ends without releasing anything, even in the middle of writing, leaves an empty root."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(root))
    child = start_child(ENDING, root, how)
    assert child.ends() == (3 if "exit" in how else 0)
    assert names(root) == []


FORKING = """
import os, sys
from nvflare_lazy.errors import (ScratchError)
from nvflare_lazy.scratch import JobScratch, reclaim

job = JobScratch.open(sys.argv[1], job="of the parent", min_free=0)
download = job.download()
file = download.new_file()
file.pwrite(b"abc", 0)
if os.fork() == 0:
    refused = 0
    uses = [lambda: file.pwrite(b"x", 0), file.finish, lambda: download.adopt("x"), download.new_file, job.download]
    for use in uses:
        try:
            use()
        except ScratchError as error:
            assert "JobScratch in each process" in str(error)
            refused += 1
    reclaimed = reclaim(sys.argv[1], include_other_hosts=True)
    own = JobScratch.open(sys.argv[1], job="of the child", min_free=0)
    own.download().new_file().pwrite(b"of the child", 0)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(30)]  # gets the numbers that the parent's files had
    file.close()
    download.release()
    job.release()
    for fd in opened:
        os.close(fd)  # raises if somebody else closed it
    print(refused, reclaimed, flush=True)
    sys.exit(0)  # runs finalizers
os.wait()
file.pwrite(b"def", 3)
print(open(file.finish().path, "rb").read(), len(os.listdir(sys.argv[1])), flush=True)
"""


def test_forked_child_does_not_touch_what_its_parent_has(start_child, root, monkeypatch):
    """In a child the parent's scratch refuses to be used, is not removed by anything, and a new one can be opened."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(root))
    child = start_child(FORKING, root)
    assert child.says() == "5 []"
    assert child.says() == "b'abcdef' 2"
    assert child.ends() == 0
    assert names(root) == []


SURVIVED_BY_A_CHILD = """
import os, sys
from nvflare_lazy.scratch import JobScratch

job = JobScratch.open(sys.argv[1], job="of the parent", min_free=0)
file = job.download().new_file()
file.pwrite(bytes(1000), 0)
if os.fork() == 0:
    os.write(1, f"{os.getppid()}\\n".encode())
sys.stdin.readline()
os._exit(0)
"""


def test_forked_child_does_not_keep_its_parent_alive(start_child, root):
    """Children share their parent's locks; one that outlives it must not make its scratch look alive."""
    parent = start_child(WITHOUT_CLEANUP + SURVIVED_BY_A_CHILD, root)
    assert int(parent.says()) == parent.pid
    assert reclaim(root) == []
    parent.kill(signal.SIGKILL)
    assert [one.job for one in reclaim(root)] == ["of the parent"]
    parent.go_on()

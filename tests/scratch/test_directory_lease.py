# SPDX-License-Identifier: Apache-2.0
"""The lease on a directory that outlives a job: refused to a second job, and taken over from processes that ended."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from dataclasses import replace

import pytest

from nvflare_lazy.errors import JobCheckpointError
from nvflare_lazy.scratch import DirectoryLease
from nvflare_lazy.scratch import _lease as lease_module
from nvflare_lazy.scratch._lease import OwnerRecord
from nvflare_lazy.scratch.directory_lease import LEASE_NAME

OWNER = """
import sys
from pathlib import Path
from nvflare_lazy.scratch import DirectoryLease

lease = DirectoryLease(Path(sys.argv[1]), job="job-1")
print("leased", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(params=["locks", "no locks"])
def file_system(request, monkeypatch) -> str:
    """A file system with locks, and one that refuses them, as some network file systems do."""
    if request.param == "no locks":

        def refuse(fd, operation):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param


def leave(directory, **changes: object) -> None:
    """Write the lease that another process would have left."""
    record = replace(OwnerRecord.for_this_process("job-1"), **changes)
    (directory / LEASE_NAME).write_bytes(record.to_json())


def test_another_process(tmp_path, start_child, file_system):
    """Refused while it runs, and while it is stopped; taken over after `kill -9`, without another command."""
    child = start_child(OWNER, tmp_path)
    assert child.says() == "leased"
    for number in (signal.SIGCONT, signal.SIGSTOP):
        os.kill(child.pid, number)
        with pytest.raises(JobCheckpointError) as caught:
            DirectoryLease(tmp_path, "job-2")
        assert f"{tmp_path} is in use by job 'job-1', process {child.pid} on {os.uname().nodename}" in str(caught.value)
        assert "choose another checkpoint_dir" in str(caught.value)
    child.kill(signal.SIGKILL)
    lease = DirectoryLease(tmp_path, "job-2")
    assert OwnerRecord.from_json((tmp_path / LEASE_NAME).read_bytes()).job == "job-2"
    lease.release()
    assert not list(tmp_path.iterdir())


def test_jobs_of_one_process(tmp_path, file_system):
    """One after the other, as in the simulator; a job that was never ended is done when its persistor is gone."""
    for job in ("a", "b"):
        lease = DirectoryLease(tmp_path, job)
        with pytest.raises(JobCheckpointError, match=f"job '{job}'"):
            DirectoryLease(tmp_path, "c")
        lease.release()
        lease.release()
    lease = DirectoryLease(tmp_path, "d")
    del lease
    assert not list(tmp_path.iterdir())


def test_a_forked_process_that_ends_does_not_release_it(tmp_path, file_system):
    """It has the object, but not the lease; when the owner releases it, no copy of the lock is left."""
    lease = DirectoryLease(tmp_path, "a")
    done, finish = os.pipe()
    pid = os.fork()
    if not pid:
        lease.release()
        os.read(done, 1)
        os._exit(0)
    with pytest.raises(JobCheckpointError, match="job 'a'"):
        DirectoryLease(tmp_path, "b")
    lease.release()
    DirectoryLease(tmp_path, "b").release()
    os.write(finish, b"x")
    assert os.waitpid(pid, 0) == (pid, 0)


@pytest.mark.parametrize(
    ("changes", "taken_without_locks"),
    [
        ({"pid": 1 << 22, "started": 1}, True),
        ({"started": 1}, True),
        ({"boot_id": "another"}, True),
        ({"hostname": "node-7", "boot_id": "another"}, False),
        ({"pid_namespace": "another"}, False),
    ],
    ids=["ended", "its number is another process's", "restarted host", "another host", "another container"],
)
def test_leases_that_were_left(tmp_path, file_system, changes, taken_without_locks):
    """A lock that is free proves that the owner ended. Without locks, another host's lease stays, with a command."""
    leave(tmp_path, **changes)
    if taken_without_locks or file_system == "locks":
        DirectoryLease(tmp_path, "job-2").release()
        return
    with pytest.raises(JobCheckpointError) as caught:
        DirectoryLease(tmp_path, "job-2")
    assert "job 'job-1'" in str(caught.value)
    command = str(caught.value).rpartition("If that job has ended: ")[2]
    assert command == f"rm {tmp_path / LEASE_NAME}"
    os.unlink(command.removeprefix("rm "))
    DirectoryLease(tmp_path, "job-2").release()


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"pid": 1e400}', b"\xff"])
def test_damaged_leases(tmp_path, file_system, content):
    """With locks they say nothing; without locks their owner is unknown."""
    (tmp_path / LEASE_NAME).write_bytes(content)
    if file_system == "locks":
        DirectoryLease(tmp_path, "job-2").release()
    else:
        with pytest.raises(JobCheckpointError, match="If that job has ended: rm "):
            DirectoryLease(tmp_path, "job-2")


def test_a_lease_that_is_removed_by_hand(tmp_path, file_system):
    """Another job may take a new one, which the first job does not remove."""
    first = DirectoryLease(tmp_path, "a")
    (tmp_path / LEASE_NAME).unlink()
    second = DirectoryLease(tmp_path, "b")
    first.release()
    assert (tmp_path / LEASE_NAME).exists()
    second.release()


def test_a_lease_that_is_released_while_it_is_taken(tmp_path, monkeypatch):
    """The lock of a file that has lost its name is worth nothing: the lease is taken again."""
    other = DirectoryLease(tmp_path, "a")
    try_lock = lease_module.try_lock

    def lock_after_release(fd):
        other.release()
        return try_lock(fd)

    monkeypatch.setattr("nvflare_lazy.scratch.directory_lease.try_lock", lock_after_release)
    lease = DirectoryLease(tmp_path, "b")
    assert OwnerRecord.from_json((tmp_path / LEASE_NAME).read_bytes()).job == "b"
    lease.release()


def test_what_is_not_a_file_is_not_followed(tmp_path):
    """A link, a pipe or a directory of that name is an error of the system, and nothing is written through it."""
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LEASE_NAME).symlink_to(target)
    (tmp_path / "directory" / LEASE_NAME).mkdir(parents=True)
    for name in ("link", "directory"):
        with pytest.raises(OSError, match=LEASE_NAME):
            DirectoryLease(tmp_path / name, "job-2")
    assert target.read_text() == "mine"

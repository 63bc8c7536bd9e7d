# SPDX-License-Identifier: Apache-2.0
"""Directories of ended owners are removed; those of running owners are not touched, whatever their records contain."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time

import pytest

from nvflare_lazy.scratch import JobScratch, _lease, list_scratch, reclaim
from nvflare_lazy.scratch._lease import OwnerRecord, OwnerStatus, process_start_time
from tests.scratch.conftest import bytes_of, names

ELSEWHERE = {"hostname": "elsewhere", "boot_id": "another"}


@pytest.fixture
def no_locks(monkeypatch):
    """A file system that does not lock, as some network file systems."""

    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_dead_owner(root, leave_behind, caplog):
    """The directory and lease of an ended owner are removed when the next job opens its scratch, which logs it."""
    caplog.set_level("INFO")
    lost = leave_behind()
    with JobScratch.open(root, job="job", min_free=0) as job:
        assert names(root) == sorted([job.path.name, f"{job.path.name}.lease"])
    assert f"Reclaimed {lost} (1000 B) of process {os.getpid()} on" in caplog.text


def test_pid_that_is_used_again(leave_behind, root):
    """A record with the pid of a running process, this one, but another start time belongs to an ended process."""
    start = process_start_time(os.getpid())
    assert start is not None
    lost = leave_behind(started=start - 1)
    assert [one.path for one in reclaim(root)] == [lost]


def test_process_that_runs_is_believed(leave_behind, root):
    """A record of a running process is not touched even if its lock is gone."""
    leave_behind(started=process_start_time(os.getpid()))
    assert reclaim(root, include_other_hosts=True) == []
    assert [lease.alive for lease in list_scratch(root)] == [True]


def test_zombie_is_dead(root, leave_behind, start_child):
    """A killed process whose parent has not waited for it still has its number, and nothing else."""
    child = start_child("import time; print(flush=True); time.sleep(100)")
    child.says()
    leave_behind(pid=child.pid, started=process_start_time(child.pid))
    assert reclaim(root) == []
    child.process.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert len(reclaim(root)) == 1


@pytest.mark.parametrize(
    ("changes", "locks", "alive", "told"),
    [
        ({}, True, False, True),
        ({}, False, False, True),
        (ELSEWHERE, True, None, True),
        (ELSEWHERE, False, None, True),
        ({"boot_id": "before"}, True, False, True),
        ({"boot_id": "before"}, False, None, True),
        ({"hostname": "another container"}, True, False, True),
        ({"pid_namespace": "pid:[1]", "pid": 1}, True, False, True),
        ({"pid_namespace": "pid:[1]", "pid": 1}, False, None, True),
        ({"pid": 2**31 - 1}, False, False, True),
        ({"pid": 2**70}, True, False, True),
    ],
    ids=lambda value: ", ".join(value) or "this host" if isinstance(value, dict) else None,
)
def test_who_is_dead(request, root, leave_behind, changes, locks, alive, told):
    """The lock proves it, or else the record; if neither is conclusive, the directory stays until a user removes it."""
    lost = leave_behind(**changes)
    if not locks:
        request.getfixturevalue("no_locks")
    (report,) = list_scratch(root)
    assert (report.path, report.alive, report.nbytes, report.job) == (lost, alive, 1000, "lost")
    assert 0 <= report.age < 60
    assert len(reclaim(root)) == (alive is False)
    assert lost.exists() == (alive is not False)
    reclaim(root, include_other_hosts=True)
    assert names(root) == []


def test_host_without_names_for_its_boots(root, leave_behind, monkeypatch):
    """Where the system names neither boots nor namespaces, as on macOS, the host name is used instead."""
    monkeypatch.setattr("nvflare_lazy.scratch._lease.boot_id", lambda: "")
    record = OwnerRecord.for_this_process("job")
    assert record.status() is OwnerStatus.ALIVE
    leave_behind(hostname="elsewhere", boot_id="")
    assert [report.alive for report in list_scratch(root)] == [None]


@pytest.mark.parametrize("written", [b"", b"{", b'{"pid": 1}', b"[]", b"\xff" * 100, b'{"pid":' * 10000])
def test_record_that_is_not_whole(root, leave_behind, written):
    """A truncated lease has no owner, because an owner would hold its lock."""
    leave_behind().with_suffix(".lease").write_bytes(written)
    assert [one.owner for one in reclaim(root)] == ["an unknown owner"]
    assert names(root) == []


def test_crash_while_creating(root, leave_behind):
    """A crash between any two steps of making a lease leaves nothing that stays."""
    lost = leave_behind()
    (root / "job-1111111111111111.lease.new").write_bytes(b"{")
    (root / "job-2222222222222222.lease").write_bytes(lost.with_suffix(".lease").read_bytes())
    (root / "job-3333333333333333").mkdir()
    leave_behind("4" * 16)
    (root / "job-4444444444444444" / "download" / "made with a strange umask").mkdir(mode=0)
    assert len(reclaim(root)) == 4
    assert names(root) == []


def test_lease_without_locks_that_is_being_made(root, leave_behind, no_locks):
    """Without locks a lease in the making is only taken for abandoned when it is old."""
    leave_behind()
    (new := root / "job-1111111111111111.lease.new").touch()
    reclaim(root, include_other_hosts=True)
    assert names(root) == [new.name]
    os.utime(new, (time.time() - 7200,) * 2)
    reclaim(root)
    assert names(root) == []


def test_nothing_else_is_touched(root, leave_behind, tmp_path):
    """A root may have other things in it, and a dead directory links to elsewhere: neither is reclaimed."""
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").write_text("keep")
    lost = leave_behind()
    (lost / "link").symlink_to(precious)
    (lost / "download" / "link").symlink_to(precious / "file")
    (root / "job-1111111111111111").symlink_to(precious)
    (root / "job-2222222222222222.lease").symlink_to(precious / "file")
    others = ["job-abc", "job-0123456789ABCDEF", "notes.lease", "results"]
    for other in others:
        (root / other).mkdir()
    reclaim(root, include_other_hosts=True)
    assert (precious / "file").read_text() == "keep"
    assert set(names(root)) >= set(others)
    assert not lost.exists()


def test_living_owner_whose_lease_file_was_deleted(root):
    """The lock on the directory still shows that the owner is running."""
    with JobScratch.open(root, job="job", min_free=0) as job:
        file = job.download().new_file()
        job.path.with_suffix(".lease").unlink()
        assert reclaim(root, include_other_hosts=True) == []
        assert [report.alive for report in list_scratch(root)] == [True]
        file.pwrite(b"abc", 0)
        assert bytes_of(file.finish()) == b"abc"
    assert names(root) == []


def test_lease_taken_for_an_abandoned_one(root, monkeypatch):
    """Another process may reclaim a lease file between its creation and its locking; the maker makes another."""
    taken = []
    really_lock = _lease.try_lock

    def lock_too_late(fd, **options):
        if not taken:
            taken.extend(names(root))
            monkeypatch.setattr(_lease, "try_lock", really_lock)
            reclaim(root)
            assert names(root) == []
        return really_lock(fd, **options)

    root.mkdir(mode=0o700)
    monkeypatch.setattr(_lease, "try_lock", lock_too_late)
    with JobScratch.open(root, job="job", min_free=0) as job:
        assert taken
        assert job.path.name not in taken[0]
        assert [report.alive for report in list_scratch(root)] == [True]


def test_lease_that_goes_while_it_is_looked_at(root, leave_behind, monkeypatch):
    """Of two that reclaim the same directory the second, however late, finds that there is nothing left to reclaim."""
    leave_behind()
    inner = []

    def lock_too_late(fd, **options):
        monkeypatch.setattr("nvflare_lazy.scratch._reclaim.try_lock", _lease.try_lock)
        inner.extend(reclaim(root))
        return _lease.try_lock(fd, **options)

    monkeypatch.setattr("nvflare_lazy.scratch._reclaim.try_lock", lock_too_late)
    assert reclaim(root) == []
    assert len(inner) == 1


def test_works_without_locks(root, no_locks, caplog):
    """On a file system without locks everything works, and what that costs is said."""
    with JobScratch.open(root, job="job", min_free=0) as job:
        assert "without locks" in caplog.text
        JobScratch.open(root, job="another", min_free=0).release()
        assert job.path.exists()
    assert names(root) == []


def test_one_that_cannot_be_reclaimed(root, leave_behind, monkeypatch, caplog):
    """One directory that resists does not keep the others from being reclaimed, nor the job from starting."""
    leave_behind("0" * 16)
    leave_behind("1" * 16)
    remove = os.rmdir

    def resist(path, **options):
        if "0" * 16 in str(path):
            raise PermissionError(errno.EPERM, "no")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", resist)
    with JobScratch.open(root, job="job", min_free=0):
        assert [lease.path.name for lease in list_scratch(root) if not lease.alive] == ["job-" + "0" * 16]
    assert "Cannot reclaim" in caplog.text


def test_jobs_open_while_others_reclaim(root):
    """Reclaiming without end takes nothing from jobs that open, write and release at the same time."""
    stop, errors = threading.Event(), []

    def reclaim_on_and_on():
        while not stop.is_set():
            if found := reclaim(root):
                errors.append(found)

    def work():
        try:
            for _ in range(60):
                with JobScratch.open(root, job="job", min_free=0, warn=False) as job:
                    file = job.download().new_file()
                    file.pwrite(b"abc", 0)
                    assert bytes_of(file.finish()) == b"abc"
        except Exception as error:
            errors.append(error)

    root.mkdir(mode=0o700)
    workers = [threading.Thread(target=work) for _ in range(4)]
    reclaimers = [threading.Thread(target=reclaim_on_and_on) for _ in range(2)]
    for thread in workers + reclaimers:
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    for thread in reclaimers:
        thread.join()
    assert errors == []
    assert names(root) == []

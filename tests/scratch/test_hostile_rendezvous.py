# SPDX-License-Identifier: Apache-2.0
"""Shared files when the peer is malicious, the machine refuses, or a process dies."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from nvflare_lazy.errors import DiskFullError, ScratchError, ScratchReleasedError
from nvflare_lazy.scratch import JobScratch, _recycled_files, list_scratch, reclaim
from nvflare_lazy.scratch.rendezvous import visit
from tests.scratch.conftest import bytes_of, names, show, wait_until_empty, written
from tests.scratch.test_processes import WITHOUT_CLEANUP

MIB = 1 << 20
DATA = os.urandom(2 * MIB)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user or mount something")


@pytest.fixture
def receiver(root):
    with JobScratch.open(root, job="receiver", min_free=0) as receiver:
        yield receiver


@pytest.fixture
def visited(job, receiver):
    with receiver.visit(job.rendezvous().lease) as visited:
        yield visited


def replace_by_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def replace_by_directory(path):
    path.unlink()
    path.mkdir(0o700)


HANDOFF, PROBE = "handoff", "handoff/probe"


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("", replace_by_link),
        (HANDOFF, replace_by_link),
        (PROBE, replace_by_link),
        (PROBE, replace_by_pipe),
        (PROBE, replace_by_directory),
        (PROBE, lambda path: path.write_bytes(b"short")),
        (PROBE, lambda path: path.write_bytes(bytes(33))),
        (PROBE, lambda path: path.unlink()),
        (HANDOFF, shutil.rmtree),
        ("", lambda path: path.chmod(0o755)),
        (HANDOFF, lambda path: path.chmod(0o770)),
        (PROBE, lambda path: path.chmod(0o640)),
        pytest.param("", lambda path: os.chown(path, NOBODY, -1), marks=needs_root),
        pytest.param(HANDOFF, lambda path: os.chown(path, NOBODY, -1), marks=needs_root),
        pytest.param(PROBE, lambda path: os.chown(path, NOBODY, -1), marks=needs_root),
    ],
)
def test_only_a_directory_of_this_user_alone_is_visited(job, receiver, place, change):
    """Each part of the path belongs to this user, no other user reads it, and it is not a link."""
    lease = job.rendezvous().lease
    receiver.visit(lease).close()
    change(job.path / place)
    assert receiver.visit(lease) is None


@pytest.mark.parametrize(
    "change",
    [
        replace_by_link,
        replace_by_pipe,
        replace_by_directory,
        lambda path: path.chmod(0o620),
        lambda path: path.chmod(0o602),
        lambda path: os.truncate(path, 5),
        pytest.param(lambda path: os.chown(path, NOBODY, -1), marks=needs_root),
    ],
)
def test_only_a_file_of_this_user_is_taken(job, receiver, visited, change):
    """A link is neither made nor opened; nothing of the file is left or counted."""
    id = show(job, written(job, DATA))
    change(job.path / HANDOFF / id)
    download = receiver.download()
    with pytest.raises(ScratchError):
        download.take_link(visited, id, len(DATA))
    with pytest.raises(ScratchError):
        visited.open(id, len(DATA))
    assert receiver.used == 0
    assert not names(download.path)


@pytest.mark.parametrize(
    "number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT, errno.EDQUOT, errno.ENOSPC, errno.EROFS]
)
def test_a_file_system_that_refuses(job, receiver, visited, monkeypatch, number):
    """The reason has a name on both sides, nothing is counted, and the file is as it was before."""
    file = written(job, DATA)
    id = show(job, file)
    before = names(job.path / HANDOFF)

    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        download = receiver.download()
        with pytest.raises(ScratchError):
            download.take_link(visited, id, len(DATA))
        with pytest.raises(ScratchError) as raised:
            show(job, file)
        assert raised.value.errno == number
        # The next one is not even offered.
        with pytest.raises(ScratchError, match=r"cannot share files .* hard links"):
            receiver.rendezvous()
    assert names(job.path / HANDOFF) == before
    assert receiver.used == 0
    assert not names(download.path)
    assert bytes_of(download.take_link(visited, id, len(DATA))) == DATA
    job.rendezvous().take_back([id])
    assert os.stat(file.path).st_mode & 0o777 == 0o600
    receiver.rendezvous()


def test_a_file_on_another_file_system_is_not_shown(job, small_disk):
    """The sender has to copy it, which the number of the error tells."""
    with JobScratch.open(small_disk, job="elsewhere", min_free=0, warn=False) as elsewhere:
        with pytest.raises(ScratchError, match="Invalid cross-device link"):
            show(job, written(elsewhere, DATA))
        # In memory, shared files work as on a disk; they are not used again.
        id = show(elsewhere, written(elsewhere, DATA))
        with JobScratch.open(small_disk, job="receiver", min_free=0, warn=False) as receiver:
            assert receiver.visit(job.rendezvous().lease) is None
            with receiver.visit(elsewhere.rendezvous().lease) as visited:
                assert bytes_of(receiver.download().take_link(visited, id, len(DATA))) == DATA


def test_a_link_needs_no_free_space(job, receiver, visited, monkeypatch):
    """A link uses no disk space, and therefore works on a full disk."""
    id = show(job, written(job, DATA))
    full = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr("nvflare_lazy.scratch._quota.os.statvfs", lambda path: full)
    taken = receiver.download().take_link(visited, id, len(DATA))
    assert receiver.used == len(DATA)
    with pytest.raises(DiskFullError):
        receiver.download(reserve=1)
    del taken
    assert receiver.used == 0


def test_lent_files_free_nothing(root, receiver):
    """Removing a file that a receiver has does not free space; removing one that it has released does."""
    with JobScratch.open(root, job="sender", min_free=0, quota=10 * MIB) as sender:
        lease = sender.rendezvous().lease
        recycled = sender._quota.recycled_files
        file = written(sender, DATA)
        with receiver.visit(lease) as visited:
            taken = receiver.download().take_link(visited, id := show(sender, file), len(DATA))
        sender.rendezvous().take_back([id])
        del file
        assert (len(recycled.files), recycled.nbytes) == (1, 0)
        recycled.remove(1)
        assert not recycled.files
        assert bytes_of(taken) == DATA
        files = [written(sender, DATA) for _ in range(2)]
        del files
        assert recycled.nbytes == 2 * len(DATA)
        recycled.remove(1)
        assert recycled.nbytes == len(DATA)


def test_without_write_leases_a_lent_file_is_not_used_again(job, receiver, visited, monkeypatch):
    """A file system that cannot tell who has it open gets a new file instead, and the old one goes."""
    file = written(job, DATA)
    taken = receiver.download().take_link(visited, id := show(job, file), len(DATA))
    job.rendezvous().take_back([id])
    del file
    del taken
    assert len(names(job.path / "recycled")) == 1

    def refuse(fd, command, *rest):
        raise OSError(errno.EAGAIN, "in use, says NFS of every file")

    monkeypatch.setattr(_recycled_files.fcntl, "fcntl", refuse)
    assert bytes_of(written(job, b"new")) == b"new"
    assert names(job.path / "recycled") == []


def test_what_a_receiver_reads_is_never_written_again(job, receiver, visited):
    """It takes and opens files while the sender takes them back and writes the next: what it gets is that file."""
    size = MIB + (256 << 10)
    ids: list[tuple[str, int]] = [(show(job, written(job, bytes(size))), 0)]
    done = threading.Event()
    wrong: list[object] = []
    taken = [0, 0]

    def take(by_link: bool) -> None:
        download = receiver.download()
        while not done.is_set():
            id, value = ids[-1]
            try:
                file = receiver.download().take_link(visited, id, size) if by_link else visited.open(id, size)
            except ScratchReleasedError:
                continue
            taken[by_link] += 1
            wrong.extend(value for _ in range(2) if bytes_of(file) != bytes([value]) * size)
            del file
        download.release()

    threads = [threading.Thread(target=take, args=(by_link,)) for by_link in (True, False)]
    for thread in threads:
        thread.start()
    inodes = set()
    try:
        for number in range(1, 150):
            id, _ = ids[-1]
            file = written(job, bytes([number]) * size)
            inodes.add(os.stat(file.path).st_ino)
            ids.append((show(job, file), number))
            job.rendezvous().take_back([id])
            del file
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert all(taken)
    assert len(inodes) < 149  # some were used again, or this shows nothing


@pytest.mark.parametrize("call", ["link", "open"])
def test_a_link_that_comes_too_late_is_not_used(job, receiver, visited, monkeypatch, call):
    """The kernel may finish a link or an open after the sender has found none, and begun to write."""
    id = show(job, written(job, DATA))
    original = getattr(os, call)

    def take_back_meanwhile(name, *arguments, **options):
        result = original(name, *arguments, **options)
        if name == id:
            monkeypatch.undo()
            job.rendezvous().take_back([id])
        return result

    monkeypatch.setattr(os, call, take_back_meanwhile)
    with pytest.raises(ScratchReleasedError):
        receiver.download().take_link(visited, id, len(DATA)) if call == "link" else visited.open(id, len(DATA))
    assert receiver.used == 0


def test_a_file_is_read_only_as_long_as_it_is_shown(job, receiver, tmp_path):
    """Twice shown, taken back twice; a checkpoint that other users may read stays readable to them."""
    path = tmp_path / "checkpoint"
    path.write_bytes(DATA)
    path.chmod(0o664)
    with path.open("rb") as file:
        ids = [job.rendezvous().show(file.fileno()) for _ in range(2)]
        for id in ids:
            assert path.stat().st_mode & 0o777 == 0o444
            job.rendezvous().take_back([id, id])
        assert path.stat().st_mode & 0o777 == 0o664
        # A receiver may hand it on, and end that later than the sender.
        first = job.rendezvous().show(file.fileno())
        second = receiver.rendezvous().show(file.fileno())
        job.rendezvous().take_back([first])
        receiver.rendezvous().take_back([second])
    assert path.stat().st_mode & 0o777 == 0o664
    assert path.stat().st_nlink == 1


def test_a_forked_process_takes_nothing_back(job):
    """Its finalizers run with a descriptor number that may be another file by then."""
    file = written(job, DATA)
    id = show(job, file)
    shared = job.rendezvous()
    child = os.fork()
    if not child:
        shared.take_back([id])
        try:
            show(job, file)
        except ScratchError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert id in names(job.path / HANDOFF)


def test_after_the_end_of_the_job(job, receiver):
    """Payloads may be released later than the job; then no file is offered."""
    file = written(job, DATA)
    id = show(job, file)
    shared = job.rendezvous()
    visited = receiver.visit(shared.lease)
    job.release()
    shared.take_back([id])
    with pytest.raises(ScratchReleasedError):
        show(job, file)
    with pytest.raises(ScratchReleasedError):
        receiver.download().take_link(visited, id, len(DATA))
    with file.descriptor() as fd, pytest.raises(ScratchError):
        shared.show(fd)
    descriptor = visited._fd
    del visited
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_link_is_not_dropped_from_a_closed_directory(job, receiver, visited, monkeypatch):
    """The number of its descriptor may be another directory by then, with a file of the same name."""
    download = receiver.download()
    taken = download.take_link(visited, show(job, written(job, DATA)), len(DATA))
    download.release()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", None)
        download.drop_link(taken)
    assert receiver.used == 0


@needs_root
def test_another_user_gets_nothing():
    """Not even in a root that it can enter."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as place,  # pytest's directories are for this user only
        JobScratch.open(Path(place, "root"), job="job", min_free=0) as job,
    ):
        lease = job.rendezvous().lease
        for directory in (Path(place), job.root):
            directory.chmod(0o755)
        child = os.fork()
        if not child:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os._exit(0 if os.access(job.root, os.X_OK) and visit(job.root, lease) is None else 1)
        assert os.waitpid(child, 0)[1] == 0


IN_A_CONTAINER = """
import sys
from pathlib import Path
from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch import JobScratch

with JobScratch.open(sys.argv[1], job="in a container", min_free=0, warn=False) as job:
    print(job.visit(sys.argv[2]))
    try:
        print(job.rendezvous())
    except ScratchError as error:
        print(error)
"""


@needs_root
@pytest.mark.parametrize("hidden", ["the root", "/proc"])
def test_another_mount_namespace(job, root, hidden):
    """A container with its own file system at the same path finds no lease; one without /proc shares no file."""
    place = root if hidden == "the root" else "/proc"
    mount = 'mount -t tmpfs -o mode=0700 none "$1" && shift && exec "$@"'
    lease = job.rendezvous().lease
    command = ["unshare", "-m", "sh", "-c", mount, "sh", place, sys.executable, "-c", IN_A_CONTAINER, root, lease]
    there, shared = subprocess.run(command, check=True, stdout=-1, text=True).stdout.splitlines()
    if hidden == "the root":
        assert there == "None"
        assert "Rendezvous" in shared
    else:
        assert "VisitedRendezvous" in there
        assert "mount /proc" in shared
    assert [report.job for report in list_scratch(root)] == ["job"]


SENDER = """
import sys
from nvflare_lazy.scratch import JobScratch

job = JobScratch.open(sys.argv[1], job="sender", min_free=0)
def writes(begun=None):
    file = begun or job.download().new_file()
    file.pwrite(bytes(2 << 20), 0)
    return file
def say(*words):
    print(*words, flush=True)
    sys.stdin.readline()
shared = job.rendezvous()
first, second = writes(), writes()
say(shared.lease)                                          # in the middle of a spill
first = first.finish()
with first.descriptor() as fd:
    id = shared.show(fd)
say(id)                                                    # shown
shared.take_back([id])
del first
say()                                                      # lent
"""
RECEIVER = """
import sys
from nvflare_lazy.scratch import JobScratch

def say(*words):
    print(*words, flush=True)
    return sys.stdin.readline().strip()
job = JobScratch.open(sys.argv[1], job="receiver", min_free=0)
lease, id = say().split()
visited = job.visit(lease)
say()                                                      # visited
taken = job.download().take_link(visited, id, 2 << 20)
say()                                                      # taken
"""


@pytest.mark.parametrize("state", ["spilling", "shown", "lent"])
@pytest.mark.parametrize("cleanup", ["", WITHOUT_CLEANUP], ids=["cleanup", "next start"])
def test_a_killed_sender(start_child, root, state, cleanup):
    """Its names are removed at once, or at the next start; the receiver keeps the file as long as it needs it."""
    sender = start_child(cleanup + SENDER, root)
    lease = sender.says()
    with JobScratch.open(root, job="receiver", min_free=0) as receiver:
        taken = None
        if state != "spilling":
            sender.go_on()
            id = sender.says()
            with receiver.visit(lease) as visited:
                taken = receiver.download().take_link(visited, id, 2 * MIB)
            if state == "lent":
                sender.go_on()
                sender.says()
        sender.kill(signal.SIGKILL)
        if cleanup:
            # The shared file is not freed by that, and is not reported as such; the probe is.
            assert [report.nbytes for report in reclaim(root)] == [(4 if taken is None else 2) * MIB + 32]
            assert receiver.visit(lease) is None
        if taken is not None:
            assert bytes_of(taken) == bytes(2 * MIB)
            assert taken.size == 2 * MIB
            assert receiver.used == 2 * MIB
    wait_until_empty(root)


@pytest.mark.parametrize("state", ["visited", "taken"])
def test_a_killed_receiver(start_child, root, state):
    """The sender's file is its own again after the next start, and is used again."""
    with JobScratch.open(root, job="sender", min_free=0) as sender:
        child = start_child(WITHOUT_CLEANUP + RECEIVER, root)
        child.says()
        file = written(sender, bytes(2 * MIB))
        inode = os.stat(file.path).st_ino
        id = show(sender, file)
        child.process.stdin.write(f"{sender.rendezvous().lease} {id}\n")
        child.process.stdin.flush()
        child.says()
        if state == "taken":
            child.go_on()
            child.says()
        child.kill(signal.SIGKILL)
        sender.rendezvous().take_back([id])
        del file
        assert (os.stat(written(sender, DATA).path).st_ino == inode) is (state == "visited")
        assert [report.job for report in reclaim(root)] == ["receiver"]
        files = [written(sender, DATA) for _ in range(2)]
        assert inode in [os.stat(file.path).st_ino for file in files]
        del files
    assert names(root) == []

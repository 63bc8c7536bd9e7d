# SPDX-License-Identifier: Apache-2.0
"""Long reads are shared among threads: every byte is read once, and no thread uses the caller's memory afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from nvflare_lazy.errors import TruncatedSourceError
from nvflare_lazy.tensors import _parallel_read
from nvflare_lazy.tensors._parallel_read import MIN_SHARED_BYTES, parallel_for_ranges
from nvflare_lazy.tensors.tensor_file import open_source

MANY = 4 * MIN_SHARED_BYTES + 5


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    """Have helpers on any machine."""
    monkeypatch.setattr(_parallel_read, "available_cores", lambda: 4)
    monkeypatch.setattr(_parallel_read, "_helpers", _parallel_read._Helpers())


@pytest.mark.parametrize(
    ("nbytes", "threads"),
    [(MIN_SHARED_BYTES, 2), (3 * MIN_SHARED_BYTES - 1, 3), (MANY, 4), (100 * MIN_SHARED_BYTES + 1, 4)],
)
def test_pieces_make_up_the_whole(nbytes, threads):
    """The pieces follow on each other from the first byte to the last, and several threads do them."""
    seen, together = [], threading.Barrier(threads, timeout=300)
    first = threading.local()

    def work(begin, end):
        if not hasattr(first, "piece"):
            first.piece = begin
            together.wait()  # none passes before all of them have begun
        seen.append((begin, end))

    parallel_for_ranges(work, nbytes)
    seen.sort()
    assert [begin for begin, _ in seen] == [0, *(end for _, end in seen[:-1])]
    assert seen[-1][1] == nbytes


@pytest.mark.parametrize("nbytes", [0, 1, MIN_SHARED_BYTES - 1])
def test_short_work_stays_with_the_caller(nbytes):
    """A read that is too short for sharing is done at once by the calling thread."""
    seen = []
    parallel_for_ranges(lambda begin, end: seen.append((begin, end, threading.get_ident())), nbytes)
    assert seen == [(0, nbytes, threading.get_ident())]


def test_busy_helpers_keep_nobody_waiting():
    """A caller does everything itself while the helpers are busy with another's work."""
    release, busy, own = threading.Event(), threading.Barrier(5, timeout=300), threading.get_ident()
    first_four = {begin for begin, _ in _parallel_read._pieces(MANY, 4)[:4]}

    def hold(begin, end):
        if begin in first_four:
            busy.wait()
            release.wait(300)

    other = threading.Thread(target=parallel_for_ranges, args=(hold, MANY))
    other.start()
    busy.wait()
    try:
        seen = []
        parallel_for_ranges(lambda begin, end: seen.append((begin, end, threading.get_ident())), MANY)
        assert {ident for *_, ident in seen} == {own}
        assert sum(end - begin for begin, end, _ in seen) == MANY
    finally:
        release.set()
        other.join(300)


@pytest.mark.parametrize("own", [True, False])
def test_errors_wait_for_the_helpers(own):
    """An error in any thread is raised, no further piece is started, and by then all threads have stopped."""
    caller, running, begun = threading.get_ident(), [], []
    together = threading.Barrier(4, timeout=300)

    def work(begin, end):
        running.append(begin)
        begun.append(begin)
        together.wait()
        try:
            if (threading.get_ident() == caller) == own:
                raise KeyboardInterrupt if own else OSError("broken")
            threading.Event().wait(0.1)
        finally:
            running.remove(begin)

    with pytest.raises(KeyboardInterrupt if own else OSError):
        parallel_for_ranges(work, MANY)
    assert not running
    assert len(begun) == 4


def test_memory_is_let_go(tmp_path):
    """What helpers have not looked at yet does not hold on to the caller's memory."""
    job = _parallel_read._Job(lambda begin, end: None, MANY, 3)
    job.run(_parallel_read._Helpers())
    job.help()
    assert not hasattr(job, "_work")


def test_a_file_cut_short_is_named(tmp_path):
    """A piece that meets the end of a file reports its position."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MANY))
    source = open_source(path)
    assert source.read() == path.read_bytes()
    os.truncate(path, MANY - 3)
    with pytest.raises(TruncatedSourceError, match=f"ends at byte {MANY - 3}"):
        source.read()


def test_forked_child_has_its_own_helpers(tmp_path):
    """A child process does not have its parent's threads; it reads with new ones."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MANY))
    source = open_source(path)
    expected = source.read()
    child = os.fork()
    if not child:
        os._exit(0 if source.read() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_reading_while_the_interpreter_ends(tmp_path):
    """A reader in an exit handler, or one for which no thread can be started, still gets all bytes."""
    path = tmp_path / "data"
    path.write_bytes(b"x" * MANY)
    script = f"""
import atexit, threading
from nvflare_lazy.tensors import _parallel_read
_parallel_read._helpers.most = 3
from nvflare_lazy.tensors.tensor_file import open_source
source = open_source({str(path)!r})
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
print(source.read().count(b"x"))
atexit.register(lambda: print(source.read().count(b"x")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500)
    assert (done.stdout.split(), done.stderr) == ([str(MANY)] * 2, "")


INTERRUPTED = """
import signal, threading, time
import torch
from nvflare_lazy.tensors import _parallel_read
from nvflare_lazy.tensors.tensor_file import TensorFile, open_source
from nvflare_lazy.tensors.lazy_tensor import LazyTensor

NBYTES = 8 << 20
open("data", "wb").write(bytes([170]) * NBYTES)
_parallel_read._helpers.most = 1
real = TensorFile._read_part

def slow(self, fd, buffer, offset):
    time.sleep(0.05 if threading.current_thread() is threading.main_thread() else 0.6)
    real(self, fd, buffer, offset)

TensorFile._read_part = slow
lazy = LazyTensor(open_source("data"), torch.uint8, (NBYTES,))
target = torch.zeros(NBYTES, dtype=torch.uint8)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.3, 0.1)
try:
    target.copy_(lazy)
except KeyboardInterrupt:
    signal.setitimer(signal.ITIMER_REAL, 0)
    target.zero_()
    time.sleep(1.5)
    print("interrupted", target.count_nonzero().item())
"""


def test_interrupted_while_helpers_write(tmp_path):
    """However often the caller is interrupted, the call returns only after all writes to its memory have ended."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert (done.stdout.split(), done.stderr) == (["interrupted", "0"], "")


def test_what_helpers_have_begun_is_done():
    """A helper that has taken the last piece does it, though the caller finds nothing more to do."""
    taken, goes_on = threading.Event(), threading.Event()
    done = []

    def work(begin, end):
        if threading.current_thread() is not threading.main_thread():
            taken.set()
            goes_on.wait(300)
        else:
            taken.wait(300)
            goes_on.set()
        done.append((begin, end))

    parallel_for_ranges(work, MIN_SHARED_BYTES)
    assert sorted(done) == list(_parallel_read._pieces(MIN_SHARED_BYTES, 2))

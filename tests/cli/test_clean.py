# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy clean` lists the scratch of jobs, and removes only the directories of ended jobs."""

from __future__ import annotations

import os

import pytest

from nvflare_lazy.scratch import JobScratch
from tests.scratch.conftest import leave_behind as leave_behind


@pytest.fixture
def root(tmp_path):
    return tmp_path / "scratch"


@pytest.fixture
def living(root):
    """Scratch of this process, with a MiB in it."""
    with JobScratch.open(root, job="running", min_free=0) as job:
        download = job.download("of site-1")
        (download.path / "data").write_bytes(bytes(1 << 20))
        yield job


def row(result, owner: str) -> list[str]:
    (line,) = [line for line in result.out.splitlines() if line.startswith(owner)]
    return line.split()


def test_nothing_there(cli, root):
    """It reports this, and makes no scratch root."""
    result = cli("clean", "--scratch-dir", root)
    assert (result.code, result.out) == (0, "No scratch directories found.\n")
    assert not root.exists()


def test_it_shows_and_touches_nothing(cli, root, living, leave_behind):
    """Each with its owner, size, job and path; ended owners with the command that frees their space."""
    dead = leave_behind()
    result = cli("clean", "--scratch-dir", root)
    assert result.code == 0
    alive = row(result, "running")
    assert {"running", str(living.path)} <= set(alive)
    assert str(os.getpid()) in result.out
    assert {"lost", str(dead)} <= set(row(result, "gone"))
    assert "nvflare-lazy clean --remove" in result.out.splitlines()[-1]
    assert dead.exists()


def test_it_removes_what_dead_ones_left(cli, root, living, leave_behind):
    """What a living process has stays, byte for byte."""
    dead = [leave_behind("0" * 16), leave_behind("1" * 16)]
    result = cli("clean", "--scratch-dir", root, "--remove")
    assert result.code == 0
    assert "Removed 2 directories" in result.out
    assert not any(path.exists() for path in dead)
    assert [path.stat().st_size for path in living.path.rglob("data")] == [1 << 20]
    assert row(result, "running")


def test_scratch_of_other_hosts(cli, root, leave_behind):
    """This host cannot check whether their owners are running: they are removed only on request."""
    other = leave_behind(hostname="elsewhere", boot_id="another")
    assert row(cli("clean", "--scratch-dir", root, "--remove"), "unknown")
    assert other.exists()
    assert cli("clean", "--scratch-dir", root, "--remove", "--include-other-hosts").code == 0
    assert not other.exists()


def test_other_hosts_without_remove(cli, root):
    """Says that it needs to be told to remove."""
    result = cli("clean", "--scratch-dir", root, "--include-other-hosts")
    assert result.code == 2
    assert "--remove" in result.err

# SPDX-License-Identifier: Apache-2.0
"""Location of scratch: chosen, created, and refused where other users could replace it."""

from __future__ import annotations

import os
import stat

import pytest

from nvflare_lazy.errors import ScratchError, ScratchPermissionError
from nvflare_lazy.scratch import JobScratch, reclaim
from nvflare_lazy.scratch.root import find_root, open_root, resolve_root

SOMEBODY_ELSE = 54321


@pytest.fixture
def given_to_somebody_else(monkeypatch):
    """Make other users own the paths: if we are root, really; otherwise, as seen by this process."""

    def give(*paths):
        if os.geteuid() == 0:
            for path in paths:
                os.chown(path, SOMEBODY_ELSE, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY_ELSE)

    return give


@pytest.fixture
def everybodys(tmp_path):
    """A directory like /tmp."""
    directory = tmp_path / "everybodys"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_argument_comes_before_environment(tmp_path, monkeypatch):
    """A root in the job's configuration overrides the machine's."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path / "environment"))
    assert resolve_root(tmp_path / "argument") == tmp_path / "argument"
    assert resolve_root() == tmp_path / "environment"


def test_home_directory_is_spelled_out(tmp_path, monkeypatch):
    """A `~` in a configuration is the user's home, not a directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_root("~/scratch") == tmp_path / "scratch"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "{}/cache", "HOME": "{}/home"}, "cache/nvflare-lazy/scratch"),
        ({"HOME": "{}/home"}, "home/.cache/nvflare-lazy/scratch"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "{}/home"}, "home/.cache/nvflare-lazy/scratch"),
        ({}, "tmp/nvflare-lazy-{uid}"),
        ({"HOME": "relative"}, "tmp/nvflare-lazy-{uid}"),
        ({"HOME": "{}/file"}, "tmp/nvflare-lazy-{uid}"),
        ({"HOME": "/proc"}, "tmp/nvflare-lazy-{uid}"),
    ],
    ids=["cache", "home", "relative cache", "no home", "relative home", "home is a file", "home cannot be written to"],
)
def test_default_is_the_cache_or_the_temporary_directory(tmp_path, monkeypatch, environment, expected):
    """Without a writable home, as in a container, scratch is a private directory in the temporary one."""
    (tmp_path / "tmp").mkdir(mode=0o700)
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert find_root() is None
    root = resolve_root()
    assert root == tmp_path / expected.format(uid=os.geteuid())
    assert mode(root) == 0o700
    assert find_root() == root


def test_home_of_another_user_is_left_alone(tmp_path, monkeypatch, given_to_somebody_else):
    """After `sudo` the home is still the caller's; directories of root in it would lock the caller out."""
    (home := tmp_path / "home").mkdir()
    (tmp := tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    given_to_somebody_else(home)
    assert resolve_root() == tmp / f"nvflare-lazy-{os.geteuid()}"
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o277, 0o777], ids=oct)
def test_modes_do_not_depend_on_the_umask(tmp_path, umask):
    """Directories are 0700 and files 0600, neither more nor less, whatever the process was started with."""
    parent = tmp_path / "project"
    parent.mkdir()
    parent.chmod(0o2700)  # its group would be inherited
    before = os.umask(umask)
    try:
        job = JobScratch.open(parent / "a" / "b", job="job", min_free=0)
        download = job.download()
        file = download.new_file()
    finally:
        os.umask(before)
    with job:
        lease = job.path.with_suffix(".lease")
        assert [mode(path) for path in (parent / "a", job.root, job.path, download.path)] == [0o700] * 4
        assert [mode(path) for path in (lease, file.path)] == [0o600] * 2
        file.close()


def test_shared_directory_gets_a_part_for_this_user(everybodys):
    """What several users share, such as /tmp, is not used itself."""
    root = resolve_root(everybodys)
    assert root == everybodys / f"nvflare-lazy-{os.geteuid()}"
    assert mode(root) == 0o700
    assert resolve_root(root) == root
    assert find_root(everybodys) == root


def test_directory_of_a_group_gets_a_part_for_this_user(tmp_path):
    """Members of a group could rename entries of the group's directory, so scratch is one level below."""
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o2770)
    assert resolve_root(shared) == shared / f"nvflare-lazy-{os.geteuid()}"


def test_directory_that_anybody_may_change_is_refused(tmp_path):
    """World-writable without a sticky bit: any user could replace our directory."""
    (open_to_all := tmp_path / "open").mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ScratchPermissionError, match=r"world-writable .*mode 0777.*chmod \+t"):
        resolve_root(open_to_all)
    assert os.listdir(open_to_all) == []


def test_directory_below_one_that_anybody_may_change_is_warned_about(tmp_path, caplog):
    """The usual volume of a container is such a directory, and has no other users: a directory in it works."""
    (volume := tmp_path / "volume").mkdir()
    volume.chmod(0o777)
    assert resolve_root(volume / "scratch") == volume / "scratch"
    assert f"{volume} is world-writable" in caplog.text


def test_directory_planted_by_somebody_else_is_refused(everybodys, given_to_somebody_else):
    """The name of our directory in /tmp is easily guessed."""
    planted = everybodys / f"nvflare-lazy-{os.geteuid()}"
    planted.mkdir(mode=0o700)
    given_to_somebody_else(planted)
    with pytest.raises(ScratchPermissionError, match="uid"):
        resolve_root(planted)


@pytest.mark.parametrize("below", ["", "scratch"], ids=["the root", "above the root"])
def test_link_planted_by_somebody_else_is_refused(everybodys, tmp_path, given_to_somebody_else, below):
    """A link in /tmp that another user made could lead anywhere; nothing is made there."""
    (target := tmp_path / "target").mkdir()
    (link := everybodys / "link").symlink_to(target)
    given_to_somebody_else(link)
    with pytest.raises(ScratchPermissionError, match="was created by uid"):
        resolve_root(link / below)
    assert os.listdir(target) == []


def test_own_links_are_followed(tmp_path):
    """A link to a larger disk is the usual way to say where scratch should be."""
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/deep")
    (tmp_path / "absolute").symlink_to(tmp_path / "link" / ".." / "other")
    assert resolve_root(tmp_path / "link") == tmp_path / "disk" / "deep"
    assert resolve_root(tmp_path / "absolute") == tmp_path / "disk" / "other"


def test_links_in_a_circle_are_refused(tmp_path):
    """A link that leads to itself ends in an error, not in a loop."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ScratchError, match="too many links"):
        resolve_root(tmp_path / "a")


def test_file_is_no_root(tmp_path):
    """If the root, or a directory above it, is a file, the error has its name."""
    (file := tmp_path / "file").touch()
    with pytest.raises(ScratchError, match=f"{file} is not a directory"):
        resolve_root(file)
    with pytest.raises(ScratchError, match="Not a directory"):
        resolve_root(file / "below")


def test_relative_root_without_a_working_directory(tmp_path, monkeypatch):
    """The simulator runs in a deleted directory: there, a relative root raises an error with the reason."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ScratchError, match="use an absolute path"):
        resolve_root("scratch")
    assert resolve_root(tmp_path / "scratch") == tmp_path / "scratch"


def test_root_that_was_swapped_is_not_opened(root, given_to_somebody_else):
    """Between choosing the root and using it, another user's directory may have replaced it."""
    resolve_root(root)
    given_to_somebody_else(root)
    with pytest.raises(ScratchPermissionError, match="replaced"):
        open_root(root)


def test_nothing_is_found_where_nothing_is(root):
    """Looking for scratch makes none."""
    assert find_root(root) is None
    assert reclaim(root) == []
    assert not root.exists()

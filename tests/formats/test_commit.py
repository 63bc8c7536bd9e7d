# SPDX-License-Identifier: Apache-2.0
"""A save is atomic: killed at any moment, interrupted, on a full disk, or concurrent with another save."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.errors import DiskFullError, SaveError
from nvflare_lazy.formats import StreamingWriter, TensorMeta, save
from nvflare_lazy.formats.atomic_file import AtomicFile
from tests.formats.killed_saves import AFTER, BEFORE

TENSORS = {name: torch.full((4,), 1.0) for name in ("a", "b", "c")}


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave like a file system where every file has a name from the beginning."""
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return real(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture(params=["nameless", "named"])
def file_system(request, monkeypatch) -> None:
    """Both kinds of file system: with files that have no name yet, and without."""
    if request.param == "named":
        without_nameless_files(monkeypatch)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> list[dict[str, Any]]:
    """State that was found after each moment at which a save was killed."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.formats.killed_saves", tmp_path_factory.mktemp("d") / "d"]
    output = subprocess.run(program, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    return [json.loads(line) for line in output.splitlines()]


# A file and others with different names do not replace each other.
PAIRS = [pair for pair in itertools.product(BEFORE, AFTER) if pair != ("plain files", "single")]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_killed_at_any_moment(killed: list[dict[str, Any]], before: str, after: str) -> None:
    """Killed before or after any of its calls to the system, a save has left the old checkpoint or made the new one."""
    results = [result for result in killed if result["before"] == before and result["after"] == after]
    assert [result["killed"] for result in results] == [True] * (len(results) - 1) + [False]
    assert len(results) > 10

    found = [result["directory"] for result in results]
    if before == "nothing":
        # Until the first checkpoint is complete none exists, and opening raises that error.
        assert all(one == "new" or one.startswith(("UnknownFormatError", "MissingShardError")) for one in found)
    else:
        assert set(found) == {"old", "new"}
    assert found[-1] == "new"
    # Once new, always new.
    assert found == sorted(found, key=lambda one: one == "new")
    for result in results:
        assert result["path"] == result["directory"] or result["path"].startswith("FileNotFoundError")
        # A file that has no name goes with its process; one may be left that had just got a name.
        assert len(result["hidden"]) <= 1
        assert result["then"] == "new"
        garbage = set(result["files"]) - set(results[-1]["files"]) - set(result["hidden"])
        assert all(".g" in name or "-of-" in name for name in garbage)
        assert len(set(result["files"]) - set(result["hidden"])) == len(set(results[-1]["files"]))


class Stop(BaseException):
    """Not an Exception: represents KeyboardInterrupt, and pytest does not treat it as one."""


def stop_at(patch: pytest.MonkeyPatch, place: int, when: str) -> None:
    """Raise around the call to the system with the given number."""
    calls = itertools.count()

    def stopping(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            is_it = next(calls) == place
            if is_it and when == "before":
                raise Stop
            result = real(*args, **kwargs)
            if is_it:
                raise Stop
            return result

        return call

    for name in ("link", "pwrite", "replace"):
        patch.setattr(os, name, stopping(getattr(os, name)))
    patch.setattr(os, "fsync", stopping(lambda fd: None))


@pytest.mark.parametrize("max_shard_size", [None, 32])
@pytest.mark.parametrize("before", [None, 16])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_at_any_moment(
    tmp_path: Path, monkeypatch, file_system, before: int | None, max_shard_size: int | None, when: str
) -> None:
    """An interrupt around any call to the system leaves a whole checkpoint, old or new, and no partial file."""
    path = tmp_path / "model.safetensors"
    for place in range(1000):
        old = {name: torch.full((4,), 0.0) for name in TENSORS}
        save(old, path, max_shard_size=before)
        there = files(tmp_path)
        with monkeypatch.context() as patch:
            stop_at(patch, place, when)
            try:
                save(TENSORS, path, max_shard_size=max_shard_size)
                return
            except Stop:
                pass
        values = {value for tensor in nvflare_lazy.open(path).values() for value in tensor.tolist()}
        assert values in ({0.0}, {1.0})
        assert not [name for name in files(tmp_path) if name.startswith(".")]
        if values == {0.0}:
            assert files(tmp_path) == there
    raise AssertionError("the save never came to an end")


def test_flushed_before_it_is_named(tmp_path: Path, monkeypatch) -> None:
    """Data is on the disk before its name is, shards before the index, and names before the save returns."""
    calls: list[str] = []
    replace = os.replace

    def fsync(fd: int) -> None:
        calls.append("sync directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(
        os, "replace", lambda *args: calls.append(f"name {os.path.basename(args[1])}") or replace(*args)
    )
    save(TENSORS, tmp_path / "m")
    assert calls == ["sync file", "name m", "sync directory"]
    calls.clear()
    save(TENSORS, tmp_path / "n.safetensors", max_shard_size=32)
    assert calls[:3] == ["sync file"] * 3
    assert [call.startswith("name n-0000") for call in calls[3:5]] == [True, True]
    assert calls[5:8] == ["sync directory", "name n.safetensors.index.json", "sync directory"]


def test_without_fsync_nothing_waits_for_the_disk(tmp_path: Path, monkeypatch) -> None:
    """Neither for data nor for names: a later step flushes both."""
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("waits for the disk"))
    with StreamingWriter(tmp_path / "m", [TensorMeta("w", "F32", (2,))], fsync=False) as writer:
        writer.write("w", 0, bytes(8))
    assert nvflare_lazy.open(tmp_path / "m")["w"].tolist() == [0.0, 0.0]


# ---- full disks ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system takes more rights than this process has")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("max_shard_size", [None, "256KiB"])
def test_full_disk(small_disk: Path, file_system, max_shard_size: str | None) -> None:
    """On a full disk a save raises that error and frees the space, and the old checkpoint stays."""
    save(TENSORS, small_disk / "model.safetensors")
    free = os.statvfs(small_disk).f_bfree
    large = {str(index): torch.zeros(1 << 15) for index in range(10)}
    with pytest.raises(DiskFullError, match=r"no space for .*nothing was written; free some space") as caught:
        save(large, small_disk / "model.safetensors", max_shard_size=max_shard_size)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, OSError)
    assert files(small_disk) == ["model.safetensors"]
    assert os.statvfs(small_disk).f_bfree == free
    assert nvflare_lazy.open(small_disk)["a"].tolist() == [1.0] * 4


def test_limit_on_the_size_of_a_file(tmp_path: Path) -> None:
    """A limit of the system on the size of files is reported as a full disk."""
    program = (
        "import resource, sys, torch, nvflare_lazy\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    nvflare_lazy.save({'a': torch.zeros(1 << 20)}, sys.argv[1])\n"
        "except nvflare_lazy.errors.DiskFullError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "m"], capture_output=True, text=True, check=True)
    assert "no space for" in done.stdout
    assert files(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_short_writes(tmp_path: Path, monkeypatch, file_system) -> None:
    """Short writes continue where they ended."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 3)], offset))
    tensor = torch.randn(1000)
    save({"a": tensor}, tmp_path / "m")
    assert torch.equal(nvflare_lazy.open(tmp_path / "m")["a"].materialize(), tensor)


# ---- concurrent saves ---------------------------------------------------------------------------------------------


def test_two_saves_at_once(tmp_path: Path) -> None:
    """Of concurrent saves to one path, one wins completely."""
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def repeat(value: int) -> None:
        start.wait()
        try:
            for round_number in range(10):
                tensors = {name: torch.full((4,), float(value)) for name in ("a", "b", "c")}
                save(tensors, tmp_path / "model.safetensors", max_shard_size=32 if (value + round_number) % 2 else None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    values = {value for tensor in nvflare_lazy.open(tmp_path).values() for value in tensor.tolist()}
    assert len(values) == 1
    assert len(files(tmp_path)) in (1, 3)


def test_generations_alternate(tmp_path: Path) -> None:
    """Each sharded save takes names that the one before did not, and removes what that one left."""
    names = []
    for _ in range(4):
        save(TENSORS, tmp_path, max_shard_size=32)
        names.append(tuple(name for name in files(tmp_path) if "-of-" in name))
        assert len(files(tmp_path)) == 3
    first, second = names[:2]
    assert names == [first, second, first, second]
    assert first == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert second == ("model-00001-of-00002.g2.safetensors", "model-00002-of-00002.g2.safetensors")


def test_other_checkpoints_stay(tmp_path: Path) -> None:
    """A save replaces the checkpoint of its name, and touches no other in the directory."""
    for name in ("other", "model-2", "mode"):
        save(TENSORS, tmp_path / f"{name}.safetensors", max_shard_size=32)
    before = set(files(tmp_path))
    save(TENSORS, tmp_path / "model.safetensors", max_shard_size=32)
    save(TENSORS, tmp_path / "model.safetensors")
    assert set(files(tmp_path)) == before | {"model.safetensors"}
    for name in ("other", "model-2", "mode"):
        assert set(nvflare_lazy.open(tmp_path / f"{name}.safetensors")) == {"a", "b", "c"}


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Saving to a symbolic link replaces the file it leads to, and the link stays."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "m").symlink_to("elsewhere/real")
    save(TENSORS, tmp_path / "m")
    assert (tmp_path / "m").is_symlink()
    assert files(tmp_path / "elsewhere") == ["real"]


def test_directories_that_are_missing(tmp_path: Path) -> None:
    """A missing directory is created, and removed if the save fails; the directory of a file has to exist."""
    save(TENSORS, f"{tmp_path}/new/directory/")
    assert files(tmp_path / "new" / "directory") == ["model.safetensors"]
    with pytest.raises(SaveError), StreamingWriter(f"{tmp_path}/failed/m/", [TensorMeta("a", "F32", (2,))]):
        pass
    with pytest.raises(FileNotFoundError, match="missing"):
        save(TENSORS, tmp_path / "missing" / "m")
    assert files(tmp_path) == ["new"]


def test_atomic_file_by_itself(tmp_path: Path, file_system) -> None:
    """The parts in which a file is written, and its answers once it is closed."""
    with AtomicFile(tmp_path / "f") as file:
        file.write_at(b"cd", 2)
        file.write_at(b"ab", 0)
        assert not file.is_published()
        assert file.publish() == str(tmp_path / "f")
        assert file.is_published()
        with pytest.raises(SaveError):
            file.write_at(b"x", 0)
    assert (tmp_path / "f").read_bytes() == b"abcd"
    with AtomicFile(tmp_path / "f") as other:
        other.write_at(b"x", 0)
        assert not other.is_published()
    assert files(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"abcd"


@pytest.mark.parametrize(("one", "other"), [("model", "model.safetensors"), ("model.safetensors", "model")])
@pytest.mark.parametrize("max_shard_size", [None, 40])
def test_names_with_and_without_suffix_do_not_meet(
    tmp_path: Path, one: str, other: str, max_shard_size: int | None
) -> None:
    """`model` and `model.safetensors` are two checkpoints, though their shards have the same names."""
    save(TENSORS, tmp_path / one, max_shard_size=40)
    for value in (2.0, 3.0):
        save({"x": torch.full((4,), value), **TENSORS}, tmp_path / other, max_shard_size=max_shard_size)
        assert set(nvflare_lazy.open(tmp_path / one)) == {"a", "b", "c"}
        assert nvflare_lazy.open(tmp_path / other)["x"].tolist() == [value] * 4
    save(TENSORS, tmp_path / one)
    assert nvflare_lazy.open(tmp_path / other)["x"].tolist() == [3.0] * 4


@pytest.mark.parametrize("max_shard_size", [None, 40])
@pytest.mark.parametrize("kind", ["pipe", "directory", "link to itself"])
def test_what_is_no_file_stays(tmp_path: Path, kind: str, max_shard_size: int | None) -> None:
    """A save does not replace a pipe, a device, a directory or a broken link."""
    path = tmp_path / "model.safetensors"
    {"pipe": os.mkfifo, "directory": os.mkdir, "link to itself": lambda path: os.symlink(path.name, path)}[kind](path)
    before = os.lstat(path)
    with pytest.raises(SaveError, match="choose another name"):
        save(TENSORS, tmp_path, max_shard_size=max_shard_size)
    assert os.path.samestat(os.lstat(path), before)
    assert files(tmp_path) == ["model.safetensors"]


def test_what_cannot_be_removed_does_not_matter(tmp_path: Path, caplog) -> None:
    """A completed save is not an error, even if its cleanup fails."""
    (tmp_path / "model-00001-of-00002.safetensors").mkdir()
    save(TENSORS, tmp_path / "model.safetensors")
    assert "Cannot remove" in caplog.text
    assert set(nvflare_lazy.open(tmp_path / "model.safetensors")) == {"a", "b", "c"}


def test_names_as_long_as_they_may_be(tmp_path: Path, file_system) -> None:
    """A file's name may have 255 bytes; an index of a longer name is refused, and nothing is left."""
    path = tmp_path / ("\u4e2d" * 80 + ".safetensors")
    save(TENSORS, path)
    assert files(tmp_path) == [path.name]
    with pytest.raises(OSError, match="File name too long"):
        save(TENSORS, path, max_shard_size=40)
    assert files(tmp_path) == [path.name]


def test_a_sharded_checkpoint_through_a_link(tmp_path: Path) -> None:
    """It is stored where the link leads, and opens by the name of the link."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link.safetensors").symlink_to("there/real.safetensors")
    save(TENSORS, tmp_path / "link.safetensors", max_shard_size=40)
    assert files(tmp_path) == ["link.safetensors", "there"]
    assert set(nvflare_lazy.open(tmp_path / "link.safetensors")) == {"a", "b", "c"}

# SPDX-License-Identifier: Apache-2.0
"""Limits of containers: cgroups of both versions, ephemeral storage, and limits that are too low for a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.fl_job.memory_group import MemoryGroup
from nvflare_lazy import _system
from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch import container
from nvflare_lazy.scratch.container import STORAGE_LIMIT, MemoryLimit, find_shortages, memory_limit, storage_limit

GIB, MIB = 1 << 30, 1 << 20
UNLIMITED_1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine whose processes are in these groups, with these files in /sys/fs/cgroup."""

    def make(groups: str, mounted: list[tuple[str, str, str, str]], files: dict[str, str]) -> Path:
        top = tmp_path / "cgroup"
        lines = [
            f"{number} 1 0:{number} {root} {os.path.normpath(top / point)} rw - {kind} {kind} rw,{options}"
            for number, (root, point, kind, options) in enumerate(mounted)
        ]
        for name, text in {**files, "../self/cgroup": groups, "../self/mountinfo": "\n".join(lines) + "\n"}.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(f"{text}\n")
        monkeypatch.setattr(container, "_GROUPS", tmp_path / "self" / "cgroup")
        monkeypatch.setattr(_system, "_MOUNTS", tmp_path / "self" / "mountinfo")
        return top

    return make


V2 = ("/", ".", "cgroup2", "nsdelegate")
V1 = ("/", "memory", "cgroup", "memory")
STAT_2 = f"anon {300 * MIB}\nfile {5 * GIB}\nshmem {20 * MIB}\nhierarchical 1 2"
STAT_1 = f"rss 1\ntotal_rss {300 * MIB}\ntotal_shmem {20 * MIB}\ntotal_cache {5 * GIB}\nhierarchical_memory_limit "


@pytest.mark.parametrize(
    ("groups", "mounted", "files", "expected"),
    [
        # A container with its own namespace.
        ("0::/", [V2], {"memory.max": f"{GIB}", "memory.stat": STAT_2}, (GIB, "memory.max")),
        # A group below one with a lower limit, as pods have, and one without any.
        (
            "0::/pod/job",
            [V2],
            {"pod/memory.max": f"{GIB}", "pod/memory.stat": STAT_2, "pod/job/memory.max": f"{2 * GIB}"},
            (GIB, "pod/memory.max"),
        ),
        ("0::/pod/job", [V2], {"pod/memory.max": "max", "pod/job/memory.max": "max"}, None),
        # A group outside the namespace.
        ("0::/../other", [V2], {"memory.max": f"{GIB}", "memory.stat": STAT_2}, (GIB, "memory.max")),
        (
            "4:memory:/docker/7f\n0::/",
            [("/docker/7f", "memory", "cgroup", "memory"), ("/", "unified", "cgroup2", "")],
            {"memory/memory.limit_in_bytes": f"{GIB}", "memory/memory.stat": f"{STAT_1}{GIB}"},
            (GIB, "memory/memory.limit_in_bytes"),
        ),
        (
            "4:cpu,memory:/a/b",
            [V1],
            {
                "memory/a/memory.limit_in_bytes": f"{GIB}",
                "memory/a/memory.stat": f"{STAT_1}{GIB}",
                "memory/a/b/memory.limit_in_bytes": f"{UNLIMITED_1}",
                "memory/a/b/memory.stat": f"total_rss 5\nhierarchical_memory_limit {GIB + 1}",
            },
            (GIB, "memory/a/memory.limit_in_bytes"),
        ),
        # A limit above the visible groups.
        (
            "4:memory:/",
            [V1],
            {"memory/memory.limit_in_bytes": f"{UNLIMITED_1}", "memory/memory.stat": f"{STAT_1}{GIB}"},
            (GIB, "memory/memory.stat"),
        ),
        ("4:memory:/", [V1], {"memory/memory.limit_in_bytes": f"{UNLIMITED_1}"}, None),
        ("4:memory:/", [("/", "cpu", "cgroup", "cpu")], {}, None),
    ],
)
def test_the_lowest_limit_of_a_process(machine, groups, mounted, files, expected):
    """With the memory in use in the group that has it, and without page cache."""
    top = machine(groups, mounted, files)
    limit = None if expected is None else MemoryLimit(expected[0], 320 * MIB, top / expected[1])
    assert memory_limit() == limit


def test_without_cgroups(monkeypatch, tmp_path):
    """There is no limit."""
    monkeypatch.setattr(container, "_GROUPS", tmp_path / "missing")
    assert memory_limit() is None


def test_memory_that_is_too_low(machine):
    """The processes have 320 MiB of 1 GiB; page cache of 5 GiB is not an obstacle."""
    machine("0::/", [V2], {"memory.max": f"{GIB}", "memory.stat": STAT_2})
    assert find_shortages(704 * MIB, {}) == []
    [shortage] = find_shortages(705 * MIB, {})
    assert shortage.startswith("the memory limit of 1.0 GiB in ")
    assert shortage.endswith(
        "320.0 MiB are in use, page cache not included, and 705.0 MiB more are needed, 1.0 MiB too many; raise it"
    )


def test_files_in_memory_are_memory(machine, tmp_path, monkeypatch):
    """Scratch on a tmpfs counts, and takes no disk."""
    machine("0::/", [V2, ("/", "..", "tmpfs", "")], {"memory.max": f"{GIB}", "memory.stat": STAT_2})
    [shortage] = find_shortages(100 * MIB, {tmp_path: 700 * MIB})
    assert "800.0 MiB more are needed" in shortage


def test_disks_that_are_too_small(machine, tmp_path, monkeypatch):
    """Directories of one disk share its space."""
    machine("0::/", [("/", "..", "ext4", "")], {})
    info = namedtuple("info", "f_bavail f_frsize f_blocks")
    monkeypatch.setattr(os, "statvfs", lambda path: info(100, MIB, 200))
    wanted = {tmp_path / "scratch" / "job": 60 * MIB, tmp_path: 50 * MIB}
    (tmp_path / "scratch").mkdir()
    [shortage] = find_shortages(0, wanted)
    assert shortage == (
        f"the disk of {tmp_path}/scratch and {tmp_path} has 100.0 MiB free, and the job needs 110.0 MiB, "
        "10.0 MiB too much; free space, or use another disk"
    )
    assert find_shortages(0, {tmp_path: 100 * MIB}) == []


@pytest.mark.parametrize(
    ("root", "kind", "counts"),
    [
        ("/", "overlay", True),
        ("/var/lib/kubelet/pods/7f/volumes/kubernetes.io~empty-dir/scratch", "ext4", True),
        ("/", "ext4", False),
        ("/var/lib/kubelet/plugins/kubernetes.io/csi/pv/7f/globalmount", "xfs", False),
    ],
)
def test_ephemeral_storage(machine, tmp_path, monkeypatch, root, kind, counts):
    """The files of the container and of an `emptyDir` count, but files of a volume with separate storage do not."""
    machine("0::/", [(root, "..", kind, "")], {})
    monkeypatch.setenv(STORAGE_LIMIT, f"{100 * MIB}")
    assert find_shortages(0, {tmp_path: 100 * MIB}) == []
    found = find_shortages(0, {tmp_path: 101 * MIB})
    assert [each.split(" is lower")[0] for each in found] == ["the ephemeral-storage limit of 100.0 MiB"] * counts


@pytest.mark.parametrize(("text", "expected"), [(None, None), ("", None), ("1073741824", GIB), ("200GiB", 200 * GIB)])
def test_the_variable_of_the_storage_limit(monkeypatch, text, expected):
    """Kubernetes writes bytes."""
    monkeypatch.delenv(STORAGE_LIMIT, raising=False)
    if text is not None:
        monkeypatch.setenv(STORAGE_LIMIT, text)
    assert storage_limit() == expected
    monkeypatch.setenv(STORAGE_LIMIT, "much")
    with pytest.raises(ScratchError, match=f"{STORAGE_LIMIT}: invalid size 'much'"):
        storage_limit()


_MEMBER = """
import json, os, sys
from nvflare_lazy.scratch.container import find_shortages, memory_limit

cached = open(sys.argv[1], "wb+")
cached.write(bytes(64 << 20))
os.fsync(cached.fileno())
held = bytearray(os.urandom(1 << 20) * 48)
limit = memory_limit()
free = limit.nbytes - limit.in_use
# The kernel counts memory with a delay.
shortages = [len(find_shortages(more, {})) for more in (free - (8 << 20), free + (8 << 20))]
print(json.dumps([limit.nbytes, limit.in_use, str(limit.path), shortages]))
"""


@pytest.mark.slow
def test_a_real_cgroup(tmp_path):
    """64 MiB of page cache in the group do not count, and 48 MiB of memory do."""
    command = [sys.executable, "-c", _MEMBER, tmp_path / "cached"]
    with ExitStack() as stack:
        try:
            group = stack.enter_context(MemoryGroup(GIB))
        except OSError as error:
            pytest.skip(str(error))
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, preexec_fn=group.enter)
    print(done.stdout)
    nbytes, in_use, path, shortages = json.loads(done.stdout)
    assert (nbytes, Path(path).parent.name[:12]) == (GIB, "nvflare-lazy")
    assert 48 * MIB < in_use < 48 * MIB + 64 * MIB
    assert shortages == [0, 1]

# SPDX-License-Identifier: Apache-2.0
"""A scratch root that a job shares with processes that are killed, and with a disk that other programs fill."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nvflare_lazy
from benchmarks.fl_job import FLJob
from integration_tests.conftest import JobRunner, records, server_app
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.flare.checkpoint_store import CheckpointStore
from nvflare_lazy.flare.lazy_model_persistor import BEST_NAME, MODEL_NAME
from nvflare_lazy.scratch import list_scratch, reclaim
from tests.scratch.conftest import wait_until_empty

USER = Path(__file__).with_name("scratch_user.py")
KILLS = 20
ROUNDS = 50


class KilledUsers:
    """Four processes that use a scratch root: each is killed at a random moment, and another one started."""

    def __init__(self, root: Path) -> None:
        self.kills = 0
        #: The number of processes that left a file, and the maximum at one time.
        self.abandoned = self.most_abandoned = 0
        self._root = root
        self._chance = random.Random(13)
        self._seed = 0
        self._users: list[tuple[subprocess.Popen[bytes], float]] = []

    def __call__(self, workspace: Path) -> None:
        while len(self._users) < 4:
            self._seed += 1
            command = [sys.executable, str(USER), str(self._root), str(self._seed)]
            self._users.append((subprocess.Popen(command), time.monotonic() + self._chance.uniform(0.1, 8.0)))
        for user, end in list(self._users):
            assert user.poll() is None, f"a user of the scratch root ended with {user.returncode}"
            if time.monotonic() > end:
                self.kill(user)

    def kill(self, user: subprocess.Popen[bytes]) -> None:
        """Kill a process with SIGKILL, and count the directories without an owner."""
        user.send_signal(signal.SIGKILL)
        user.wait()
        self._users = [one for one in self._users if one[0] is not user]
        self.kills += 1
        left = sum(lease.alive is False for lease in list_scratch(self._root))
        self.abandoned += bool(left)
        self.most_abandoned = max(self.most_abandoned, left)

    def end(self) -> None:
        """Kill the remaining ones."""
        for user, _ in list(self._users):
            self.kill(user)


@pytest.mark.slow
def test_kills_beside_a_running_job(run_job: JobRunner, tmp_path: Path):
    """All others in its scratch root are killed, start and reclaim: the job loses nothing, and nothing is left."""
    scratch = tmp_path / "job1" / "scratch"
    users = KilledUsers(scratch)
    job = FLJob(mode="level-3", model_mib=4, tensors=8, rounds=ROUNDS)
    try:
        result = run_job(job, during=users, timeout=3000)
    finally:
        users.end()
    rounds = records(result, "round")
    assert [record["aggregated"] for record in rounds] == [["site-1", "site-2"]] * ROUNDS
    assert not any(record["skipped"] for record in rounds)
    value = start(5, job.elements)
    for _ in range(ROUNDS):
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    assert ulps(nvflare_lazy.open(server_app(result) / MODEL_NAME)["layer00005"].numpy(), exact) <= 1
    assert users.kills >= KILLS
    # Half of the users have no cleanup process; the next start removes the scratch of the last ones.
    reclaim(scratch)
    wait_until_empty(scratch)
    print(
        f"{users.kills} kills during {ROUNDS} rounds in {result.seconds:.0f} s: nothing lost, nothing left; after "
        f"{users.abandoned} kills something was there for a moment, of up to {users.most_abandoned} processes"
    )


DISK = 160 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 160 MiB in a file, where this user may mount one."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, stderr=subprocess.PIPE)
        subprocess.run(["mount", "-o", "loop", image, place], check=True, stderr=subprocess.PIPE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this user may not mount a file system: {error}")
    place.chmod(0o700)
    yield place
    subprocess.run(["umount", place], check=True)


class OtherProgram:
    """Fills a disk when a job has finished its first rounds, and frees it when it has finished more, or never."""

    def __init__(self, disk: Path, *, until: int | None) -> None:
        self._file = disk / "of another program"
        self._until = until
        self.filled = False

    def __call__(self, workspace: Path) -> None:
        log = workspace / "server" / "log.txt"
        finished = log.read_text().count(" finished in ") if log.exists() else 0
        if finished >= 2 and not self.filled:
            self.filled = True
            self._fill()
        elif self._until is not None and finished >= self._until:
            self._file.unlink(missing_ok=True)

    def _fill(self) -> None:
        with self._file.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))


@pytest.mark.slow
@pytest.mark.parametrize("on_too_few", ["skip", "fail"])
def test_disk_that_fills_up_in_a_running_job(run_job: JobRunner, tmp_path: Path, disk: Path, on_too_few: str):
    """The job continues with the results that fit, or ends with the cause; the last checkpoint is intact."""
    checkpoints, scratch = disk / "checkpoints", disk / "scratch"
    program = OtherProgram(disk, until=5 if on_too_few == "skip" else None)
    job = FLJob(
        mode="level-2",
        model_mib=16,
        tensors=8,
        rounds=8,
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        offload={"scratch_dir": str(scratch), "min_free": "1MiB"},
        persistor={"checkpoint_dir": str(checkpoints)},
        # The space that one result used before is recycled, so one result fits into a full disk.
        aggregator={"on_too_few": on_too_few, "min_results": 2 if on_too_few == "fail" else 1},
    )
    result = run_job(job, may_fail=on_too_few == "fail", during=program, timeout=600)
    assert program.filled
    rounds = records(result, "round")
    complete = [record for record in rounds if record["aggregated"]]
    skipped = [reason for record in rounds for reason in record["skipped"].values()]
    print(f"{on_too_few}: {[len(record['aggregated']) for record in rounds]} results used; skipped:", *skipped)
    if on_too_few == "skip":
        assert "Finished FedAvg" in result.server_log
        assert rounds[-1]["aggregated"] == ["site-1", "site-2"]
        assert any(len(record["aggregated"]) < 2 for record in rounds)
    else:
        assert "Finished FedAvg" not in result.server_log
        assert re.search(r"free some space|No space left", result.server_log)
    last = CheckpointStore(checkpoints, MODEL_NAME, BEST_NAME).latest()
    assert last is not None
    value = start(3, job.elements)
    for record in complete:
        exact = next_global(value, [int(name[-1]) for name in record["aggregated"]])
        value = exact.astype("float32")
    found = nvflare_lazy.open(last.path)
    assert ulps(found["layer00003"].numpy(), exact) <= 1
    for name in found:
        found[name].materialize()
    del found
    wait_until_empty(scratch)

# SPDX-License-Identifier: Apache-2.0
"""Rules for every test: signals, time limits, and that a test leaves no file and no process behind.

pytest loads this module for `tests/` and `integration_tests/`, with and without worker processes.
"""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
SLOW_TEST_SECONDS = 3600
MAX_WORKERS = 3
#: Worker processes start with these, so that no worker is left with a long test at the end.
LONGEST_FIRST = ("integration_tests/", "tests/documents/", "tests/transport/")
#: Workers take the tests of these modules one by one. The tests of other modules stay together and share fixtures.
TEST_BY_TEST = ("integration_tests/", "tests/documents/test_documents.py")
#: These need a gigabyte of disk: one worker runs them one after the other.
GIGABYTES = ("test_flat_memory.py", "test_a_trainer_needs_no_second_model", "transport/test_memory.py")

_repository = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Give processes that tests start the default signals.

    `nohup make test &` ignores SIGHUP and SIGINT, and a new program inherits an ignored signal. It does not inherit a
    handler. A handler that does nothing therefore protects pytest itself and lets its child processes end.
    """
    for signum in (signal.SIGINT, signal.SIGHUP):
        # Workers have the default signals; they end with pytest.
        if signal.getsignal(signum) is signal.SIG_IGN or (signum == signal.SIGHUP and _is_worker(config)):
            signal.signal(signum, lambda *_: None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Choose one worker more than processors, because federated jobs mostly wait; each worker takes 1 GiB of memory."""
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let workers take modules, in the order of `_place`; long modules are taken test by test.

    `--dist loadgroup` would do the same with markers, but pytest-xdist 3.8 does not see them with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if any(name in nodeid for name in GIGABYTES):
                return "gigabytes"
            return nodeid if nodeid.startswith(TEST_BY_TEST) else nodeid.partition("::")[0]

    return ByModule(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the time limit of slow tests, and the order of tests in workers."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_SECONDS))
    if _is_worker(config):
        items.sort(key=_place)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _place(item: pytest.Item) -> tuple[bool, str, int, str]:
    """Return a test's place in the order, which must be the same in all workers, whatever the order of a set is."""
    path, line, _ = item.location
    return not item.nodeid.startswith(LONGEST_FIRST), path, line or 0, item.nodeid


@pytest.fixture(scope="session")
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory for the temporary files of this process and its child processes, which must end before the tests do."""
    # These two stay until this process ends: pytest's directory and the directory of multiprocessing.
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()
    # Not below pytest's own directory: the path of a Unix socket must not be longer than 107 bytes.
    own = Path(tempfile.mkdtemp(prefix="nvflare-lazy-tests-"))
    directory, home = own / "tmp", own / "home"
    with pytest.MonkeyPatch.context() as patch:
        _use_for_temporary_files(directory, patch)
        # Caches, scratch without a root, and NVFlare's settings.
        home.mkdir()
        patch.setenv("HOME", str(home))
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "NVFLARE_LAZY_SCRATCH"):
            patch.delenv(name, raising=False)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "torchinductor"))
        yield directory
    left = _processes_with(str(own))
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = _processes_with(str(own))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(own, ignore_errors=True)
    assert not left, f"processes outlived the tests: {left}"


@pytest.fixture
def disposable_temporary_directory(temporary_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the temporary files of a test that runs NVFlare, which leaves some."""
    directory = temporary_directory.with_name("nvflare")
    _use_for_temporary_files(directory, monkeypatch)
    yield
    shutil.rmtree(directory, ignore_errors=True)


def _use_for_temporary_files(directory: Path, patch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    patch.setenv("TMPDIR", str(directory))
    patch.setattr(tempfile, "tempdir", None)


@pytest.fixture(autouse=True)
def nothing_is_left(temporary_directory: Path) -> Iterator[None]:
    """Fail a test that leaves something in the temporary directory."""
    yield
    left = sorted(os.listdir(temporary_directory))
    for name in left:
        path = temporary_directory / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    assert not left, f"left in the temporary directory: {left}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the files in the repository."""
    if not _is_worker(session.config):
        session.config.stash[_repository] = _files()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if there are new files in the repository."""
    before = session.config.stash.get(_repository, None)
    if before is not None and (left := sorted(_files() - before)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
            reporter.write_line(f"\nERROR: the tests left files in the repository: {left}", red=True)


def _files() -> set[str]:
    """Return the files in the repository that git neither tracks nor ignores."""
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # noqa: S603 (nothing comes from outside)
    return set(listed.stdout.splitlines())


def _processes_with(text: str) -> dict[int, str]:
    """Return the processes that were started with `text` in their environment, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.fsencode(text) in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # It has ended, or it belongs to another user.
            continue
    # The servers of multiprocessing live as long as the process that they belong to.
    return {pid: command for pid, command in found.items() if "from multiprocessing." not in command}

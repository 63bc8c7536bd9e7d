# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy doctor`: check that a machine, and a site on it, is ready to run jobs."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvflare_lazy._text import format_size, printable
from nvflare_lazy.errors import ScratchError, UnsupportedNVFlareError
from nvflare_lazy.scratch import JobScratch, list_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

OK, WARNING, ERROR = "OK", "WARNING", "ERROR"
_PACKAGES = ("nvflare-lazy", "nvflare", "torch", "safetensors", "numpy")
_MIN_FILES = 1024
_SPEED_TEST_BYTES = 256 << 20
_SLOW_BYTES_PER_SECOND = 150 << 20
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
PREFIX = "nvflare_lazy."


@click.command()
@click.option("--scratch-dir", type=click.Path(), help="Scratch root. Default: the current user's.")
@click.option(
    "--site", type=click.Path(), help="Directory of a provisioned server or site; check which classes it allows."
)
@click.pass_context
def doctor(context: click.Context, scratch_dir: str | None, site: str | None) -> None:
    """Check that this machine is ready to run jobs.

    Checks versions, NVFlare's handlers, the scratch root (space, speed, whether it is memory), process limits and, with
    --site, the classes that jobs may name there.

    The exit code is 1 if any line is an ERROR.
    """
    errors = 0
    checks = [check_versions(), check_handlers(), check_scratch(scratch_dir), check_limits()]
    for check in chain(*checks, () if site is None else check_allow_list(Path(site))):
        errors += check.level == ERROR
        click.echo(f"{check.level:8} {printable(check.message)}")
    context.exit(1 if errors else 0)


@dataclass(frozen=True)
class Check:
    """The result of one check: its level, the finding, and what to do about a warning or an error."""

    level: str
    message: str


def check_versions() -> Iterator[Check]:
    """Check that the packages are installed."""
    yield Check(OK, f"Python {sys.version.split()[0]} at {sys.executable}")
    for package in _PACKAGES:
        try:
            yield Check(OK, f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            yield Check(ERROR, f"{package} is not installed in this environment: pip install {package}")


def check_handlers() -> Iterator[Check]:
    """Check that this package's handlers can be registered with NVFlare."""
    try:
        from nvflare_lazy.transport.registration import register
    except UnsupportedNVFlareError as error:
        yield Check(ERROR, str(error))
        return
    found = register()
    for handler in found.handlers:
        yield Check(OK if handler.ours else ERROR, f"Handler of {handler}")


def check_scratch(scratch_dir: str | None) -> Iterator[Check]:
    """Check the scratch root: lease a directory as a job does, and measure its speed."""
    try:
        left = [lease for lease in list_scratch(scratch_dir) if lease.alive is False]
        job = JobScratch.open(scratch_dir, job="doctor", warn=False)
    except ScratchError as error:
        yield Check(ERROR, f"Scratch: {error}")
        return
    with job:
        report = job.root_info
        for warning in report.warnings:
            yield Check(WARNING if report.writable else ERROR, f"Scratch: {warning}")
        free = job.free()
        yield Check(
            OK if free > _SPEED_TEST_BYTES else ERROR,
            f"Scratch root {report.path} on {report.file_system}: {format_size(free)} free of "
            f"{format_size(report.total)}; one round needs the size of the model times the number of clients plus one",
        )
        if free > 2 * _SPEED_TEST_BYTES:
            yield _speed(job)
    if left:
        size = format_size(sum(lease.nbytes for lease in left))
        remaining = [lease.path for lease in list_scratch(scratch_dir) if lease.alive is False]
        if remaining:
            yield Check(WARNING, f"Scratch of processes that no longer exist cannot be removed: remove {remaining[0]}")
        else:
            yield Check(OK, f"Removed {size} of scratch of processes that no longer exist, as a job does")


def check_limits() -> Iterator[Check]:
    """Check the limits of the process and the container."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _MIN_FILES:
        yield Check(WARNING, f"Only {files} open files are allowed; raise the limit with ulimit -n {_MIN_FILES}")
    else:
        yield Check(OK, f"{files} open files are allowed")
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        yield Check(WARNING, f"Files are limited to {format_size(size)}: a larger model cannot be saved")
    for path in _CGROUP_LIMITS:
        try:
            limit = path.read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            yield Check(OK, f"The container is limited to {format_size(int(limit))} of memory, including page cache")


def check_allow_list(site: Path) -> Iterator[Check]:
    """Check which component classes a site allows in jobs without custom code."""
    local = site / "local" if (site / "local").is_dir() else site
    path = next(
        (local / name for name in ("resources.json", "resources.json.default") if (local / name).exists()), None
    )
    if path is None:
        yield Check(ERROR, f"{site} has no local/resources.json: is it the directory of a site?")
        return
    try:
        resources = json.loads(path.read_text())
    except ValueError as error:
        yield Check(ERROR, f"{path} is not JSON: {error}")
        return
    allowed = resources.get("class_allow_list")
    if allowed is not None and any(entry == "*" or PREFIX.startswith(entry) for entry in allowed):
        yield Check(OK, f"{path} allows {PREFIX}*")
    elif resources.get("class_list_enforcement_mode") == "warn":
        yield Check(WARNING, f'{path} does not allow {PREFIX}*, but only warns; add "{PREFIX}" to class_allow_list')
    else:
        yield Check(
            ERROR,
            f'{path} does not allow {PREFIX}*; add "{PREFIX}" to class_allow_list, or only jobs with custom code '
            "(BYOC) can use it",
        )


def _speed(job: JobScratch) -> Check:
    block = bytearray(8 << 20)
    file = job.download("speed").new_file()
    started = time.monotonic()
    for offset in range(0, _SPEED_TEST_BYTES, len(block)):
        file.pwrite(block, offset)
    with file.finish().descriptor() as fd:
        os.fsync(fd)
    speed = _SPEED_TEST_BYTES / (time.monotonic() - started)
    if speed < _SLOW_BYTES_PER_SECOND:
        return Check(
            WARNING, f"Scratch disk writes {format_size(int(speed))}/s; rounds will be disk-bound. Use a faster disk."
        )
    return Check(OK, f"Scratch disk writes {format_size(int(speed))}/s")

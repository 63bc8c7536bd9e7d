# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy doctor`: whether this machine, and a site on it, is ready for a job."""

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

from nvflare_lazy._text import format_size
from nvflare_lazy.cli._common import printable
from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch import JobScratch, list_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

OK, WARNING, PROBLEM = "ok", "WARNING", "PROBLEM"
_PACKAGES = ("nvflare-lazy", "nvflare", "torch", "safetensors", "numpy")
_ENOUGH_FILES = 1024
_SPEED_TEST_BYTES = 256 << 20
_SLOW_BYTES_PER_SECOND = 150 << 20
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
PREFIX = "nvflare_lazy."


@click.command()
@click.option("--scratch", "scratch_dir", type=click.Path(), help="The scratch root the job will use.")
@click.option("--site", type=click.Path(), help="Folder of a provisioned server or site, to check what it allows.")
@click.pass_context
def doctor(context: click.Context, scratch_dir: str | None, site: str | None) -> None:
    """Check a machine before a job runs on it.

    Versions, NVFlare's handlers, the scratch root (space, speed, whether it is memory), the limits of processes, and
    with --site the list of classes that jobs may name there.

    The exit code is 1 if anything is a PROBLEM.
    """
    problems = 0
    findings = [versions(), handlers(), scratch(scratch_dir), limits()]
    for finding in chain(*findings, () if site is None else allow_list(Path(site))):
        problems += finding.level == PROBLEM
        click.echo(f"{finding.level:8} {printable(finding.what)}")
    context.exit(1 if problems else 0)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `OK`, `WARNING` or `PROBLEM`.
        what: What was found, and if it is not well, what to do.
    """

    level: str
    what: str


def versions() -> Iterator[Finding]:
    """Say what is installed."""
    yield Finding(OK, f"Python {sys.version.split()[0]} at {sys.executable}")
    for package in _PACKAGES:
        try:
            yield Finding(OK, f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            yield Finding(PROBLEM, f"{package} is not installed in this environment: pip install {package}")


def handlers() -> Iterator[Finding]:
    """Say whether this package's handlers can take their places in NVFlare."""
    from nvflare_lazy.transport.registration import register

    found = register()
    for handler in found.handlers:
        yield Finding(OK if handler.ours else PROBLEM, f"handler of {handler}")


def scratch(scratch_dir: str | None) -> Iterator[Finding]:
    """Lease scratch as a job would, and measure it."""
    try:
        dead = [lease for lease in list_scratch(scratch_dir) if lease.alive is False]
        job = JobScratch.open(scratch_dir, job="doctor", warn=False)
    except ScratchError as error:
        yield Finding(PROBLEM, f"scratch: {error}")
        return
    with job:
        report = job.report
        for warning in report.warnings:
            yield Finding(WARNING if report.writable else PROBLEM, f"scratch: {warning}")
        room = job.free()
        yield Finding(
            OK if room > _SPEED_TEST_BYTES else PROBLEM,
            f"scratch root {report.path} on {report.file_system}: {format_size(room)} to use of "
            f"{format_size(report.total)}; one round takes the model's size times the number of clients, and once more",
        )
        if room > 2 * _SPEED_TEST_BYTES:
            yield _speed(job)
    if dead:
        left = format_size(sum(lease.nbytes for lease in dead))
        still = [lease.path for lease in list_scratch(scratch_dir) if lease.alive is False]
        if still:
            yield Finding(WARNING, f"dead processes left scratch that cannot be removed, such as {still[0]}: remove it")
        else:
            yield Finding(OK, f"dead processes had left {left} of scratch: it is removed now, as a job would have done")


def limits() -> Iterator[Finding]:
    """Look at what the system lets a process have."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _ENOUGH_FILES:
        yield Finding(WARNING, f"only {files} open files are allowed: raise it with ulimit -n {_ENOUGH_FILES}")
    else:
        yield Finding(OK, f"{files} open files are allowed")
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        yield Finding(WARNING, f"files may have {format_size(size)} at most: a model that is larger cannot be saved")
    for path in _CGROUP_LIMITS:
        try:
            limit = path.read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            yield Finding(OK, f"this container may use {format_size(int(limit))} of memory, page cache included")


def allow_list(site: Path) -> Iterator[Finding]:
    """Look at which component classes a site lets jobs name that bring no code of their own."""
    local = site / "local" if (site / "local").is_dir() else site
    path = next(
        (local / name for name in ("resources.json", "resources.json.default") if (local / name).exists()), None
    )
    if path is None:
        yield Finding(PROBLEM, f"{site} has no local/resources.json: is it the folder of a site?")
        return
    try:
        resources = json.loads(path.read_text())
    except ValueError as error:
        yield Finding(PROBLEM, f"{path} is not JSON: {error}")
        return
    allowed = resources.get("class_allow_list")
    if allowed is not None and any(entry == "*" or PREFIX.startswith(entry) for entry in allowed):
        yield Finding(OK, f"{path} allows {PREFIX}*")
    elif resources.get("class_list_enforcement_mode") == "warn":
        yield Finding(WARNING, f'{path} does not allow {PREFIX}*, and only warns: add "{PREFIX}" to class_allow_list')
    else:
        yield Finding(
            PROBLEM,
            f'{path} does not allow {PREFIX}*: add "{PREFIX}" to class_allow_list, or only jobs with code of their '
            "own (BYOC) can use it",
        )


def _speed(job: JobScratch) -> Finding:
    block = bytearray(8 << 20)
    file = job.download("speed").new_file()
    started = time.monotonic()
    for offset in range(0, _SPEED_TEST_BYTES, len(block)):
        file.pwrite(block, offset)
    with file.finish().descriptor() as fd:
        os.fsync(fd)
    speed = _SPEED_TEST_BYTES / (time.monotonic() - started)
    if speed < _SLOW_BYTES_PER_SECOND:
        return Finding(
            WARNING, f"scratch takes {format_size(int(speed))}/s: rounds will wait for it; use a faster disk"
        )
    return Finding(OK, f"scratch takes {format_size(int(speed))}/s")

# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy doctor`: check that a machine, and a site on it, is ready to run jobs."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvflare_lazy._text import format_size, printable
from nvflare_lazy.cli._common import json_option, print_json
from nvflare_lazy.errors import ScratchError, UnsupportedNVFlareError
from nvflare_lazy.scratch import JobScratch, list_scratch
from nvflare_lazy.scratch.container import STORAGE_LIMIT, memory_limit, storage_limit

if TYPE_CHECKING:
    from collections.abc import Iterator

OK, WARNING, ERROR = "OK", "WARNING", "ERROR"
_PACKAGES = ("nvflare-lazy", "nvflare", "torch", "safetensors", "numpy")
_MIN_FILES = 1024
_SPEED_TEST_BYTES = 256 << 20
_SLOW_BYTES_PER_SECOND = 150 << 20
# A segment of 2 MiB with its headers.
_MIN_MESSAGE_BYTES = 4 << 20
# NVFlare's variables of the environment, and its default of the second one.
MAX_MESSAGE, MAX_BLOB = "NVFLARE_MAX_MESSAGE_SIZE", "NVFLARE_STREAMING_MAX_BLOB_SIZE"
_DEFAULT_MAX_BLOB_BYTES = 4 << 30
PREFIX = "nvflare_lazy."
# The values of the setting `nvflare_decomposers`, and the jobs that they are for.
SETTINGS = {
    "nvflare_lazy.flare.decomposers": "jobs that set enable_tensor_disk_offload",
    "nvflare_lazy.flare.install": "all jobs",
}


@click.command(epilog="Example: nvflare-lazy doctor --scratch-dir /var/tmp")
@click.option("--scratch-dir", type=click.Path(), help="Scratch root. Default: the current user's.")
@click.option("--site", type=click.Path(), help="Directory of a provisioned server or site; check its resources.json.")
@json_option
@click.pass_context
def doctor(context: click.Context, scratch_dir: str | None, site: str | None, as_json: bool) -> None:
    """Check that this machine is ready to run jobs.

    Checks versions, NVFlare's handlers, and the scratch root: space, speed, and whether it is memory. Also checks the
    limits of the process, the container and NVFlare's messages. With --site, checks the site's setting
    nvflare_decomposers and the classes that jobs may name there. To check a machine for a job, use `nvflare-lazy plan
    --against`.

    The exit code is 1 if any line is an ERROR.
    """
    findings = []
    checks = [check_versions(), check_handlers(), check_scratch(scratch_dir), check_limits()]
    checks.append(check_messages(None if site is None else Path(site)))
    if site is not None:
        checks.append(check_site(Path(site)))
    for check in chain(*checks):
        findings.append(asdict(check))
        if not as_json:
            click.echo(f"{check.level:8} {printable(check.message)}")
    if as_json:
        print_json({"checks": findings})
    context.exit(1 if any(finding["level"] == ERROR for finding in findings) else 0)


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
    limit = memory_limit()
    if limit is not None:
        yield Check(
            OK,
            f"The memory limit is {format_size(limit.nbytes)} ({limit.path}); {format_size(limit.in_use)} are in use, "
            "page cache not included",
        )
    try:
        storage = storage_limit()
    except ScratchError as error:
        yield Check(ERROR, str(error))
        return
    if storage is not None:
        yield Check(OK, f"The ephemeral-storage limit is {format_size(storage)} ({STORAGE_LIMIT})")


def check_messages(site: Path | None) -> Iterator[Check]:
    """Check NVFlare's limits on messages, in the environment and in the configuration of a site."""
    config = {} if site is None else _read_config(site)
    found = {
        name: os.environ.get(name) or config.get(name.removeprefix("NVFLARE_").lower(), default)
        for name, default in ((MAX_MESSAGE, _MIN_MESSAGE_BYTES), (MAX_BLOB, _DEFAULT_MAX_BLOB_BYTES))
    }
    try:
        message, blob = (int(str(value)) for value in found.values())
    except ValueError as error:
        yield Check(ERROR, f"{MAX_MESSAGE} or {MAX_BLOB} is not a number: {error}")
        return
    if message < _MIN_MESSAGE_BYTES:
        yield Check(
            ERROR,
            f"{MAX_MESSAGE} (max_message_size) is {format_size(message)}, and transfers of tensors fail; set it to "
            f"{format_size(_MIN_MESSAGE_BYTES)} or more",
        )
    if blob < _DEFAULT_MAX_BLOB_BYTES:
        yield Check(
            WARNING,
            f"{MAX_BLOB} (streaming_max_blob_size) is {format_size(blob)}: processes without nvflare-lazy cannot "
            "exchange larger tensors",
        )


def _read_config(site: Path) -> dict[str, object]:
    path = (site / "local" if (site / "local").is_dir() else site) / "comm_config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_site(site: Path) -> Iterator[Check]:
    """Check a site's setting `nvflare_decomposers`, and the component classes it allows in jobs without custom code."""
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
    setting = resources.get("nvflare_decomposers")
    jobs = SETTINGS.get(setting) if isinstance(setting, str) else None
    if jobs is not None:
        yield Check(OK, f"{path} imports {setting}: {jobs} receive on disk")
    elif PREFIX[:-1] in str(setting):
        yield Check(
            ERROR,
            f"{path} has nvflare_decomposers {setting!r}, which NVFlare ignores without a message; use "
            + " or ".join(SETTINGS),
        )
    allowed = resources.get("class_allow_list")
    if allowed is not None and any(entry == "*" or PREFIX.startswith(entry) for entry in allowed):
        yield Check(OK, f"{path} allows {PREFIX}*")
    elif resources.get("class_list_enforcement_mode") == "warn":
        yield Check(WARNING, f'{path} does not allow {PREFIX}*, but only warns; add "{PREFIX}" to class_allow_list')
    else:
        yield Check(
            ERROR if jobs is None else WARNING,
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

# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the records of a job: in workspaces, run directories, job stores, downloads and zip files.

Files are grouped by the job and the site that they name. A job has one file for each process that records.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import RecordsError
from nvflare_lazy.records import FILE_NAME, JobRecord, Records, parse_records
from nvflare_lazy.records.reader import MAX_FILE_BYTES
from nvflare_lazy.records.schema import from_plain

_MAX_DEPTH = 8
_MAX_FILES = 10_000
# The id of every job in NVFlare's simulator.
_SIMULATED = "simulate_job"
_RESOURCES = ("resources.json", "resources.json.default")


@dataclass(frozen=True)
class RecordFile:
    """The records of one site.

    Attributes:
        place: Their path, in a zip file with the name of the member after a colon.
        run_dir: The directory that contains them; None in a zip file.
    """

    place: str
    job: str
    site: str
    run_dir: Path | None
    records: Records


@dataclass(frozen=True)
class _Found:
    """A record file, or a member of a zip file, that belongs to any job."""

    path: Path
    member: str | None
    modified: float

    @property
    def place(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"

    @property
    def folder(self) -> Path:
        return self.path.parent if self.member is None else self.path / PurePosixPath(self.member).parent

    @property
    def workspace(self) -> Path:
        """The workspace, if the file is in the run directory of a simulated job; a zip file has one or more."""
        found = self.folder.parent.parent
        return found if self.member is None or found.is_relative_to(self.path) else self.path

    def lines(self) -> list[bytes]:
        if self.member is None:
            with open(self.path, "rb") as file:
                return file.read(MAX_FILE_BYTES).splitlines()
        with _opened(self.path) as archive, archive.open(self.member) as packed:
            return packed.read(MAX_FILE_BYTES).splitlines()

    def names(self) -> tuple[str, str]:
        """Return the ids of the job and the site of the last start, or else the names of the directories."""
        for line in reversed(self.lines()):
            if line.startswith(b'{"kind": "job"'):
                try:
                    start = from_plain(json.loads(line))
                except (ValueError, RecursionError):
                    continue
                if isinstance(start, JobRecord) and start.job and start.site:
                    return start.job, start.site
        return self.folder.name, self.folder.parent.name


def read_job(run: Path, job: str | None = None) -> list[RecordFile]:
    """Read the records of one job: those of each site that are at or below a path.

    Args:
        run: A record file, a workspace, a folder in or above one, or a zip file of one.
        job: The id of the job, or the beginning of it. Default: the job with the newest record.

    Raises:
        RecordsError: If no records are found, or not those of the job.

    Example:
        >>> [file.site for file in read_job(Path("workspace"))]
        ['server', 'site-1', 'site-2']
    """
    if not run.exists():
        raise RecordsError(f"{run} does not exist; name a workspace, a run directory, a download or a record file")
    jobs: dict[tuple[str, Path | None], dict[str, _Found]] = {}
    for number, found in enumerate(_find(run)):
        if number == _MAX_FILES:
            raise RecordsError(f"{run} has more than {_MAX_FILES:,} files with records; name the folder of one job")
        name, site = found.names()
        # The id of a simulated job is not unique, but its workspace is.
        sites = jobs.setdefault((name, found.workspace if name == _SIMULATED else None), {})
        # A job has copies of its records in the archive of its run directory and next to its checkpoints.
        if site not in sites or sites[site].modified < found.modified:
            sites[site] = found
    if not jobs:
        raise RecordsError(
            f"{run} has no {FILE_NAME}; name the workspace or a download of a job with TensorOffload. NVFlare archives "
            "the server's run directory at the end of a job: nvflare job download JOB_ID"
        )
    newest = {key: max(found.modified for found in sites.values()) for key, sites in jobs.items()}
    chosen = [key for key in newest if job is None or key[0].startswith(job)]
    if not chosen or (job is not None and len({name for name, _ in chosen}) > 1):
        names = dict.fromkeys(name for name, _ in sorted(newest, key=lambda key: -newest[key]))
        problem = "several jobs begin with" if chosen else "no records of job"
        raise RecordsError(f"{problem} {quoted(job)} in {run}; available: {', '.join(list(names)[:20])}")
    key = max(chosen, key=lambda each: newest[each])
    return [
        RecordFile(
            place=found.place,
            job=key[0],
            site=site,
            run_dir=found.folder if found.member is None else None,
            records=parse_records(found.lines(), Path(found.place)),
        )
        for site, found in sorted(jobs[key].items())
    ]


def _find(run: Path) -> Iterator[_Found]:
    if run.is_file():
        if run.suffix != Path(FILE_NAME).suffix and not zipfile.is_zipfile(run):
            raise RecordsError(
                f"{run} is neither a record file nor a complete zip file; if it is a download, repeat it"
            )
        yield from _in_file(run)
        return
    for root in (run, *_job_stores(run)):
        for directory, folders, names in os.walk(root):
            if len(Path(directory).relative_to(root).parts) >= _MAX_DEPTH:
                folders.clear()
            for name in names:
                path = Path(directory, name)
                # NVFlare's job store names the archive of a run directory `workspace`. Opening a pipe would block.
                if (name in (FILE_NAME, "workspace") or name.endswith(".zip")) and path.is_file():
                    yield from _in_file(path)


def _in_file(path: Path) -> Iterator[_Found]:
    if path.suffix == Path(FILE_NAME).suffix:
        yield _Found(path, None, path.stat().st_mtime)
    elif zipfile.is_zipfile(path):
        with _opened(path) as archive:
            members = archive.infolist()
        for member in members:
            if PurePosixPath(member.filename).name == FILE_NAME:
                yield _Found(path, member.filename, _modified(path, member))


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file, and raise one error for all kinds of damage and for members that cannot be unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise RecordsError(f"cannot read the zip file {path}: {error}; download it again, or remove it") from error


def _modified(path: Path, member: zipfile.ZipInfo) -> float:
    try:
        return datetime(*member.date_time).timestamp()
    except ValueError:
        # Some programs write no date, which is month 0 of 1980.
        return path.stat().st_mtime


def _job_stores(run: Path) -> Iterator[Path]:
    """Yield the directories in which the server of a workspace archives finished jobs, if they are elsewhere."""
    for local in (run / "local", *run.glob("*/local"), *run.glob("*/*/*/local")):
        try:
            path = next(local / name for name in _RESOURCES if (local / name).exists())
            components = json.loads(path.read_text())["components"]
            store = next(Path(each["args"]["uri_root"]) for each in components if each["id"] == "job_manager")
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            continue  # a client, or a server with another job store
        if store.is_dir() and not store.is_relative_to(run):
            yield store

# SPDX-License-Identifier: Apache-2.0
"""The records of a job are found wherever NVFlare leaves or sends them."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from nvflare_lazy.errors import RecordsError
from nvflare_lazy.records import FILE_NAME
from nvflare_lazy.report import read_job
from tests.report.jobs import BEGIN, client_records, server_records, simulated, write

JOB = "0a1b2c3d-0000-4000-8000-000000000001"


def sites(run: Path, job: str | None = None) -> dict[str, int]:
    return {file.site: len(file.records.rounds) for file in read_job(run, job)}


def archive(path: Path, records: Path, folder: str = "", *, date: tuple[int, ...] = (2026, 1, 2, 3, 4, 5)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(zipfile.ZipInfo(f"{folder}{FILE_NAME}", date), records.read_bytes())
    return path


def test_a_simulator_workspace_and_its_parts(tmp_path: Path):
    """The workspace has all sites; a folder of a site, a run directory and a file have one."""
    workspace = simulated(tmp_path / "workspace")
    assert sites(workspace) == {"server": 3, "site-1": 0, "site-2": 0, "site-3": 0}
    for part in ("server", "server/simulate_job", f"server/simulate_job/{FILE_NAME}"):
        assert sites(workspace / part) == {"server": 3}
    assert sites(workspace / "site-2") == {"site-2": 0}
    packed = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", workspace))
    assert sites(packed) == sites(workspace)


def test_two_simulations_below_one_folder(tmp_path: Path):
    """All simulated jobs have the same id, but the sites of two workspaces are not mixed."""
    for place, clients in enumerate((["site-1"], ["site-1", "site-2"])):
        workspace = simulated(tmp_path / f"run{place}", clients=clients)
        for path in workspace.rglob(FILE_NAME):
            os.utime(path, (BEGIN + place, BEGIN + place))
    assert sites(tmp_path) == {"server": 3, "site-1": 0, "site-2": 0}


def test_two_simulations_in_zip_files(tmp_path: Path):
    """Their sites are not mixed either, whatever the folders in the archives."""
    first = write(tmp_path / "first", server_records(rounds=(0,)))
    archive(tmp_path / "runs" / "1.zip", first, "server/", date=(2026, 1, 2, 0, 0, 0))
    archive(tmp_path / "runs" / "2.zip", write(tmp_path / "second", client_records("site-1")), "../site-1/")
    assert sites(tmp_path / "runs") == {"site-1": 0}
    assert sites(tmp_path / "runs" / "1.zip") == {"server": 1}


@pytest.mark.parametrize("store", ["inside", "elsewhere"])
def test_a_deployment(tmp_path: Path, store: str):
    """While a job runs, records are in run directories; then the server's are in its job store, as a zip file."""
    kits = tmp_path / "poc" / "example_project" / "prod_00"
    write(kits / "server" / JOB / FILE_NAME, server_records(JOB, rounds=(0,), ended=False))
    write(kits / "site-1" / JOB / FILE_NAME, client_records("site-1", JOB))
    assert sites(tmp_path / "poc") == sites(kits) == {"server": 1, "site-1": 0}
    jobs = tmp_path / ("poc/jobs-storage" if store == "inside" else "jobs")
    component = {"id": "job_manager", "args": {"uri_root": str(jobs)}}
    (kits / "server" / "local").mkdir()
    (kits / "server" / "local" / "resources.json").write_text(json.dumps({"components": [component]}))
    shutil.rmtree(kits / "server" / JOB)
    ended = write(tmp_path / FILE_NAME, server_records(JOB))
    packed = archive(jobs / JOB / "workspace", ended)
    ended.unlink()
    for run in (tmp_path / "poc", kits):
        if store == "elsewhere" or run.name == "poc":
            assert sites(run) == {"server": 3, "site-1": 0}
    assert sites(packed) == sites(jobs) == {"server": 3}
    if store == "elsewhere":
        assert sites(kits / "server") == {"server": 3}


def test_several_jobs(tmp_path: Path):
    """The newest job is reported, or the one whose id starts with the given text; an error lists them."""
    for number in (1, 2, 3):
        path = write(
            tmp_path / "server" / f"job-{number}" / FILE_NAME, server_records(f"job-{number}", rounds=[0] * number)
        )
        os.utime(path, (BEGIN - number, BEGIN - number))
    assert read_job(tmp_path)[0].job == "job-1"
    assert read_job(tmp_path, "job-3")[0].job == "job-3"
    with pytest.raises(RecordsError, match=r"no records of job 'job-4' in .*; available: job-1, job-2, job-3"):
        read_job(tmp_path, "job-4")
    with pytest.raises(RecordsError, match=r"several jobs begin with 'job' in .*; available: job-1, job-2, job-3"):
        read_job(tmp_path, "job")


def test_a_resumed_job_has_its_last_id(tmp_path: Path):
    """The records of the job that it continues come first; two copies of the records of a site are one site."""
    records = [*server_records("first", rounds=(0,), ended=False), *server_records("second", rounds=(1,))]
    write(tmp_path / "checkpoints" / FILE_NAME, records)
    write(tmp_path / "server" / "second" / FILE_NAME, records)
    (file,) = read_job(tmp_path)
    assert (file.job, len(file.records.rounds), len(file.records.starts)) == ("second", 2, 2)


def test_damaged_and_missing_records(tmp_path: Path):
    """Without a readable first line, the directories name job and site; errors say what to do."""
    path = write(tmp_path / "site-7" / "job-9" / FILE_NAME, client_records("x")[1:])
    path.write_bytes(b"\xff{\n" + path.read_bytes() + b'{"kind": "rou')
    path.with_name(f"{FILE_NAME}.zip").symlink_to("nowhere")
    os.mkfifo(path.with_name("more.zip"))
    (file,) = read_job(tmp_path)
    assert (file.job, file.site, file.records.damaged) == ("job-9", "site-7", 2)
    path.write_bytes(path.read_bytes() + b'\n{"kind": "job", "x": ' + b"[" * 100_000)
    assert read_job(tmp_path)[0].job == "job-9"
    with pytest.raises(RecordsError, match="does not exist; name a workspace"):
        read_job(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordsError, match=r"has no nvflare_lazy\.jsonl; name the workspace"):
        read_job(tmp_path / "empty")


def test_damaged_zip_files(tmp_path: Path):
    """An archive without dates is read; one that is cut, has other bytes or is encrypted is an error."""
    records = write(tmp_path / FILE_NAME, server_records(JOB))
    packed = archive(tmp_path / "packed.zip", records, date=(1980, 0, 0, 0, 0, 0))
    assert sites(packed) == {"server": 3}
    content = packed.read_bytes()
    packed.write_bytes(content.replace(b'"site"', b'"SITE"', 1))
    with pytest.raises(RecordsError, match=r"cannot read the zip file .*: Bad CRC-32 .*; download it again"):
        read_job(packed)
    packed.write_bytes(content[:-30])
    with pytest.raises(RecordsError, match=r"nor a complete zip file; if it is a download, repeat it"):
        read_job(packed)
    directory = content.rindex(b"PK\x01\x02")
    packed.write_bytes(content[:6] + b"\x01" + content[7 : directory + 8] + b"\x01" + content[directory + 9 :])
    with pytest.raises(RecordsError, match=r"cannot read the zip file .* is encrypted"):
        read_job(packed)

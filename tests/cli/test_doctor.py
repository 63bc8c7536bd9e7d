# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy doctor`: its report on a healthy machine, and on each problem that a machine may have."""

from __future__ import annotations

import json
import resource
from importlib import metadata

import pytest
from nvflare.fuel.f3.comm_config import CommConfigurator, VarName

from nvflare_lazy.cli import doctor
from nvflare_lazy.scratch.container import STORAGE_LIMIT, MemoryLimit
from tests.scratch.conftest import leave_behind as leave_behind
from tests.scratch.conftest import small_disk as small_disk


@pytest.fixture
def root(tmp_path):
    return tmp_path / "scratch"


@pytest.fixture
def site(tmp_path):
    """Maker of a site whose resources say these things."""

    def make(name="resources.json", **resources):
        local = tmp_path / "site" / "local"
        local.mkdir(parents=True, exist_ok=True)
        (local / name).write_text(json.dumps({"format_version": 2, **resources}))
        return tmp_path / "site"

    return make


def findings(result) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in result.out.splitlines():
        level, _, what = line.partition(" ")
        found.setdefault(level, []).append(what.strip())
    return found


def one(found: list[str], beginning: str) -> str:
    (line,) = [line for line in found if line.startswith(beginning)]
    return line


def test_a_machine_that_is_ready(cli, root, site):
    """Versions, handlers, scratch with its speed, limits, what the site allows; exit code 0 and nothing left behind."""
    result = cli("doctor", "--scratch-dir", root, "--site", site(class_allow_list=["nvflare_lazy."]))
    found = findings(result)
    assert result.code == 0
    assert "ERROR" not in found
    for package in ("nvflare", "torch", "safetensors", "numpy"):
        assert one(found["OK"], f"{package} ") == f"{package} {metadata.version(package)}"
    for kind in ("torch.Tensor", "numpy.ndarray", "LazyDownloadRef"):
        (handler,) = [line for line in found["OK"] if line.startswith("Handler of") and kind in line.split(" by ")[0]]
        assert " by nvflare_lazy." in handler
    assert str(root) in one(found["OK"], "Scratch root")
    assert "/s" in one(found["OK"] + found.get("WARNING", []), "Scratch disk writes")
    assert one(found["OK"], f"{root.parent}/site/local/resources.json allows nvflare_lazy.*")
    assert list(root.glob("job-*")) == []


ALLOWS = [
    ({"class_allow_list": ["nvflare.", "nvflare_lazy."]}, "OK", "allows nvflare_lazy.*"),
    ({"class_allow_list": ["*"]}, "OK", "allows nvflare_lazy.*"),
    ({"class_allow_list": ["nvflare."]}, "ERROR", 'add "nvflare_lazy." to class_allow_list'),
    ({}, "ERROR", 'add "nvflare_lazy." to class_allow_list'),
    ({"class_list_enforcement_mode": "warn"}, "WARNING", "only warns"),
]


@pytest.mark.parametrize("name", ["resources.json", "resources.json.default"])
@pytest.mark.parametrize(("resources", "level", "says"), ALLOWS)
def test_what_a_site_allows(site, resources, level, says, name):
    """As NVFlare reads it: a list of the site's own, or none, which means NVFlare's classes only."""
    (finding,) = doctor.check_site(site(name, **resources))
    assert finding.level == level
    assert says in finding.message


@pytest.mark.parametrize(
    ("setting", "levels"),
    [
        ("nvflare_lazy.flare.decomposers", ["OK", "WARNING"]),
        ("nvflare_lazy.flare.install", ["OK", "WARNING"]),
        # A typing error, and a list, of which NVFlare makes text.
        ("nvflare_lazy.flare.decomposer", ["ERROR", "ERROR"]),
        (["nvflare_lazy.flare.decomposers"], ["ERROR", "ERROR"]),
        ("our.decomposers", ["ERROR"]),
    ],
)
def test_setting_of_a_site(site, setting, levels):
    """With the setting, jobs need not name a class; NVFlare ignores a value that it cannot import."""
    found = list(doctor.check_site(site(nvflare_decomposers=setting)))
    assert [finding.level for finding in found] == levels
    assert "class_allow_list" in found[-1].message
    assert len(found) == 1 or str(setting) in found[0].message


def test_a_site_that_is_none(tmp_path, site):
    """No resources, and resources that cannot be read, are problems with the path in them."""
    (finding,) = doctor.check_site(tmp_path)
    assert (finding.level, str(tmp_path) in finding.message) == (doctor.ERROR, True)
    path = site() / "local" / "resources.json"
    path.write_text("{")
    (finding,) = doctor.check_site(path.parents[1])
    assert (finding.level, "is not JSON" in finding.message) == (doctor.ERROR, True)


def test_scratch_that_cannot_be_used(cli, tmp_path):
    """A file instead of a directory is a problem, and the exit code reports it."""
    (tmp_path / "file").write_text("")
    result = cli("doctor", "--scratch-dir", tmp_path / "file")
    assert result.code == 1
    assert str(tmp_path / "file") in one(findings(result)["ERROR"], "Scratch")


def test_scratch_that_is_memory_and_small(cli, small_disk):
    """A tmpfs uses the memory that this package saves: a warning; eight MiB are too little: a problem."""
    result = cli("doctor", "--scratch-dir", small_disk)
    found = findings(result)
    assert result.code == 1
    assert any("tmpfs" in line for line in found["WARNING"])
    assert "8.0 MiB" in one(found["ERROR"], "Scratch root")
    assert not any(line.startswith("Scratch disk writes") for lines in found.values() for line in lines)


def test_left_scratch_is_removed_and_reported(root, leave_behind):
    """Leasing scratch as a job does frees the space of ended processes, and the report has the size."""
    directory = leave_behind()
    (finding,) = [found for found in doctor.check_scratch(str(root)) if "no longer exist" in found.message]
    assert (finding.level, "Removed" in finding.message) == (doctor.OK, True)
    assert not directory.exists()


def test_left_scratch_that_stays(root, leave_behind, monkeypatch):
    """What cannot be removed is a warning that names it."""
    directory = leave_behind()
    monkeypatch.setattr(doctor.JobScratch, "open", _open_without_reclaiming(directory))
    (finding,) = [found for found in doctor.check_scratch(str(root)) if "no longer exist" in found.message]
    assert finding.level == doctor.WARNING
    assert str(directory) in finding.message


def _open_without_reclaiming(directory):
    """Opens scratch although an ended process left a directory at an unused path."""
    opening = doctor.JobScratch.open

    def opened(*args, **kwargs):
        lease, elsewhere = directory.with_suffix(".lease"), directory.parent.parent
        moved = [path.rename(elsewhere / path.name) for path in (directory, lease)]
        job = opening(*args, **kwargs)
        for path in moved:
            path.rename(directory.parent / path.name)
        return job

    return opened


def test_limits_of_processes(monkeypatch):
    """Few open files and a largest file size are warnings; enough of both are not."""
    limits = {resource.RLIMIT_NOFILE: (256, 256), resource.RLIMIT_FSIZE: (1 << 30, 1 << 30)}
    monkeypatch.setattr(doctor.resource, "getrlimit", limits.__getitem__)
    warned = [found.message for found in doctor.check_limits() if found.level == doctor.WARNING]
    assert "Only 256 open files" in warned[0]
    assert "1.0 GiB" in warned[1]
    limits |= {resource.RLIMIT_NOFILE: (65536, 65536), resource.RLIMIT_FSIZE: (resource.RLIM_INFINITY,) * 2}
    assert not [found for found in doctor.check_limits() if found.level != doctor.OK]


def test_the_limits_of_a_container(monkeypatch, tmp_path):
    """Memory and ephemeral storage; a limit that is not a size is an error."""
    monkeypatch.setattr(doctor, "memory_limit", lambda: MemoryLimit(3 << 30, 1 << 20, tmp_path))
    monkeypatch.setenv(STORAGE_LIMIT, "2GiB")
    found = [found.message for found in doctor.check_limits()]
    assert any("memory limit is 3.0 GiB" in message and "1.0 MiB are in use" in message for message in found)
    assert f"The ephemeral-storage limit is 2.0 GiB ({STORAGE_LIMIT})" in found
    monkeypatch.setenv(STORAGE_LIMIT, "much")
    assert [found.level for found in doctor.check_limits()][-1] == doctor.ERROR


def test_limits_of_messages(monkeypatch, tmp_path):
    """NVFlare reads the same variables; settings that break transfers are found, even in the files of a site."""
    assert list(doctor.check_messages(tmp_path)) == []
    for name in (doctor.MAX_MESSAGE, doctor.MAX_BLOB):
        monkeypatch.setenv(name, "1000000")
    assert CommConfigurator().get_max_message_size() == CommConfigurator().get_streaming_max_blob_size() == 1_000_000
    by_variable = [(found.level, found.message) for found in doctor.check_messages(None)]
    assert [level for level, _ in by_variable] == [doctor.ERROR, doctor.WARNING]
    monkeypatch.delenv(doctor.MAX_MESSAGE)
    monkeypatch.delenv(doctor.MAX_BLOB)
    (tmp_path / "local").mkdir()
    config = {VarName.MAX_MESSAGE_SIZE: 1_000_000, VarName.STREAMING_MAX_BLOB_SIZE: 1_000_000}
    (tmp_path / "local" / "comm_config.json").write_text(json.dumps(config))
    assert [(found.level, found.message) for found in doctor.check_messages(tmp_path)] == by_variable
    monkeypatch.setenv(doctor.MAX_BLOB, "4G")
    assert [found.level for found in doctor.check_messages(tmp_path)] == [doctor.ERROR]


def test_a_package_that_is_missing(monkeypatch):
    """It is a problem, with the command that installs it."""

    def version(package):
        if package == "safetensors":
            raise metadata.PackageNotFoundError
        return "1"

    monkeypatch.setattr(doctor.metadata, "version", version)
    (problem,) = [found for found in doctor.check_versions() if found.level == doctor.ERROR]
    assert "pip install safetensors" in problem.message


def test_a_slow_disk(monkeypatch, root):
    """It is measured, and one that rounds would wait for is a warning."""
    monkeypatch.setattr(doctor, "_SPEED_TEST_BYTES", 8 << 20)
    monkeypatch.setattr(doctor, "_SLOW_BYTES_PER_SECOND", 1 << 60)
    (finding,) = [found for found in doctor.check_scratch(str(root)) if found.message.startswith("Scratch disk writes")]
    assert finding.level == doctor.WARNING
    assert list(root.glob("job-*")) == []

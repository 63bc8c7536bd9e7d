# SPDX-License-Identifier: Apache-2.0
"""The supported releases of NVFlare: which they are, the error elsewhere, and the tests with the newest candidate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nvflare_lazy.transport.supported_nvflare import SUPPORTED, is_supported
from tests.environment import ROOT, make_environment, run_tests

VERSIONS = [
    *("2.8.3", "2.9", "2.9.0", "2.9.0rc1", "2.9.0.dev3", "2.9a1", "2.9.1rc5", "2.9.1.dev2+4.gabc", "2.9.12"),
    *("2.9.0.post1", "2.9.0+23.gdef.dirty", "2.10.0", "2.10.0rc1", "2.10.0.dev1", "2.10", "3.0", "2.90.0"),
]
CHECKPOINT_TOOLS = "import nvflare_lazy; nvflare_lazy.open, nvflare_lazy.save, nvflare_lazy.aggregate; "
NEEDING_NVFLARE = [
    "nvflare_lazy.install",
    "from nvflare_lazy.flare import TensorOffload",
    "import nvflare_lazy.recipes",
]


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_are_judged_as_packaging_does(version):
    """Candidates of a later patch release are supported; candidates of 2.9.0 and 2.10.0 are not."""
    assert is_supported(version) == SpecifierSet(SUPPORTED).contains(version, prereleases=True)


def test_the_requirement_of_the_package_is_the_same():
    """Another one would install a version that does not import."""
    [line] = re.findall(r'^    "(nvflare[<>=].*)",', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert Requirement(line).specifier == SpecifierSet(SUPPORTED)
    assert not is_supported("a version")


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("code", "version"), [*zip(NEEDING_NVFLARE, ["2.8.3", "2.10.0rc1", "2.10.0"], strict=True)])
def test_another_version_is_an_error_that_names_both(tmp_path, code, version):
    """The import of a part that needs NVFlare fails before NVFlare is imported; checkpoint tools work."""
    installed = tmp_path / f"nvflare-{version}.dist-info" / "METADATA"
    installed.parent.mkdir()
    installed.write_text(f"Metadata-Version: 2.1\nName: nvflare\nVersion: {version}\n")
    done = run_python(CHECKPOINT_TOOLS + code, tmp_path)
    assert f"UnsupportedNVFlareError: nvflare-lazy needs nvflare>=2.9,<2.10, and {version} is installed" in done.stderr
    assert "site-packages/nvflare" not in done.stderr


@pytest.mark.slow
def test_a_release_that_lacks_names(tmp_path):
    """With NVFlare 2.8, the commands for checkpoints work, and `doctor` reports the version."""
    python = make_environment(tmp_path / "environment", "--no-deps", "nvflare==2.8.3", unpinned="nvflare")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        run = [python, "-m", "nvflare_lazy.cli", *arguments]
        return subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True)

    save = "import nvflare_lazy, torch; nvflare_lazy.save({'w': torch.ones(3)}, 'm.safetensors')"
    subprocess.run([python, "-c", save], env=environment, cwd=tmp_path, check=True)
    assert command("verify", "m.safetensors").stdout.startswith("m.safetensors: OK")
    found = command("doctor", "--scratch-dir", str(tmp_path / "scratch"))
    assert found.returncode == 1
    assert "ERROR    nvflare-lazy needs nvflare>=2.9,<2.10, and 2.8.3 is installed" in found.stdout


@pytest.mark.slow
def test_the_newest_candidate(tmp_path):
    """The tests of the transport and the components, and jobs, pass with the newest 2.9, candidates included."""
    newest = ["--upgrade", "--pre", f"nvflare{SUPPORTED}"]
    python = make_environment(tmp_path / "environment", *newest, unpinned="nvflare")
    code = "from importlib.metadata import version; print(version('nvflare'))"
    version = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    print(f"NVFlare {version}")
    assert is_supported(version)
    assert version != metadata.version("nvflare")
    folders = ["tests/transport", "tests/flare", "tests/recipes"]
    jobs = ["test_lazy_job", "test_one_component", "test_recipes", "test_restart"]
    run_tests(python, "-m", "not slow", *folders, *(f"integration_tests/{name}.py" for name in jobs))

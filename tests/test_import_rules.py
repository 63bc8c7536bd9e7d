# SPDX-License-Identifier: Apache-2.0
"""The import rules in pyproject.toml bite: each is tried on a small package that breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as run; run()"


def lint(directory: Path, modules: dict[str, str]) -> tuple[int, str]:
    """Lint a package made of these modules by this project's rules: the exit code, and what was said."""
    package = directory / "nvflare_lazy"
    for name, source in {"__init__": "", **modules}.items():
        path = package / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(package).parents:
            (package / parent / "__init__.py").touch()
        path.write_text(source)
    shutil.copy(ROOT / "pyproject.toml", directory)
    done = subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS, "--no-cache"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"errors": ""}, id="only the lowest layer"),
        pytest.param(
            {
                "errors": "",
                "tensors.lazy": "import nvflare_lazy.errors",
                "formats.reader": "import nvflare_lazy.tensors.lazy",
                "scratch.lease": "import nvflare_lazy.errors",
                "aggregation.engine": "import nvflare_lazy.formats.reader, nvflare_lazy.scratch.lease",
                "transport.decomposers": "import nvflare.fuel, nvflare_lazy.formats.reader",
                "flare.__init__": "import nvflare",
                "flare.locator": "import nvflare.app_common, nvflare_lazy.aggregation.engine",
                "recipes.fedavg": "from nvflare.job_config import api; import nvflare_lazy.flare.locator",
                "cli.doctor": "def doctor():\n    import nvflare_lazy.flare.locator",
            },
            id="every layer",
        ),
    ],
)
def test_right_way(tmp_path, modules):
    """Packages that are not there yet are no mistake, and imports down the layers pass."""
    code, output = lint(tmp_path, modules)
    assert code == 0, output


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("errors", "tensors.a"),
        ("tensors.a", "formats.a"),
        ("formats.a", "scratch.a"),
        ("scratch.a", "formats.a"),
        ("scratch.a", "aggregation.a"),
        ("transport.a", "aggregation.a"),
        ("aggregation.a", "transport.a"),
        ("aggregation.a", "flare.a"),
        ("flare.a", "recipes.a"),
        ("recipes.a", "cli.a"),
    ],
)
def test_against_the_layers(tmp_path, importer, imported):
    """An import up the layers, or between siblings, is refused; inside a function, too."""
    for place, source in (("top", "import {}"), ("function", "def f():\n    import {}")):
        modules = {importer: source.format(f"nvflare_lazy.{imported}"), imported: ""}
        code, output = lint(tmp_path / place, modules)
        assert code == 1, output
        assert "BROKEN" in output


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(
            {
                "tensors.a": "import nvflare_lazy",
                "__init__": "import nvflare_lazy.formats.b",
                "formats.b": "",
            },
            id="through the top",
        ),
        pytest.param({"helpers": ""}, id="a module without a layer"),
        *(
            pytest.param({f"{layer}.a": "from nvflare.fuel.utils import fobs"}, id=f"{layer} and nvflare")
            for layer in ("tensors", "formats", "scratch", "aggregation", "cli")
        ),
        pytest.param({"errors": "import nvflare"}, id="errors and nvflare"),
        pytest.param({"__init__": "import nvflare"}, id="the top and nvflare"),
        pytest.param({"cli.a": "def doctor():\n    import nvflare"}, id="cli and nvflare, lazily"),
    ],
)
def test_other_ways_around(tmp_path, modules):
    """Detours, modules without a layer, and nvflare outside of its three packages are refused."""
    code, output = lint(tmp_path, modules)
    assert code == 1, output
    assert "BROKEN" in output


@pytest.mark.parametrize(
    ("importer", "imported", "code"),
    [
        ("tensors.a", "tensors._b", 0),
        ("formats.pytorch.open", "formats.pytorch._zip", 0),
        ("formats.pytorch._zip", "formats._commit", 0),
        ("formats.pytorch.open", "tensors._b", 1),
        ("formats.open", "formats.pytorch._zip", 1),
        ("aggregation.api", "aggregation._engine.passes", 0),
        ("flare.a", "aggregation._engine.passes", 1),
    ],
)
def test_private_modules(tmp_path, importer, imported, code):
    """A module or package whose name begins with an underscore is imported only inside its parent package."""
    found, output = lint(tmp_path, {importer: f"import nvflare_lazy.{imported}", imported: ""})
    assert found == code, output
    assert ("which is private to its package" in " ".join(output.split())) == bool(code)

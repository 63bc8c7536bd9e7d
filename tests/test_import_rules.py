# SPDX-License-Identifier: Apache-2.0
"""The import rules in pyproject.toml bite: each is tried on a small package that breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as run; run()"


def lint(directory: Path, modules: dict[str, str]) -> tuple[int, str]:
    """Lint a package made of these modules by this project's rules: the exit code, and the output."""
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


def test_right_way(tmp_path):
    """Missing packages are allowed, and imports down the layers and of a package's own private modules pass."""
    for name, modules in {
        "only the lowest layer": {"errors": ""},
        "every layer": {
            "errors": "",
            "tensors.lazy": "import nvflare_lazy.errors, nvflare_lazy.tensors._storage",
            "tensors._storage": "",
            "formats._commit": "",
            "formats.reader": "import nvflare_lazy.tensors.lazy",
            "formats.pytorch.open": "import nvflare_lazy.formats.pytorch._zip",
            "formats.pytorch._zip": "import nvflare_lazy.formats._commit",
            "scratch.lease": "import nvflare_lazy.errors",
            "aggregation._engine.passes": "",
            "aggregation.api": "import nvflare_lazy.formats.reader, nvflare_lazy.aggregation._engine.passes",
            "transport.decomposers": "import nvflare.fuel, nvflare_lazy.formats.reader",
            "flare.__init__": "import nvflare",
            "flare.locator": "import nvflare.app_common, nvflare_lazy.aggregation.api",
            "recipes.fedavg": "from nvflare.job_config import api; import nvflare_lazy.flare.locator",
            "cli.doctor": "def doctor():\n    import nvflare_lazy.flare.locator",
        },
    }.items():
        code, output = lint(tmp_path / name, modules)
        assert code == 0, output


def test_against_the_layers(tmp_path):
    """Imports up the layers, between siblings and through the top are refused, even inside functions."""
    wrong = [
        ("errors", "tensors.a"),
        ("tensors.a", "formats.a"),
        ("tensors.b", "nvflare_lazy"),
        ("formats.a", "scratch.a"),
        ("scratch.a", "formats.a"),
        ("scratch.b", "aggregation.a"),
        ("transport.a", "aggregation.a"),
        ("aggregation.a", "transport.a"),
        ("aggregation.b", "flare.a"),
        ("flare.a", "recipes.a"),
        ("recipes.a", "cli.a"),
    ]
    for place, source in (("top", "import {}"), ("function", "def f():\n    import {}")):
        modules = {imported: "" for _, imported in wrong if imported != "nvflare_lazy"}
        modules["__init__"] = "import nvflare_lazy.formats.a"
        for importer, imported in wrong:
            modules[importer] = source.format(imported if imported == "nvflare_lazy" else f"nvflare_lazy.{imported}")
        code, output = lint(tmp_path / place, modules)
        assert code == 1, output
        for importer, imported in wrong:
            target = "nvflare_lazy" if imported == "nvflare_lazy" else f"nvflare_lazy.{imported}"
            assert f"nvflare_lazy.{importer} -> {target} (l." in output, (importer, imported, output)


def test_a_module_without_a_layer(tmp_path):
    """A new module at the top has to choose its layer."""
    code, output = lint(tmp_path, {"helpers": ""})
    assert code == 1, output
    assert "helpers" in output


def test_nvflare_is_imported_in_three_packages_only(tmp_path):
    """Other packages may not import NVFlare, even inside functions."""
    layers = ("errors", "tensors.a", "formats.a", "scratch.a", "aggregation.a", "cli.a")
    modules = dict.fromkeys(layers, "from nvflare.fuel.utils import fobs")
    modules |= {"cli.b": "def doctor():\n    import nvflare", "__init__": "import nvflare", "flare.a": "import nvflare"}
    code, output = lint(tmp_path, modules)
    assert code == 1, output
    for name in ("nvflare_lazy", *(f"nvflare_lazy.{layer}" for layer in (*layers, "cli.b"))):
        assert f"{name} -> nvflare (l." in output, (name, output)
    assert "nvflare_lazy.flare.a -> nvflare " not in output


def test_private_modules(tmp_path):
    """A module or package with a leading underscore is imported only inside its parent package."""
    wrong = {
        "formats.pytorch.open": "tensors._b",
        "formats.open": "formats.pytorch._zip",
        "flare.a": "aggregation._engine.passes",
    }
    modules = {importer: f"import nvflare_lazy.{imported}" for importer, imported in wrong.items()}
    modules |= dict.fromkeys(wrong.values(), "")
    code, output = lint(tmp_path, modules)
    assert code == 1, output
    for importer, imported in wrong.items():
        assert f"nvflare_lazy.{importer} imports nvflare_lazy.{imported}," in " ".join(output.split()), output

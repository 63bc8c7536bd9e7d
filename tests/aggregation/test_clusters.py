# SPDX-License-Identifier: Apache-2.0
"""Aggregation on a process pool, a Dask cluster of two processes and a Ray cluster, and with killed processes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import psutil
import pytest
import torch

import nvflare_lazy
from nvflare_lazy.aggregation import (
    Aggregation,
    Bulyan,
    ClippedMean,
    CoordinateRule,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    Rule,
    TrimmedMean,
)
from nvflare_lazy.aggregation.executors import Workers
from nvflare_lazy.aggregation.testing import _ALL_DTYPES, RuleContract
from nvflare_lazy.errors import ExecutorError
from tests.aggregation.test_executors import hidden, make_contributions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
RULES: dict[str, Rule] = {
    "mean": Mean(),
    "median": Median(),
    "trimmed_mean": TrimmedMean(),
    "krum": Krum(),
    "multi_krum": MultiKrum(),
    "bulyan": Bulyan(),
    "geometric_median": GeometricMedian(),
    "clipped_mean": ClippedMean(clip_norm=1.0, noise_multiplier=0.5, seed=1),
}
KINDS = ["processes", "dask", "ray"]


@pytest.fixture(scope="module", params=KINDS)
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with started(request.param, tmp_path_factory) as workers:
        yield workers


@contextmanager
def started(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Start two workers of a kind for a block."""
    spec: dict[str, Any] = {"name": kind}
    with ExitStack() as until_done:
        if kind == "processes":
            spec["max_workers"] = 2
        else:
            pytest.importorskip("distributed" if kind == "dask" else "ray")
            patch = until_done.enter_context(pytest.MonkeyPatch.context())
            # Their processes import this module.
            patch.setenv("PYTHONPATH", str(ROOT))
            if kind == "dask":
                directory = str(tmp_path_factory.mktemp("dask"))
                settings = importlib.import_module("dask").config
                until_done.enter_context(settings.set({"temporary-directory": directory}))
                spec |= {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
            else:
                patch.setenv("RAY_AUTH_MODE", "disabled")
                # The path of a socket has at most 107 bytes.
                directory = until_done.enter_context(TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True))
                spec |= {"num_cpus": 1, "include_dashboard": False, "_temp_dir": directory}
        yield until_done.enter_context(Workers(spec))


@pytest.mark.parametrize("name", RULES)
def test_same_bytes(name: str, workers: Workers, tmp_path: Path) -> None:
    """2, 4 and 7 parts give the bytes of one process, for every rule and every dtype."""
    rule = RULES[name]
    dtypes = (*_ALL_DTYPES, *(() if rule.uses_order else (torch.complex64,)))
    generator = torch.Generator().manual_seed(3)
    contributions = {}
    for number in range(9):
        tensors = {str(dtype): made(dtype, 2, 4001, generator) for dtype in dtypes}
        tensors |= {"large": torch.randn(1_000_000, generator=generator), "scalar": torch.tensor(1.0)}
        path = nvflare_lazy.save(tensors, tmp_path / f"{number}.safetensors")
        contributions[f"site-{number}"] = nvflare_lazy.open(path)
    reference = contributions["site-8"]
    Aggregation(rule).run(contributions, tmp_path / "one.safetensors", reference=reference)
    nbytes = sum(contribution.nbytes for contribution in contributions.values())
    for parts in (2, 4, 7):
        counted = Counted(workers)
        Aggregation(rule, executor=counted, part_size=nbytes // parts + 20_000).run(
            contributions, tmp_path / "parts.safetensors", reference=reference
        )
        assert parts in counted.passes
        assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


class Counted(Workers):
    """Counts the parts of each pass."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.passes: list[int] = []

    @property
    def executor(self) -> Any:
        return self

    def submit(self, fn: Any, part: Any) -> Any:
        kind = type(part).__name__
        if not self.passes or kind != self._kind:
            self.passes.append(0)
        self._kind = kind
        self.passes[-1] += 1
        return self._workers.executor.submit(fn, part)


def made(dtype: torch.dtype, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        return torch.randn(rows, columns, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(rows, columns, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (rows, columns), generator=generator).to(dtype)


@pytest.mark.parametrize("name", RULES)
def test_contract(name: str, workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The rules keep their contract on an executor: order of arrival, tiles, errors, reports, memory."""

    class OnWorkers(RuleContract):
        # Its description does not have the seed, on purpose.
        rule: ClassVar[Rule] = ClippedMean(clip_norm=5.0) if name == "clipped_mean" else RULES[name]

        def _aggregate(self, contributions: Mapping[str, Mapping[str, Any]], out: Path, **settings: Any) -> Any:
            return super()._aggregate(contributions, out, executor=workers, part_size="100KiB", **settings)

    tests = [method for test, method in vars(RuleContract).items() if test.startswith("test_")]
    assert len(tests) >= 8
    for test in tests:
        test(OnWorkers(), tmp_path_factory.mktemp(test.__name__[:20]))


@dataclass(frozen=True)
class Killing(CoordinateRule):
    """The largest value. Each file in a directory kills one worker in the middle of a part."""

    directory: str = ""

    def combine(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for path in Path(self.directory).iterdir():
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return values.amax(0)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_worker(kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The parts of two workers that are killed with kill -9 are repeated, and the result has the same bytes."""
    contributions = make_contributions(tmp_path)
    kills = tmp_path / "kills"
    kills.mkdir()
    rule = Killing(directory=str(kills))
    Aggregation(rule).run(contributions, tmp_path / "one.safetensors")
    with started(kind, tmp_path_factory) as workers:
        for number in range(2):
            (kills / str(number)).touch()
        Aggregation(rule, executor=workers, part_size="500KiB").run(contributions, tmp_path / "parts.safetensors")
    assert not any(kills.iterdir())
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert not hidden(tmp_path)


def test_part_that_kills_every_worker(tmp_path: Path) -> None:
    """A part that ends its process each time ends the aggregation with an error, and nothing is left."""
    kills = tmp_path / "kills"
    kills.mkdir()
    for number in range(9):
        (kills / str(number)).touch()
    aggregation = Aggregation(
        Killing(directory=str(kills)), executor={"name": "processes", "max_workers": 1}, part_size="1GiB"
    )
    with pytest.raises(ExecutorError, match="failed 3 times"):
        aggregation.run(make_contributions(tmp_path), tmp_path / "out.safetensors")
    assert not hidden(tmp_path)
    assert not (tmp_path / "out.safetensors").exists()


@dataclass(frozen=True)
class Slow(CoordinateRule):
    """The largest value, slowly. Each worker leaves a file in a directory when it begins."""

    directory: str = ""

    def combine(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        (Path(self.directory) / str(os.getpid())).touch()
        time.sleep(0.02)
        return values.amax(0)


def run_slowly(directory: Path, kind: str) -> None:
    """Aggregate in a process that the test kills."""
    contributions = {path.name: nvflare_lazy.open(path) for path in directory.glob("site-*.safetensors")}
    spec = {"name": kind, "max_workers": 2}
    rule = Slow(directory=str(directory / "begun"))
    Aggregation(rule, executor=spec, part_size="300KiB", tile_size="4KiB").run(
        contributions, directory / "out.safetensors"
    )


@pytest.mark.parametrize("parts_done", [0, 3])
def test_killed_driver(parts_done: int, tmp_path: Path) -> None:
    """After kill -9 of the driver, the old result stays, the workers end, and the next aggregation leaves nothing."""
    contributions = make_contributions(tmp_path)
    out = nvflare_lazy.save({"w": torch.zeros(3)}, tmp_path / "out.safetensors")
    before = out.read_bytes()
    begun = tmp_path / "begun"
    begun.mkdir()
    program = (
        "from pathlib import Path; from tests.aggregation.test_clusters import run_slowly\n"
        f"if __name__ == '__main__': run_slowly(Path({str(tmp_path)!r}), 'processes')"
    )
    script = tmp_path / "driver.py"
    script.write_text(program)
    driver = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_until(lambda: any(begun.iterdir()) or driver.poll() is not None)
        time.sleep(0.2 * parts_done)
        assert driver.poll() is None
        children = psutil.Process(driver.pid).children(recursive=True)
        assert children
    finally:
        driver.kill()
        driver.wait()
    assert out.read_bytes() == before
    wait_until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    assert len(hidden(tmp_path)) == 1
    assert out.read_bytes() == before
    Aggregation("median", executor="processes").run(contributions, out)
    assert nvflare_lazy.open(out).keys() == contributions["site-0"].keys()
    assert not hidden(tmp_path)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def test_script_without_guard(tmp_path: Path) -> None:
    """A script that starts worker processes at import gets an error with the lines to add."""
    make_contributions(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import nvflare_lazy\n"
        f"paths = [{str(tmp_path)!r} + f'/site-{{n}}.safetensors' for n in range(3)]\n"
        "nvflare_lazy.aggregate({path: nvflare_lazy.open(path) for path in paths}, out='out.safetensors',"
        " executor='processes')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "ExecutorError: the executor failed 3 times" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr
    assert not hidden(tmp_path)

# SPDX-License-Identifier: Apache-2.0
"""Contributions that the page cache does not have are read ahead, and give the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import nvflare_lazy
from benchmarks.aggregation_limits import make_cold
from nvflare_lazy.aggregation import Aggregation
from nvflare_lazy.aggregation._engine import passes
from nvflare_lazy.aggregation._engine.tile_io import InputVector

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Five contributions, each with tensors of three types; a pass has several steps, with several tiles each."""
    monkeypatch.setattr(passes, "STEP_BYTES", 1 << 20)
    found = []
    for number in range(5):
        random = torch.Generator().manual_seed(number)
        model = {f"layer{index}": torch.randn(300_001 + index, generator=random) for index in range(3)}
        model |= {f"half{index}": torch.randn(70_003, generator=random).bfloat16() for index in range(9)}
        model |= {f"bias{index}": torch.randn(7, generator=random) for index in range(200)}
        model["mask"] = torch.rand(1000, generator=random) < 0.5
        found.append(tmp_path / f"site-{number}.safetensors")
        nvflare_lazy.save(model, found[-1])
    return found


def drop(paths: list[Path]) -> None:
    """Remove files from the page cache."""
    try:
        make_cold(paths)
    except RuntimeError:
        pytest.skip("this file system keeps its files in memory")


def aggregate(paths: list[Path], *, is_cold: bool, **settings: object) -> bytes:
    """The bytes of the result."""
    if is_cold:
        drop(paths)
    else:
        for path in paths:
            path.read_bytes()
    out = paths[0].with_name("out")
    opened = {path.name: nvflare_lazy.open(path) for path in paths}
    Aggregation(**{"fsync": False, "tile_size": "32KiB", **settings}).run(opened, out)
    return out.read_bytes()


@pytest.mark.parametrize("rule", ["mean", "median", "krum"])
def test_the_same_bytes(paths: list[Path], rule: str) -> None:
    assert aggregate(paths, is_cold=True, rule=rule) == aggregate(paths, is_cold=False, rule=rule)


def test_buffers_that_are_too_small(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some contributions of a step are read ahead, and the others by the threads that need them."""
    expected = aggregate(paths, is_cold=False)
    read = []
    read_tile = InputVector.read
    monkeypatch.setattr(InputVector, "read", lambda *args: (read.append(args), read_tile(*args)))
    assert aggregate(paths, is_cold=True, tile_size="1MiB", threads=1, memory_budget="16MiB") == expected
    seldom = len(read)
    read.clear()
    assert aggregate(paths, is_cold=False, tile_size="1MiB", threads=1, memory_budget="16MiB") == expected
    assert 0 < seldom < len(read)


def test_tiles_that_were_read_ahead(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not read again; nothing is read ahead if its buffers do not fit into the budget."""
    read = []
    read_tile = InputVector.read
    monkeypatch.setattr(InputVector, "read", lambda *args: (read.append(args), read_tile(*args)))
    counts = []
    for budget in ("64MiB", "2MiB"):
        read.clear()
        aggregate(paths, is_cold=True, memory_budget=budget)
        counts.append(len(read))
    assert counts[0] < counts[1] // 4


def test_a_contribution_that_was_cut_short(paths: list[Path]) -> None:
    """It is skipped with its error, as if it had been read by the thread that needs it."""
    opened = {path.name: nvflare_lazy.open(path) for path in paths}
    with paths[2].open("r+b") as file:
        file.truncate(2_000_000)
    drop(paths)
    result = Aggregation(fsync=False, tile_size="32KiB").run(opened, paths[0].with_name("out"))
    assert [*result.report.skipped] == ["site-2.safetensors"]
    assert "ends at byte" in str(result.report.skipped["site-2.safetensors"])
    found = {name: tensor.materialize() for name, tensor in result.tensors.items()}
    aggregate([*paths[:2], *paths[3:]], is_cold=False)
    expected = nvflare_lazy.open(paths[0].with_name("out"))
    assert all(torch.equal(found[name], tensor.materialize()) for name, tensor in expected.items())

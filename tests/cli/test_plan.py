# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy plan`: its table, its JSON, and the check of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nvflare_lazy.scratch import container
from nvflare_lazy.scratch.container import MemoryLimit
from tests.cli.sparse import write_sparse

GIB = 1 << 30


@pytest.fixture
def large(tmp_path) -> Path:
    """A model of 1 TiB, which takes no disk."""
    path = tmp_path / "large.safetensors"
    write_sparse(path, {f"layers.{index}": ("F32", (1 << 34,)) for index in range(16)})
    return path


def test_a_model_larger_than_memory(cli, large, rchar):
    """A row for each process; of the file, only the header is read."""
    cli("plan", large, "--clients", 2)
    before = rchar()
    result = cli("plan", large, "--clients", 10, "--optimizer", "fedavgm", "--keep-rounds", 2)
    assert rchar() - before < 1 << 20
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "Model: 1.0 TiB in 16 tensors, the largest 64.0 GiB"
    assert lines[1] == "Job: level 3, 10 clients, mean, fedavgm; each site on its own host"
    cells = [re.split(r" {2,}", line) for line in lines[3:]]
    assert cells[0] == ["SITE", "PROCESS", "MEMORY", "SCRATCH", "CHECKPOINTS", "RECEIVED", "SENT"]
    rows = {(site, process): sizes for site, process, *sizes in cells[1:]}
    assert rows["server", "server job"][1:] == ["10.0 TiB", "8.0 TiB", "10.0 TiB", "10.0 TiB"]
    assert rows["each client", "client job"][1:] == ["1.0 TiB", "-", "1.0 TiB", "1.0 TiB"]


def test_json(cli, model):
    """The sizes, all options, and a dictionary for each process."""
    result = cli("plan", model, "--clients", 3, "--level", 2, "--checkpoint-dir", "checkpoints", "--json")
    found = json.loads(result.out)
    assert found["model"]["tensors"] == 4
    assert found["options"]["keep_rounds"] == 2
    server, *_, client, _ = found["processes"]
    nbytes = found["model"]["nbytes"]
    assert (server["process"], server["scratch"], server["checkpoints"]) == ("server job", 3 * nbytes, 4 * nbytes)
    assert (client["process"], client["count"], client["memory"]) == ("client job", 3, None)


def test_a_machine_that_is_large_enough(cli, model):
    """Exit code 0, and a list of the parts that the check does not include."""
    result = cli("plan", model, "--clients", 3, "--against", ".", "--memory-budget", "1MiB")
    assert result.code == 0
    assert result.out.endswith("\nThis machine has the memory and the disk space for a server of this job.\n")
    result = cli("plan", model, "--clients", 3, "--level", 2, "--against", ".", "--site", "client")
    assert result.out.endswith(" for a client of this job; the memory of unchanged processes is not included.\n")


def test_a_machine_that_is_too_small(cli, large, monkeypatch):
    """Exit code 1, and the missing space; directories that do not exist yet share their future disk."""
    monkeypatch.setattr(container, "memory_limit", lambda: MemoryLimit(GIB, GIB // 2, Path("/memory.max")))
    args = ("plan", large, "--clients", 4, "--env", "sim", "--against", "scratch", "--checkpoint-dir", "checkpoints")
    result = cli(*args)
    assert result.code == 1
    memory, *_, disk = [line for line in result.out.splitlines() if line.startswith("Too small: ")]
    assert "the memory limit of 1.0 GiB in /memory.max is lower than the job needs" in memory
    assert "and the job needs 8.0 TiB, " in disk
    assert " too much; free space, or use another disk" in disk
    result = cli(*args, "--json")
    assert result.code == 1
    assert f"Too small: {json.loads(result.out)['shortages'][-1].partition(' has ')[0]}" in disk


def test_options_that_do_not_fit(cli, model):
    """A usage error; a file that is not a model is another error."""
    result = cli("plan", model, "--clients", 2, "--rule", "bulyan")
    assert (result.code, result.out) == (2, "")
    assert "Error: the rule bulyan requires 7 or more clients, got 2" in result.err
    Path("empty").touch()
    result = cli("plan", "empty", "--clients", 2)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("Error: empty is not a checkpoint. It is an empty file")

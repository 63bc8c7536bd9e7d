# SPDX-License-Identifier: Apache-2.0
"""kill -9 of an S3 server while workers aggregate from it and to it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.aggregation import Aggregation
from nvflare_lazy.errors import NVFlareLazyError
from tests.aggregation.test_executors import Counting
from tests.remote.s3_on_disk import S3OnDisk

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store that can be killed, with three models and an old result."""
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()
    server = S3OnDisk(tmp_path / "s3")
    (tmp_path / "scratch").mkdir(mode=0o700)
    for name, value in {**server.environment, "NVFLARE_LAZY_SCRATCH": str(tmp_path / "scratch")}.items():
        monkeypatch.setenv(name, value)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        nvflare_lazy.save(
            {f"layer{index}": torch.randn(200_000, generator=generator) for index in range(6)},
            f"s3://bucket/site-{number}/",
            max_shard_size="2MB",
        )
    nvflare_lazy.save({"old": torch.ones(3)}, "s3://bucket/out/", max_shard_size="2MB")
    yield server
    server.kill()
    s3fs.S3FileSystem.clear_instance_cache()


def at_urls():
    return {f"site-{number}": nvflare_lazy.open(f"s3://bucket/site-{number}/") for number in range(3)}


def contents(path):
    return {name: value.tolist() for name, value in nvflare_lazy.open(path).items()}


def kill_at(server: S3OnDisk, match: str, method: str, *, back_after: float | None) -> threading.Thread:
    """Kill the server when it has a request that matches, and does not answer it."""
    before = len(server.requests())
    server.fail(method, match, "hang")

    def kill() -> None:
        while not any(match in request and request.startswith(method) for request in server.requests()[before:]):
            time.sleep(0.02)
        server.kill()
        if back_after is not None:
            time.sleep(back_after)
            server.start()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize(("method", "match"), [("GET", "site-1"), ("PUT", "out")])
def test_a_store_that_is_killed_and_started_again(store, tmp_path, method, match):
    """After kill -9 of the store in mid-job, requests are repeated, and the result is that of an undisturbed job."""
    Aggregation("median").run(at_urls(), tmp_path / "one.safetensors")
    updates = at_urls()
    killing = kill_at(store, match, method, back_after=2.0)
    aggregation = Aggregation("median", executor="processes", part_size="1MB", max_shard_size="2MB")
    report = aggregation.run(updates, "s3://bucket/out/").report
    killing.join()
    assert report.skipped == {}
    assert contents("s3://bucket/out/") == contents(tmp_path / "one.safetensors")


@pytest.mark.parametrize(("method", "match"), [("GET", "site-1"), ("PUT", "out")])
def test_a_store_that_is_killed(store, tmp_path, monkeypatch, soon, method, match):
    """If it does not come back, the job fails; when it does, it has the old result, and the next job succeeds."""
    monkeypatch.setattr("nvflare_lazy.remote.upload._FIRST_PAUSE_SECONDS", 0.01)
    Aggregation("median").run(at_urls(), tmp_path / "one.safetensors")
    updates = at_urls()
    killing = kill_at(store, match, method, back_after=None)
    aggregation = Aggregation("median", executor=Counting(), part_size="1MB", max_shard_size="2MB")
    with pytest.raises(NVFlareLazyError, match=r"s3://bucket/"):
        aggregation.run(updates, "s3://bucket/out/")
    killing.join()
    store.start()
    assert contents("s3://bucket/out/") == {"old": [1.0, 1.0, 1.0]}
    assert not [*(tmp_path / "scratch").rglob("*.parts")]
    aggregation.run(at_urls(), "s3://bucket/out/")
    assert contents("s3://bucket/out/") == contents(tmp_path / "one.safetensors")

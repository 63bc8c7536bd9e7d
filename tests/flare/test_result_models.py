# SPDX-License-Identifier: Apache-2.0
"""What the run directory of a job has at its end, as NVFlare archives it and as its `job download` command reads it."""

from __future__ import annotations

import errno
import json
import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage
from nvflare.fuel.utils.zip_utils import unzip_all_from_file
from nvflare.tool.job import job_cli

import nvflare_lazy
from nvflare_lazy.errors import DiskFullError
from nvflare_lazy.flare import LazyAggregator, result_models
from nvflare_lazy.flare.result_models import MANIFEST_NAME
from nvflare_lazy.formats.hugging_face import ModelDirectory

W = torch.zeros(1000)
LAST, BEST = "FL_global_model.safetensors", "best_FL_global_model.safetensors"
HF_BEST = "best/model.safetensors"
ELSEWHERE = {"checkpoint_dir": "checkpoints"}
ROUNDS = 3


@pytest.fixture
def run(start, fl_ctx, result, tmp_path):
    """Runs a job of three rounds whose model is filled with the round's number, and returns its run directory."""

    def run(best: int | None, **arguments) -> Path:
        app = tmp_path / "run" / "app_server"
        app.mkdir(parents=True)
        fl_ctx.set_prop(FLContextKey.APP_ROOT, str(app))
        if "checkpoint_dir" in arguments:
            arguments["checkpoint_dir"] = str(tmp_path / arguments["checkpoint_dir"])
        source = tmp_path / arguments.pop("source", "initial.safetensors")
        if not source.exists():
            nvflare_lazy.save({"w": W}, source)
        persistor = start(source_ckpt_file_full_name=str(source), **arguments)
        for number in range(ROUNDS):
            fl_ctx.set_prop(AppConstants.CURRENT_ROUND, number)
            aggregator = LazyAggregator(server_optimizer={"name": "fedavgm", "momentum": 1e-9})
            aggregator.handle_event(EventType.START_RUN, fl_ctx)
            names = nvflare_lazy.open(source)
            aggregator.accept_model(result("site-1", **dict.fromkeys(names, W + number)))
            model = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)
            model["weights"] = aggregator.aggregate_model().params
            persistor.save_model(model, fl_ctx)
            if number == best:
                persistor.handle_event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, fl_ctx)
        fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, None)
        persistor.handle_event(EventType.END_RUN, fl_ctx)
        return app.parent

    return run


@pytest.fixture
def download(tmp_path):
    """Archives a run directory and finds its models, both with NVFlare's code; returns the contents."""

    def download(directory: Path) -> tuple[dict, dict[str, float]]:
        storage = FilesystemStorage(str(tmp_path / "jobs"))
        storage.create_object("/job", b"", {})
        storage.update_object("/job", [str(directory)], "workspace")
        storage.get_data_for_download("/job", "workspace", str(tmp_path / "workspace.zip"))
        target = tmp_path / "download" / "workspace"
        target.mkdir(parents=True)
        unzip_all_from_file(str(tmp_path / "workspace.zip"), str(target))
        found, missing = job_cli._discover_job_download_artifacts(str(target.parent))
        assert "global_model" not in missing
        large = [path for path in target.rglob("*") if path.is_file() and path.stat().st_size > W.nbytes]
        models = {str(path.relative_to(target / "app_server")): value_of(path) for path in large}
        return {name: path for name, path in found.items() if "model" in name}, models

    return download


def value_of(path: Path) -> float:
    section = "model" if path.suffix == ".pt" else None
    return float(next(iter(nvflare_lazy.open(path, section=section).values()))[0])


@pytest.mark.parametrize(
    ("best", "arguments", "models"),
    [
        (None, {}, {LAST: 2.0}),
        (1, {}, {LAST: 2.0, BEST: 1.0}),
        (2, {}, {LAST: 2.0}),
        (1, {"keep_rounds": 3}, {LAST: 2.0, BEST: 1.0, "rounds/round-00000/model.safetensors": 0.0}),
        (1, {"save_pytorch": True}, {"FL_global_model.pt": 2.0, "best_FL_global_model.pt": 1.0}),
        (2, {"save_pytorch": True}, {"FL_global_model.pt": 2.0}),
        (1, ELSEWHERE, {LAST: 2.0, BEST: 1.0}),
        (2, {**ELSEWHERE, "save_pytorch": True}, {"FL_global_model.pt": 2.0}),
        (1, {"source": "hf"}, {"model.safetensors": 2.0, HF_BEST: 1.0}),
        (2, {"source": "hf"}, {"model.safetensors": 2.0}),
        (1, {"source": "adapter"}, {"adapter_model.safetensors": 2.0, "best/adapter_model.safetensors": 1.0}),
        (1, {"source": "hf", **ELSEWHERE}, {"model.safetensors": 2.0, HF_BEST: 1.0}),
    ],
)
def test_each_model_is_once_in_the_download(run, download, tmp_path, best, arguments, models):
    """NVFlare's command finds the global model; checkpoints elsewhere stay complete."""
    for name, weights in (("hf/config", "model"), ("adapter/adapter_config", "adapter_model")):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir()
        path.write_text("{}")
        nvflare_lazy.save({"w": W}, path.parent / f"{weights}.safetensors")
    directory = run(best, **arguments)
    artifacts, found = download(directory)
    assert found == models
    assert Path(artifacts["global_model"]).name == next(iter(models)).rpartition("/")[2]
    assert value_of(Path(artifacts["global_model"])) == 2.0
    manifest = json.loads((directory / MANIFEST_NAME).read_text())["artifacts"]
    rounds = {f"round_{number}": float(number) for number in range(3 - arguments.get("keep_rounds", 1), 3)}
    expected = {"global_model": 2.0, **({} if best is None else {"best_global_model": float(best)})}
    values = {name: value_of(directory / path) for name, path in manifest.items()}
    assert values == (expected if "checkpoint_dir" in arguments else {**expected, **rounds})
    for name in models:
        if "source" in arguments:
            assert ModelDirectory((directory / "app_server" / name).parent).open()["w"].shape == W.shape
    if "checkpoint_dir" in arguments:
        kept = sorted(path.name for path in (tmp_path / "checkpoints" / "rounds").iterdir())
        assert kept == ["round-00001", "round-00002"]
        assert (tmp_path / "checkpoints" / "optimizer").exists()


@pytest.mark.parametrize("arguments", [{}, {**ELSEWHERE}])
def test_a_sharded_model_is_named_by_its_index(run, download, tmp_path, arguments):
    """Its shards are once in the download, and so is the index."""
    nvflare_lazy.save({"w": W, "v": W}, f"{tmp_path}/hf/", max_shard_size=W.nbytes)
    (tmp_path / "hf" / "config.json").write_text("{}")
    artifacts, found = download(run(2, source="hf", **arguments))
    assert Path(artifacts["global_model"]).name == "model.safetensors.index.json"
    assert nvflare_lazy.open(artifacts["global_model"])["v"][0] == 2.0
    assert len(found) == 2


def test_a_link_costs_no_disk_and_another_file_system_a_copy(run, download, monkeypatch, tmp_path):
    """The last model in the run directory is the file in `checkpoint_dir` if that is possible."""
    assert (run(None, **ELSEWHERE) / "app_server" / LAST).samefile(tmp_path / "checkpoints" / LAST)
    (tmp_path / "run").rename(tmp_path / "first")
    link = os.link

    def refuse(source, target, **how):
        if Path(target).is_relative_to(tmp_path / "run"):
            raise OSError(errno.EXDEV, "another file system")
        link(source, target, **how)

    monkeypatch.setattr(os, "link", refuse)
    directory = run(None, checkpoint_dir="others")
    assert not (directory / "app_server" / LAST).samefile(tmp_path / "others" / LAST)
    assert download(directory)[1] == {LAST: 2.0}

    (tmp_path / "run").rename(tmp_path / "second")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(result_models.shutil, "disk_usage", lambda path: usage(1000))
    directory = run(None, checkpoint_dir="full")
    assert [path.name for path in directory.rglob("*") if path.is_file()] == []


def test_a_disk_too_small_for_pytorch_files(run, download, monkeypatch, caplog):
    """The download has the safetensors file, and the log has the reason."""

    def fail(*_, **__):
        raise DiskFullError("no space")

    monkeypatch.setattr(result_models, "write_pytorch_file", fail)
    assert download(run(None, save_pytorch=True))[1] == {LAST: 2.0}
    assert "The result of the job is incomplete" in caplog.text


def test_a_job_without_a_model_has_no_manifest(start, fl_ctx, engine, tmp_path):
    """It ended before a round was complete."""
    persistor = start(source_ckpt_file_full_name="/missing")
    assert engine.panics
    persistor.handle_event(EventType.END_RUN, fl_ctx)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and "scratch" not in path.parts] == []

# SPDX-License-Identifier: Apache-2.0
"""Cross-site evaluation: models are written to files and returned unread, and one invalid model is not evaluated."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.app_common.app_constant import AppConstants

from nvflare_lazy.flare import LazyCrossSiteEval, LazyModelLocator
from nvflare_lazy.formats import open_safetensors, save
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize("numpy", [False, True])
def test_a_model_is_passed_on_unread(fl_ctx, result, tmp_path, kind, numpy):
    """As received: tensors or arrays, of the same kind, with the same metadata; its scratch may be freed at once."""
    data = dict(result("site-1", w=torch.arange(6.0).reshape(2, 3)).params)
    if numpy:
        data = {name: LazyArray.from_lazy_tensor(value) for name, value in data.items()}
    controller = LazyCrossSiteEval()
    controller._save_dxo_content("site-1", str(tmp_path), DXO(kind, data=data, meta={"note": 7}), fl_ctx)
    data.clear()
    loaded = controller._load_validation_content("site-1", str(tmp_path), fl_ctx)
    assert (loaded.data_kind, loaded.meta["note"]) == (kind, 7)
    assert type(loaded.data["w"]) is (LazyArray if numpy else LazyTensor)
    assert np.array_equal(np.asarray(loaded.data["w"]), np.arange(6.0).reshape(2, 3))
    assert list(open_safetensors(tmp_path / "site-1.safetensors")) == ["w"]


def test_a_big_endian_array_keeps_its_values(fl_ctx, tmp_path):
    """A client may send arrays in either byte order; safetensors files have one."""
    values = np.array([1.0, 2.0, 3.0], ">f4")
    data = {"lazy": LazyArray(MemorySource(values.tobytes()), ">f4", (3,)), "ordinary": values}
    controller = LazyCrossSiteEval()
    controller._save_dxo_content("site-1", str(tmp_path), DXO(DataKind.WEIGHTS, data=data), fl_ctx)
    loaded = controller._load_validation_content("site-1", str(tmp_path), fl_ctx)
    assert {name: value.tolist() for name, value in loaded.data.items()} == {name: [1.0, 2.0, 3.0] for name in data}


def test_what_is_no_model_goes_nvflares_way(fl_ctx, tmp_path):
    """The metrics that sites come to."""
    controller = LazyCrossSiteEval()
    controller._save_dxo_content("m", str(tmp_path), DXO(DataKind.METRICS, data={"accuracy": 0.5}), fl_ctx)
    assert controller._load_validation_content("m", str(tmp_path), fl_ctx).data == {"accuracy": 0.5}


def test_a_model_that_cannot_be_read_is_not_evaluated(fl_ctx, result, tmp_path, monkeypatch, caplog):
    """The log names its owner; the others' models go out."""
    controller = LazyCrossSiteEval()
    controller._cross_val_models_dir = str(tmp_path)
    sent = []
    monkeypatch.setattr(controller, "_send_validation_task", lambda name, _: sent.append(name))
    bad = dict(result("site-1", w=torch.ones(100_000)).params)
    with open(next((tmp_path / "scratch").rglob("r.safetensors")), "r+b") as file:
        file.truncate(1000)
    good = dict(result("site-2", w=torch.ones(3)).params)
    for name, data in (("site-1", bad), ("site-2", good)):
        controller._save_client_model(name, DXO(DataKind.WEIGHTS, data=data), fl_ctx)
    assert sent == ["site-2"]
    assert "Skipped the evaluation of the model of site-1" in caplog.text
    assert not (tmp_path / "site-1.safetensors").exists()


def test_models_of_the_server_are_not_copied(start, fl_ctx, tmp_path, monkeypatch):
    """They are on disk already; the result of the job has each model once, and `cleanup_models` does not remove it."""
    path = save({"w": torch.ones(3)}, tmp_path / "initial.safetensors")
    persistor = start(source_ckpt_file_full_name=str(path))
    persistor.save_model(fl_ctx.get_prop(AppConstants.GLOBAL_MODEL), fl_ctx)
    locator = LazyModelLocator()
    locator.handle_event(EventType.START_RUN, fl_ctx)
    controller = LazyCrossSiteEval(cleanup_models=True)
    (tmp_path / "models").mkdir()
    monkeypatch.setattr(controller, "_model_locator", locator)
    monkeypatch.setattr(controller, "_cross_val_models_dir", str(tmp_path / "models"))
    monkeypatch.setattr(controller, "cancel_all_tasks", lambda fl_ctx: None)
    assert controller._locate_server_models(fl_ctx)
    for name in ("SRV_initial.safetensors", "SRV_FL_global_model.safetensors"):
        loaded = controller._load_validation_content(name, str(tmp_path / "models"), fl_ctx)
        assert loaded.data["w"].tolist() == [1.0] * 3
    controller.stop_controller(fl_ctx)
    assert not list((tmp_path / "models").iterdir())
    assert len(persistor.get_model_inventory(fl_ctx)) == 2


def test_a_tied_tensor_is_stored_once(start, fl_ctx, result, tmp_path, monkeypatch):
    """A client's model of a job from a Hugging Face directory; the persistor sends it under all names again."""
    words, head = "model.embed_tokens.weight", "lm_head.weight"
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 6}
    save({words: torch.ones(6, 2)}, f"{tmp_path}/base/")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    persistor = start(source_ckpt_file_full_name=str(tmp_path / "base"))
    controller = LazyCrossSiteEval()
    controller._cross_val_models_dir = str(tmp_path)
    monkeypatch.setattr(controller, "_send_validation_task", lambda *_: None)
    for names in ((words, head), (head,)):
        model = result("site-1", **dict.fromkeys(names, torch.zeros(6, 2))).params
        controller._save_client_model("site-1", DXO(DataKind.WEIGHTS, data=dict(model)), fl_ctx)
        assert list(open_safetensors(tmp_path / "site-1.safetensors")) == [words]
    task = controller._load_validation_content("site-1", str(tmp_path), fl_ctx).to_shareable()
    fl_ctx.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
    persistor.handle_event(EventType.BEFORE_TASK_DATA_FILTER, fl_ctx)
    assert from_shareable(task).data.keys() == {words, head}


def test_it_takes_the_place_of_nvflares():
    """With all of its arguments."""
    given = {
        "task_check_period": 0.25,
        "cross_val_dir": "evaluations",
        "submit_model_timeout": 7,
        "validation_timeout": 8,
        "model_locator_id": "locator",
        "submit_model_task_name": "hand_in",
        "cleanup_models": True,
        "participating_clients": ["site-2"],
    }
    ours = LazyCrossSiteEval(**given)
    assert {name: getattr(ours, f"_{name}") for name in given} == given

# SPDX-License-Identifier: Apache-2.0
"""Jobs that start from a Hugging Face directory: names of tied tensors, prefixes, and complete checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable, model_learnable_to_dxo
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.fedavg import FedAvg

import nvflare_lazy
from nvflare_lazy.errors import ResultMismatchError
from nvflare_lazy.flare import LazyAggregator, TensorOffload
from nvflare_lazy.flare.tensor_names import TensorNames
from nvflare_lazy.formats.hugging_face import ModelDirectory
from tests.flare.test_acceptance_rules import accepted, one_component

WORDS, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
MODEL = {WORDS: torch.arange(12.0).reshape(6, 2), NORM: torch.ones(2)}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 6, "tie_word_embeddings": True}
MATRIX = "base_model.model.model.layers.0.q_proj.lora_A.weight"


@pytest.fixture
def qwen(tmp_path) -> Path:
    """A tied model in shards."""
    path = tmp_path / "qwen"
    nvflare_lazy.save(MODEL, f"{path}/", max_shard_size=50)
    (path / "config.json").write_text(json.dumps(QWEN))
    (path / "tokenizer.json").write_text("{}")
    assert len(list(path.glob("*.safetensors"))) == 2
    return path


@pytest.fixture
def begin(start, fl_ctx, tmp_path):
    def begin(directory: Path, **arguments):
        return start(
            source_ckpt_file_full_name=str(directory), checkpoint_dir=str(tmp_path / "checkpoints"), **arguments
        )

    return begin


def task_sent(persistor, fl_ctx, **meta) -> DXO:
    """Return what a client gets."""
    dxo = model_learnable_to_dxo(fl_ctx.get_prop(AppConstants.GLOBAL_MODEL))
    task = DXO(dxo.data_kind, dxo.data, {**dxo.meta, **meta}).to_shareable()
    fl_ctx.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
    persistor.handle_event(EventType.BEFORE_TASK_DATA_FILTER, fl_ctx)
    return from_shareable(task)


def weights(fl_ctx) -> dict:
    return fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]


def end_round(persistor, fl_ctx, result, *results: dict, **arguments) -> dict:
    """Aggregate and save a round, and return the new model."""
    aggregator = LazyAggregator(**arguments)
    aggregator.handle_event(EventType.START_RUN, fl_ctx)
    for number, tensors in enumerate(results):
        aggregator.accept_model(result(f"site-{number}", **tensors))
    learnable = make_model_learnable(aggregator.aggregate_model().params, {})
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, learnable)
    persistor.save_model(learnable, fl_ctx)
    return {name: value.tolist() for name, value in learnable[ModelLearnableKey.WEIGHTS].items()}


def test_tied_tensors_are_sent_under_all_names_and_stored_under_one(begin, qwen, fl_ctx, result):
    """All names are one object, which is sent once; a result may have any of them, and the stored name counts."""
    persistor = begin(qwen)
    sent = task_sent(persistor, fl_ctx, controls={WORDS: torch.zeros(6, 2)}, other=7)
    assert sent.data.keys() == {WORDS, HEAD, NORM}
    assert sent.data[HEAD] is sent.data[WORDS]
    assert sent.meta["controls"].keys() == {WORDS, HEAD}
    assert sent.meta["other"] == 7
    assert weights(fl_ctx).keys() == MODEL.keys()
    words, norm = torch.zeros(6, 2), torch.ones(2)
    model = end_round(
        persistor,
        fl_ctx,
        result,
        {WORDS: words + 1, HEAD: words + 100, NORM: norm},
        {WORDS: words + 2, NORM: norm},
        {HEAD: words + 6, NORM: norm},
    )
    assert model == {WORDS: [[3.0, 3.0]] * 6, NORM: [1.0, 1.0]}
    assert task_sent(persistor, fl_ctx).data.keys() == {WORDS, HEAD, NORM}


@pytest.mark.parametrize("rename", [lambda name: f"model.{name}", lambda name: name.removeprefix("model.")])
def test_a_prefix_that_all_names_have_or_lack(begin, qwen, fl_ctx, result, rename):
    """It is found by the names of the global model."""
    persistor = begin(qwen)
    tensors = {rename(name): value + 1 for name, value in MODEL.items()}
    assert end_round(persistor, fl_ctx, result, tensors)[NORM] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("names", "renamed"),
    [
        (["x.a.w", "x.b.w"], {"x.a.w": "a.w", "x.b.w": "b.w"}),
        (["x.a.w", "b.w"], {"x.a.w": "a.w"}),
        (["x.tied"], {"x.tied": "a.w"}),
        (["x.tied", "x.a.w"], {"x.tied": None, "x.a.w": "a.w"}),
        # More than one change is possible, or none is for all names.
        (["w"], {}),
        (["x.a.w", "y.b.w"], {}),
        (["x.a.w", "a.w"], {}),
        (["x.a.w", "z"], {}),
        (["tied", "z"], {"tied": "a.w"}),
        ([".a.w." * 100], {}),
        (["skip.me", "x.a.w"], {"skip.me": None, "x.a.w": "a.w"}),
    ],
)
def test_stored_names(names, renamed):
    """A prefix is changed only if all names then are names of the model."""
    assert TensorNames({"tied": "a.w"}, exclude=re.compile("skip")).stored(names, ["a.w", "b.w"]) == renamed


A, B = (f"base_model.model.model.q_proj.lora_{part}" for part in "AB")
SAVED = f"{A}.weight", f"{B}.weight"
BASE = {"base_model.model.model.q_proj.base_layer.weight": None, "base_model.model.lm_head.weight": None}


@pytest.mark.parametrize(
    ("names", "renamed"),
    [
        (SAVED, {}),
        ((f"{A}.default.weight", f"{B}.default.weight"),
         {f"{part}.default.weight": f"{part}.weight" for part in (A, B)}),
        ((f"{A}.site.weight", SAVED[1]), {f"{A}.site.weight": SAVED[0]}),
        ((f"module.{A}.default.weight", f"module.{SAVED[1]}"),
         {f"module.{A}.default.weight": SAVED[0], f"module.{SAVED[1]}": SAVED[1]}),
        # All parameters of the model; those of the base model are frozen.
        ((f"{A}.default.weight", *BASE, SAVED[1]), {f"{A}.default.weight": SAVED[0], **BASE}),
        # Two adapters, or a part of one next to other tensors: the result is rejected.
        ((f"{A}.one.weight", f"{A}.two.weight"), {}),
        ((f"{A}.default.weight", *BASE), {f"{A}.default.weight": SAVED[0]}),
    ],
)  # fmt: skip
def test_names_of_an_adapter(names, renamed):
    """In a model, the names of an adapter have the name of the adapter."""
    assert TensorNames(is_adapter=True).stored(names, SAVED) == renamed


@pytest.mark.parametrize(
    ("names", "renamed"),
    [
        (["new.w", "b.w"], {"new.w": "old.w"}),
        (["old.w", "b.w"], {}),
        (["x.new.w", "x.b.w"], {"x.new.w": "old.w", "x.b.w": "b.w"}),
    ],
)
def test_names_that_transformers_changes(names, renamed):
    """They are sent instead of the stored names, and both are accepted."""
    changed = TensorNames({"new.w": "old.w"}, frozenset(["old.w"]))
    assert changed.of_clients({"old.w": 1, "b.w": 2}) == {"new.w": 1, "b.w": 2}
    assert changed.stored(names, ["old.w", "b.w"]) == renamed


def test_names_that_match_nothing(begin, qwen, fl_ctx, result):
    """The message has examples from both sides, and the ways out."""
    persistor = begin(qwen)
    with pytest.raises(ResultMismatchError) as error:
        end_round(persistor, fl_ctx, result, {"transformer.wte.weight": torch.ones(6, 2)})
    for part in ("'transformer.wte.weight'", f"'{WORDS}'", "server_key_prefix", "exclude_vars"):
        assert part in str(error.value)


@pytest.mark.parametrize("where", ["persistor", "aggregator"])
def test_excluded_tensors(begin, qwen, fl_ctx, tmp_path, result, where):
    """A tensor that `exclude_vars` matches is not sent, or not used. The same is true of its further names."""
    excluded = {"exclude_vars": "embed_tokens"}
    persistor = begin(qwen, **(excluded if where == "persistor" else {}))
    assert (HEAD in task_sent(persistor, fl_ctx).data) == (where == "aggregator")
    tensors = {WORDS: torch.zeros(6, 2), NORM: torch.zeros(2)}
    model = end_round(persistor, fl_ctx, result, tensors, **(excluded if where == "aggregator" else {}))
    assert model == {NORM: [0.0, 0.0]}
    # A checkpoint is complete, and a resumed job excludes the same tensors.
    saved = ModelDirectory(tmp_path / "checkpoints").open()
    assert {name: value.tolist() for name, value in saved.items()} == {WORDS: MODEL[WORDS].tolist(), **model}
    persistor.handle_event(EventType.END_RUN, fl_ctx)
    begin(qwen, **(excluded if where == "persistor" else {}))
    assert (WORDS in weights(fl_ctx)) == (where == "aggregator")


def test_at_level_1_nvflare_gets_the_stored_names(begin, qwen, fl_ctx, tmp_path):
    """It would add unknown tensors to the model."""
    begin(qwen)
    offload = one_component(fl_ctx, FedAvg(num_clients=2), **weights(fl_ctx))
    data = {"model." + name: value for name, value in {**MODEL, HEAD: MODEL[WORDS]}.items()}
    result = DXO(DataKind.WEIGHTS, data=data).to_shareable()
    assert isinstance(offload, TensorOffload)
    assert accepted(offload, fl_ctx, result)
    assert from_shareable(result).data.keys() == MODEL.keys()


def test_checkpoints_are_complete_directories(begin, qwen, fl_ctx, tmp_path, result):
    """The last model, the best one and each round's have the companions and the shards of the initial directory."""
    persistor = begin(qwen)
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, None)
    persistor.handle_event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, fl_ctx)
    begin(qwen)
    shutil.rmtree(qwen)
    end_round(persistor, fl_ctx, result, {name: value + 1 for name, value in MODEL.items()})
    last = tmp_path / "checkpoints"
    for directory, norm in ((last, 2.0), (last / "best", 1.0), (last / "rounds" / "round-00000", 2.0)):
        opened = ModelDirectory(directory)
        assert [path.name for path in opened.companions()] == ["config.json", "tokenizer.json"]
        assert opened.open()[NORM].tolist() == [norm, norm]
        assert opened.open().metadata["format"] == "pt"
        assert nvflare_lazy.open(directory).keys() == MODEL.keys()
        assert (directory / "model.safetensors.index.json").exists()
        assert (directory / "config.json").samefile(last / "config.json")
    # Nothing is copied, and the aggregate is sent again from the files that aggregation wrote.
    written = {Path(value.source.file_range()[0].path) for value in weights(fl_ctx).values()}
    assert {path.parent.parent.name for path in written} == {".incoming"}
    for directory in (last, last / "rounds" / "round-00000"):
        assert {path.stat().st_ino for path in directory.glob("*.safetensors")} == {
            path.stat().st_ino for path in written
        }


@pytest.mark.parametrize(("max_shard_size", "shards"), [(None, 2), ("1GB", 1), ("20B", 2), ("8B", 2)])
def test_shards(begin, qwen, fl_ctx, tmp_path, result, max_shard_size, shards):
    """The initial directory or the option sets the number of shards; each round replaces the previous shards."""
    persistor = begin(qwen, max_shard_size=max_shard_size, keep_rounds=1)
    last = tmp_path / "checkpoints"
    for number in range(3):
        fl_ctx.set_prop(AppConstants.CURRENT_ROUND, number)
        end_round(persistor, fl_ctx, result, {name: value + number for name, value in MODEL.items()})
        for directory in (last, last / "rounds" / f"round-{number:05d}"):
            assert len(list(directory.glob("*.safetensors"))) == shards
            assert ModelDirectory(directory).open()[NORM].tolist() == [number + 1.0] * 2
    assert [path.name for path in (last / "rounds").iterdir()] == ["round-00002"]
    persistor.handle_event(EventType.END_RUN, fl_ctx)
    shutil.rmtree(qwen)
    persistor = begin(qwen, max_shard_size=max_shard_size)
    assert persistor.resumed.round == 2
    assert [*persistor.store.models()] == ["FL_global_model.safetensors"]
    end_round(persistor, fl_ctx, result, {name: value + 7 for name, value in MODEL.items()})
    assert len(list(last.glob("*.safetensors"))) == shards


def test_a_server_optimizer_writes_shards(begin, qwen, fl_ctx, tmp_path, result):
    """The updated model is written once, as shards, of which the checkpoint has further names."""
    persistor = begin(qwen)
    tensors = {name: value + 1 for name, value in MODEL.items()}
    end_round(persistor, fl_ctx, result, tensors, server_optimizer={"name": "fedavgm", "lr": 1.0})
    written = {Path(value.source.file_range()[0].path).stat().st_ino for value in weights(fl_ctx).values()}
    assert len(written) == 2
    assert {path.stat().st_ino for path in (tmp_path / "checkpoints").glob("*.safetensors")} == written


def test_a_model_of_no_directory_in_shards(start, fl_ctx, tmp_path, result):
    """The global model has an index of the usual name, from which cross-site evaluation opens it."""
    source = nvflare_lazy.save(MODEL, tmp_path / "m.safetensors")
    persistor = start(source_ckpt_file_full_name=str(source), max_shard_size="20B")
    end_round(persistor, fl_ctx, result, {name: value + 1 for name, value in MODEL.items()})
    assert len(list((tmp_path / "app").glob("FL_global_model-*-of-00002.safetensors"))) == 2
    for path in (tmp_path / "app" / "FL_global_model.safetensors", persistor.store.latest().path):
        assert nvflare_lazy.open(path)[NORM].tolist() == [2.0, 2.0]
    [_, name] = persistor.get_model_inventory(fl_ctx)
    assert persistor.get_model(name, fl_ctx)[ModelLearnableKey.WEIGHTS][NORM].tolist() == [2.0, 2.0]


def test_a_job_resumes_without_the_initial_directory(begin, qwen, fl_ctx, tmp_path, result):
    """Its checkpoints have the configuration."""
    persistor = begin(qwen)
    end_round(persistor, fl_ctx, result, {name: value + 1 for name, value in MODEL.items()})
    persistor.handle_event(EventType.END_RUN, fl_ctx)
    shutil.rmtree(qwen)
    persistor = begin(qwen)
    assert task_sent(persistor, fl_ctx).data[HEAD].tolist() == (MODEL[WORDS] + 1).tolist()
    end_round(persistor, fl_ctx, result, {name: value + 3 for name, value in MODEL.items()})
    assert ModelDirectory(tmp_path / "checkpoints").open()[NORM].tolist() == [4.0, 4.0]


def test_the_initial_directory_is_not_replaced(begin, qwen, tmp_path, engine):
    """A job whose checkpoints would go to it does not start."""
    qwen.rename(tmp_path / "checkpoints")
    begin(tmp_path / "checkpoints")
    [reason] = engine.panics
    assert "is the initial model" in reason


def test_an_adapter(begin, tmp_path, fl_ctx, result):
    """PEFT finds it under the name that it expects."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    nvflare_lazy.save({MATRIX: torch.ones(2, 2)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    # Trainers leave further files, which are not the adapter.
    nvflare_lazy.save({"x": torch.ones(1)}, adapter / "other.safetensors")
    persistor = begin(adapter)
    assert task_sent(persistor, fl_ctx).data.keys() == {MATRIX}
    end_round(persistor, fl_ctx, result, {f"model.{MATRIX}": torch.zeros(2, 2)})
    last = ModelDirectory(tmp_path / "checkpoints")
    assert last.is_adapter
    assert last.open()[MATRIX].tolist() == [[0.0, 0.0]] * 2
    assert (tmp_path / "checkpoints" / "adapter_model.safetensors").exists()


def test_a_pytorch_checkpoint_of_a_tied_model(begin, tmp_path, fl_ctx):
    """A tied tensor that a PyTorch checkpoint has twice is stored once."""
    directory = tmp_path / "old"
    directory.mkdir()
    torch.save({**MODEL, HEAD: MODEL[WORDS]}, directory / "pytorch_model.bin")
    (directory / "config.json").write_text(json.dumps(QWEN))
    persistor = begin(directory)
    assert weights(fl_ctx).keys() == MODEL.keys()
    assert task_sent(persistor, fl_ctx).data.keys() == {WORDS, HEAD, NORM}

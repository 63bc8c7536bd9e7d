# SPDX-License-Identifier: Apache-2.0
"""The persistor: initial models, saves without a copy, kept checkpoints, and the recovery of a model."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor

import nvflare_lazy
from nvflare_lazy.cli.program import run
from nvflare_lazy.errors import JobCheckpointError
from nvflare_lazy.flare import LazyAggregator, LazyModelLocator, LazyModelPersistor
from nvflare_lazy.flare.checkpoint_store import RECORD_NAME, CheckpointStore
from nvflare_lazy.flare.lazy_model_persistor import BEST_NAME, MODEL_NAME
from nvflare_lazy.formats.safetensors import header as safetensors_header
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from tests.flare.conftest import files_below
from tests.flare.networks import Small

WEIGHTS = {"layer.weight": [[0.5, 0.5]], "layer.bias": [0.25]}
NET = "tests.flare.networks.Small"


def weights(fl_ctx) -> dict:
    return fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]


def values(tensors) -> dict[str, list]:
    return {name: value.tolist() for name, value in tensors.items()}


def round_of(persistor, fl_ctx, result, number: int, bias: float) -> None:
    """Let a round come to a model with this bias, by our aggregator, and save it."""
    fl_ctx.set_prop(AppConstants.CURRENT_ROUND, number)
    aggregator = LazyAggregator()
    aggregator.handle_event(EventType.START_RUN, fl_ctx)
    aggregator.accept_model(result("site-1", **{"layer.weight": [[0.5, 0.5]], "layer.bias": [bias]}))
    learnable = make_model_learnable(aggregator.aggregate_model().params, {"rounds": number})
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, learnable)
    persistor.save_model(learnable, fl_ctx)


# ---- the initial model ---------------------------------------------------------------------------------------------


def plain_safetensors(path: Path) -> Path:
    return nvflare_lazy.save(Small().state_dict(), path / "m.safetensors")


def sharded(path: Path) -> Path:
    (path / "sharded").mkdir()
    nvflare_lazy.save(Small().state_dict(), path / "sharded", max_shard_size=8)
    assert len(list((path / "sharded").glob("*.safetensors"))) == 2
    return path / "sharded"


def pytorch_zip(path: Path) -> Path:
    torch.save(Small().state_dict(), path / "m.pt")
    return path / "m.pt"


def pytorch_legacy(path: Path) -> Path:
    torch.save(Small().state_dict(), path / "m.pth", _use_new_zipfile_serialization=False)
    return path / "m.pth"


def of_nvflares_persistor(path: Path) -> Path:
    torch.save({"model": Small().state_dict(), "train_conf": {"train": {"model": "Small"}}}, path / "FL.pt")
    return path / "FL.pt"


@pytest.mark.parametrize(
    "make", [plain_safetensors, sharded, pytorch_zip, pytorch_legacy, of_nvflares_persistor], ids=lambda f: f.__name__
)
def test_a_job_begins_with_any_readable_checkpoint(start, fl_ctx, tmp_path, make):
    """Whatever kind of file it is, the job gets lazy tensors of it, and nothing is copied."""
    start(source_ckpt_file_full_name=str(make(tmp_path)))
    assert values(weights(fl_ctx)) == WEIGHTS
    assert all(isinstance(value, LazyTensor) for value in weights(fl_ctx).values())
    assert files_below(tmp_path / "app") == []


def test_initial_model_at_a_url(start, fl_ctx, result, tmp_path):
    """A job starts from a URL, whose model stays in the inventory; the name of the model in records has no secrets."""
    url = "memory://persistor/initial.safetensors"
    nvflare_lazy.save(Small().state_dict(), url)
    persistor = start(source_ckpt_file_full_name=url)
    assert values(weights(fl_ctx)) == WEIGHTS
    assert persistor.base == url
    round_of(persistor, fl_ctx, result, 0, 0.75)
    assert nvflare_lazy.open(persistor.store.model_path)["layer.bias"].tolist() == [0.75]
    assert set(persistor.get_model_inventory(fl_ctx)) >= {"initial.safetensors", MODEL_NAME}
    initial = persistor.get_model("initial.safetensors", fl_ctx)
    assert values(initial[ModelLearnableKey.WEIGHTS]) == WEIGHTS
    secret = LazyModelPersistor(source_ckpt_file_full_name="https://me:pass@host/m.pt?key=1")
    assert secret.base == "https://host/m.pt"


def test_a_relative_name_is_looked_for_where_nvflare_does(start, fl_ctx, tmp_path):
    """In the `custom` folder of the app."""
    (tmp_path / "app" / "custom").mkdir()
    plain_safetensors(tmp_path / "app" / "custom")
    start(source_ckpt_file_full_name="m.safetensors")
    assert values(weights(fl_ctx)) == WEIGHTS


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
def test_a_model_class_is_instantiated_once_and_elsewhere(start, fl_ctx, tmp_path, monkeypatch, policy):
    """Another process makes it without loading NVFlare, and writes it to a file, which goes with the last tensor.

    Its OpenMP threads sleep while they wait, unless the environment says otherwise.
    """
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    witness = tmp_path / "witness"
    args = {"width": 3, "witness": str(witness)}
    persistor = start(model={"path": NET, "args": args, "config_type": "dict"})
    pid, has_loaded_nvflare, used_policy = witness.read_text().split()
    assert used_policy == (policy or "PASSIVE")
    assert int(pid) != os.getpid()
    assert has_loaded_nvflare == "False"
    assert weights(fl_ctx)["layer.weight"].tolist() == [[0.5, 0.5, 0.5]]
    assert len(files_below(tmp_path / "app")) == 1
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, None)
    persistor.handle_event(EventType.END_RUN, fl_ctx)
    assert files_below(tmp_path / "app") == []


def test_the_initial_model_leaves_the_disk_after_its_round(scratch, fl_ctx, engine, result, tmp_path):
    """Although NVFlare's context of the workflow, which lives as long as the job, keeps the loaded model."""
    manager = FLContextManager(engine, "server", "job", {}, {FLContextKey.APP_ROOT: str(tmp_path / "app")})
    workflow = manager.new_context()
    persistor = LazyModelPersistor(model=Small(), allow_numpy_conversion=False)
    persistor.handle_event(EventType.START_RUN, workflow)
    workflow.set_prop(AppConstants.GLOBAL_MODEL, persistor.load_model(workflow))
    (initial,) = files_below(tmp_path / "app")
    with manager.new_context() as later:
        round_of(persistor, later, result, 0, 0.5)
    assert initial not in files_below(tmp_path / "app")
    persistor.handle_event(EventType.END_RUN, workflow)


@pytest.mark.parametrize("by_id", [True, False])
def test_a_model_that_nvflare_made_is_freed(start, fl_ctx, engine, by_id):
    """Its parameters go to a file, and out of the module that NVFlare keeps a reference to."""
    module = engine.components["net"] = Small()
    start(model="net" if by_id else module)
    assert values(weights(fl_ctx)) == WEIGHTS
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}


def test_arrays_for_jobs_that_exchange_arrays(start, fl_ctx, tmp_path):
    """As NVFlare's persistor does by default; bfloat16, which NumPy lacks, becomes float32."""
    path = nvflare_lazy.save({"w": torch.tensor([1.5], dtype=torch.bfloat16)}, tmp_path / "m.safetensors")
    start(source_ckpt_file_full_name=str(path), allow_numpy_conversion=True)
    (array,) = weights(fl_ctx).values()
    assert isinstance(array, LazyArray)
    assert (array.dtype, array.tolist()) == (np.float32, [1.5])


NO_MODEL = {
    "no file": ({"source_ckpt_file_full_name": "/nowhere/m.safetensors"}, "/nowhere/m.safetensors"),
    "no class": ({"model": {"path": "tests.flare.networks.Large"}}, "Large"),
    "a class that fails": ({"model": {"path": NET, "args": {"fail": True}}}, "no such model today"),
    "not a model": ({"model": {"path": "tests.flare.networks.not_a_model"}}, "not a torch.nn.Module"),
    "no path": ({"model": {"args": {}}}, "set it to the path"),
    "arguments that are no JSON": ({"model": {"path": NET, "args": {"width": {1}}}}, "save a checkpoint"),
    "no component": ({"model": "nobody"}, "no initial model"),
    "nothing": ({}, "no initial model"),
}


@pytest.mark.parametrize(("arguments", "says"), NO_MODEL.values(), ids=NO_MODEL.keys())
def test_without_a_model_the_job_ends_and_says_why(start, engine, arguments, says):
    """A system panic with a reason that names the file or the class."""
    start(**arguments)
    (reason,) = engine.panics
    assert says in reason


# ---- saving --------------------------------------------------------------------------------------------------------


def test_what_aggregation_wrote_is_the_checkpoint(start, fl_ctx, result, tmp_path):
    """One file with several names: nothing is copied, for the last model, the round and the best one."""
    persistor = start(model=Small())
    round_of(persistor, fl_ctx, result, 0, 1.0)
    persistor.handle_event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, fl_ctx)
    app = tmp_path / "app"
    names = [app / MODEL_NAME, app / BEST_NAME, app / "rounds" / "round-00000" / "model.safetensors"]
    written = Path(weights(fl_ctx)["layer.bias"].source.file_range()[0].path)
    assert len({path.stat().st_ino for path in [written, *names]}) == 1
    assert nvflare_lazy.open(app / MODEL_NAME)["layer.bias"].tolist() == [1.0]


@pytest.mark.parametrize("link", [True, False])
def test_provenance_of_a_model(start, fl_ctx, result, tmp_path, monkeypatch, capsys, link):
    """Each model names its job, round, contributors, rule and initial model, also if it had to be copied."""
    if not link:
        monkeypatch.setattr(CheckpointStore, "_can_link", lambda *args: False)
    source = plain_safetensors(tmp_path)
    persistor = start(source_ckpt_file_full_name=str(source))
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "job-1")
    round_of(persistor, fl_ctx, result, 3, 1.0)
    assert run(["inspect", str(tmp_path / "app" / MODEL_NAME), "--json"]) == 0
    provenance = json.loads(capsys.readouterr().out)["provenance"]
    expected = {"job": "job-1", "round": 3, "base": str(source), "contributors": ["site-1"]}
    assert {key: provenance[key] for key in expected} == expected
    assert provenance["rule"]["name"] == "mean"


def test_the_header_of_an_aggregate_is_not_read_again(start, fl_ctx, result, monkeypatch):
    """The process that wrote a file knows its contents: only the client's result is parsed in this round."""
    persistor = start(model=Small())
    parsed = []
    parse = safetensors_header.parse_header
    monkeypatch.setattr(
        safetensors_header, "parse_header", lambda text, where: parsed.append(Path(where).name) or parse(text, where)
    )
    round_of(persistor, fl_ctx, result, 0, 1.0)
    assert parsed == ["r.safetensors"]


def test_an_aggregate_goes_with_its_last_tensor(start, fl_ctx, result, tmp_path, no_gc):
    """At once, without a garbage collection: only its names as a checkpoint remain."""
    persistor = start(model=Small())
    for number in range(2):
        round_of(persistor, fl_ctx, result, number, float(number))
        assert len(files_below(tmp_path / "app" / ".incoming")) == 1


def test_the_best_model_stays_when_the_last_one_goes_on(start, fl_ctx, result, tmp_path):
    """Afterwards, it is another file."""
    persistor = start(model=Small())
    round_of(persistor, fl_ctx, result, 0, 1.0)
    persistor.handle_event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, fl_ctx)
    round_of(persistor, fl_ctx, result, 1, 2.0)
    assert nvflare_lazy.open(tmp_path / "app" / BEST_NAME)["layer.bias"].tolist() == [1.0]
    assert nvflare_lazy.open(tmp_path / "app" / MODEL_NAME)["layer.bias"].tolist() == [2.0]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_rounds_are_kept(start, fl_ctx, result, tmp_path, keep):
    """The requested number of checkpoints, and no file of any other."""
    persistor = start(model=Small(), keep_rounds=keep)
    for number in range(5):
        round_of(persistor, fl_ctx, result, number, float(number))
    kept = [f"rounds/round-{number:05d}/model.safetensors" for number in range(5 - keep, 5)]
    app = tmp_path / "app"
    # And the file under the name it was written as, as long as its tensors are the global model.
    assert [name for name in files_below(app) if not name.startswith(".")] == [MODEL_NAME, RECORD_NAME, *kept]
    for name in kept:
        assert nvflare_lazy.open(app / name)["layer.bias"].tolist() == [float(name.split("/")[1][-1])]


def test_ordinary_tensors_are_saved_too(start, fl_ctx, tmp_path):
    """From an aggregator that makes its own model; tensors that it omits keep their values."""
    persistor = start(model=Small())
    persistor.save_model(make_model_learnable({"layer.bias": torch.tensor([7.0])}, {}), fl_ctx)
    found = nvflare_lazy.open(tmp_path / "app" / MODEL_NAME)
    assert values(found) == {**WEIGHTS, "layer.bias": [7.0]}


@pytest.mark.parametrize("wrong", [{"stranger": [1.0]}, {"layer.bias": [1.0, 2.0]}])
def test_what_is_not_the_model_is_not_saved(start, fl_ctx, result, tmp_path, wrong):
    """An error names the tensor, and the checkpoint stays."""
    persistor = start(model=Small())
    round_of(persistor, fl_ctx, result, 0, 1.0)
    tensors = {name: torch.tensor(value) for name, value in wrong.items()}
    with pytest.raises(JobCheckpointError, match=next(iter(wrong))):
        persistor.save_model(make_model_learnable(tensors, {}), fl_ctx)
    assert nvflare_lazy.open(tmp_path / "app" / MODEL_NAME)["layer.bias"].tolist() == [1.0]


# ---- resuming -------------------------------------------------------------------------------------------------------


def test_a_job_goes_on_after_its_last_round(start, fl_ctx, result, tmp_path):
    """With its model and NVFlare's other data, whatever the initial model of the job would be."""
    kept = str(tmp_path / "kept")
    first = start(model=Small(), checkpoint_dir=kept)
    round_of(first, fl_ctx, result, 3, 1.0)
    first.handle_event(EventType.END_RUN, fl_ctx)
    again = start(model=Small(), checkpoint_dir=kept)
    assert again.resumed.round == 3
    assert weights(fl_ctx)["layer.bias"].tolist() == [1.0]
    assert fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.META] == {"rounds": 3}


def test_another_job_begins_with_a_checkpoint_that_is_replaced_meanwhile(start, fl_ctx, result, tmp_path):
    """A running job's last checkpoint: a reader that has opened it continues with that file."""
    first = start(model=Small(), checkpoint_dir=str(tmp_path / "first"), keep_rounds=1)
    round_of(first, fl_ctx, result, 0, 1.0)
    source = tmp_path / "first" / MODEL_NAME
    second = start(source_ckpt_file_full_name=str(source), checkpoint_dir=str(tmp_path / "second"))
    taken = weights(fl_ctx)["layer.bias"]
    for number in (1, 2):
        round_of(first, fl_ctx, result, number, 2.0)
    assert nvflare_lazy.open(source)["layer.bias"].tolist() == [2.0]
    assert taken.tolist() == [1.0]
    assert second.resumed is None


def test_a_second_job_in_the_directory_is_refused(start, fl_ctx, engine, tmp_path):
    """At its start, with the first job's id and host; it removes nothing, and the first job continues."""
    kept = tmp_path / "kept"
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "job-1")
    first = start(model=Small(), checkpoint_dir=str(kept))
    written = first.store.incoming / "of the first job"
    written.mkdir()
    second = start(model=Small(), checkpoint_dir=str(kept))
    (reason,) = engine.panics
    assert f"{kept} is in use by job 'job-1', process {os.getpid()} on {os.uname().nodename}" in reason
    second.handle_event(EventType.END_RUN, fl_ctx)
    assert written.exists()
    first.handle_event(EventType.END_RUN, fl_ctx)
    third = start(model=Small(), checkpoint_dir=str(kept))
    assert len(engine.panics) == 1
    third.handle_event(EventType.END_RUN, fl_ctx)
    assert files_below(kept) == []


def damaged(**changes: object) -> str:
    return json.dumps({"format": 2, "round": 0, "directory": "round-00000", "meta": {}, **changes})


DAMAGED_RECORDS = {
    "empty": ("", "is not JSON"),
    "cut short": (damaged()[:-9], "is not JSON"),
    "binary": (bytes(range(256)), "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "deep meta data": (damaged()[:-3] + '{"a":' * 100_000, "is not JSON"),
    "a huge integer": (damaged()[:-1] + ', "round": ' + "9" * 10_000 + "}", "is not JSON"),
    "a list": ("[1]", "is not a record"),
    "text": ('"round"', "is not a record"),
    "no version": ("{}", "is not a record"),
    "another version": (damaged(format=1), "another version"),
    "a version that is not a number": (damaged(format=[]), "is not a record"),
    "no round and no file": ('{"format": 2}', "names None"),
    "a float": (damaged(round=0.0), "has the round 0.0"),
    "infinity": (damaged()[:-1] + ', "round": 1e400}', "has the round inf"),
    "true": (damaged(round=True), "has the round True"),
    "negative": (damaged(round=-1), "has the round -1"),
    "astronomical": (damaged(round=1 << 100), "has the round 126"),
    "another round's file": (damaged(round=1), "names 'round-00000'"),
    "a file elsewhere": (damaged(directory="../../etc/passwd"), "names '../../etc/passwd'"),
    "an absolute path": (damaged(directory="/etc/passwd"), "names '/etc/passwd'"),
    "a line break": (damaged(directory="a\nb"), r"names 'a\\nb'"),
    "a file that is not text": (damaged(directory=[7]), r"names \[7\]"),
    "meta data in a list": (damaged(meta=[1]), "has the meta data"),
    "a missing file": (damaged(round=7, directory="round-00007"), "is missing"),
    "a link to itself": (Path(RECORD_NAME), "symbolic links"),
    "a directory": (None, "not a regular file"),
}


@pytest.mark.parametrize("name", DAMAGED_RECORDS)
def test_a_record_that_cannot_be_understood_is_no_new_beginning(start, engine, tmp_path, name):
    """The job ends with an error that has a remedy, and does not silently start at zero."""
    content, says = DAMAGED_RECORDS[name]
    kept = tmp_path / "kept"
    nvflare_lazy.save(Small().state_dict(), f"{kept}/rounds/round-00000/")
    match content:
        case bytes():
            (kept / RECORD_NAME).write_bytes(content)
        case str():
            (kept / RECORD_NAME).write_text(content)
        case Path():
            (kept / RECORD_NAME).symlink_to(content)
        case _:
            (kept / RECORD_NAME).mkdir()
    start(model=Small(), checkpoint_dir=str(kept))
    (reason,) = engine.panics
    assert re.search(says, reason)
    assert "JSONDecodeError" not in reason
    assert str(kept / RECORD_NAME) in reason
    if "another version" not in reason and "symbolic" not in reason:
        assert f"or set source_ckpt_file_full_name to {kept}/rounds/round-00000" in reason


def test_a_damaged_file_of_the_last_round(start, engine, fl_ctx, result, tmp_path):
    """The error has the path, and what to do."""
    kept = tmp_path / "kept"
    first = start(model=Small(), checkpoint_dir=str(kept))
    round_of(first, fl_ctx, result, 3, 1.0)
    path = first.store.latest().path / "model.safetensors"
    first.handle_event(EventType.END_RUN, fl_ctx)
    path.write_bytes(path.read_bytes()[:-1])
    start(model=Small(), checkpoint_dir=str(kept))
    (reason,) = engine.panics
    assert f"{path} has" in reason
    assert "restore the file from a backup, or remove" in reason


def test_what_a_killed_process_was_writing_is_removed(start, tmp_path):
    """Files of unfinished checkpoints, when the next job starts."""
    store = CheckpointStore(tmp_path / "kept", MODEL_NAME, BEST_NAME)
    nvflare_lazy.save({"w": torch.ones(100)}, f"{store.incoming}/half/")
    start(source_ckpt_file_full_name=str(plain_safetensors(tmp_path)), checkpoint_dir=str(tmp_path / "kept"))
    assert files_below(store.incoming) == []


# ---- for others ----------------------------------------------------------------------------------------------------


def test_models_for_cross_site_evaluation(start, fl_ctx, result, tmp_path, engine):
    """The initial checkpoint, the last model and the best one, by name, unread; the locator offers them."""
    source = plain_safetensors(tmp_path)
    persistor = start(source_ckpt_file_full_name=str(source))
    round_of(persistor, fl_ctx, result, 0, 1.0)
    persistor.handle_event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, fl_ctx)
    round_of(persistor, fl_ctx, result, 1, 2.0)
    inventory = persistor.get_model_inventory(fl_ctx)
    assert list(inventory) == ["m.safetensors", MODEL_NAME, BEST_NAME]
    locator = LazyModelLocator()
    locator.handle_event(EventType.START_RUN, fl_ctx)
    assert locator.get_model_names(fl_ctx) == list(inventory)
    for name, bias in zip(inventory, (0.25, 2.0, 1.0), strict=True):
        found = persistor.get(name, fl_ctx)[ModelLearnableKey.WEIGHTS]
        located = locator.locate_model(name, fl_ctx).data
        for tensors in (found, located):
            assert isinstance(tensors["layer.bias"], LazyTensor)
            assert tensors["layer.bias"].tolist() == [bias]
    assert persistor.get("nobody", fl_ctx) is None
    with pytest.raises(JobCheckpointError, match="unknown model 'nobody'"):
        locator.locate_model("nobody", fl_ctx)


def test_a_locator_without_its_persistor_ends_the_job(fl_ctx, engine):
    """The error names the actual type."""
    engine.components["persistor"] = Small()
    LazyModelLocator().handle_event(EventType.START_RUN, fl_ctx)
    (reason,) = engine.panics
    assert "is a Small; LazyModelLocator needs a LazyModelPersistor" in reason


def test_the_pytorch_file_is_one_that_nvflares_persistor_goes_on_from(start, fl_ctx, result, tmp_path, engine):
    """At the end of the run, in its layout: `torch.load` reads it safely, and so does that persistor."""
    persistor = start(model=Small(), save_pytorch=True)
    round_of(persistor, fl_ctx, result, 0, 1.0)
    persistor.handle_event(EventType.END_RUN, fl_ctx)
    written = (tmp_path / "app" / MODEL_NAME).with_suffix(".pt")
    assert values(torch.load(written, weights_only=True)["model"]) == {**WEIGHTS, "layer.bias": [1.0]}
    stock = PTFileModelPersistor(model=Small(), source_ckpt_file_full_name=str(written), allow_numpy_conversion=False)
    stock.handle_event(EventType.START_RUN, fl_ctx)
    loaded = stock.load_model(fl_ctx)[ModelLearnableKey.WEIGHTS]
    assert loaded["layer.bias"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"global_model_file_name": "model.pt"}, "set save_pytorch"),
        ({"best_global_model_file_name": "../best.safetensors"}, "invalid model file name"),
        ({"keep_rounds": 0}, "keep_rounds must be >= 1, got 0"),
        ({"checkpoint_dir": "relative"}, "absolute path"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_said_at_once(arguments, says):
    """By the constructor, with what to write instead."""
    with pytest.raises(ValueError, match=says):
        LazyModelPersistor(**arguments)


def test_excluded_variables_are_not_part_of_the_job(start, fl_ctx, tmp_path):
    """They are neither sent nor saved."""
    start(source_ckpt_file_full_name=str(plain_safetensors(tmp_path)), exclude_vars="bias")
    assert list(weights(fl_ctx)) == ["layer.weight"]


def test_file_systems_without_hard_links(tmp_path, monkeypatch):
    """A model is saved under each of its names."""
    link = os.link

    def refusing(source, *args, **kwargs):
        if not str(source).startswith("/proc/"):  # nameless files get their name by a link
            raise PermissionError(errno.EPERM, "no links here")
        link(source, *args, **kwargs)

    monkeypatch.setattr(os, "link", refusing)
    store = CheckpointStore(tmp_path, "model.safetensors", "best.safetensors")
    for number in range(2):
        written = nvflare_lazy.open(
            nvflare_lazy.save({"w": torch.full((3,), number)}, store.incoming / "new.safetensors")
        )
        store.save(written, number)
        paths = (store.model_path, store.latest().path / "model.safetensors")
        assert [nvflare_lazy.open(path)["w"].tolist() for path in paths] == [[number] * 3] * 2
        assert len({path.stat().st_ino for path in paths}) == 2


def test_settings_without_effect(start, tmp_path, caplog):
    """A pattern that matches nothing, and names of files that a Hugging Face directory does not have."""
    source = tmp_path / "initial"
    source.mkdir()
    nvflare_lazy.save({"a": torch.zeros(2), "b": torch.zeros(2)}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    start(source_ckpt_file_full_name=str(source), checkpoint_dir=str(tmp_path / "1"), exclude_vars="b")
    assert "Setting without effect" not in caplog.text
    arguments = {"source_ckpt_file_full_name": str(source), "checkpoint_dir": str(tmp_path / "2")}
    start(**arguments, exclude_vars="c", global_model_file_name="m.safetensors")
    for setting in ("exclude_vars='c', because no tensor", "global_model_file_name, because the job started from"):
        assert caplog.text.count(f"Setting without effect: {setting}") == 1

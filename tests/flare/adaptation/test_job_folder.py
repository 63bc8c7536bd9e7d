# SPDX-License-Identifier: Apache-2.0
"""Jobs from NVFlare's recipes and from users become lazy, with their arguments, or get an error with the reason."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import nvflare
import pytest
from nvflare.app_opt.pt.recipes import FedAvgRecipe as StockFedAvg
from nvflare.app_opt.pt.recipes.cyclic import CyclicRecipe
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe as StockFedOpt
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe as StockScaffold
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe
from nvflare.client.config import TransferType
from nvflare.recipe.utils import add_cross_site_evaluation, set_per_site_config

from nvflare_lazy.errors import JobAdaptationError
from nvflare_lazy.flare.adaptation import component_mapping as mapping
from nvflare_lazy.flare.adaptation.component_mapping import AdaptationOptions, SiteConfig
from nvflare_lazy.flare.adaptation.job_folder import adapt_job
from nvflare_lazy.recipes import make_lazy
from tests.flare.networks import Small

NVFLARE = Path(nvflare.__file__).parent
OURS = "nvflare_lazy.flare."
MODEL = {"path": "tests.flare.networks.Small", "args": {}, "config_type": "dict"}


def test_nvflare_has_the_classes_of_the_mapping():
    """A class that NVFlare moves or renames would otherwise be taken for one that needs no replacement."""
    source = {
        ".".join(path.relative_to(NVFLARE.parent).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in NVFLARE.rglob("*.py")
    }
    for name in (*mapping._PACKAGES, *mapping._NO_COUNTERPART, *mapping._CLIENT_CONTROLLERS):
        defined = re.compile(rf"^(class {name}\b|{name} =)", re.MULTILINE)
        modules = [module for module, text in source.items() if name in text and defined.search(text)]
        config = SiteConfig("server", True, {})
        assert [module for module in modules if config.nvflare_class({"path": f"{module}.{name}"}) == name], name


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "train.py").write_text("import nvflare.client as flare\n\nflare.init()\n")
    return {"model": Small(), "min_clients": 2, "num_rounds": 2, "train_script": str(tmp_path / "train.py")}


@pytest.fixture
def lazy(tmp_path: Path) -> Callable[..., dict[str, dict]]:
    """Export a recipe, adapt the folder, and return the configurations by name."""

    def lazy(recipe: Any, level: int = 2) -> dict[str, dict]:
        recipe.export(str(tmp_path / "jobs"))
        folder = tmp_path / "jobs" / recipe.name
        adapt_job(folder, level).write()
        again = adapt_job(folder, level)
        assert (again.changed, again.diff()) == ([], "")
        return configs(folder)

    return lazy


def configs(folder: Path) -> dict[str, dict]:
    return {
        path.stem.removeprefix("config_fed_"): json.loads(path.read_text())
        for path in sorted(folder.rglob("config_fed_*"))
    }


def ours(config: dict) -> dict[str, dict]:
    """Return the arguments of our components by class name, and check the exact paths."""
    parts = [*config.get("workflows", []), *config["components"]]
    found = {part["path"].rpartition(".")[2]: part["args"] for part in parts if "nvflare_lazy" in part["path"]}
    assert all(part["path"].startswith(OURS) for part in parts if "nvflare_lazy" in part["path"])
    return found


def by_id(config: dict, component_id: str) -> dict:
    (found,) = [part for part in config["components"] if part["id"] == component_id]
    return found


def test_fedavg(lazy, arguments):
    """All of level 2, with file names and cross-site evaluation, and nothing on the clients."""
    recipe = StockFedAvg(
        exclude_vars="bias", aggregation_weights={"site-1": 2.0}, best_model_filename="best.pt", **arguments
    )
    add_cross_site_evaluation(recipe, submit_model_timeout=7)
    found = lazy(recipe)
    assert "nvflare_lazy" not in json.dumps(found["client"])
    parts = ours(found["server"])
    assert parts["LazyFedAvg"]["exclude_vars"] == "bias"
    assert parts["LazyFedAvg"]["aggregation_weights"] == {"site-1": 2.0}
    persistor = {"model": MODEL, "best_global_model_file_name": "best.safetensors", "save_pytorch": True}
    assert parts["LazyModelPersistor"] == persistor
    assert parts["LazyCrossSiteEval"] == {"submit_model_timeout": 7, "model_locator_id": "component"}
    assert by_id(found["server"], "component")["path"] == OURS + "LazyModelLocator"
    assert parts["TensorOffload"] == {}


def test_levels(lazy, arguments):
    """Level 1 adds one component; level 3 raises the same folder, and adds the clients."""
    recipe = StockFedAvg(**arguments)
    found = lazy(recipe, 1)
    assert ours(found["server"]).keys() == {"TensorOffload"}
    found = lazy(recipe, 3)
    assert ours(found["client"]).keys() == {"TensorOffload"}
    assert ours(found["server"]).keys() == {"LazyFedAvg", "LazyModelPersistor", "LazyModelLocator", "TensorOffload"}


def test_differences(lazy, arguments):
    """The server accepts only differences if the clients compute them, and the arguments go to the aggregator."""
    recipe = StockFedAvg(params_transfer_type=TransferType.DIFF, exclude_vars="bias", **arguments)
    parts = ours(lazy(recipe)["server"])
    assert parts["LazyFedAvg"]["aggregator"] == {
        "path": OURS + "LazyAggregator",
        "args": {"exclude_vars": "bias", "params_type": "DIFF"},
    }
    assert "exclude_vars" not in parts["LazyFedAvg"]
    assert parts["TensorOffload"] == {"params_type": "DIFF"}


def test_sites_one_by_one(lazy, arguments, tmp_path):
    """Each app has its own configuration; one site with whole models is enough for both kinds to be accepted."""
    recipe = StockFedAvg(**arguments)
    config = {"site-1": {"params_transfer_type": TransferType.DIFF}, "site-2": {}}
    set_per_site_config(recipe, config)
    recipe.export(str(tmp_path / "jobs"))
    job = adapt_job(tmp_path / "jobs" / "fedavg", 3)
    assert {str(path.relative_to(job.folder).parent.parent) for path in job.changed} == {
        *("app_server", "app_site-1", "app_site-2")
    }
    job.write()
    assert ours(configs(job.folder)["server"])["TensorOffload"] == {}


def test_fedopt(lazy, arguments):
    """The optimizer moves to the aggregator, and the model from its component to the persistor."""
    optimizer = {"path": "torch.optim.SGD", "args": {"lr": 0.5, "momentum": 0.9}}
    schedule = {"path": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": "{num_rounds}"}}
    config = lazy(StockFedOpt(optimizer_args=optimizer, lr_scheduler_args=schedule, **arguments))["server"]
    plain = {"config_type": "dict"}
    assert ours(config)["LazyAggregator"] == {
        "params_type": "DIFF",
        "server_optimizer": {
            "name": "fedavgm",
            "lr": 0.5,
            "momentum": 0.9,
            **plain,
            "lr_scheduler": {"path": schedule["path"], "args": {"T_max": 2}, **plain},
        },
    }
    assert ours(config)["LazyModelPersistor"]["model"] == MODEL
    assert "model" not in {part["id"] for part in config["components"]}
    assert by_id(config, "shareable_generator")["path"].endswith(".FullModelShareableGenerator")


def test_scaffold_and_cyclic(lazy, arguments):
    """Their persistors, locators and controllers."""
    expected = {"LazyModelPersistor", "LazyModelLocator", "TensorOffload"}
    assert ours(lazy(StockScaffold(**arguments))["server"]).keys() == {*expected, "LazyScaffold"}
    assert ours(lazy(CyclicRecipe(**arguments))["server"]).keys() == expected


def test_a_training_script_in_its_own_process(tmp_path, arguments):
    """Only the script itself can receive on disk there: a note has instructions."""
    recipe = StockFedAvg(launch_external_process=True, **arguments)
    recipe.export(str(tmp_path / "jobs"))
    folder = tmp_path / "jobs" / "fedavg"
    (note,) = adapt_job(folder, 3).notes
    assert note.endswith("call nvflare_lazy.install() in it before flare.init(), or set install_in_trainers")
    assert adapt_job(folder, 2).notes == []
    job = adapt_job(folder, 3, AdaptationOptions(install_in_trainers=True))
    job.write()
    assert job.notes == adapt_job(folder, 3).notes == []
    executor = configs(folder)["client"]["executors"][0]["executor"]["args"]
    assert executor["command"] == ["python3", "-u", "-m", "nvflare_lazy.flare.install", "custom/train.py"]
    assert adapt_job(folder, 3, AdaptationOptions(install_in_trainers=True)).changed == []


INSTALL = "-m nvflare_lazy.flare.install"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python3.11 -u custom/train.py --epochs 1", f"python3.11 -u {INSTALL} custom/train.py --epochs 1"),
        ("env A=b /opt/bin/python -m mine.train x.py", f"env A=b /opt/bin/python {INSTALL} -m mine.train x.py"),
        ("torchrun --nproc_per_node 2 train.py", f"torchrun --nproc_per_node 2 {INSTALL} train.py"),
        ("python -m torch.distributed.run train.py", f"python -m torch.distributed.run {INSTALL} train.py"),
        ("accelerate launch -m mine.train", f"accelerate launch {INSTALL} -m mine.train"),
        ("bash train.sh", None),
        ("./train.py", None),
    ],
)
def test_commands_that_start_a_training_script(command, expected):
    """`install()` comes first in each process that runs the script; a command that is not understood is refused."""
    args = {"execution_mode": "external_process", "command": command}
    client = {"executors": [{"tasks": ["*"], "executor": {"path": "some.Executor", "args": args}}], "components": []}
    configs = [SiteConfig("client", False, client)]
    if expected is None:
        with pytest.raises(JobAdaptationError, match=r"call nvflare_lazy.install\(\) in the script"):
            mapping.adapt_configs(configs, 1, AdaptationOptions(install_in_trainers=True))
    else:
        mapping.adapt_configs(configs, 1, AdaptationOptions(install_in_trainers=True))
        assert args["command"] == expected.split()


def test_only_trainers_that_the_client_starts(tmp_path, arguments):
    """A script in the client's own process has nowhere to be preceded by anything."""
    recipe = StockFedAvg(**arguments)
    make_lazy(recipe, install_in_trainers=True)
    with pytest.raises(JobAdaptationError, match="install_in_trainers requires executors"):
        recipe.export(str(tmp_path / "jobs"))


@pytest.mark.parametrize("level", [1, 2])
def test_swarm(lazy, arguments, level):
    """The models are on the clients: their configuration is adapted, and the server's stays."""
    found = lazy(SwarmLearningRecipe(name="swarm", do_cross_site_eval=True, **arguments), level)
    assert "nvflare_lazy" not in json.dumps(found["server"])
    parts = ours(found["client"])
    assert parts["TensorOffload"] == {}
    controller = found["client"]["executors"][0]["executor"]
    assert controller["path"].endswith("SwarmClientController")
    if level == 1:
        # NVFlare's controller requests results in memory otherwise.
        assert controller["args"]["enable_tensor_disk_offload"] is True
    else:
        assert controller["path"] == OURS + "LazySwarmClientController"
        assert parts["LazyAggregator"] == {"params_type": "FULL"}
        assert parts["LazyModelPersistor"] == {"model": MODEL}


def test_make_lazy(tmp_path, arguments):
    """A recipe makes the same job as an adapted folder, including later additions to the recipe."""
    recipe = StockFedAvg(**arguments)
    make_lazy(recipe, scratch_dir="/data/scratch", checkpoint_dir="/data/checkpoints", keep_rounds=3)
    add_cross_site_evaluation(recipe)
    recipe.export(str(tmp_path / "jobs"))
    found = configs(tmp_path / "jobs" / "fedavg")
    parts = ours(found["server"])
    assert parts["LazyModelPersistor"] == {"model": MODEL, "checkpoint_dir": "/data/checkpoints", "keep_rounds": 3}
    assert parts["TensorOffload"] == ours(found["client"])["TensorOffload"] == {"scratch_dir": "/data/scratch"}
    assert "LazyCrossSiteEval" in parts
    assert not list((tmp_path / "jobs").rglob("nvflare_lazy"))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"level": 4}, "level must be 1, 2 or 3"),
        ({"level": 1, "checkpoint_dir": "/data"}, "checkpoint_dir requires level 2 or 3"),
        ({"checkpoint_dir": "data"}, "must be an absolute path"),
        ({"memory_budget": "plenty"}, "plenty"),
    ],
)
def test_arguments_are_checked_at_once(arguments, given, problem):
    """Before there is a job."""
    with pytest.raises(ValueError, match=problem):
        make_lazy(StockFedAvg(**arguments), **given)


def test_a_recipe_that_cannot_be_mapped_leaves_no_job(tmp_path, arguments):
    """Not one that looks adapted."""
    recipe = StockFedOpt(optimizer_args={"path": "torch.optim.Adam"}, **arguments)
    make_lazy(recipe)
    with pytest.raises(JobAdaptationError, match="no bias correction"):
        recipe.export(str(tmp_path / "jobs"))
    assert os.listdir(tmp_path / "jobs") == []


# ---- jobs that were written by hand ----------------------------------------------------------------------------------

SERVER = {
    "format_version": 2,
    "workflows": [
        {
            "id": "controller",
            "path": "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather",
            "args": {"aggregator_id": "sum", "persistor_id": "store", "shareable_generator_id": "generator"},
        }
    ],
    "components": [
        {
            "id": "store",
            "path": "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor",
            "args": {"model": "net"},
        },
        {"id": "net", "path": "net.Net"},
        {
            "id": "sum",
            "path": "nvflare.app_common.aggregators.intime_accumulate_model_aggregator."
            "InTimeAccumulateWeightedAggregator",
            "args": {"exclude_vars": "bn", "aggregation_weights": {"site-1": 3}, "expected_data_kind": "WEIGHTS"},
        },
        {
            "id": "generator",
            "path": "nvflare.app_common.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator",
        },
    ],
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a job folder from the server's configuration, as data or as HOCON."""

    def write(server: dict | str, deploy_map: Any = None) -> Path:
        folder = tmp_path / "job"
        config = folder / "app" / "config"
        config.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").write_text(json.dumps({"deploy_map": deploy_map or {"app": ["@ALL"]}}))
        if isinstance(server, str):
            (config / "config_fed_server.conf").write_text(server)
        else:
            (config / "config_fed_server.json").write_text(json.dumps(server, indent=2))
        return folder

    return write


def part(component_id: str, **changes: Any) -> dict:
    """Return the configuration with changes to one component, or to the controller."""
    config = deepcopy(SERVER)
    (found,) = [part for part in (*config["components"], *config["workflows"]) if part["id"] == component_id]
    found.setdefault("args", {}).update(changes.pop("args", {}))
    found.update(changes)
    return config


def test_scatter_and_gather(write):
    """Components are found by the ids of the job, and the aggregator's arguments move."""
    job = adapt_job(write(SERVER), 2)
    assert job.notes == []
    job.write()
    config = configs(job.folder)["server"]
    assert by_id(config, "sum") == {
        "id": "sum",
        "path": OURS + "LazyAggregator",
        "args": {"exclude_vars": "bn", "aggregation_weights": {"site-1": 3}, "params_type": "FULL"},
    }
    model = {"path": "net.Net", "args": {}, "config_type": "dict"}
    assert by_id(config, "store")["args"] == {"model": model}
    assert config["workflows"] == SERVER["workflows"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"class_path": "net.Net"}, {"path": "net.Net", "args": {}, "config_type": "dict"}),
        # NVFlare instantiates the inner component, and then the model with it.
        ({"path": "net.Net", "args": {"part": {"path": "net.Part"}}}, None),
        (None, None),
    ],
)
def test_models_of_a_persistor(write, model, expected):
    """A separate process instantiates a class with plain arguments; everything else stays as it is."""
    config = part("store", args={"model": model, "load_weights_only": False, "load_device": "cpu"})
    job = adapt_job(write(config), 2)
    job.write()
    assert by_id(configs(job.folder)["server"], "store")["args"] == {"model": expected or model}


HOCON = """\
format_version = 2
# the persistor of this job
store = "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor"
model_class_path = "net.Net"
workflows = [{ id = ctl, name = FedAvg, args { num_clients = 2 } }]
components = [
  {
    id = "persistor"
    path = "{store}"
    # a model of our own
    args.model.path = "{model_class_path}"
  }
]
"""


def test_hocon(write):
    """Variables are resolved to find the class, and stay where they name the model; comments stay."""
    job = adapt_job(write(HOCON), 2)
    job.write()
    assert (job.folder / "app" / "config" / "config_fed_server.conf").read_text() == HOCON.replace(
        "name = FedAvg, args { num_clients = 2 }", f'args {{ num_clients = 2 }}, path = "{OURS}LazyFedAvg"'
    ).replace('"{store}"', f'"{OURS}LazyModelPersistor"').replace(
        '"{model_class_path}"\n  }\n',
        '"{model_class_path}"\n    args.model.args = {}\n    args.model.config_type = "dict"\n  }\n'
        f'  {{\n    id = "offload"\n    path = "{OURS}TensorOffload"\n    args = {{}}\n  }}\n',
    )


def test_your_own_classes_are_kept(write):
    """Each with a note, and the model that they may look for; a persistor's locator stays with it."""
    config = part("sum", path="median.MedianAggregator")
    config["components"] += [
        {
            "id": "locator",
            "path": "nvflare.app_opt.pt.file_model_locator.PTFileModelLocator",
            "args": {"pt_persistor_id": "own"},
        },
        {"id": "own", "path": "store.MyPersistor"},
    ]
    job = adapt_job(write(config), 2)
    (note,) = job.notes
    assert note.startswith(
        "app/config/config_fed_server.json: kept median.MedianAggregator (sum): it is your own class"
    )
    job.write()
    found = configs(job.folder)["server"]
    assert by_id(found, "sum")["path"] == "median.MedianAggregator"
    assert by_id(found, "store")["args"] == {"model": "net"}
    assert by_id(found, "net")["path"] == "net.Net"
    assert by_id(found, "locator")["path"].endswith(".PTFileModelLocator")


def test_fedavg_with_your_own_aggregator(write):
    """It stays, and arguments that NVFlare ignores then are removed."""
    args = {"aggregator": {"path": "median.Median", "args": {}}, "exclude_vars": "bn"}
    job = adapt_job(write(part("controller", path="nvflare.app_common.workflows.fedavg.FedAvg", args=args)), 2)
    job.write()
    controller = configs(job.folder)["server"]["workflows"][0]
    assert controller["path"] == OURS + "LazyFedAvg"
    assert controller["args"]["aggregator"] == {"path": "median.Median", "args": {}}
    assert "exclude_vars" not in controller["args"]
    assert [note.partition(": ")[2][:7] for note in job.notes] == ["removed", "kept th"]


REFUSED = [
    (part("store", path="nvflare.app_opt.tf.model_persistor.TFModelPersistor"), "TFModelPersistor .store. has no"),
    (part("sum", args={"weigh_by_local_iter": False}), "weigh_by_local_iter"),
    (part("sum", args={"expected_data_kind": {"a": "WEIGHTS", "b": "WEIGHTS"}}), "more than one set of weights"),
    (part("store", args={"global_model_file_name": "models/last.pt"}), "without a directory"),
    (part("store", args={"unknown": 1}), "unknown argument unknown"),
    (
        part("controller", path="nvflare.app_opt.pt.fedavg.PTFedAvg", args={"model": {"path": "net.Net"}}),
        "its own model",
    ),
    (
        part(
            "generator",
            path="nvflare.app_opt.pt.fedopt.PTFedOptModelShareableGenerator",
            args={"optimizer_args": {"path": "torch.optim.SGD", "args": {"nesterov": True}}},
        ),
        "does not support nesterov",
    ),
    ({"format_version": 2, "workflows": [{"path": "nvflare.app_common.psi.PSI"}]}, "no component has a counterpart"),
]


@pytest.mark.parametrize(("config", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_what_has_no_counterpart_is_refused(write, config, problem):
    """The file, the component and what to do; the folder stays, and level 1 works."""
    folder = write(config)
    with pytest.raises(JobAdaptationError, match=rf"^app/config/config_fed_server.json: .*{problem}.*"):
        adapt_job(folder, 2)
    assert configs(folder)["server"] == config
    adapt_job(folder, 1).write()
    assert by_id(configs(folder)["server"], "offload")["path"] == OURS + "TensorOffload"


def test_encryption_is_refused_at_every_level(write):
    """There is nothing that level 1 could do."""
    path = "nvflare.app_opt.he.intime_accumulate_model_aggregator.HEInTimeAccumulateWeightedAggregator"
    with pytest.raises(JobAdaptationError, match="encrypted results are not tensors"):
        adapt_job(write(part("sum", path=path)), 1)


BROKEN = [
    (lambda job: (job / "meta.json").unlink(), "no meta.json"),
    (lambda job: (job / "meta.json").write_text("{}"), "deploy_map"),
    (lambda job: (job / "meta.json").write_text('{"deploy_map": {"none": []}}'), "names the app 'none'"),
    (lambda job: (job / "meta.json").write_text('{"deploy_map": {"../app": []}}'), r"names the app '\.\./app'"),
    (lambda job: (job / "app/config/config_fed_server.json").unlink(), "has no config_fed_server"),
    (lambda job: (job / "app/config/config_fed_server.json").write_text("{"), "not valid JSON"),
    (lambda job: (job / "app/config/config_fed_server.json").write_text("[]"), "not an object"),
    (lambda job: (job / "app/config/config_fed_server.json").write_bytes(b"\xff"), "not UTF-8"),
    (lambda job: (job / "app/config/config_fed_server.json").write_text('{"components": [1]}'), "list of objects"),
    (lambda job: (job / "app/config/environment.json").write_text('{"APP_CKPT": "a.pt"}'), "source_ckpt_file_full"),
]


@pytest.mark.parametrize(("damage", "problem"), BROKEN, ids=[problem for _, problem in BROKEN])
def test_folders_that_are_not_a_job(write, damage, problem):
    """An error that names the file."""
    folder = write(SERVER)
    damage(folder)
    with pytest.raises(JobAdaptationError, match=problem):
        adapt_job(folder, 2)


def test_a_substitution_that_hides_a_component(write):
    """What NVFlare reads is not what the text shows: refused rather than adapted in part."""
    folder = write(HOCON.replace('"{store}"', "${store}"))
    with pytest.raises(JobAdaptationError, match="depends on a substitution"):
        adapt_job(folder, 2)


def test_writing_is_atomic(write, tmp_path, monkeypatch):
    """If the second file cannot be replaced, the first one has its old text, and nothing is left over."""
    folder = write(SERVER, {"app": ["server"], "other": ["site-1"]})
    other = folder / "other" / "config"
    other.mkdir(parents=True)
    (other / "config_fed_client.json").write_text('{"executors": []}')
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    job = adapt_job(folder, 3)
    assert len(job.changed) == 2
    replace = os.replace

    def fail_for_clients(source: str, target: Path) -> None:
        if "client" in str(target):
            raise OSError("the disk is full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_for_clients)
    with pytest.raises(OSError, match="full"):
        job.write()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    monkeypatch.undo()
    with pytest.raises(JobAdaptationError, match="exists"):
        job.write(tmp_path / "job")
    job.write(tmp_path / "new" / "copy")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert adapt_job(tmp_path / "new" / "copy", 3).changed == []
    assert os.listdir(tmp_path / "new") == ["copy"]


def test_options_need_a_persistor(write):
    """A `checkpoint_dir` that nothing would use is an error."""
    config = deepcopy(SERVER)
    del config["components"][0]
    with pytest.raises(JobAdaptationError, match="requires a PTFileModelPersistor"):
        adapt_job(write(config), 2, AdaptationOptions(persistor={"checkpoint_dir": "/data"}))

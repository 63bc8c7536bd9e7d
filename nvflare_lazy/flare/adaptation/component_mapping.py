# SPDX-License-Identifier: Apache-2.0
"""The mapping from NVFlare's components to ours, over the plain data of a job's configurations.

`adapt_configs` applies it for a level. A component without a counterpart raises an error with the reason and the
remedy. A user's own component is kept, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from nvflare.fuel.utils.secret_utils import split_command_preserving_secret_refs

from nvflare_lazy.errors import JobAdaptationError

LEVELS = (1, 2, 3)
OFFLOAD_ID = "offload"
SUFFIX = ".safetensors"
# NVFlare passes a dictionary with this member to a component unchanged.
PLAIN_DICT = {"config_type": "dict"}

_OURS = "nvflare_lazy."
_FLARE = "nvflare_lazy.flare."
_OFFLOAD = _FLARE + "TensorOffload"
_AGGREGATOR = _FLARE + "LazyAggregator"
_SGD, _ADAM, _ADAGRAD = "torch.optim.SGD", "torch.optim.Adam", "torch.optim.Adagrad"
_FULL_GENERATOR = "nvflare.app_common.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator"

#: The packages in which NVFlare's classes of these names are; classes of the same name in others are not meant.
_PACKAGES = {
    "FedAvg": "nvflare.app_common.workflows.",
    "PTFedAvg": "nvflare.app_opt.pt.",
    "PTFedAvgEarlyStopping": "nvflare.app_opt.pt.",
    "FedOpt": "nvflare.app_opt.pt.",
    "Scaffold": "nvflare.app_common.workflows.",
    "CrossSiteModelEval": "nvflare.app_common.workflows.",
    "InTimeAccumulateWeightedAggregator": "nvflare.app_common.aggregators.",
    "AccumulateWeightedAggregator": "nvflare.app_common.aggregators.",
    "PTFedOptModelShareableGenerator": "nvflare.app_opt.pt.",
    "PTFileModelPersistor": "nvflare.app_opt.pt.",
    "PTFileModelLocator": "nvflare.app_opt.pt.",
    "SwarmClientController": "nvflare.app_common.ccwf.",
}
#: Controllers that run on clients, where the models of such a job are.
_CLIENT_CONTROLLERS = ("SwarmClientController", "CyclicClientController", "CrossSiteEvalClientController")
_OWN_FORMAT = "it keeps the model in memory and in its own format"
_ENCRYPTED = "encrypted results are not tensors"
#: NVFlare's components that prevent level 2, each with the reason.
_NO_COUNTERPART = {
    "TFModelPersistor": _OWN_FORMAT,
    "NPModelPersistor": _OWN_FORMAT,
    "NPFileModelPersistor": _OWN_FORMAT,
    "JoblibModelParamPersistor": _OWN_FORMAT,
    "XGBModelPersistor": _OWN_FORMAT,
    "ScatterAndGatherScaffold": "use nvflare.app_common.workflows.scaffold.Scaffold, which has one",
    "CollectAndAssembleAggregator": "its assembler combines more than tensors",
    "CollectAndAssembleModelAggregator": "its assembler combines more than tensors",
    "DXOAggregator": "it combines more than tensors",
    "XGBBaggingAggregator": "it combines trees",
    "HEInTimeAccumulateWeightedAggregator": _ENCRYPTED,
    "HEModelShareableGenerator": _ENCRYPTED,
    "HEModelEncryptor": _ENCRYPTED,
    "HEModelDecryptor": _ENCRYPTED,
}
_PERSISTOR_ARGS = (
    *("exclude_vars", "model", "global_model_file_name", "best_global_model_file_name"),
    *("source_ckpt_file_full_name", "filter_id", "allow_numpy_conversion"),
)
# Arguments of controllers that name components which level 2 replaces.
_ROLES = ("persistor_id", "aggregator_id", "shareable_generator_id", "model_locator_id")
_INSTALL = "nvflare_lazy.flare.install"
# They run a module with -m, as they run a script; some of them are modules of Python.
_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|accelerate")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
# They are about loading a model into memory.
_DROPPED_PERSISTOR_ARGS = ("load_weights_only", "load_device")


@dataclass(frozen=True)
class AdaptationOptions:
    """Arguments of the components that a job gets.

    Args:
        offload: Arguments of `TensorOffload`.
        persistor: Arguments of `LazyModelPersistor` that NVFlare's persistor lacks.
        install_in_trainers: Whether external trainers run after `install()`.
    """

    offload: Mapping[str, Any] = field(default_factory=dict)
    persistor: Mapping[str, Any] = field(default_factory=dict)
    install_in_trainers: bool = False

    def check(self, level: int) -> None:
        """Raise a `ValueError` if the level does not exist or does not use the options."""
        if level not in LEVELS:
            raise ValueError(f"level must be 1, 2 or 3, got {level!r}")
        if self.persistor and level == 1:
            raise ValueError(f"{next(iter(self.persistor))} requires level 2 or 3: level 1 keeps NVFlare's persistor")


@dataclass
class SiteConfig:
    """A configuration of the server or of clients.

    Args:
        name: Name of the file, for messages.
        is_server: Whether the server reads the file.
        data: Content of the file; `adapt_configs` changes it.
    """

    name: str
    is_server: bool
    data: dict[str, Any]

    def __post_init__(self) -> None:
        for section in ("components", "workflows" if self.is_server else "executors"):
            if not all(isinstance(part, dict) for part in self._section(section)):
                raise JobAdaptationError(f"{self.name}: {section} must be a list of objects")

    @property
    def components(self) -> list[dict[str, Any]]:
        """The components with ids."""
        return self._section("components")

    @property
    def workflows(self) -> list[dict[str, Any]]:
        """The controllers of a server's configuration."""
        return self._section("workflows")

    @property
    def executors(self) -> list[dict[str, Any]]:
        """The executors of a client's configuration."""
        found = [part.get("executor") for part in self._section("executors")]
        return [executor for executor in found if isinstance(executor, dict)]

    def _section(self, name: str) -> list[dict[str, Any]]:
        found = self.data.get(name, [])
        if not isinstance(found, list):
            raise JobAdaptationError(f"{self.name}: {name} must be a list")
        return found

    def class_path(self, component: Mapping[str, Any]) -> str:
        """Return the class of a component, with NVFlare's variables replaced; its bare name if that is all there is."""
        found = next((component[key] for key in ("path", "class_path", "name") if key in component), "")
        variable = re.fullmatch(r"\{(\w+)\}", found) if isinstance(found, str) else None
        if variable:
            found = self.data.get(variable[1], found)
        return found if isinstance(found, str) else ""

    def nvflare_class(self, component: Mapping[str, Any]) -> str:
        """Return the name of a component's class if it is NVFlare's, or an empty string."""
        path = self.class_path(component)
        package, _, name = path.rpartition(".")
        if not package:
            return name if "name" in component else ""
        return name if path.startswith(_PACKAGES.get(name, "nvflare.")) else ""

    def is_ours(self, component: Mapping[str, Any], name: str = "") -> bool:
        """Return whether a component's class is of this package, and has the name if one is given."""
        path = self.class_path(component)
        return path.startswith(_OURS) and (not name or path.endswith(f".{name}"))

    def is_custom(self, component: Mapping[str, Any]) -> bool:
        """Return whether a component's class is neither of this package nor NVFlare's."""
        path = self.class_path(component)
        return "." in path and not path.startswith((_OURS, "nvflare."))

    def component(self, component_id: str) -> dict[str, Any] | None:
        """Return the component with an id."""
        return next((part for part in self.components if part.get("id") == component_id), None)


def adapt_configs(configs: Sequence[SiteConfig], level: int, options: AdaptationOptions | None = None) -> list[str]:
    """Change the configurations of a job to a level, and return notes on the components that were kept.

    A job that has the level already stays as it is.

    Args:
        configs: The configurations.
        level: 1 for `TensorOffload` where results arrive, 2 to also replace aggregation and persistor, 3 to also add
            `TensorOffload` to the clients.
        options: Arguments of the components.

    Raises:
        JobAdaptationError: If a component cannot be mapped; the configurations are then in an undefined state.
    """
    options = options or AdaptationOptions()
    options.check(level)
    clients_hold_models = any(
        config.nvflare_class(executor) in _CLIENT_CONTROLLERS or _is_client_controller(config, executor)
        for config in configs
        for executor in config.executors
    )
    params_type = _params_type(configs)
    sides = [_Side(config, options, params_type) for config in configs]
    for side in sides:
        side.refuse(_ENCRYPTED)
    if level >= 2:
        for side in sides:
            side.replace()
        if not any(side.has_ours() for side in sides):
            raise JobAdaptationError(
                f"{sides[0].config.name}: no component has a counterpart for level {level}; use level 1"
            )
    else:
        for side in sides:
            side.receive_on_disk()
    if options.install_in_trainers and sum(side.install_in_trainers() for side in sides) == 0:
        raise JobAdaptationError(
            "install_in_trainers requires executors that start the training script in a separate process; for any "
            "other, call nvflare_lazy.install() in the script"
        )
    for side in sides:
        if clients_hold_models != side.config.is_server or (level == 3 and not side.config.is_server):
            side.add_offload()
    if options.persistor and not any(side.has_persistor for side in sides):
        raise JobAdaptationError(f"{next(iter(options.persistor))} requires a PTFileModelPersistor; add one to the job")
    return [note for side in sides for note in side.notes]


def server_optimizer(optimizer_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert NVFlare's optimizer arguments to our server optimizer.

    Args:
        optimizer_args: A torch optimizer as "path" and "args", or a server optimizer of this package as "name" and
            parameters.
    """
    if optimizer_args is None:
        return {"name": "fedavgm", "lr": 1.0, "momentum": 0.0, **PLAIN_DICT}
    if "name" in optimizer_args:
        return {**optimizer_args, **PLAIN_DICT}
    path = optimizer_args.get("path") or optimizer_args.get("class_path")
    args = dict(optimizer_args.get("args") or {})
    if path == _SGD:
        found = {"name": "fedavgm", "lr": args.pop("lr", 1e-3), "momentum": args.pop("momentum", 0.0)}
    elif path == _ADAM:
        beta1, beta2 = args.pop("betas", (0.9, 0.999))
        lr, tau = args.pop("lr", 1e-3), args.pop("eps", 1e-8)
        found = {"name": "fedadam", "lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau}
    elif path == _ADAGRAD:
        found = {"name": "fedadagrad", "lr": args.pop("lr", 1e-2), "beta1": 0.0, "tau": args.pop("eps", 1e-10)}
    else:
        raise ValueError(
            f"no server optimizer for {path!r}; use {_SGD}, {_ADAM} or {_ADAGRAD}, or an optimizer by name, such as "
            '{"name": "fedyogi", "lr": 0.01}, or NVFlare\'s FedOptRecipe, which keeps the model in memory'
        )
    if args:
        raise ValueError(f"the server optimizer for {path} does not support {', '.join(sorted(args))}")
    return {**found, **PLAIN_DICT}


def learning_rate_schedule(lr_scheduler_args: Mapping[str, Any]) -> dict[str, Any]:
    """Convert NVFlare's scheduler arguments to the "lr_scheduler" of our server optimizer."""
    path = lr_scheduler_args.get("path") or lr_scheduler_args["class_path"]
    # With the marker, NVFlare does not instantiate the scheduler while it reads the configuration.
    return {"path": path, "args": dict(lr_scheduler_args.get("args") or {}), **PLAIN_DICT}


class _Side:
    """Changes one configuration."""

    def __init__(self, config: SiteConfig, options: AdaptationOptions, params_type: str | None) -> None:
        self.config = config
        self.notes: list[str] = []
        self._options = options
        self._params_type = params_type
        self._replacements: dict[str, Callable[[dict[str, Any]], None]] = {
            "FedAvg": self._replace_fedavg,
            "PTFedAvg": self._replace_fedavg,
            "PTFedAvgEarlyStopping": self._replace_fedavg,
            "FedOpt": self._replace_fedopt,
            "Scaffold": lambda part: _set_class(part, "LazyScaffold"),
            "CrossSiteModelEval": lambda part: _set_class(part, "LazyCrossSiteEval"),
            "InTimeAccumulateWeightedAggregator": self._replace_aggregator,
            "AccumulateWeightedAggregator": self._replace_aggregator,
            "PTFileModelPersistor": self._replace_persistor,
            "SwarmClientController": self._replace_swarm_controller,
        }

    def refuse(self, reason: str | None = None) -> None:
        """Raise an error if a component has no counterpart, for the given or any reason."""
        for part in self._parts():
            why = _NO_COUNTERPART.get(self.config.nvflare_class(part))
            if why is not None and reason in (None, why):
                advice = "leave the job as it is" if why == _ENCRYPTED else "use level 1"
                raise self._error(part, f"has no counterpart: {why}; {advice}")

    def replace(self) -> None:
        """Replace the components of level 2."""
        self.refuse()
        for part in list(self._parts()):
            replace = self._replacements.get(self.config.nvflare_class(part))
            if replace is not None:
                replace(part)
            elif self._params_type:
                self._set_params_type(part)
        # Optimizers and locators depend on the replaced components.
        for part in list(self._parts()):
            kind = self.config.nvflare_class(part)
            if kind == "PTFedOptModelShareableGenerator":
                self._replace_optimizer(part)
            elif kind == "PTFileModelLocator":
                self._replace_locator(part)
            elif self.config.is_custom(part) and self._has_a_role(part):
                self.notes.append(
                    f"{self.config.name}: kept {self._name(part)}: it is your own class; check that it works with the "
                    "replaced components"
                )
        self._move_models()
        if self._options.persistor:
            for part in self.config.components:
                if self.config.is_ours(part, "LazyModelPersistor"):
                    _args(part).update(self._options.persistor)

    def has_ours(self) -> bool:
        """Return whether a component of level 2 is one of this package."""
        return any(
            self.config.is_ours(part) and not self.config.is_ours(part, "TensorOffload") for part in self._parts()
        )

    @property
    def has_persistor(self) -> bool:
        """Whether the configuration has our persistor."""
        return any(self.config.is_ours(part, "LazyModelPersistor") for part in self.config.components)

    def add_offload(self) -> None:
        """Add `TensorOffload`, or set the given arguments of the one that exists."""
        given = dict(self._options.offload)
        for part in self.config.components:
            if self.config.is_ours(part, "TensorOffload"):
                if given:
                    _args(part).update(given)
                return
        if self.config.is_server and self._params_type:
            given.setdefault("params_type", self._params_type)
        taken = {part.get("id") for part in (*self.config.components, *self.config.workflows)}
        free = next(name for name in (OFFLOAD_ID, "tensor_offload", "nvflare_lazy_offload") if name not in taken)
        self.config.data.setdefault("components", []).append({"id": free, "path": _OFFLOAD, "args": given})
        if any(_INSTALL not in str(_read_args(executor).get("command")) for executor in self._external_trainers()):
            self.notes.append(
                f"{self.config.name}: the training script runs in its own process; call nvflare_lazy.install() in it "
                "before flare.init(), or set install_in_trainers"
            )

    def install_in_trainers(self) -> bool:
        """Let the commands that start training scripts run `install()` first; return whether there is one."""
        found = False
        for executor in self._external_trainers():
            found = True
            args = _args(executor)
            command = args.get("command")
            if isinstance(command, str):
                words = split_command_preserving_secret_refs(command, posix=True)
            else:
                words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
            at = _start_of_script(words)
            if at is None:
                raise self._error(
                    executor,
                    f"starts the training script by {command!r}, in which no Python script was found after python, "
                    "torchrun or accelerate; call nvflare_lazy.install() in the script",
                )
            if _INSTALL not in words:
                args["command"] = [*words[:at], "-m", _INSTALL, *words[at:]]
        return found

    def _external_trainers(self) -> Iterator[dict[str, Any]]:
        for executor in self.config.executors:
            if _read_args(executor).get("execution_mode") == "external_process":
                yield executor

    def receive_on_disk(self) -> None:
        """Let NVFlare's swarm learning request results on disk: its own request for memory would be honored."""
        for part in self.config.executors:
            if self.config.nvflare_class(part) == "SwarmClientController":
                _args(part)["enable_tensor_disk_offload"] = True

    # ---- components --------------------------------------------------------------------------------------------------

    def _set_params_type(self, part: dict[str, Any]) -> None:
        """Let our aggregator, in a job that has it already, accept differences only."""
        for aggregator in (part, _read_args(part).get("aggregator")):
            if isinstance(aggregator, dict) and self.config.is_ours(aggregator, "LazyAggregator"):
                _args(aggregator).setdefault("params_type", self._params_type)

    def _replace_fedavg(self, part: dict[str, Any]) -> None:
        args = _args(part)
        if args.get("model") is not None:
            raise self._error(
                part, "has its own model, which it keeps in memory; add a PTFileModelPersistor, or use level 1"
            )
        aggregator = args.get("aggregator")
        if aggregator is None:
            if self._params_type:
                moved = _moved(args)
                args["aggregator"] = {"path": _AGGREGATOR, "args": {**moved, "params_type": self._params_type}}
        else:
            # NVFlare's controller ignores them with an aggregator; ours raises.
            for name in ("exclude_vars", "aggregation_weights"):
                if args.pop(name, None) is not None:
                    self.notes.append(
                        f"{self.config.name}: removed {name} of {self._name(part)}: it has no effect with an aggregator"
                    )
            if isinstance(aggregator, dict) and not self.config.is_ours(aggregator):
                self.notes.append(
                    f"{self.config.name}: kept the aggregator {self.config.class_path(aggregator)}: it receives lazy "
                    "tensors, and may compute in memory"
                )
        _set_class(part, "LazyFedAvg")

    def _replace_fedopt(self, part: dict[str, Any]) -> None:
        args = _args(part)
        optimizer = args.pop("optimizer_args", {"path": _SGD, "args": {"lr": 1.0, "momentum": 0.6}})
        schedule = args.pop(
            "lr_scheduler_args",
            {"path": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": 3, "eta_min": 0.9}},
        )
        for name in ("source_model", "device"):
            args.pop(name, None)
        moved = _moved(args)
        server = self._server_optimizer(part, optimizer, schedule)
        args["aggregator"] = {"path": _AGGREGATOR, "args": {**moved, "params_type": "DIFF", "server_optimizer": server}}
        _set_class(part, "LazyFedAvg")

    def _replace_aggregator(self, part: dict[str, Any]) -> None:
        args = _args(part)
        kinds = {"WEIGHTS": "FULL", "WEIGHT_DIFF": "DIFF"}
        kind = args.get("expected_data_kind", "WEIGHT_DIFF")
        weights = args.get("aggregation_weights") or {}
        nested = isinstance(weights, dict) and any(isinstance(value, dict) for value in weights.values())
        if not isinstance(kind, str) or kind not in kinds or isinstance(args.get("exclude_vars"), dict) or nested:
            raise self._error(part, f"aggregates more than one set of weights ({kind}); use level 1")
        if args.get("weigh_by_local_iter", True) is not True:
            raise self._error(part, "has weigh_by_local_iter=False, and LazyAggregator weighs by steps; use level 1")
        part["args"] = {**_moved(args), "params_type": kinds[kind]}
        _set_class(part, "LazyAggregator")

    def _replace_optimizer(self, part: dict[str, Any]) -> None:
        """Move the optimizer of a shareable generator to the aggregator that its controller names."""
        for workflow in self.config.workflows:
            named = _read_args(workflow)
            if named.get("shareable_generator_id", "shareable_generator") != part.get("id"):
                continue
            aggregator = self.config.component(named.get("aggregator_id", "aggregator"))
            if aggregator is None or not self.config.is_ours(aggregator, "LazyAggregator"):
                raise self._error(part, "works on the result of an aggregator that has no counterpart; use level 1")
            args = _args(part)
            optimizer = args.get("optimizer_args") or {"path": _SGD, "args": {"lr": 1.0}}
            server = self._server_optimizer(part, optimizer, args.get("lr_scheduler_args"))
            _args(aggregator)["server_optimizer"] = server
            part["args"] = {}
            _set_class(part, _FULL_GENERATOR)

    def _server_optimizer(self, part: dict[str, Any], optimizer: Any, schedule: Any) -> dict[str, Any]:
        path = (optimizer.get("path") or optimizer.get("class_path")) if isinstance(optimizer, dict) else None
        if path in (_ADAM, _ADAGRAD):
            raise self._error(
                part,
                f"uses {path}, which differs from the server optimizer of the same name here (no bias correction); "
                "use level 1, or nvflare_lazy.recipes.FedOptRecipe",
            )
        try:
            found = server_optimizer(optimizer)
            if schedule is not None:
                found["lr_scheduler"] = learning_rate_schedule(schedule)
        except (ValueError, KeyError, AttributeError) as error:
            raise self._error(part, f"has an optimizer without a counterpart ({error}); use level 1") from None
        return found

    def _replace_persistor(self, part: dict[str, Any]) -> None:
        args = _args(part)
        unknown = [name for name in args if name not in (*_PERSISTOR_ARGS, *_DROPPED_PERSISTOR_ARGS)]
        if unknown:
            raise self._error(part, f"has the unknown argument {unknown[0]}; remove it, or use level 1")
        if isinstance(args.get("exclude_vars"), dict):
            raise self._error(part, "has an exclude_vars that is not text; write it as a regular expression")
        for name in _DROPPED_PERSISTOR_ARGS:
            args.pop(name, None)
        for name in ("global_model_file_name", "best_global_model_file_name"):
            if name in args:
                stem = args[name]
                if not isinstance(stem, str) or PurePath(stem).name != stem:
                    raise self._error(part, f"has the file name {stem!r}; use a name without a directory, or level 1")
                if not stem.endswith(SUFFIX):
                    args[name] = PurePath(stem).stem + SUFFIX
                    args["save_pytorch"] = True
        _set_class(part, "LazyModelPersistor")

    def _replace_swarm_controller(self, part: dict[str, Any]) -> None:
        # On by default with ours.
        _args(part).pop("enable_tensor_disk_offload", None)
        _set_class(part, "LazySwarmClientController")

    def _replace_locator(self, part: dict[str, Any]) -> None:
        persistor = self.config.component(_read_args(part).get("pt_persistor_id", ""))
        if persistor is not None and self.config.is_ours(persistor, "LazyModelPersistor"):
            _set_class(part, "LazyModelLocator")

    def _move_models(self) -> None:
        """Let a separate process instantiate the model of a persistor, instead of the server."""
        for persistor in self.config.components:
            if not self.config.is_ours(persistor, "LazyModelPersistor"):
                continue
            model = _read_args(persistor).get("model")
            if isinstance(model, str):
                source = self.config.component(model)
                # A component of a user's own class may look for the model by its id, without a sign in its arguments.
                others = [part for part in self._parts() if part is not source]
                private = not any(self.config.is_custom(part) for part in others)
                if source is None or not private or _mentions(self.config.data, model) > 2:
                    continue
                self.config.components.remove(source)
                model = {key: value for key, value in source.items() if key != "id"}
            if isinstance(model, dict) and "config_type" not in model and not _has_components(model.get("args")):
                path = model.get("path", model.get("class_path"))
                _args(persistor)["model"] = {"path": path, "args": model.get("args") or {}, **PLAIN_DICT}

    # ---- for messages ------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[dict[str, Any]]:
        yield from self.config.workflows
        yield from self.config.executors
        yield from self.config.components
        for name in ("task_data_filters", "task_result_filters"):
            for chain in self.config._section(name):
                yield from (part for part in chain.get("filters", []) if isinstance(part, dict))

    def _has_a_role(self, part: dict[str, Any]) -> bool:
        """Return whether a controller, or an argument such as `aggregator_id`, names a component."""
        if any(part is workflow for workflow in self.config.workflows):
            return True
        controllers = (*self.config.workflows, *self.config.executors)
        named = {
            value
            for controller in controllers
            for name, value in _read_args(controller).items()
            if name in _ROLES and isinstance(value, str)
        }
        # Also NVFlare's default ids.
        return part.get("id") in {*named, "persistor", "aggregator", "shareable_generator"}

    def _name(self, part: dict[str, Any]) -> str:
        name = part.get("id")
        return f"{self.config.class_path(part)}{f' ({name})' if isinstance(name, str) else ''}"

    def _error(self, part: dict[str, Any], problem: str) -> JobAdaptationError:
        return JobAdaptationError(f"{self.config.name}: {self._name(part)} {problem}")


def _args(part: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a component to change."""
    found = part.setdefault("args", {})
    if not isinstance(found, dict):
        raise JobAdaptationError(f"the args of {part.get('path')!r} must be an object; write them out")
    return found


def _read_args(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a component; empty if it lacks them."""
    found = part.get("args")
    return found if isinstance(found, dict) else {}


def _moved(args: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of an aggregator, and return the ones with a value."""
    moved = {name: args.pop(name, None) for name in ("exclude_vars", "aggregation_weights")}
    return {name: value for name, value in moved.items() if value}


def _start_of_script(command: Sequence[str]) -> int | None:
    """Return where in a command the training script begins: at its file, or at `-m` and a module; None if nowhere."""
    launched = False
    for at, word in enumerate(command):
        if word == "-m" and command[at + 1 : at + 2] and command[at + 1] in _LAUNCHER_MODULES:
            continue
        if launched and (word == "-m" or word.endswith(".py")):
            return at
        launched = launched or _LAUNCHERS.fullmatch(word.rpartition("/")[2]) is not None
    return None


def _set_class(part: dict[str, Any], name: str) -> None:
    """Change the class of a component, at the place of its old name."""
    path = name if "." in name else _FLARE + name
    items = [("path", path) if key in ("path", "class_path", "name") else (key, value) for key, value in part.items()]
    part.clear()
    part.update(items)


def _params_type(configs: Sequence[SiteConfig]) -> str | None:
    """Return "DIFF" if NVFlare's clients compute differences whatever their scripts send."""
    trainers = [
        _read_args(executor)
        for config in configs
        for executor in config.executors
        if config.nvflare_class(executor).endswith(("ClientAPIExecutor", "ClientAPILauncherExecutor"))
    ]
    kinds = {args.get("params_transfer_type", "FULL") for args in trainers}
    return "DIFF" if kinds == {"DIFF"} else None


def _is_client_controller(config: SiteConfig, executor: dict[str, Any]) -> bool:
    """Return whether a client's executor names a persistor or an aggregator, as swarm learning does."""
    return any(
        config.component(value) is not None
        for name, value in _read_args(executor).items()
        if name in ("persistor_id", "aggregator_id") and isinstance(value, str)
    )


def _mentions(data: Any, text: str) -> int:
    """Return how often a text is a value."""
    if isinstance(data, dict):
        return sum(_mentions(value, text) for value in data.values())
    if isinstance(data, list):
        return sum(_mentions(value, text) for value in data)
    return int(data == text)


def _has_components(args: Any) -> bool:
    """Return whether arguments contain components, which NVFlare instantiates before it passes them on."""
    if isinstance(args, dict):
        return any(key in args for key in ("path", "class_path")) or any(map(_has_components, args.values()))
    return isinstance(args, list) and any(map(_has_components, args))

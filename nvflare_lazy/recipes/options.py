# SPDX-License-Identifier: Apache-2.0
"""What every recipe of ours takes beyond NVFlare's arguments, and what that puts into a job."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nvflare.recipe.utils import prepare_initial_ckpt, recipe_model_to_job_model

from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor
from nvflare_lazy.flare.tensor_offload import DEFAULT_MEMORY_BUDGET, TensorOffload

if TYPE_CHECKING:
    from nvflare.recipe.spec import Recipe

OFFLOAD_ID = "offload"
PACKAGE = "nvflare_lazy"
# NVFlare hands a dictionary that says so to the component as it is.
_AS_IT_IS = {"config_type": "dict"}


@dataclass(frozen=True)
class OffloadOptions:
    """Where and within what a job's models are kept.

    | argument         | meaning                                                                          |
    |------------------|----------------------------------------------------------------------------------|
    | `checkpoint`     | what to begin with: a checkpoint on the server, or a file here by relative path  |
    | `checkpoint_dir` | an absolute path on the server where checkpoints outlive the job and are gone on from |
    | `keep`           | rounds to keep there, besides the best model                                     |
    | `pytorch_file`   | also write the last and the best model as PyTorch files, as NVFlare does          |
    | `scratch_dir`    | the disk for what is received (on the server and on the clients)                 |
    | `scratch_quota`  | the most it may take there                                                       |
    | `memory_budget`  | memory for receiving and combining                                               |
    | `lazy_clients`   | whether the clients use this package, too; False if it is not installed there    |
    """

    checkpoint: str | None = None
    checkpoint_dir: str | None = None
    keep: int = 2
    pytorch_file: bool = False
    scratch_dir: str | None = None
    scratch_quota: int | str | None = None
    memory_budget: int | str = DEFAULT_MEMORY_BUDGET
    lazy_clients: bool = True

    def offload(self) -> TensorOffload:
        """Return the component for the server or a client."""
        return TensorOffload(scratch_dir=self.scratch_dir, quota=self.scratch_quota, memory_budget=self.memory_budget)

    def add_persistor(self, job: Any, model: Any, initial_ckpt: str | None, *, numpy: bool, best_name: str) -> str:
        """Add the persistor to a job and return its id.

        Args:
            job: The job.
            model: A module, a model's configuration, or None.
            initial_ckpt: A checkpoint as NVFlare's recipes take it; not looked at if there is `checkpoint`.
            numpy: Whether arrays are exchanged.
            best_name: File of the best model.
        """
        source = source_file_of(model)
        if source is not None:
            job.to_server(source)
        persistor = LazyModelPersistor(
            model=class_of(model),
            # A relative path is a file of this machine: it travels with the job.
            source_ckpt_file_full_name=prepare_initial_ckpt(self.checkpoint or initial_ckpt, job),
            allow_numpy_conversion=numpy,
            best_global_model_file_name=best_name,
            checkpoint_dir=self.checkpoint_dir,
            keep=self.keep,
            pytorch_file=self.pytorch_file,
        )
        added: str = job.to_server(persistor, id="persistor")
        return added

    def add_offload(self, job: Any) -> None:
        """Add the offload component to the server's and, if they are to have it, to the clients' configuration."""
        # Otherwise the sources of the package would be copied into the job.
        job.set_app_packages([PACKAGE])
        job.to_server(self.offload(), id=OFFLOAD_ID)


def add_tensor_offload(recipe: Recipe, *, clients: bool = False, **arguments: Any) -> None:
    """Add the `TensorOffload` component to any recipe.

    Args:
        recipe: The recipe.
        clients: Whether the clients get the component, too; this package must be installed there.
        arguments: Arguments of the component.

    Example:
        >>> recipe = nvflare.app_opt.pt.recipes.FedAvgRecipe(aggregator=MyAggregator(), ...)
        >>> add_tensor_offload(recipe, scratch_dir="/data/scratch")
    """
    job = recipe._job
    # It is installed where the job runs: NVFlare would copy its sources into the job.
    job.set_app_packages([*job.job.app_packages, PACKAGE])
    job.to_server(TensorOffload(**arguments), id=OFFLOAD_ID)
    if clients:
        recipe._add_to_client_apps(TensorOffload(**arguments), id=OFFLOAD_ID)


def class_of(model: Any) -> dict[str, Any] | None:
    """Return the configuration of a model.

    Args:
        model: A module, a dictionary with "class_path" (or "path") and "args", or None.

    Raises:
        TypeError: If a module's arguments cannot be written down.
    """
    if model is None:
        return None
    if isinstance(model, dict):
        return {**recipe_model_to_job_model(model), **_AS_IT_IS}
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module, or a class_path and args")
    args = _constructor_arguments(model)
    try:
        json.dumps(args)
    except TypeError:
        raise TypeError(
            f"the arguments of {type(model).__name__} cannot be written into a job: {args!r}. Give the model as "
            '{"class_path": "...", "args": {...}}, or save it and give it as checkpoint'
        ) from None
    return {"path": f"{_module_of(model)}.{type(model).__qualname__}", "args": args, **_AS_IT_IS}


def source_file_of(model: Any) -> str | None:
    """Return the file a module's class is in if it has to travel with the job, or None if it is installed."""
    if not isinstance(model, torch.nn.Module):
        return None
    path = Path(inspect.getsourcefile(type(model)) or "")
    installed = any(part in ("site-packages", "dist-packages") for part in path.parts)
    return None if installed or path.is_relative_to(sys.base_prefix) else str(path.resolve())


def _constructor_arguments(model: torch.nn.Module) -> dict[str, Any]:
    arguments = {}
    for name, parameter in inspect.signature(type(model).__init__).parameters.items():
        held = model.__dict__.get(name, model.__dict__.get(f"_{name}", parameter.default))
        plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name != "self" and plain and held is not parameter.empty and held != parameter.default:
            arguments[name] = held
    return arguments


def _module_of(model: torch.nn.Module) -> str:
    module = type(model).__module__
    return Path(inspect.getsourcefile(type(model)) or "").stem if module == "__main__" else module

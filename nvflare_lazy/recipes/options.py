# SPDX-License-Identifier: Apache-2.0
"""The arguments that the recipes add to NVFlare's, and the components that they add to a job."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nvflare.recipe.utils import prepare_initial_ckpt, recipe_model_to_job_model

from nvflare_lazy._text import get_logger
from nvflare_lazy.flare.adaptation.component_mapping import PLAIN_DICT, AdaptationOptions
from nvflare_lazy.flare.adaptation.job_folder import adapt_job
from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor
from nvflare_lazy.flare.tensor_offload import DEFAULT_MEMORY_BUDGET, TensorOffload
from nvflare_lazy.remote import is_url

if TYPE_CHECKING:
    from nvflare.recipe.spec import Recipe

PACKAGE = "nvflare_lazy"
logger = get_logger(__name__)


@dataclass(frozen=True)
class OffloadOptions:
    """Where a job keeps its models, and its limits.

    | argument              | meaning                                                                                  |
    |-----------------------|------------------------------------------------------------------------------------------|
    | `checkpoint`          | initial checkpoint or Hugging Face directory; a file at a relative path travels along    |
    | `checkpoint_dir`      | absolute path on the server of checkpoints that outlive the job and that it resumes from |
    | `keep_rounds`         | rounds to keep, plus the best model; default: 2 in `checkpoint_dir`, otherwise 1         |
    | `save_pytorch`        | the job's result has PyTorch files, as NVFlare's has, instead of safetensors files       |
    | `max_shard_size`      | split larger checkpoints; default: as the initial Hugging Face directory is split        |
    | `scratch_dir`         | scratch root for received tensors, on the server and the clients                         |
    | `scratch_quota`       | maximum bytes of scratch per process                                                     |
    | `memory_budget`       | memory for receiving and aggregation                                                     |
    | `offload_clients`     | whether clients also use this package; False if it is not installed there                |
    | `install_in_trainers` | with `launch_external_process`, the training script runs after `install()`               |
    """

    checkpoint: str | None = None
    checkpoint_dir: str | None = None
    keep_rounds: int | None = None
    save_pytorch: bool = False
    max_shard_size: int | str | None = None
    scratch_dir: str | None = None
    scratch_quota: int | str | None = None
    memory_budget: int | str = DEFAULT_MEMORY_BUDGET
    offload_clients: bool = True
    install_in_trainers: bool = False

    def add_persistor(self, job: Any, model: Any, initial_ckpt: str | None, *, numpy: bool, best_name: str) -> str:
        """Add the persistor to a job and return its id.

        Args:
            job: The job.
            model: A module, a model's configuration, or None.
            initial_ckpt: A checkpoint as NVFlare's recipes take it; ignored if `checkpoint` is set.
            numpy: Whether arrays are exchanged.
            best_name: File of the best model.
        """
        script = source_file(model)
        if script is not None:
            job.to_server(script)
        source = self.checkpoint or initial_ckpt
        persistor = LazyModelPersistor(
            model=model_config(model),
            # A relative path is a file of this machine: it travels with the job.
            source_ckpt_file_full_name=source if is_url(source) else prepare_initial_ckpt(source, job),
            allow_numpy_conversion=numpy,
            best_global_model_file_name=best_name,
            checkpoint_dir=self.checkpoint_dir,
            keep_rounds=self.keep_rounds,
            save_pytorch=self.save_pytorch,
            max_shard_size=self.max_shard_size,
        )
        added: str = job.to_server(persistor, id="persistor")
        return added


def make_lazy(
    recipe: Recipe,
    level: int = 3,
    *,
    checkpoint_dir: str | None = None,
    keep_rounds: int | None = None,
    save_pytorch: bool | None = None,
    install_in_trainers: bool = False,
    **offload: Any,
) -> None:
    """Make any recipe lazy: the jobs that it exports or executes have the components of a level.

    The mapping is shared with `nvflare-lazy adapt`. A component that cannot be mapped is an error when the recipe
    exports or executes its job.

    Args:
        recipe: The recipe.
        level: 1 adds `TensorOffload` to the server. 2 also replaces aggregation, persistor and cross-site evaluation. 3
            also adds `TensorOffload` to the clients, where this package must be installed.
        checkpoint_dir: As for `OffloadOptions`; levels 2 and 3.
        keep_rounds: As for `OffloadOptions`; levels 2 and 3.
        save_pytorch: As for `OffloadOptions`; levels 2 and 3.
        install_in_trainers: As for `OffloadOptions`.
        offload: Arguments of `TensorOffload`, such as `scratch_dir` and `memory_budget`.

    Raises:
        ValueError: If an argument is invalid, or requires another level.

    Example:
        >>> recipe = nvflare.app_opt.pt.recipes.FedAvgRecipe(...)
        >>> make_lazy(recipe, scratch_dir="/data/scratch")
    """
    given = {"checkpoint_dir": checkpoint_dir, "keep_rounds": keep_rounds, "save_pytorch": save_pytorch}
    offload = {name: value for name, value in offload.items() if value is not None}
    persistor = {name: value for name, value in given.items() if value is not None}
    options = AdaptationOptions(offload, persistor, install_in_trainers)
    options.check(level)
    # Raise on invalid arguments now rather than when the job starts.
    TensorOffload(**offload)
    LazyModelPersistor(**options.persistor)
    config = recipe._job.job
    generate = config.generate_job_config

    def generate_adapted(job_root: str) -> None:
        generate(job_root)
        folder = Path(job_root, config.job_name)
        try:
            job = adapt_job(folder, level, options)
            job.write()
        except BaseException:
            # Not a job that looks as if it had been adapted.
            shutil.rmtree(folder)
            raise
        for note in job.notes:
            logger.info("%s", note)

    config.generate_job_config = generate_adapted


def model_config(model: Any) -> dict[str, Any] | None:
    """Return the configuration of a model.

    Args:
        model: A module, a dictionary with "class_path" (or "path") and "args", or None.

    Raises:
        TypeError: If the arguments of a module cannot be written as JSON.
    """
    if model is None:
        return None
    if isinstance(model, dict):
        return {**recipe_model_to_job_model(model), **PLAIN_DICT}
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, or a dictionary with class_path and args, got {type(model).__name__}"
        )
    args = _constructor_arguments(model)
    try:
        json.dumps(args)
    except TypeError:
        raise TypeError(
            f"the arguments of {type(model).__name__} cannot be written to a job: {args!r}; pass the model as "
            '{"class_path": "...", "args": {...}}, or save it and pass it as checkpoint'
        ) from None
    return {"path": f"{_module_of(model)}.{type(model).__qualname__}", "args": args, **PLAIN_DICT}


def source_file(model: Any) -> str | None:
    """Return the source file of a module's class if it must travel with the job, or None if it is installed."""
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

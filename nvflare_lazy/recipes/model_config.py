# SPDX-License-Identifier: Apache-2.0
"""A model for a job's configuration: by class and arguments, so that no process has to hold an instance.

NVFlare's recipes write a module down by its class and by those of its attributes that are called like arguments of its
constructor. So does this, with one more word that keeps the server from instantiating it.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from nvflare.recipe.utils import recipe_model_to_job_model

# NVFlare hands a dictionary that says so to the component as it is.
_AS_IT_IS = {"config_type": "dict"}


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

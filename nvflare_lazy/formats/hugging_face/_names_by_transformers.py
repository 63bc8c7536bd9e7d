# SPDX-License-Identifier: Apache-2.0
"""The process that asks transformers for the names of a model's tensors (see `model_names`).

It instantiates the model without memory, and runs only code of the installed transformers, none of the directory.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from nvflare_lazy.formats.hugging_face.model_directory import ModelDirectory


def names_in_model(path: str) -> dict[str, Any]:
    """Return the names of the model's tensors, each with its name in the directory, and those without a counterpart."""
    import torch
    import transformers

    directory = ModelDirectory(path)
    stored = list(directory.open())
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    architecture = directory.config()["architectures"][0]
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    state = model.state_dict(keep_vars=True)
    loaded = _renamed(model, stored, state)
    by_tensor = {id(state[name]): source for source, name in loaded.items() if name in state}
    names = {name: by_tensor[id(tensor)] for name, tensor in state.items() if id(tensor) in by_tensor}
    # A directory may have a tied tensor under each of its names.
    names.update({name: source for source, name in loaded.items() if name in state})
    return {
        "version": transformers.__version__,
        "names": names,
        "missing": [name for name in state if name not in names],
        "unexpected": [source for source in stored if loaded.get(source) not in state],
    }


def _renamed(model: Any, stored: list[str], state: dict[str, Any]) -> dict[str, str]:
    """Return the name in the model for each stored name, as `from_pretrained` finds it."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return _renamed_by_version_4(model, stored)
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    found = {}
    for name in stored:
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        # A converter computes tensors from others, such as one of many experts.
        if converted is None:
            found[name] = renamed
    return found


def _renamed_by_version_4(model: Any, stored: list[str]) -> dict[str, str]:
    from transformers import modeling_utils

    classes = [base.__name__.lower() for base in type(model).__mro__[:-1]]
    has_mapping = any(known in name for name in classes for known in modeling_utils.VLMS)
    prefix = model.base_model_prefix
    has_prefix = bool(prefix) and any(name.startswith(prefix) for name in stored)
    expects_prefix = bool(prefix) and hasattr(model, prefix)
    found: dict[str, str] = model._get_key_renaming_mapping(
        stored,
        model._checkpoint_conversion_mapping if has_mapping else None,
        loading_base_model_from_task_state_dict=has_prefix and not expects_prefix,
        loading_task_model_from_base_state_dict=not has_prefix and expects_prefix,
    )
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return {name: target for name, target in found.items() if not any(each.search(target) for each in ignored)}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = names_in_model(sys.argv[1])
    print("\n" + json.dumps(found))

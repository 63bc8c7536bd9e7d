# SPDX-License-Identifier: Apache-2.0
"""`model_names()`: the names that a model has for the tensors of its directory, in memory and thus at the clients.

These are tied tensors, of which a directory stores one, and tensors that transformers renames when it loads them. If
transformers is installed, it determines the names, in a separate process, except for frequent decoders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nvflare_lazy._text import get_logger
from nvflare_lazy.formats.hugging_face.tied import is_plain_decoder, tied_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.formats.hugging_face.model_directory import ModelDirectory
    from nvflare_lazy.tensors.entry import TensorEntry

logger = get_logger(__name__)

_MAX_SECONDS = 300


@dataclass(frozen=True)
class ModelNames:
    """The names of the tensors in a model, as far as they differ from those in its directory.

    Attributes:
        stored: For each name that only the model has, the name in the directory.
        unused: Names that only the directory has.
        missing: Names of tensors in the model that no single tensor of the directory contains.
        unexpected: Names of tensors in the directory that no single tensor of the model contains.
        version: The version of transformers that this is true of, or None if it was not asked.
    """

    stored: Mapping[str, str] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    version: str | None = None


def model_names(directory: ModelDirectory, entries: Mapping[str, TensorEntry]) -> ModelNames:
    """Return the names of the tensors in a model; an adapter has those of its file.

    Args:
        directory: The directory.
        entries: The tensors of the directory.

    Example:
        >>> model_names(directory, directory.open().entries).stored
        {'lm_head.weight': 'model.embed_tokens.weight'}
    """
    if directory.is_adapter:
        return ModelNames()
    config = directory.config()
    if not is_plain_decoder(config, entries) and find_spec("transformers") is not None:
        asked = _ask_transformers(directory)
        if asked is not None:
            return asked
    return ModelNames(tied_names(config, entries))


def _ask_transformers(directory: ModelDirectory) -> ModelNames | None:
    command = [sys.executable, "-m", "nvflare_lazy.formats.hugging_face._names_by_transformers", str(directory.path)]
    try:
        asked = subprocess.run(  # noqa: S603  # our own module
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            check=True,
            timeout=_MAX_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        logger.warning(
            "transformers cannot instantiate the model of %s (%s); names of tied tensors come from a table",
            *(directory.path, reason),
        )
        return None
    found = json.loads(asked.stdout.splitlines()[-1])
    names: dict[str, str] = found["names"]
    return ModelNames(
        stored={name: stored for name, stored in names.items() if name != stored},
        unused=frozenset(names.values()) - names.keys(),
        missing=tuple(found["missing"]),
        unexpected=tuple(found["unexpected"]),
        version=found["version"],
    )

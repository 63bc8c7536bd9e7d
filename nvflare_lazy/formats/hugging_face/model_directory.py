# SPDX-License-Identifier: Apache-2.0
"""`ModelDirectory`: a directory as `save_pretrained` writes it, and the files that belong next to its weights.

`StreamingWriter` copies these files next to the weights that it writes, so that `from_pretrained` loads the result.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare_lazy.errors import ModelDirectoryError
from nvflare_lazy.formats.atomic_file import AtomicFile
from nvflare_lazy.formats.open_checkpoint import open as open_checkpoint
from nvflare_lazy.formats.safetensors.shards import INDEX_SUFFIX, SUFFIX
from nvflare_lazy.remote.url import display, is_url
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

WEIGHTS_NAME = "model.safetensors"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"

# The names that `save_pretrained` of transformers' models, tokenizers and processors and of PEFT's models writes.
_COMPANION = re.compile(
    r"(?:.*_)?config\.json"
    r"|(?:added_tokens|special_tokens_map|chat_template|normalizer|emoji|byte_maps|tekken|word_(?:shape|pronunciation))\.json"
    r"|(?:.*[-_])?(?:vocab|tokenizer)(?:[-_].*)?\.(?:json|txt|model|bpe)"
    r"|.*(?:spiece|sentencepiece|spm|bpe|tiktoken).*\.model"
    r"|.*\.(?:spm|tiktoken|jinja)"
    r"|(?:merges|dict)\.txt|bpe\.codes"
)
_TEMPLATES = "additional_chat_templates"
# A tokenizer.json of the largest vocabularies has a fifth of this.
_MAX_COMPANION_BYTES = 200_000_000


class ModelDirectory:
    """A directory with a model or a PEFT adapter.

    Args:
        path: The directory, which has a `config.json` or an `adapter_config.json`.
        adapter: Whether it is an adapter. Default: whether it has an `adapter_config.json` and no `config.json`.

    Raises:
        ModelDirectoryError: It has neither, or `adapter` is true and it has no `adapter_config.json`.

    Example:
        >>> directory = ModelDirectory("Qwen2-0.5B")
        >>> [path.name for path in directory.companions()]
        ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """

    def __init__(self, path: str | os.PathLike[str], *, adapter: bool | None = None) -> None:
        if is_url(path):
            raise ModelDirectoryError(f"{display(str(path))} is a URL; download the directory, and give its local path")
        self.path = Path(path)
        has_config, has_adapter_config = ((self.path / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME))
        if adapter and not has_adapter_config:
            raise ModelDirectoryError(
                f"{self.path} has no {ADAPTER_CONFIG_NAME}, without which PEFT loads no adapter; write one with "
                "LoraConfig(...).save_pretrained(DIR), with the arguments of the trainers"
            )
        if not has_config and not has_adapter_config:
            raise ModelDirectoryError(
                f"{self.path} is not a Hugging Face directory: it has neither {CONFIG_NAME} nor {ADAPTER_CONFIG_NAME}"
            )
        #: Whether the directory is a PEFT adapter.
        self.is_adapter = not has_config if adapter is None else adapter

    @classmethod
    def find(cls, path: str | os.PathLike[str]) -> ModelDirectory | None:
        """Return the directory at a path if it has a configuration and weights, or None; always None for a URL."""
        if is_url(path) or not any((Path(path) / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
            return None
        directory = cls(path)
        return directory if directory.has_weights() else None

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> ModelDirectory:
        """Return the directory at a path, or `path` if it is one already."""
        return path if isinstance(path, ModelDirectory) else cls(path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def weights_name(self) -> str:
        """The name that `from_pretrained` expects of the weights."""
        return ADAPTER_WEIGHTS_NAME if self.is_adapter else WEIGHTS_NAME

    def config(self) -> dict[str, Any]:
        """Return the configuration of the model or of the adapter."""
        return _read_json(self.path / (ADAPTER_CONFIG_NAME if self.is_adapter else CONFIG_NAME))

    def has_weights(self) -> bool:
        """Whether the directory has weights."""
        return self._weights() is not None

    def open(self) -> LazyTensorDict:
        """Open the weights: safetensors, otherwise a PyTorch checkpoint."""
        path = self._weights()
        if path is None:
            raise ModelDirectoryError(f"{self.path} has no weights: neither {self.weights_name} nor its index")
        return open_checkpoint(path)

    def _weights(self) -> Path | None:
        stem = self.weights_name.removesuffix(SUFFIX)
        pytorch = f"{stem if self.is_adapter else 'pytorch_model'}.bin"
        names = (name + suffix for name in (self.weights_name, pytorch) for suffix in ("", INDEX_SUFFIX))
        return next((self.path / name for name in names if (self.path / name).is_file()), None)

    def companions(self) -> list[Path]:
        """Return the files that belong next to the weights, relative to the directory.

        These are configurations, tokenizer files, chat templates and the configurations of processors. Python files
        are included only if an `auto_map` of a configuration names a module of this directory. Weights, indexes of
        weights, model cards and the files of a `Trainer` are not included.
        """
        names = sorted(path.name for path in self.path.iterdir() if path.is_file())
        found = [Path(name) for name in names if _COMPANION.fullmatch(name)]
        if any(self._requires_code(name) for name in found if name.name.endswith("config.json")):
            found += [Path(name) for name in names if name.endswith(".py")]
        if (self.path / _TEMPLATES).is_dir():
            found += sorted(path.relative_to(self.path) for path in (self.path / _TEMPLATES).glob("*.jinja"))
        return found

    def max_shard_size(self) -> int | None:
        """Return the bytes of the largest shard, or None if the weights are in one file."""
        sizes: Counter[object] = Counter()
        for entry in self.open().entries.values():
            sizes[entry.source.file()] += entry.nbytes
        return max(sizes.values()) if len(sizes) > 1 else None

    def copy_companions(self, directory: str | os.PathLike[str], *, link: bool = False) -> None:
        """Copy the companions to a directory; each replaces the file of its name atomically.

        Args:
            directory: The directory.
            link: Whether a link is enough, because the files of this directory are replaced and never written to.
        """
        directory = Path(directory)
        if os.path.samefile(self.path, directory):
            return
        for name in self.companions():
            target = directory / name
            target.parent.mkdir(exist_ok=True)
            if link and _link(self.path / name, target):
                continue
            with AtomicFile(target) as file:
                file.write_at(self.read_companion(name), 0)
                file.sync()
                file.publish()

    def read_companion(self, name: Path) -> bytes:
        """Return the content of a companion."""
        source = self.path / name
        if source.stat().st_size > _MAX_COMPANION_BYTES:
            raise ModelDirectoryError(f"{source} has {source.stat().st_size} bytes, too many for a configuration")
        return source.read_bytes()

    def _requires_code(self, name: Path) -> bool:
        """Whether a configuration names classes in Python files of this directory, and not of another repository."""
        classes = _strings(_read_json(self.path / name).get("auto_map"))
        return any("--" not in text for text in classes)


def _link(source: Path, target: Path) -> bool:
    try:
        with AtomicFile(target, existing=TensorFile(source)) as file:
            file.publish()
    except OSError:
        return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{path} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ModelDirectoryError(f"{path} is not a JSON object")
    return read


def _strings(value: object) -> Iterator[str]:
    """Yield the texts in an `auto_map`: the name of a class, or a list of names, for each automatic class."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)

# SPDX-License-Identifier: Apache-2.0
"""`match_model_directory()`: the tensors of a federated result, with the names of a Hugging Face directory.

Used by `nvflare-lazy export`. The result has exactly the names and shapes of the directory, or there is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ModelDirectoryError
from nvflare_lazy.formats.hugging_face.model_names import model_names
from nvflare_lazy.formats.hugging_face.names import adapter_tensors, examples, rename_like, without_wrapper
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.formats.hugging_face.model_directory import ModelDirectory
    from nvflare_lazy.tensors.entry import TensorEntry

_TILE_BYTES = 4 << 20


def match_model_directory(result: LazyTensorDict, base: ModelDirectory) -> LazyTensorDict:
    """Return the tensors of a result with the names of a Hugging Face directory, without reading or copying the model.

    A prefix that NVFlare's client or a wrapper has put before the names, or stripped, is recognized, and so are names
    that transformers changes when it loads the model. If the configuration does not exclude it, a tied embedding that
    the directory does not store is dropped, and one that the directory stores and the result lacks is restored.

    Args:
        result: A model, or an adapter if the directory is one.
        base: The initial directory of the job. For an adapter, its weights may be missing.

    Raises:
        ModelDirectoryError: Names or shapes do not match; the message has examples from both sides.

    Example:
        >>> result = nvflare_lazy.open("FL_global_model.safetensors")
        >>> base = ModelDirectory("Qwen2-0.5B")
        >>> nvflare_lazy.save(match_model_directory(result, base), "fine-tuned", like=base)
    """
    try:
        return _match(result, base, {})
    except ModelDirectoryError:
        renamed = model_names(base, base.open().entries).stored if base.has_weights() else {}
        if not renamed:
            raise
        return _match(result, base, renamed)


def _match(result: LazyTensorDict, base: ModelDirectory, renamed: Mapping[str, str]) -> LazyTensorDict:
    """Match names with the names of a directory and of its model that are renamed."""
    where = str(base.path)
    entries: Mapping[str, TensorEntry] = result.entries
    of_base_model: Mapping[str, TensorEntry] = {}
    if base.is_adapter:
        entries, of_base_model = adapter_tensors(entries)
        if not base.has_weights():
            return LazyTensorDict.from_entries(without_wrapper(entries, where), metadata=result.metadata)
    initial = base.open().entries
    found, others = rename_like({**entries, **of_base_model}, {**renamed, **initial}, where)
    for name in renamed.keys() & found.keys():
        entry = found.pop(name)
        # A tied tensor that differs from the stored one is unexpected.
        if not _same_bytes(entry, found.setdefault(renamed[name], entry)):
            others[name] = entry
    others = {name: entry for name, entry in others.items() if name not in of_base_model}
    if not base.is_adapter:
        embeddings = Embeddings(base.config())
        others = {name: entry for name, entry in others.items() if not embeddings.partner(entry, found)}
        for name in initial.keys() - found.keys():
            partner = embeddings.partner(initial[name], {known: initial[known] for known in found})
            if partner is not None:
                found[name] = found[partner]
    missing = [name for name in initial if name not in found]
    if missing or others:
        raise ModelDirectoryError(
            f"the tensors of the result do not match {where}: missing {examples(missing)}; "
            f"unexpected {examples(others)}"
        )
    for name, entry in initial.items():
        if found[name].shape != entry.shape:
            raise ModelDirectoryError(
                f"{quoted(name)} has shape {list(entry.shape)} in {where} and {list(found[name].shape)} in the result"
            )
    return LazyTensorDict.from_entries({name: found[name] for name in initial}, metadata=result.metadata)


class Embeddings:
    """The tensors that a model's configuration may tie: those with a row for each token.

    Args:
        config: The configuration of the model.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        parts = [config, *(part for part in config.values() if isinstance(part, dict))]
        self._rows = {part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)}
        self._tied = not any(part.get("tie_word_embeddings") is False for part in parts)

    def partner(self, entry: TensorEntry, others: Mapping[str, TensorEntry]) -> str | None:
        """Return the name of the embedding with the same values, or None. Only embeddings are read."""
        if not self._tied or not entry.shape or entry.shape[0] not in self._rows:
            return None
        alike = (name for name, other in others.items() if other.shape == entry.shape)
        return next((name for name in alike if _same_bytes(entry, others[name])), None)


def _same_bytes(one: TensorEntry, two: TensorEntry) -> bool:
    if (one.element_type, one.shape) != (two.element_type, two.shape):
        return False
    first, second = one.rows(), two.rows()
    return all(
        first.read(begin, size) == second.read(begin, size)
        for begin in range(0, one.nbytes, _TILE_BYTES)
        for size in (min(_TILE_BYTES, one.nbytes - begin),)
    )

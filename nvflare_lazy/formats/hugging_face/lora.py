# SPDX-License-Identifier: Apache-2.0
"""`merge_lora()`: a model with a LoRA adapter merged into its weights, one matrix at a time, for models of any size.

Computes what PEFT's `merge_and_unload` computes, in the same order of operations, so that the bits are the same.
`nvflare-lazy merge-lora` writes the result.
"""

from __future__ import annotations

import math
import re
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ModelDirectoryError
from nvflare_lazy.formats.hugging_face.match import Embeddings
from nvflare_lazy.formats.hugging_face.names import ADAPTER_PREFIX, adapter_tensors, examples, renaming
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors.byte_source import ByteSource
from nvflare_lazy.tensors.entry import TensorEntry
from nvflare_lazy.tensors.tensor_memory import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nvflare_lazy.formats.hugging_face.model_directory import ModelDirectory

_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB]\.(?:weight|bias)|lora_embedding_[AB]|lora_magnitude_vector)")
_MERGED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Settings of a LoraConfig with which the merged weight is another function of the adapter, or none at all.
_UNSUPPORTED = (
    *("layer_replication", "target_parameters", "trainable_token_indices", "megatron_config", "use_qalora"),
    *("use_bdlora", "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "kasa_config"),
)
# These initializations leave the base model unchanged.
_PLAIN_INITIALIZATIONS = (True, False, None, "gaussian", "eva")
# Their linear layers store the transposed matrix (transformers' Conv1D).
_TRANSPOSED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")


def merge_lora(base: ModelDirectory, adapter: ModelDirectory) -> LazyTensorDict:
    """Return the tensors of a model with a LoRA adapter merged into them, each computed when it is read.

    Reading a merged tensor takes memory for about three times the tensor. LoRA and DoRA of linear layers and
    embeddings are supported, with rank patterns, alpha patterns, rank-stabilized scaling, biases and modules that were
    trained completely. Other kinds of adapters are refused.

    PEFT's `merge_and_unload` computes the same bits, after `PeftModel.from_pretrained` on a CPU.

    Args:
        base: The directory of the base model.
        adapter: The directory of the adapter.

    Raises:
        ModelDirectoryError: The adapter is of another kind, or does not match the model.

    Example:
        >>> base = ModelDirectory("Qwen2-0.5B")
        >>> nvflare_lazy.save(merge_lora(base, ModelDirectory("adapter")), "merged", like=base)
    """
    config, adapter_config = base.config(), adapter.config()
    where = str(adapter.path)
    _check_supported(config, adapter_config, where)
    merged = dict(base.open().entries)
    parts, replaced = _read_adapter(adapter)
    if not parts:
        raise ModelDirectoryError(f"{where} has no tensor of a LoRA adapter")
    rename = renaming([f"{module}.weight" for module in parts], merged, str(base.path))
    for name, entry in replaced.items():
        known = rename(name)
        if known in merged and merged[known].shape != entry.shape:
            raise ModelDirectoryError(
                f"{quoted(name)} has shape {list(entry.shape)} in {where}, expected {list(merged[known].shape)}"
            )
        merged[known] = entry
    missing = [f"{module}.weight" for module in parts if rename(f"{module}.weight") not in merged]
    if missing:
        raise ModelDirectoryError(
            f"{where} changes {examples(missing)}, which {base.path} does not have; an adapter of a tied layer cannot "
            "be merged, because from_pretrained would tie it again"
        )
    embeddings = Embeddings(config)
    is_transposed = adapter_config.get("fan_in_fan_out") is True or config.get("model_type") in _TRANSPOSED_MODELS
    before = dict(merged)
    for module, tensors in parts.items():
        update = _Update.of(module, tensors, adapter_config, where)
        name = rename(f"{module}.weight")
        others = {other: before[other] for other in before if other != name}
        for changed in filter(None, (name, embeddings.partner(before[name], others))):
            merged[changed] = update.of_weight(before[changed], is_transposed)
        if update.bias is not None:
            bias_name = rename(f"{module}.bias")
            if bias_name not in merged:
                raise ModelDirectoryError(f"{where} has a bias for {quoted(module)}, but its layer does not have one")
            merged[bias_name] = update.of_bias(before[bias_name])
    return LazyTensorDict.from_entries(merged)


def _check_supported(config: Mapping[str, Any], adapter: Mapping[str, Any], where: str) -> None:
    if adapter.get("peft_type") != "LORA":
        raise ModelDirectoryError(f"{where} is an adapter of type {quoted(adapter.get('peft_type'))}, not LORA")
    used = [name for name in _UNSUPPORTED if adapter.get(name)]
    initialization = adapter.get("init_lora_weights")
    if initialization not in _PLAIN_INITIALIZATIONS:
        used.append(f"init_lora_weights={initialization!r}")
    if used:
        raise ModelDirectoryError(f"{where} uses {', '.join(used)}; merge it with PEFT's merge_and_unload()")
    if config.get("quantization_config"):
        raise ModelDirectoryError("the base model is quantized; use the model that it was quantized from")


def _read_adapter(adapter: ModelDirectory) -> tuple[dict[str, dict[str, TensorEntry]], dict[str, TensorEntry]]:
    """Return LoRA's tensors for each module, and the tensors that replace those of the base model."""
    parts: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    replaced = {}
    for saved, entry in adapter_tensors(adapter.open().entries)[0].items():
        name = saved.removeprefix(ADAPTER_PREFIX)
        match = _PART.fullmatch(name)
        if match is None:
            replaced[name.replace(".base_layer.", ".")] = entry
        else:
            parts[match["module"]][match["part"]] = entry
    return parts, replaced


@dataclass(frozen=True)
class _Update:
    """The change of one module."""

    module: str
    a: TensorEntry
    b: TensorEntry
    magnitude: TensorEntry | None
    bias: TensorEntry | None
    scaling: float
    is_embedding: bool

    @classmethod
    def of(cls, module: str, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], where: str) -> _Update:
        """Return the change of a module, by its tensors and the configuration of the adapter."""
        is_embedding = "lora_embedding_A" in tensors
        a, b = (tensors.get(f"lora_embedding_{x}" if is_embedding else f"lora_{x}.weight") for x in "AB")
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise ModelDirectoryError(
                f"{where} has no LoRA of two matrices for {quoted(module)}; it has {examples(tensors)}"
            )
        rank, alpha = (
            _of_module(config, *names, module) for names in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
        )
        if not isinstance(alpha, (int, float)) or rank != a.shape[0]:
            raise ModelDirectoryError(
                f"{where}: the LoRA of {quoted(module)} has rank {a.shape[0]}, expected {rank}, with alpha {alpha}"
            )
        scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        magnitude = tensors.get("lora_magnitude_vector")
        if bool(config.get("use_dora")) != (magnitude is not None):
            raise ModelDirectoryError(f"{where}: use_dora of the configuration does not match {quoted(module)}")
        return cls(module, a, b, magnitude, tensors.get("lora_B.bias"), scaling, is_embedding)

    def of_weight(self, entry: TensorEntry, is_transposed: bool) -> TensorEntry:
        """Return the changed weight; `is_transposed` counts for square matrices, others show it by their shape."""
        shape = (self.b.shape[0], self.a.shape[1])
        if entry.shape not in (shape, shape[::-1]) or entry.dtype not in _MERGED_DTYPES:
            raise ModelDirectoryError(
                f"the LoRA of {quoted(self.module)} has shape {list(shape)}, the weight has shape {list(entry.shape)} "
                f"and type {entry.dtype}; only linear layers and embeddings of floating-point numbers can be merged"
            )
        if shape[0] != shape[1]:
            is_transposed = entry.shape != shape
        return self._computed(entry, lambda: self._merge(entry, is_transposed or self.is_embedding))

    def of_bias(self, entry: TensorEntry) -> TensorEntry:
        """Return the changed bias."""
        assert self.bias is not None
        change = self.bias

        def merge() -> torch.Tensor:
            bias = entry.lazy().materialize()
            bias += _load(change, bias.dtype) * self.scaling
            return bias

        return self._computed(entry, merge)

    def _merge(self, entry: TensorEntry, is_transposed: bool) -> torch.Tensor:
        weight = entry.lazy().materialize()
        delta = _load(self.b, weight.dtype) @ _load(self.a, weight.dtype)
        delta = (delta.T if is_transposed else delta) * self.scaling
        if self.magnitude is None:
            # PEFT rounds the change of an embedding before it adds it.
            weight += delta.to(weight.dtype) if self.is_embedding else delta
            return weight
        changed = weight + delta
        norm = torch.linalg.norm(changed.T if is_transposed else changed, dim=1)
        factor = (_load(self.magnitude, weight.dtype) / norm).view(-1, 1)
        merged: torch.Tensor = (factor.T if is_transposed else factor) * changed
        return merged.to(weight.dtype)

    def _computed(self, entry: TensorEntry, compute: Callable[[], torch.Tensor]) -> TensorEntry:
        source = _ComputedSource(entry.nbytes, compute, f"{entry.source.describe()}, merged")
        return TensorEntry(source, entry.element_type, entry.shape)


def _load(entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """Load a tensor of an adapter in the precision that PEFT gives it: that of the model, but at least float32."""
    return entry.lazy().materialize().to(dtype if dtype is torch.float64 else torch.float32)


def _of_module(config: Mapping[str, Any], name: str, patterns: str, module: str) -> Any:
    """Return a setting of one module, as PEFT finds it."""
    for pattern, value in (config.get(patterns) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ModelDirectoryError(f"{patterns} has an invalid expression {quoted(pattern)}: {error}") from None
    return config.get(name)


class _ComputedSource(ByteSource):
    """The bytes of a tensor that is computed when it is first read, and kept until its last byte is read."""

    def __init__(self, nbytes: int, compute: Callable[[], torch.Tensor], description: str) -> None:
        self.nbytes = nbytes
        self._compute = compute
        self._description = description
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        with self._lock:
            if self._tensor is None:
                self._tensor = self._compute().contiguous()
            end = offset + len(buffer)
            buffer[:] = storage_bytes(self._tensor)[offset:end]
            if end == self.nbytes:
                self._tensor = None

    def describe(self) -> str:
        return self._description

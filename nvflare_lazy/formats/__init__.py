# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats: reads safetensors and PyTorch files as lazy tensors, and writes safetensors files.

Does not depend on NVFlare. The transport, aggregation and the command line read and write all files through it.
"""

from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.open_checkpoint import open
from nvflare_lazy.formats.pytorch import LazyDataSource, LegacyMultiStorageSource, ZipSource, open_pytorch
from nvflare_lazy.formats.safetensors.header import SafetensorsHeader, parse_message, read_header
from nvflare_lazy.formats.safetensors.layout import (
    DTYPE_ELEMENT_SIZE,
    DTYPE_TO_SAFETENSORS,
    StateDictMeta,
    StateDictMetaItem,
    TensorMeta,
)
from nvflare_lazy.formats.safetensors.reader import open_safetensors
from nvflare_lazy.formats.safetensors.writer import StreamingWriter
from nvflare_lazy.formats.save_checkpoint import collect_state_dict_meta, save, save_safetensors_streaming
from nvflare_lazy.tensors.tensor_file import StoredTensor

__all__ = [
    "DTYPE_ELEMENT_SIZE",
    "DTYPE_TO_SAFETENSORS",
    "LazyDataSource",
    "LazyTensorDict",
    "LegacyMultiStorageSource",
    "SafetensorsHeader",
    "StateDictMeta",
    "StateDictMetaItem",
    "StoredTensor",
    "StreamingWriter",
    "TensorMeta",
    "ZipSource",
    "collect_state_dict_meta",
    "open",
    "open_pytorch",
    "open_safetensors",
    "parse_message",
    "read_header",
    "save",
    "save_safetensors_streaming",
]

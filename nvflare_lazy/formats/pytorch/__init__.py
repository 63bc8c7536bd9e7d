# SPDX-License-Identifier: Apache-2.0
"""PyTorch checkpoints of every age (zip, legacy, tar), opened without loading them."""

from nvflare_lazy.formats.pytorch._legacy import LegacyMultiStorageSource
from nvflare_lazy.formats.pytorch._tar import TarSource
from nvflare_lazy.formats.pytorch._zip import ZipRecord, ZipSource
from nvflare_lazy.formats.pytorch.data_source import LazyDataSource
from nvflare_lazy.formats.pytorch.open import open_pytorch, sniff_pytorch, zip_records

__all__ = [
    "LazyDataSource",
    "LegacyMultiStorageSource",
    "TarSource",
    "ZipRecord",
    "ZipSource",
    "open_pytorch",
    "sniff_pytorch",
    "zip_records",
]

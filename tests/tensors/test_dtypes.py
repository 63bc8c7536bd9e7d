# SPDX-License-Identifier: Apache-2.0
"""The table of element types agrees with torch, NumPy and safetensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.tensors import dtypes

WITH_TORCH = [row for row in dtypes.ELEMENT_TYPES if row.torch is not None]


@pytest.mark.parametrize("row", WITH_TORCH, ids=lambda row: str(row.torch))
def test_widths_are_torchs(row):
    """A torch element takes as many bytes as the table lists, packed types included."""
    assert row.bits * row.packed == row.torch.itemsize * 8
    assert dtypes.by_torch(row.torch) is row


@pytest.mark.parametrize("row", [r for r in dtypes.ELEMENT_TYPES if r.numpy is not None], ids=lambda r: str(r.numpy))
def test_widths_are_numpys(row):
    """A NumPy element takes as many bytes as the table lists, in either byte order."""
    assert row.bits == row.numpy.itemsize * 8
    assert dtypes.by_numpy(row.numpy) is row
    assert dtypes.by_numpy(row.numpy.newbyteorder(">")) is row


@pytest.mark.parametrize("row", [r for r in WITH_TORCH if r.name], ids=lambda row: row.name)
def test_names_are_the_librarys(row):
    """The safetensors library writes the name that the table has."""
    written = save({"t": torch.zeros(2, dtype=torch.uint8).new_zeros(2 * row.torch.itemsize).view(row.torch)})
    assert f'"dtype":"{row.name}"'.encode() in written


def test_sizes_are_whole_bytes_or_none():
    """Sub-byte types pack, and a shape that would end within a byte has no size."""
    four = dtypes.by_name("F4")
    assert four is not None
    assert dtypes.nbytes(four, (3, 2)) == 3
    assert dtypes.nbytes(four, (3,)) is None
    six = dtypes.by_name("F6_E2M3")
    assert six is not None
    assert dtypes.nbytes(six, (4,)) == 3
    assert dtypes.nbytes(six, ()) is None


def test_unknown_types_are_named_errors():
    """Types no file can hold are refused by name."""
    with pytest.raises(UnsupportedDtypeError, match="qint8"):
        dtypes.by_torch(torch.qint8)
    with pytest.raises(UnsupportedDtypeError, match="<U3"):
        dtypes.by_numpy(np.dtype("<U3"))
    assert dtypes.by_name("F128") is None

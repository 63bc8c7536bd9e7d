# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint as rows of text and numbers, and what they add up to.

Between an opened checkpoint and the commands that show it; made from recipes alone, so no tensor is ever touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from nvflare_lazy.formats.safetensors_reader import UntypedEntry
from nvflare_lazy.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nvflare_lazy.tensors.tensor_entry import TensorEntry


@dataclass(frozen=True)
class Row:
    """One tensor.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Its type as safetensors calls it; as torch does, where safetensors has no name.
        shape: Its shape, counted in elements of that type.
        nbytes: Bytes of its elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass
class Total:
    """What some tensors add up to."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0

    def add(self, row: Row) -> None:
        """Count one more."""
        self.tensors += 1
        self.elements += row.elements
        self.nbytes += row.nbytes


def rows_of(entries: Mapping[str, TensorEntry]) -> list[Row]:
    """Return a checkpoint's tensors, in its own order."""
    return [_row(name, entry) for name, entry in entries.items()]


def totals(rows: Iterable[Row]) -> tuple[Total, dict[str, Total]]:
    """Return what rows add up to, altogether and for each dtype."""
    altogether, by_dtype = Total(), dict[str, Total]()
    for row in rows:
        altogether.add(row)
        by_dtype.setdefault(row.dtype, Total()).add(row)
    return altogether, by_dtype


def _row(name: str, entry: TensorEntry) -> Row:
    if isinstance(entry, UntypedEntry):
        return Row(name, entry.element_type.name or "?", entry.shape, entry.nbytes)
    element_type, shape = dtypes.by_torch(entry.dtype), entry.shape
    if element_type.packed != 1 and shape:
        # torch counts the bytes that several elements share.
        shape = (*shape[:-1], shape[-1] * element_type.packed)
    return Row(name, element_type.name or str(entry.dtype).removeprefix("torch."), shape, entry.nbytes)

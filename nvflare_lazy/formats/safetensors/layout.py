# SPDX-License-Identifier: Apache-2.0
"""The position of each tensor in a safetensors file, computed from its metadata before any data is written.

The streaming writer uses it. The order is the safetensors library's: the widest types first, so that each tensor is
aligned to its own elements, and by name within a type. The same tensors therefore give the same file, in any order of
arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import SafetensorsError
from nvflare_lazy.tensors import dtypes

_FILE_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)
_RANK = {name: rank for rank, name in enumerate(_FILE_ORDER)}


class TensorMeta(NamedTuple):
    """The promised description of one tensor.

    Attributes:
        name: Its name.
        dtype: Its type as a safetensors header calls it, for example "BF16"; functions that take metadata also accept
            torch's types and their names.
        shape: Its shape in elements of the format, even if torch counts pairs of them.
    """

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        row = dtypes.by_name(self.dtype)
        if row is None:
            raise SafetensorsError(
                "unknown-dtype", f"tensor {quoted(self.name)}: the format has no dtype {quoted(self.dtype)}"
            )
        # A sub-byte type that ends within a byte is reported when the header is checked.
        return dtypes.nbytes(row, self.shape) or 0


#: The promised tensors of a file, in the order in which they arrive.
StateDictMeta = list[TensorMeta]
#: What functions accept for one of them: a plain tuple, with the type in any spelling.
StateDictMetaItem = TensorMeta | tuple[str, str | torch.dtype, Sequence[int]]
#: Names of the types in a header.
DTYPE_TO_SAFETENSORS: dict[torch.dtype, str] = {
    row.torch: row.name for row in dtypes.ELEMENT_TYPES if row.torch is not None and row.name is not None
}
#: The bytes of one element, for types of whole bytes.
DTYPE_ELEMENT_SIZE: dict[str, int] = {
    row.name: row.bits // 8 for row in dtypes.ELEMENT_TYPES if row.name is not None and row.bits % 8 == 0
}


def to_tensor_metas(items: Iterable[StateDictMetaItem]) -> StateDictMeta:
    """Return metadata with the types as a header calls them; an unknown type remains, for the header's own error."""
    metas = []
    for name, dtype, shape in items:
        row = dtypes.by_spelling(dtype)
        metas.append(TensorMeta(name, str(dtype) if row is None or row.name is None else row.name, shape))
    return metas


def in_file_order(state_dict_meta: Sequence[TensorMeta]) -> StateDictMeta:
    """Return the tensors in the order of the file: by type, the widest first, then by name."""
    return sorted(state_dict_meta, key=lambda meta: (_RANK.get(meta.dtype, len(_RANK)), meta.name))


def split_into_shards(state_dict_meta: Sequence[TensorMeta], max_shard_size: int) -> list[StateDictMeta]:
    """Split tensors into files of at most `max_shard_size` bytes, in file order; a larger tensor gets its own file."""
    shards: list[StateDictMeta] = [[]]
    room = max_shard_size
    for meta in in_file_order(state_dict_meta):
        if meta.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_size
        shards[-1].append(meta)
        room -= meta.nbytes
    return shards

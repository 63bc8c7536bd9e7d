# SPDX-License-Identifier: Apache-2.0
"""A tile: the same range of elements from every contributor that has them, and the checks when they are read.

The engine passes tiles to the reduction of a rule, which reads their elements into reused memory.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NoReturn

import torch

from nvflare_lazy.aggregation._engine.rounding import FLOATS, SUMMABLE
from nvflare_lazy.errors import (
    MissingPackageError,
    NonFiniteError,
    RemoteDirectoryError,
    RemoteError,
    RemoteFileChangedError,
    RemoteNotFoundError,
)

if TYPE_CHECKING:
    from contextlib import ExitStack

    from nvflare_lazy.aggregation._engine.memory_plan import Arena
    from nvflare_lazy.aggregation._engine.read_ahead import Loaded
    from nvflare_lazy.aggregation._engine.tile_io import InputVector

#: Handling of NaN and infinity in a contribution.
NonFinitePolicy = Literal["keep", "skip", "error"]


class ContributionError(Exception):  # never reaches a caller: the engine continues without the contribution
    """A contribution has to be skipped: it cannot be read, or has values that are not allowed."""

    def __init__(self, contributor: str, error: Exception) -> None:
        super().__init__(contributor, error)
        self.contributor = contributor
        self.error = error


def is_store_error(error: Exception) -> bool:
    """Whether an input at a URL cannot be read although it may be unchanged: no answer, no access, or no client."""
    about_the_file = (RemoteNotFoundError, RemoteFileChangedError, RemoteDirectoryError)
    return isinstance(error, (RemoteError, MissingPackageError)) and not isinstance(error, about_the_file)


def raise_input_error(contributor: str, error: Exception) -> NoReturn:
    """Raise the error of an input: of the contribution, which is then skipped, or of the store, which ends the round.

    A store that does not answer would otherwise cost one contribution after the other.
    """
    if is_store_error(error):
        raise error
    raise ContributionError(contributor, error) from error


@dataclass(slots=True)
class TensorGroup:
    """Tensors of one type that the same contributors have, as one long vector.

    Attributes:
        index: Index of the group in the round.
        dtype: Dtype of the tensors.
        names: Names of the tensors, in order.
        sizes: Number of real numbers of each tensor.
        members: The contributors that have the tensors, as ascending indices into the contributors of the round.
        contributors: The names of these contributors.
        inputs: The vectors of these contributors.
        reference: The vector of the global model, if the rule uses it.
        first: Index of the first number within the complete group, of which this may be a part.
        ends: The end of each tensor in the vector.
    """

    index: int
    dtype: torch.dtype
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    members: tuple[int, ...]
    contributors: tuple[str, ...]
    inputs: tuple[InputVector, ...]
    reference: InputVector | None = None
    first: int = 0
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = [*accumulate(self.sizes)]

    def borrow(self, until: ExitStack) -> None:
        """Borrow the descriptors of the files until the end of a block.

        Raises:
            ContributionError: If a file no longer exists.
        """
        for contributor, vector in zip(self.contributors, self.inputs, strict=True):
            try:
                until.enter_context(vector)
            except Exception as error:
                raise_input_error(contributor, error)
        if self.reference is not None:
            until.enter_context(self.reference)

    @property
    def numel(self) -> int:
        """Number of real numbers of each vector."""
        return self.ends[-1]

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point or complex numbers, not counters or masks."""
        return self.inputs[0].dtype in FLOATS


class Tile:
    """A range of elements of a group.

    Attributes:
        group: The group.
        start: The first element.
        count: Number of elements.
        nbytes: Bytes of the contributions in the range.
        arena: Memory of the thread.
    """

    def __init__(
        self,
        group: TensorGroup,
        start: int,
        count: int,
        arena: Arena,
        non_finite: NonFinitePolicy,
        loaded: Loaded | None = None,
    ) -> None:
        self.group = group
        self._loaded = loaded
        self.start = start
        self.count = count
        self.arena = arena
        self._non_finite = non_finite if group.is_float else "keep"
        self._values, self._bytes = arena.take_buffer(group.inputs[0].dtype, count)
        self.nbytes = count * group.inputs[0].dtype.itemsize * len(group.members)
        self._reference = None if group.reference is None else arena.take_buffer(group.reference.dtype, count)

    def read(self, index: int, into: tuple[torch.Tensor, memoryview] | None = None) -> torch.Tensor:
        """Return the elements of one member of the group, by index.

        Args:
            index: The member.
            into: A tensor of the group's real dtype and its bytes, to read to. Default: memory that the next call may
                overwrite, and that must not be changed, because further calls may return it.
        """
        values, buffer = (self._values, self._bytes) if into is None else into
        contributor = self.group.contributors[index]
        found = self._find(index) if self._loaded else None
        if found is not None:
            values = found if into is None else values.copy_(found)
        else:
            try:
                self.group.inputs[index].read(self.start, buffer)
            except MemoryError:
                raise
            except Exception as error:
                raise_input_error(contributor, error)
        if self._non_finite != "keep" and not _all_finite(values):
            raise ContributionError(contributor, self._where_not_finite(contributor, values))
        return self._clean(values)

    def _find(self, index: int) -> torch.Tensor | None:
        """Return the elements of a member if they have been read ahead."""
        assert self._loaded is not None
        vector = self.group.inputs[index]
        places = vector.file_ranges(self.start, self.count)
        raw = self._loaded.find(places[0]) if len(places) == 1 else None
        if (
            raw is None
            or len(raw) != self.count * vector.dtype.itemsize
            or raw.storage_offset() % vector.dtype.itemsize
        ):
            return None
        return raw.view(vector.dtype)

    def read_reference(self) -> torch.Tensor:
        """Return the elements of the global model; valid until the next call."""
        assert self.group.reference is not None
        assert self._reference is not None
        values, buffer = self._reference
        self.group.reference.read(self.start, buffer)
        return self._clean(values)

    def _clean(self, values: torch.Tensor) -> torch.Tensor:
        # In a file, a bool can be any byte; as a number, it is at most 1.
        return values.clamp_(max=1) if self.group.dtype is torch.bool else values

    def _where_not_finite(self, contributor: str, values: torch.Tensor) -> NonFiniteError:
        found = int((~torch.isfinite(values.double())).nonzero()[0])
        index = bisect_right(self.group.ends, self.start + found)
        return NonFiniteError(f"{self.group.names[index]!r} of {contributor!r} contains {values[found].item()}")


def _all_finite(values: torch.Tensor) -> bool:
    # A sum is ten times as fast as a check of each element. It may overflow although all elements are finite.
    if values.dtype in SUMMABLE and torch.isfinite(values.sum()):
        return True
    return bool(torch.isfinite(values.double()).all())

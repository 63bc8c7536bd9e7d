# SPDX-License-Identifier: Apache-2.0
"""A tile: the same stretch of elements from everybody who has them, and what may go wrong in reading it.

What the engine hands to a rule. The elements are read when the rule asks for them, into memory that is used again.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch

from nvflare_lazy.aggregation._engine.rounding import FLOATS, SUMMABLE
from nvflare_lazy.errors import NonFiniteError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from nvflare_lazy.aggregation._engine.memory_plan import Arena
    from nvflare_lazy.aggregation._engine.tile_io import InputVector

#: What to do about NaN and infinity in a contribution.
NonFinitePolicy = Literal["keep", "skip", "error"]


class ContributionError(Exception):  # never reaches a caller: the engine continues without the contribution
    """A contribution has to be skipped: it cannot be read, or has values that are not allowed.

    Args:
        contributor: Who it is from.
        error: What is wrong with it.
    """

    def __init__(self, contributor: str, error: Exception) -> None:
        super().__init__(contributor, error)
        self.contributor = contributor
        self.error = error


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one type that the same contributors have, as one long vector.

    Attributes:
        index: Which of the groups of a round it is.
        dtype: Type of the tensors.
        names: Their names, in order.
        sizes: How many numbers each of them has.
        members: Who has them, as indices into the contributors of the round, ascending.
        contributors: The names of these.
        inputs: The vectors of these.
        reference: The vector of the global model, if the rule asked for it.
    """

    index: int
    dtype: torch.dtype
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    members: tuple[int, ...]
    contributors: tuple[str, ...]
    inputs: tuple[InputVector, ...]
    reference: InputVector | None = None

    def borrow(self, until: ExitStack) -> None:
        """Read files by descriptors that are borrowed until the end of a block.

        Raises:
            ContributionError: A file is not there any more.
        """
        for contributor, vector in zip(self.contributors, self.inputs, strict=True):
            try:
                until.enter_context(vector)
            except Exception as error:
                raise ContributionError(contributor, error) from error
        if self.reference is not None:
            until.enter_context(self.reference)

    @cached_property
    def ends(self) -> list[int]:
        """Where each tensor ends in the vector."""
        return [*accumulate(self.sizes)]

    @property
    def numel(self) -> int:
        """How many numbers each of the vectors has."""
        return self.ends[-1]

    @property
    def is_float(self) -> bool:
        """Whether these are floating-point numbers, or complex ones, and no counters or masks."""
        return self.inputs[0].dtype in FLOATS


class Tile:
    """One stretch of a group.

    Attributes:
        group: The group.
        start: The first element.
        count: How many.
        nbytes: Bytes of the contributions in it.
        arena: Memory of the thread.

    Args:
        group: The group.
        start: The first element.
        count: How many.
        arena: Memory of the thread.
        non_finite: What to do about NaN and infinity.
    """

    def __init__(self, group: TensorGroup, start: int, count: int, arena: Arena, non_finite: NonFinitePolicy) -> None:
        self.group = group
        self.start = start
        self.count = count
        self.arena = arena
        self._non_finite = non_finite if group.is_float else "keep"
        self._values, self._bytes = arena.take_buffer(group.inputs[0].dtype, count)
        self.nbytes = count * group.inputs[0].dtype.itemsize * len(group.members)
        self._reference = None if group.reference is None else arena.take_buffer(group.reference.dtype, count)

    def read(self, index: int) -> torch.Tensor:
        """Return the elements of one member of the group, by its place there; valid until the next call."""
        contributor = self.group.contributors[index]
        try:
            self.group.inputs[index].read(self.start, self._bytes)
        except MemoryError:
            raise
        except Exception as error:
            raise ContributionError(contributor, error) from error
        if self._non_finite != "keep" and not _all_finite(self._values):
            raise ContributionError(contributor, self._where_not_finite(contributor))
        return self._clean(self._values)

    def read_reference(self) -> torch.Tensor:
        """Return the elements of the global model; valid until the next call."""
        assert self.group.reference is not None
        assert self._reference is not None
        values, buffer = self._reference
        self.group.reference.read(self.start, buffer)
        return self._clean(values)

    def _clean(self, values: torch.Tensor) -> torch.Tensor:
        # A bool is any byte in a file; it may count for no more than one.
        return values.clamp_(max=1) if self.group.dtype is torch.bool else values

    def _where_not_finite(self, contributor: str) -> NonFiniteError:
        found = int((~torch.isfinite(self._values.double())).nonzero()[0])
        index = bisect_right(self.group.ends, self.start + found)
        return NonFiniteError(
            f"{self.group.names[index]!r} of {contributor!r} holds {self._values[found].item()}: leave that "
            "contribution out, or keep such values, by on_non_finite"
        )


def _all_finite(values: torch.Tensor) -> bool:
    # A sum is ten times as fast as a look at each element. It may overflow where no element is infinite.
    if values.dtype in SUMMABLE and torch.isfinite(values.sum()):
        return True
    return bool(torch.isfinite(values.double()).all())

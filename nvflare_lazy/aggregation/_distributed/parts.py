# SPDX-License-Identifier: Apache-2.0
"""The parts of a pass: sent to a worker, which reads, computes and writes them, and returns an `Outcome`."""

from __future__ import annotations

import os
import pickle
import socket
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from nvflare_lazy._text import get_logger
from nvflare_lazy.aggregation._distributed.part_writer import PartWriter
from nvflare_lazy.aggregation._distributed.shared_directory import COPY_BYTES, SESSION_FILE
from nvflare_lazy.aggregation._distributed.sources import InputError, unpickled
from nvflare_lazy.aggregation._engine.memory_plan import SpareMemory
from nvflare_lazy.aggregation._engine.passes import Engine
from nvflare_lazy.aggregation._engine.tile import ContributionError, TensorGroup, raise_input_error
from nvflare_lazy.aggregation._engine.tile_io import InputVector
from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor
from nvflare_lazy.errors import SharedStorageError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nvflare_lazy.aggregation._engine.tile import NonFinitePolicy
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.statistics import Statistic

logger = get_logger(__name__)

_CHECK_SECONDS = 1.0
# Executors call a function in the processes of the workers, so this memory has no other owner.
_spare = SpareMemory()
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Limits:
    budget: int
    threads: int
    tile_bytes: int | None
    non_finite: NonFinitePolicy


@dataclass(frozen=True)
class GroupPart:
    """A range of the elements of a group, without its data."""

    index: int
    dtype: torch.dtype
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    members: tuple[int, ...]
    contributors: tuple[str, ...]
    element_type: torch.dtype
    inputs: tuple[bytes, ...]
    reference_type: torch.dtype | None
    reference: bytes | None
    first: int

    def open(self) -> TensorGroup:
        """Return the group with its inputs, opened in this process."""
        inputs = []
        for contributor, text in zip(self.contributors, self.inputs, strict=True):
            try:
                inputs.append(InputVector.over(unpickled(text), self.element_type))
            except InputError as error:
                raise error.of(contributor) from error
            except Exception as error:
                raise_input_error(contributor, error)
        reference = None
        if self.reference is not None:
            assert self.reference_type is not None
            reference = InputVector.over(unpickled(self.reference), self.reference_type)
        return TensorGroup(
            self.index,
            self.dtype,
            self.names,
            self.sizes,
            self.members,
            self.contributors,
            tuple(inputs),
            reference,
            self.first,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the part reads of the group."""
        return sum(self.sizes) * self.element_type.itemsize * len(self.members)


@dataclass(frozen=True)
class Part(ABC, Generic[_Result]):
    """A part of a pass, as a worker receives it."""

    directory: str
    token: str
    groups: tuple[GroupPart, ...]
    limits: Limits

    @property
    def nbytes(self) -> int:
        """Bytes that the part reads."""
        return sum(group.nbytes for group in self.groups)

    def read_inputs_of(self, contributor: str) -> None:
        """Read the inputs of a contributor, and drop them; raises if they cannot be read."""
        for group in self.groups:
            for name, text in zip(group.contributors, group.inputs, strict=True):
                for source in unpickled(text) if name == contributor else ():
                    for begin in range(0, source.nbytes, COPY_BYTES):
                        source.read(begin, min(COPY_BYTES, source.nbytes - begin))

    def run(self) -> _Result:
        """Run the part, in the worker."""
        self._check_token()
        groups = [group.open() for group in self.groups]
        with ExitStack() as borrowed:
            for group in groups:
                group.borrow(borrowed)
            limits = self.limits
            return self._compute(
                Engine(
                    groups,
                    limits.budget,
                    limits.threads,
                    limits.tile_bytes,
                    limits.non_finite,
                    PassMonitor(should_cancel=_Every(_CHECK_SECONDS, self._is_revoked)),
                    _spare,
                )
            )

    @abstractmethod
    def _compute(self, engine: Engine) -> _Result:
        """Return the result of the part."""

    def _check_token(self) -> None:
        path = os.path.join(self.directory, SESSION_FILE)
        try:
            with open(path, encoding="ascii") as file:
                problem = None if file.read() == self.token else "it has other content"
        except OSError as error:
            problem = str(error)
        if problem is not None:
            raise SharedStorageError(
                f"the worker on {socket.gethostname()} does not see {path}, which this aggregation has written "
                f"({problem}); put inputs and outputs on storage that all workers share, under the same path, and run "
                "the workers as the same user"
            )

    def _is_revoked(self) -> bool:
        try:
            # An NFS client asks the server when a file is opened.
            os.close(os.open(os.path.join(self.directory, SESSION_FILE), os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return True
        return False


@dataclass(frozen=True)
class StatisticPart(Part[torch.Tensor]):
    statistic: Statistic

    def _compute(self, engine: Engine) -> torch.Tensor:
        sums: list[torch.Tensor] = []
        engine.sum_stretches(self.statistic, sums.append)
        return torch.stack(sums)


@dataclass(frozen=True)
class ReductionPart(Part[None]):
    reduction: Reduction
    stage: str
    locations: Mapping[str, tuple[str, int]]
    fsync: bool

    def _compute(self, engine: Engine) -> None:
        with PartWriter(self.locations, self._is_revoked, fsync=self.fsync) as writer:
            engine.reduce(self.reduction, self.stage, writer)
            writer.finish()


@dataclass(frozen=True)
class Outcome(Generic[_Result]):
    """What a part returns: its result, or its own error. An exception is therefore one of the executor."""

    result: _Result | None
    error: Exception | None = None
    host: str = ""


class _Every:
    """A function that runs at most once in a period; in between, its last answer is repeated."""

    def __init__(self, seconds: float, function: Callable[[], bool]) -> None:
        self._seconds = seconds
        self._function = function
        self._next = 0.0
        self._last = False

    def __call__(self) -> bool:
        now = time.monotonic()
        if now >= self._next:
            self._last, self._next = self._function(), now + self._seconds
        return self._last


def run_part(part: Part[_Result]) -> Outcome[_Result]:
    """Run a part in a worker; executors call it."""
    try:
        return Outcome(part.run())
    except Exception as error:
        return Outcome(None, _portable(error), socket.gethostname())


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process."""
    if isinstance(error, ContributionError):
        return ContributionError(error.contributor, _portable(error.error))
    try:
        same = pickle.loads(pickle.dumps(error))  # noqa: S301  # just pickled
        if type(same) is type(error) and str(same) == str(error):
            return error
    except Exception as problem:
        logger.debug("%s cannot be sent: %s", type(error).__name__, problem)
    return SourceError(f"{type(error).__name__}: {error}")

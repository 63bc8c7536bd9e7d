# SPDX-License-Identifier: Apache-2.0
"""Placeholders for tensors that could not be received: values that raise the reason when they are used.

NVFlare ends the whole server job if a result cannot be decoded. So one client's broken download must decode, and cost
that client's contribution alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    from nvflare_lazy.transport._backends import ArrayBackend


class FailedPayload:
    """All values of a download that failed."""

    def __init__(self, error: Exception) -> None:
        self.error = _without_frames(error)

    def value(self, backend: ArrayBackend, dtype: Any = None, shape: tuple[int, ...] | None = None) -> Any:
        """Return a value that raises the error when its elements are read; its dtype and shape may be unknown."""
        if dtype is None or shape is None:
            dtype, shape = backend.unknown()
        return backend.lazy(FailedSource(backend.nbytes(dtype, shape), self.error), dtype, shape)


def failure_of(value: Any) -> Exception | None:
    """Return why a result could not be received: the error of the first failed value in it, or None.

    Args:
        value: A tensor or array, or dictionaries, lists and tuples of them. Lazy values are not read.

    Example:
        >>> error = failure_of(model.params)
        >>> if error is not None:
        ...     logger.warning("Skipped %s: %s", client, error)
    """
    if isinstance(value, (LazyTensor, LazyArray)):
        source = value.source
        return source.error if isinstance(source, FailedSource) else None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    for item in value:
        error = failure_of(item)
        if error is not None:
            return error
    return None


def _without_frames(error: Exception) -> Exception:
    """Drop the traces of an error: they hold what the frames held, segments among it, as long as the error lives."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error

# SPDX-License-Identifier: Apache-2.0
"""`PayloadLimits`: the most that the tensors of one message may take, for all ways of transport.

A process that trusts its peers has limits that no model reaches. A server knows the model, and limits each result to a
small multiple of it (`flare.tensor_offload`). Receivers check a payload with a `PayloadTally` before they reserve
memory or disk for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from nvflare_lazy._text import format_size
from nvflare_lazy.errors import ProtocolError

# More than any model has: some mixtures of experts have 200,000 tensors, with names of 60 bytes.
_MAX_TENSORS = 500_000
_MAX_NAME_BYTES = 32 << 20
# A payload may be this many times as large as the model: full weights and as much state, such as control variates.
_TIMES_MODEL = 2
_MIN_BYTES = 64 << 20
_EXTRA_TENSORS = 1000
_EXTRA_NAME_BYTES = 64 << 10
# NVFlare renames the tensors of a message to T0, T1 and so on.
_USUAL_NAME_BYTES = 16


@dataclass(frozen=True)
class PayloadLimits:
    """The most that the tensors of one message may take, all of its payloads together.

    Attributes:
        nbytes: Bytes of all tensors. Default: no limit but the disk's.
        tensors: Number of tensors.
        name_bytes: Bytes of all names, in UTF-8.
    """

    nbytes: int | None = None
    tensors: int = _MAX_TENSORS
    name_bytes: int = _MAX_NAME_BYTES

    @classmethod
    def for_model(cls, model: PayloadSize, nbytes: int | None = None) -> PayloadLimits:
        """Return the limits of results for a model of some size.

        Args:
            model: The size of the model.
            nbytes: The most bytes. Default: twice the model's, and at least 64 MiB.

        Example:
            >>> PayloadLimits.for_model(PayloadSize(nbytes=1 << 30, tensors=300, name_bytes=6000)).nbytes >> 30
            2
        """
        limit = max(_TIMES_MODEL * model.nbytes, _MIN_BYTES) if nbytes is None else nbytes
        # More bytes than usual may be more tensors than usual, such as the state of an optimizer.
        times = max(_TIMES_MODEL, -(-limit // model.nbytes) if nbytes is not None and model.nbytes else 0)
        tensors = min(times * model.tensors + _EXTRA_TENSORS, _MAX_TENSORS)
        names = times * model.name_bytes + tensors * _USUAL_NAME_BYTES + _EXTRA_NAME_BYTES
        return cls(limit, tensors, min(names, _MAX_NAME_BYTES))


@dataclass(frozen=True)
class PayloadSize:
    """The size of some tensors: bytes of their elements, number, and bytes of their names."""

    nbytes: int = 0
    tensors: int = 0
    name_bytes: int = 0

    def __add__(self, other: PayloadSize) -> PayloadSize:
        return PayloadSize(self.nbytes + other.nbytes, self.tensors + other.tensors, self.name_bytes + other.name_bytes)

    def __sub__(self, other: PayloadSize) -> PayloadSize:
        return PayloadSize(self.nbytes - other.nbytes, self.tensors - other.tensors, self.name_bytes - other.name_bytes)

    def union(self, other: PayloadSize) -> PayloadSize:
        """Return the larger of the two in each respect."""
        return PayloadSize(
            max(self.nbytes, other.nbytes),
            max(self.tensors, other.tensors),
            max(self.name_bytes, other.name_bytes),
        )


class PayloadTally:
    """What one message has brought so far, within its limits."""

    def __init__(self, limits: PayloadLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._size = PayloadSize()

    def check(self, sender: str, size: PayloadSize) -> None:
        """Raise unless the message may have these items and bytes in addition to the earlier ones.

        Raises:
            ProtocolError: If it is more than the limits; the message names the sender, the size and the limit.
        """
        self._check(sender, self._size + size)

    def add(self, sender: str, size: PayloadSize) -> None:
        """Count received items and bytes; raises as `check` does."""
        with self._lock:
            total = self._size + size
            self._check(sender, total)
            self._size = total

    def remove(self, size: PayloadSize) -> None:
        """Undo `add`: it was not received."""
        with self._lock:
            self._size = self._size - size

    def _check(self, sender: str, total: PayloadSize) -> None:
        limits = self.limits
        if limits.nbytes is not None and total.nbytes > limits.nbytes:
            raise ProtocolError(
                f"{sender} sends {format_size(total.nbytes)} of tensors in one message, more than the limit of "
                f"{format_size(limits.nbytes)}; if its results are that large, set max_result_size of TensorOffload"
            )
        if total.tensors > limits.tensors:
            raise ProtocolError(
                f"{sender} sends {total.tensors} tensors in one message, more than the limit of {limits.tensors}; "
                "if its results have that many, set max_result_size of TensorOffload"
            )
        if total.name_bytes > limits.name_bytes:
            raise ProtocolError(
                f"{sender} sends names of {format_size(total.name_bytes)} in one message, more than the limit of "
                f"{format_size(limits.name_bytes)}; use shorter names, or set max_result_size of TensorOffload"
            )

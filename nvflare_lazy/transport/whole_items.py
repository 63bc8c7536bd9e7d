# SPDX-License-Identifier: Apache-2.0
"""How many whole tensors are on their way to receivers without this package at a time, in bytes.

NVFlare holds several copies of a message until it is sent, so sending a model to many clients at once takes as much
memory as there are clients. Here they take turns, tensor by tensor; those who are slow do not keep others waiting.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from nvflare_lazy.transport.budget import BUDGET

if TYPE_CHECKING:
    from collections.abc import Hashable

    from nvflare_lazy.transport.budget import InflightBudget

# A receiver that has not come back for the next tensor by then is slow, and little of its tensor is still in memory.
_SLOW_SECONDS = 5.0
# Nobody waits longer than this for a turn: a request that is not answered for long looks like a dead sender.
_PATIENCE_SECONDS = 2.0


class Turns:
    """Who has a tensor on its way.

    Args:
        budget: Its limit is the limit here, too; what is received does not count against what is sent.
    """

    def __init__(self, budget: InflightBudget) -> None:
        self._budget = budget
        self._changed = threading.Condition()
        self._taken: dict[Hashable, tuple[int, float]] = {}

    def take(self, receiver: Hashable, nbytes: int) -> None:
        """Wait for a turn to send so much; what was on its way to this receiver has arrived, or it would not ask."""
        with self._changed:
            self._drop(receiver)
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not self._fits(nbytes) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.2))
            self._taken[receiver] = (nbytes, time.monotonic())

    def end(self, receiver: Hashable) -> None:
        """Nothing is on its way to this receiver any more."""
        with self._changed:
            self._drop(receiver)

    @property
    def used(self) -> int:
        """Bytes on their way."""
        with self._changed:
            return self._used()

    def _fits(self, nbytes: int) -> bool:
        used = self._used()
        return not used or used + nbytes <= self._budget.limit

    def _used(self) -> int:
        young = time.monotonic() - _SLOW_SECONDS
        for receiver in [receiver for receiver, (_, since) in self._taken.items() if since < young]:
            del self._taken[receiver]
        return sum(nbytes for nbytes, _ in self._taken.values())

    def _drop(self, receiver: Hashable) -> None:
        if self._taken.pop(receiver, None) is not None:
            self._changed.notify_all()


TURNS = Turns(BUDGET)

#: Whose first answer is on its way here: from a sender without this package it comes with a whole tensor in it, before
#: there is a chance to ask for less.
FIRST_ANSWERS = Turns(BUDGET)
#: What such a tensor is taken for.
FIRST_ANSWER_BYTES = 16 << 20

# SPDX-License-Identifier: Apache-2.0
"""Limits on the bytes in flight: of segments, and of whole tensors to and from processes without this package.

A server's memory for its clients' results does not grow with their number.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

DEFAULT_BYTES = 32 << 20
_POLL_SECONDS = 0.2


class InflightBudget:
    """Bytes of segments that may be in flight to this process, for all of its downloads together.

    Every request for a segment reserves bytes, and releases them when they are written.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._changed = threading.Condition()
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._starving = 0

    def resize(self, limit: int) -> None:
        """Change the limit; bytes in flight are not affected."""
        if limit < 1:
            raise ValueError(f"budget must be >= 1 byte, got {limit}")
        with self._changed:
            self.limit = limit
            self._changed.notify_all()

    def acquire(self, nbytes: int, *, holding: int, timeout: float = 0.0) -> bool:
        """Reserve bytes if the limit permits; wait for them up to `timeout` seconds.

        `holding` is the number of bytes that the caller has in flight already. A caller with none goes first, so that a
        busy download cannot keep a new one waiting.
        """
        with self._changed:
            if holding:
                granted = not self._starving and self._fits(nbytes)
            else:
                self._starving += 1
                try:
                    granted = self._changed.wait_for(lambda: self._fits(nbytes), timeout)
                finally:
                    self._starving -= 1
            if granted:
                self.used += nbytes
                self.peak = max(self.peak, self.used)
            return granted

    def release(self, nbytes: int) -> None:
        """Release reserved bytes."""
        with self._changed:
            self.used -= nbytes
            self._changed.notify_all()

    @contextmanager
    def hold(self, nbytes: int, check: Callable[[], None]) -> Iterator[None]:
        """Keep bytes reserved while the block runs: other downloads take turns with it.

        While it waits for them, it runs `check`, which raises to give up.
        """
        while not self.acquire(nbytes, holding=0, timeout=_POLL_SECONDS):
            check()
        try:
            yield
        finally:
            self.release(nbytes)

    def _fits(self, nbytes: int) -> bool:
        # Something must always be able to move, even through a budget smaller than a segment.
        return self.used + nbytes <= self.limit or self.used == 0


# A tensor that is still in flight by then is part of a slow transfer: it no longer counts, and that transfer does not
# wait for its next one, since waiting would take it longer than it keeps memory from others.
_SLOW_SECONDS = 5.0
# A receiver does not wait longer than this for a slot: a sender that does not answer for long looks lost.
_MAX_WAIT_SECONDS = 2.0


class Slot:
    """A whole tensor in flight."""

    __slots__ = ("_since", "nbytes", "slow")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.slow = False
        self._since = time.monotonic()

    def update_age(self) -> None:
        """Check whether it takes too long."""
        self.slow = self.slow or time.monotonic() - self._since > _SLOW_SECONDS


class WholeTensorThrottle:
    """Limits the whole tensors in flight, by the limit of a budget; segments do not count against them.

    NVFlare holds several copies of a message while it is sent or received, so a model that goes to many clients at
    once, or from many, would take memory for each of them. Here transfers take turns, tensor by tensor, in the order
    in which they ask; a slow transfer does not keep others waiting, and need not wait.

    After a whole tensor is released, `on_release` runs with no lock held: its buffers are all over the heap.
    """

    def __init__(self, budget: InflightBudget, on_release: Iterable[Callable[[], None]] = ()) -> None:
        self._budget = budget
        self._on_release = on_release
        self._changed = threading.Condition()
        self._taken: set[Slot] = set()
        self._line: deque[object] = deque()

    def acquire(self, nbytes: int, *, after: Slot | None = None, give_up: Callable[[], bool] | None = None) -> Slot:
        """Wait for a slot until `give_up` returns true; by default, a few seconds.

        `after` is the previous slot of the same transfer; it is released now.
        """
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        place = object()
        with self._changed:
            self._end(after)
            self._line.append(place)
            try:
                while not (after is not None and after.slow) and not (self._line[0] is place and self._fits(nbytes)):
                    if give_up() if give_up is not None else time.monotonic() > deadline:
                        break
                    self._changed.wait(_POLL_SECONDS)
            finally:
                self._line.remove(place)
                self._changed.notify_all()
            slot = self._add(nbytes)
        if after is not None:
            self._note_release()
        return slot

    def acquire_if_free(self, nbytes: int) -> Slot | None:
        """Take a slot that no other transfer else waits for, if there is one."""
        with self._changed:
            return None if self._line or not self._fits(nbytes) else self._add(nbytes)

    def release(self, slot: Slot | None) -> None:
        """Release a slot: the tensor is no longer in memory."""
        with self._changed:
            self._end(slot)
        self._note_release()

    @property
    def used(self) -> int:
        """Bytes in flight."""
        with self._changed:
            return self._used()

    def _note_release(self) -> None:
        for function in tuple(self._on_release):
            function()

    def _add(self, nbytes: int) -> Slot:
        slot = Slot(nbytes)
        self._taken.add(slot)
        return slot

    def _end(self, slot: Slot | None) -> None:
        if slot in self._taken:
            slot.update_age()
            self._taken.remove(slot)
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        used = self._used()
        # A tensor travels with a header; a tensor at the limit must also be within it with the header.
        return not used or used + nbytes <= self._budget.limit + self._budget.limit // 16

    def _used(self) -> int:
        for slot in list(self._taken):
            slot.update_age()
            if slot.slow:
                self._taken.remove(slot)
        return sum(slot.nbytes for slot in self._taken)


#: The size that is assumed of a first answer: a sender without this package puts a whole tensor into it, before the
#: receiver can ask for less.
FIRST_ANSWER_BYTES = 16 << 20

# SPDX-License-Identifier: Apache-2.0
"""`ReceiverProgress` decides whether a request keeps its payload available: a receiver must get new bytes in time.

NVFlare ends a transaction after some minutes without a request. A receiver that repeats requests, or requests a byte
per second, would keep the tensors in memory until the job ends.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right

# A receiver that is slower than this on average, after the time that NVFlare waits for its first request, is given up.
_MIN_BYTES_PER_SECOND = 16 << 10
# A request that has no bytes, such as the one for the end, counts as some.
_REQUEST_BYTES = 4 << 10
# More gaps than any receiver leaves, which requests a few segments ahead.
_MAX_EDGES = 8192
_MAX_RECEIVERS = 4096


class Ranges:
    """A set of integers, as sorted edges of ranges: even ones begin a range, odd ones end it."""

    def __init__(self) -> None:
        self._edges: list[int] = []

    def add(self, start: int, stop: int) -> int:
        """Add a range; return how many of its integers are new."""
        edges = self._edges
        left, right = bisect_left(edges, start), bisect_right(edges, stop)
        inside = [*([start] if left % 2 else []), *edges[left:right], *([stop] if right % 2 else [])]
        known = sum(inside[1::2]) - sum(inside[::2])
        outer = [*([] if left % 2 else [start]), *([] if right % 2 else [stop])]
        if start >= stop or len(edges) - (right - left) + len(outer) > _MAX_EDGES:
            return 0
        edges[left:right] = outer
        return stop - start - known


class _Receiver:
    """One site, with everything that its cells have asked for."""

    __slots__ = ("nbytes", "position", "ranges", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.nbytes = 0
        self.position = -2
        self.ranges = Ranges()


class ReceiverProgress:
    """What each receiver of a payload has been sent.

    Attributes:
        last: The time of the last request that counted, by the clock, as NVFlare records it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[str, _Receiver] = {}
        self.last = time.time()

    def sent(self, receiver: str, start: int, stop: int, patience: float) -> bool:
        """Note a range of the payload's bytes that was sent; return whether it counts.

        `patience` is the time in seconds that NVFlare waits for the next request.
        """
        with self._lock:
            found = self._find(receiver)
            return found is not None and self._counts(found, found.ranges.add(start, stop), patience)

    def reached(self, receiver: str, position: int, nbytes: int, patience: float) -> bool:
        """Note that a receiver asks for the item of this number and size: it has those before."""
        with self._lock:
            found = self._find(receiver)
            if found is None or position <= found.position:
                return False
            found.position = position
            return self._counts(found, nbytes + _REQUEST_BYTES, patience)

    def _find(self, receiver: str) -> _Receiver | None:
        # The cells of a site count together: their number is not limited.
        site = receiver.partition(".")[0]
        if site not in self._receivers and len(self._receivers) < _MAX_RECEIVERS:
            self._receivers[site] = _Receiver(time.monotonic())
        return self._receivers.get(site)

    def _counts(self, receiver: _Receiver, new: int, patience: float) -> bool:
        receiver.nbytes += new
        in_time = receiver.nbytes >= (time.monotonic() - receiver.since - patience) * _MIN_BYTES_PER_SECOND
        if new and in_time:
            self.last = time.time()
        return bool(new) and in_time

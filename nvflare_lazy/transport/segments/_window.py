# SPDX-License-Identifier: Apache-2.0
"""`Window`: how many bytes a download keeps in flight, measured while it runs.

A line that delivers 200 MB/s after 80 ms holds 16 MB; with fewer in flight, it waits for requests. A short line holds
little, and more bytes in flight would only wait in memory. Used by `SegmentDownload`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nvflare_lazy.transport.segments._receipts import MAX_TRANSFER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

# The measured rate is at most what the present window permits. Twice the bytes that the line holds therefore doubles
# the window until the rate is limited by the line.
_GAIN = 2
# After a slow segment, the window shrinks by this part with each segment, not at once: the pause may be ours.
_SHRINK = 16


class Window:
    """How many bytes one download may have in flight.

    Args:
        least: Its size on a short line.
        most: Its size on a long one. Default: the bytes that a sender sends without receipts.
        clock: Returns the time in seconds.
    """

    def __init__(self, least: int, most: int = MAX_TRANSFER_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self.nbytes = least
        self._least = least
        self._most = most
        self._clock = clock
        self._latency = float("inf")
        self._arrived = 0
        self._asked: dict[int, tuple[float, int]] = {}

    def note_request(self, offset: int) -> None:
        """A segment was requested."""
        self._asked[offset] = self._clock(), self._arrived

    def note_arrival(self, offset: int, nbytes: int) -> None:
        """A segment has arrived."""
        self._arrived += nbytes
        asked = self._asked.pop(offset, None)
        if asked is None:
            return
        since, arrived = asked
        seconds = max(self._clock() - since, 1e-6)
        # The shortest one: later segments also wait for earlier ones.
        self._latency = min(self._latency, seconds)
        on_the_line = (self._arrived - arrived) / seconds * self._latency
        size = max(int(_GAIN * on_the_line), self.nbytes - self.nbytes // _SHRINK)
        self.nbytes = min(max(size, self._least), self._most)

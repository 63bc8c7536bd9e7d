# SPDX-License-Identifier: Apache-2.0
"""The threads that answer requests for segments: there while there is something to send, and nobody waits for them.

A process ends without joining them. NVFlare reports what else is still running at the end of a job, and then ends the
process the hard way.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Longer than the pauses between two segments of a transfer, and short enough that a process at rest has none.
_LINGER_SECONDS = 5.0


class SendingThreads:
    """Calls functions on a few threads.

    Args:
        most: How many threads there are at most.
        name: What their names begin with.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._idle = 0
        self._count = 0

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function called as soon as a thread is free; it must not raise."""
        with self._changed:
            self._calls.append((function, args))
            if self._idle >= len(self._calls):
                self._changed.notify()
            elif self._count < self._most:
                threading.Thread(target=self._run, name=f"{self._name}_{self._count}", daemon=True).start()
                self._count += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls, _LINGER_SECONDS)
                self._idle -= 1
                if not self._calls:
                    self._count -= 1
                    return
                function, args = self._calls.popleft()
            function(*args)
            del function, args  # what was sent is not held until the next call

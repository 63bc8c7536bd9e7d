# SPDX-License-Identifier: Apache-2.0
"""`Sampler`: records the memory and the scratch of a process over time, and the peak of each round.

The kernel keeps no peak of anonymous memory. A thread looks at it twice a second, and every two seconds in long jobs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nvflare_lazy._system import anonymous_bytes
from nvflare_lazy.records.schema import SampleRecord

_MIN_SECONDS = 0.5
_MAX_SECONDS_BETWEEN_LOOKS = 2.0
# The number of samples grows with the logarithm of the duration.
_SAMPLES_PER_DURATION = 500


class Sampler:
    """Looks at memory and scratch, and writes the largest values since the last record, with the time of most memory.

    Args:
        write: Receives each record.
        scratch_bytes: Returns the bytes of scratch in use.
    """

    def __init__(self, write: Callable[[SampleRecord], None], scratch_bytes: Callable[[], int]) -> None:
        self._write = write
        self._scratch_bytes = scratch_bytes
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._largest: SampleRecord | None = None
        self._peak = 0
        self._started = self._written = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="nvflare_lazy_sampler", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look now, such as when a result has been received, and write a record if it is time for one."""
        sample = SampleRecord(memory_bytes=anonymous_bytes(), scratch_bytes=self._scratch_bytes())
        with self._lock:
            self._peak = max(self._peak, sample.memory_bytes)
            before = self._largest or sample
            self._largest = sample if sample.memory_bytes >= before.memory_bytes else before
            self._largest.scratch_bytes = max(sample.scratch_bytes, before.scratch_bytes)
            if time.monotonic() - self._written >= self._interval:
                self._flush()

    def take_peak(self) -> int:
        """Return the most anonymous memory since the last call."""
        self.look()
        with self._lock:
            peak, self._peak = self._peak, 0
            return peak

    def stop(self) -> None:
        """Write the last record, and end the thread."""
        self._stopped.set()
        self._thread.join()
        self.look()
        with self._lock:
            self._flush()

    @property
    def _interval(self) -> float:
        return max(_MIN_SECONDS, (time.monotonic() - self._started) / _SAMPLES_PER_DURATION)

    def _flush(self) -> None:
        if self._largest is not None:
            self._write(self._largest)
        self._largest, self._written = None, time.monotonic()

    def _run(self) -> None:
        while not self._stopped.wait(min(self._interval, _MAX_SECONDS_BETWEEN_LOOKS)):
            self.look()

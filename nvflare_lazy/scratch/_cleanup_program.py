# SPDX-License-Identifier: Apache-2.0
"""The program of `CleanupProcess`: waits for the end of another process, then reclaims the scratch that it left.

Until then it imports only a few modules of the standard library, because it waits for as long as a job runs.
"""

from __future__ import annotations

import os
import signal
import sys
import time

# The locks of a process that ends are released within moments of its other descriptors. A process that reclaims at the
# same time also holds them.
_RECLAIM_SECONDS = 60.0
_PAUSE_SECONDS = 0.1


def main(package_parent: str) -> None:
    """Continue in a child process, and serve the process at the other end of the standard input."""
    # systemd sends SIGTERM to all processes of a service at the same time; this one still has to remove the scratch.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    left = _wait_for_end()
    if left:
        sys.path.insert(0, package_parent)
        _reclaim(left)


def _wait_for_end() -> set[str]:
    """Return the directories that the other process still had when it ended."""
    leased: set[bytes] = set()
    rest = b""
    while received := os.read(0, 1 << 16):
        *changes, rest = (rest + received).split(b"\0")
        for change in changes:
            (leased.add if change[:1] == b"+" else leased.discard)(change[1:])
    return {os.fsdecode(path) for path in leased}


def _reclaim(paths: set[str]) -> None:
    from nvflare_lazy.scratch._reclaim import reclaim

    deadline = time.monotonic() + _RECLAIM_SECONDS
    while time.monotonic() < deadline:
        paths = {path for path in paths if os.path.lexists(path) or os.path.lexists(f"{path}.lease")}
        if not paths:
            return
        for root in {os.path.dirname(path) for path in paths}:
            reclaim(root)
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])

# SPDX-License-Identifier: Apache-2.0
"""Bytes over sockets: all processes of a measured job talk over loopback, whose counters the kernel keeps."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def separate_loopback() -> bool:
    """Move this thread, and every process and thread that it starts, to a network namespace with only a loopback.

    Then `loopback_bytes` counts nothing else. Return whether that was possible; it needs the rights of root.
    """
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(control, _GET_FLAGS, request))
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
    return True


def loopback_bytes() -> int:
    """Return the bytes that loopback has carried, headers included, in the network namespace of this thread."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0
